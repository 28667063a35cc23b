"""Does every gradient that reaches a RecurrentNetwork operator get through?"""

import collections.abc
from typing import Any, Dict, List, Mapping, Optional, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

from caffe2_recurrent.backward.gradient_maker import POSITIONS, PYTHON_POSITIONS
from caffe2_recurrent.cudnn_machine import OPERATOR as CUDNN_OPERATOR
from caffe2_recurrent.loops.loop import is_optimised
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.operator_arguments import BACKWARD_STEP_NET, PARAMETER_GRADIENTS, RENAMED, argument
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, gradient_name, is_backward_of
from caffe2_recurrent.problems import Problems, given, names


def check_gradients(net: Union[ModelHelper, core.Net], gradients: Optional[Mapping[Any, Any]] = None) -> None:
    """Name the gradients that a net's RecurrentNetwork operators drop or misplace.

    Call it after `AddGradientOperators`, with the model, or with the net and the map that
    `net.AddGradientOperators` returned. It finds

    - an output that receives a gradient but is not in `outputs_with_grads`: Caffe2 drops that gradient silently;
    - a sequence that a later operator reads too, for which Caffe2 renames the gradient while the engine goes on
      writing the old name;
    - a gradient of the last states of `cudnn_LSTM`, which the engine drops;
    - a name that a loop's backward step and the net itself both write: the step writes to the net's blob;
    - a sequence that a later operator reads though steps write over it, as with `memory_optimization`.

    `outputs_with_grads='auto'` is free of all that concerns loops.

    Raises `ValueError` that names all of them, `TypeError` where the map of gradients is missing.
    """
    if isinstance(net, ModelHelper):
        net, gradients = net.net, getattr(net, "grad_map", None) if gradients is None else gradients
    if not isinstance(net, core.Net):
        raise TypeError("check_gradients takes a model or a core.Net; got {}".format(given(net)))
    if gradients is None:
        raise TypeError(
            "check_gradients needs the gradients of net '{}': call AddGradientOperators first, and with a plain net "
            "pass the map it returns".format(net.Name())
        )
    if not isinstance(gradients, collections.abc.Mapping):
        raise TypeError(
            "check_gradients takes the map that AddGradientOperators returned; got {}".format(given(gradients))
        )
    by_name = {str(blob): gradient for blob, gradient in gradients.items() if gradient is not None}
    backward_of = {op.input[-1]: op for op in net.Proto().op if op.type == GRADIENT_OPERATOR}
    problems = Problems("check_gradients")
    for operator in net.Proto().op:
        if operator.type == CUDNN_OPERATOR:
            _check_last_states(operator, by_name, problems)
        if operator.type == OPERATOR:
            backward = backward_of.get(operator.output[-1])
            # One that `optimize` has made a loop of has the gradients among its inputs, and no positions.
            if not any(is_backward_of(other, operator) for other in net.Proto().op):
                _check_dropped(operator, backward, by_name, problems)
            if backward is not None:
                _check_misplaced(backward, problems)
                _check_shared_names(net, backward, problems)
    _check_overwritten(net.Proto(), problems)
    problems.raise_if_any()


def _check_dropped(
    operator: caffe2_pb2.OperatorDef,
    backward: Optional[caffe2_pb2.OperatorDef],
    gradients: Dict[str, Any],
    problems: Problems,
) -> None:
    if argument(operator, PYTHON_POSITIONS) is not None and argument(operator, BACKWARD_STEP_NET) is None:
        # Nothing in the step has a gradient.
        return
    listed = argument(backward, POSITIONS) if backward is not None else None
    positions: List[int] = list(listed.ints) if listed is not None else []
    for position, output in enumerate(operator.output[:-1]):
        if output in gradients and position not in positions:
            problems.add(
                "the gradient of '{}' (position {}) is dropped; outputs_with_grads is {}: add {} to it or pass 'auto'",
                output,
                position,
                tuple(positions),
                position,
            )


def _check_last_states(operator: caffe2_pb2.OperatorDef, gradients: Dict[str, Any], problems: Problems) -> None:
    dropped = [output for output in operator.output[1:3] if output in gradients]
    if dropped:
        problems.add(
            "the gradient of {} is dropped; cudnn_LSTM passes back that of '{}' alone, whose last step is the last "
            "hidden state of the last layer",
            names(dropped),
            operator.output[0],
        )


def _check_misplaced(backward: caffe2_pb2.OperatorDef, problems: Problems) -> None:
    positions = argument(backward, POSITIONS)
    # The first sequence, or a blob of its shape that stands for it in an optimised loop.
    sequence = backward.input[len(positions.ints) if positions is not None else 0]
    name = gradient_name(sequence)
    renamed = argument(backward, name + RENAMED)
    written = renamed.s.decode() if renamed is not None else name
    if backward.output[0] != written:
        problems.add(
            "the gradient of sequence '{}' is lost: a later operator reads '{}' too, so Caffe2 expects it in '{}' "
            "while the engine writes '{}'; give the loop a Copy of '{}', or pass outputs_with_grads='auto'",
            sequence,
            sequence,
            backward.output[0],
            written,
            sequence,
        )


def _check_overwritten(net: caffe2_pb2.NetDef, problems: Problems) -> None:
    for position, loop in read_loops(net).items():
        if is_optimised(loop.forward):
            continue
        states = {state.outer_states for state in loop.states}
        over = [link.outer for link in loop.links if link.inner in loop.written and link.outer not in states]
        # Those of the loop itself know of it.
        others = [operator for operator in net.op[position + 1 :] if loop.workspaces not in operator.input]
        for blob in dict.fromkeys(over):
            kinds = dict.fromkeys(operator.type for operator in others if blob in operator.input)
            if kinds:
                problems.add(
                    "'{}' is read by {} when the steps of loop '{}' have written over it: let a Copy in front of the "
                    "loop be read, or build the loop without memory_optimization",
                    blob,
                    " and ".join(kinds),
                    loop.name,
                )


def _check_shared_names(net: core.Net, backward: caffe2_pb2.OperatorDef, problems: Problems) -> None:
    step = argument(backward, BACKWARD_STEP_NET)
    parameters = argument(backward, PARAMETER_GRADIENTS)
    # The engine renames the gradients of parameters within the step.
    engines = {name.decode() for name in parameters.strings} if parameters is not None else set()
    own = {blob for operator in (step.n.op if step is not None else ()) for blob in operator.output} - engines
    written = {blob for operator in net.Proto().op if operator.output != backward.output for blob in operator.output}
    # What the engine adds up for a parameter, in a blob that the step would look for by the same name.
    written.update(backward.output[1:])
    for blob in sorted(own & written):
        problems.add(
            "'{}' is written by the backward step of the loop of '{}' and by net '{}', so each spoils the other's "
            "gradient; pass outputs_with_grads='auto', or rename the blob it is the gradient of",
            blob,
            backward.input[-1],
            net.Name(),
        )
