"""What calls of `LSTM`, `MILSTM` and `GRU` have in common: the same arguments, checked and built the same way."""

import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from caffe2_recurrent.checks import Checks
from caffe2_recurrent.layer import Blobs, Cell
from caffe2_recurrent.stack import add_stack

NO_DROPOUT = "{}: dropout_ratio={} does nothing, as it is for dropout between layers, and there is one layer"
SHAPE = ("dim_in", "dim_out", "bidirectional", "dropout_ratio", "is_test")


class Options(NamedTuple):
    """What a cell is told beside its sizes; `flags` are those that it alone has, by name."""

    forget_bias: float
    drop_states: bool
    memory_optimization: bool
    flags: Dict[str, bool]


class Kind(NamedTuple):
    """A kind of layer: its name in errors, its states, how to make a cell of it, and how callers get its parameters."""

    caller: str
    states: Tuple[str, ...]
    make: Callable[[int, int, Options], Cell]
    parameters: Callable[[Blobs], Dict[str, Any]]
    flags: Sequence[str] = ()


def add_sequence_layer(kind: Kind, arguments: Mapping[str, Any]) -> Tuple[Any, ...]:
    """Check the arguments of a call, named as those of `LSTM`; add the layers it asks for and give what it returns."""
    checks = Checks(kind.caller)
    model = arguments["model"]
    checks.model(model)
    sequence = checks.blob("input_blob", arguments["input_blob"])
    lengths = checks.lengths("seq_lengths", arguments["seq_lengths"])
    shape = checks.stack(*(arguments[name] for name in SHAPE))
    initial = checks.states(arguments["initial_states"], kind.states, shape.loops)
    scope = checks.scope(arguments["scope"])
    outputs: List[str] = [state + ending for state in kind.states for ending in ("_all", "_last")]
    positions = checks.positions(arguments["outputs_with_grads"], outputs)
    with_parameters = checks.flag("return_params", arguments.get("return_params", False))
    save_memory = checks.flag("memory_optimization", arguments["memory_optimization"])
    bias = checks.number("forget_bias", arguments["forget_bias"])
    forward_only = checks.flag("forward_only", arguments["forward_only"])
    drop = checks.flag("drop_states", arguments["drop_states"])
    # Without a backward step there is nothing to keep.
    save_memory = save_memory and not forward_only
    options = Options(bias, drop, save_memory, {name: checks.flag(name, arguments[name]) for name in kind.flags})
    checks.done()
    if shape.dropout_ratio and not shape.is_test and len(shape.dims) == 1:
        warnings.warn(NO_DROPOUT.format(kind.caller, shape.dropout_ratio), UserWarning, stacklevel=3)
    stack = add_stack(
        model,
        lambda dim_in, dim: kind.make(dim_in, dim, options),
        shape,
        sequence,
        lengths,
        initial,
        scope,
        positions,
        forward_only,
    )
    if not with_parameters:
        return stack.outputs
    found = [kind.parameters(loop.parameters) for loop in stack.loops]
    return (*stack.outputs, found[0] if len(found) == 1 else found)
