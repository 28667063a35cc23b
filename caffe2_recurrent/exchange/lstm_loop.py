"""One loop of a net as a direction of an LSTM's layer, if that is what it is.

    before the loop, for all steps   FC         sequence, weight_ih, bias_ih -> x
    in a step                        FC         h_prev, weight_hh, bias_hh -> gates_t
                                     Sum        gates_t, x_t -> gates_t
                                     LSTMUnit   h_prev, c_prev, gates_t, [lengths,] t -> h_t, c_t

`LSTM` builds this, and so does the `LSTM` of Caffe2's `rnn_cell` for a single layer. Other cells have other loops, and
`optimize` makes another one of this.
"""

from typing import Dict, Mapping, NamedTuple, Optional, Tuple, Union

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.exchange.layout import LoopWeights
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.operator_arguments import integer, number
from caffe2_recurrent.problems import names

STEP = ("FC", "Sum", "LSTMUnit")
# Offsets of aliases.
ALL_STEPS, LAST_STEP = 1, -1


class Outputs(NamedTuple):
    """`[T, N, D]`, `[1, N, D]` and the same of the cells; None for what a net does not compute."""

    hidden_all: Optional[str]
    hidden_last: Optional[str]
    cell_all: Optional[str]
    cell_last: Optional[str]


class LSTMLoop(NamedTuple):
    """One direction of one layer, in outer blobs.

    `parameters` are named as the fields of `LoopWeights`, `initial` is (hidden, cell). `forget_bias` is added to the
    forget gate. With `drop_states` states past the end of a sequence are 0, else they stay what they were.
    """

    sequence: str
    parameters: Dict[str, str]
    initial: Tuple[str, str]
    lengths: Optional[str]
    outputs: Outputs
    forget_bias: float
    drop_states: bool


def read_lstm_loop(loop: Loop, producers: Mapping[str, caffe2_pb2.OperatorDef]) -> Union[LSTMLoop, str]:
    """What `loop` is, or why it is none of an LSTM; `producers` has the operator that makes each outer blob."""
    kinds = tuple(operator.type for operator in loop.operators)
    if kinds in (STEP + (("FC", *STEP) * above) for above in range(1, len(kinds))):
        return (
            "its step has the {} layers of an LSTM of Caffe2's rnn_cell; each must have a loop of its own, as LSTM "
            "builds it: docs/leaving.md shows how to go on with the same weights".format(kinds.count("LSTMUnit"))
        )
    if kinds != STEP:
        return (
            "its step has {}, not {}; other cells have no counterpart, and a net must be read before `optimize` "
            "rewrites it".format(names(kinds), names(STEP))
        )
    product, total, unit = loop.operators
    has_lengths = bool(integer(unit, "sequence_lengths", 1))
    of_input = _product_of_input(loop, producers)
    states = _states(loop)
    if (
        of_input is None
        or states is None
        or (product.input[0], total.output[0]) != (unit.input[0], unit.input[2])
        or len(unit.input) != 4 + has_lengths
    ):
        return (
            "the operators of its step, or the FC over all steps before it, are connected in another way; a net must "
            "be read before `optimize` rewrites it"
        )
    blobs = (of_input.input[1], product.input[1], of_input.input[2], product.input[2])
    computed = [blob for blob in blobs if blob in producers]
    if computed:
        return "the net computes {} itself, where a parameter was expected".format(names(computed))
    initial = {state.outer_states: state.outer_initial for state in loop.states}
    shown = {(alias.outer_states, alias.offset): alias.outer_output for alias in loop.aliases}
    return LSTMLoop(
        sequence=of_input.input[0],
        parameters=dict(zip(LoopWeights._fields, blobs)),
        initial=(initial[states[0]], initial[states[1]]),
        lengths=unit.input[3] if has_lengths else None,
        outputs=Outputs(*(shown.get((state, end)) for state in states for end in (ALL_STEPS, LAST_STEP))),
        forget_bias=number(unit, "forget_bias", 0.0),
        drop_states=bool(integer(unit, "drop_states", 0)),
    )


def _product_of_input(loop: Loop, producers: Mapping[str, caffe2_pb2.OperatorDef]) -> Optional[caffe2_pb2.OperatorDef]:
    """The FC over all steps, whose slice a step adds to its own product."""
    product, total, _ = loop.operators
    others = [blob for blob in total.input if blob != product.output[0]]
    link = loop.link(others[0]) if len(total.input) == 2 and len(others) == 1 else None
    found = None if link is None else producers.get(link.outer)
    return found if found is not None and found.type == "FC" and len(found.input) == 3 else None


def _states(loop: Loop) -> Optional[Tuple[str, str]]:
    """The outer state blobs of hidden and cell state, whose next values are what the unit makes."""
    unit = loop.operators[-1]
    previous, following = (
        [link.outer for link in map(loop.link, blobs) if link is not None] for blobs in (unit.input[:2], unit.output)
    )
    return (previous[0], previous[1]) if previous == following and len(previous) == 2 else None
