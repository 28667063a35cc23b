"""The gradient of a RecurrentNetwork operator, where the engine's own gradient maker is not enough.

The C++ gradient maker passes back the outputs listed in the operator's `outputs_with_grads` and the gradient of one
sequence. Caffe2 asks it first, and a function registered in Python only where it throws, as it does for an empty
list. `gradient_arguments` leaves the list empty where more is wanted, and says what in arguments of our own:

    outputs_with_grads='auto'     python_outputs_with_grads = "auto"
    several sequences             python_outputs_with_grads = the positions
    either                        sequence_gradients = for each sequence 1 if it has a gradient, else 0

The operator then made is the engine's RecurrentNetworkGradient, so a net with its gradient operators needs nothing
from this package to run. Source: GetRecurrentNetworkGradient in caffe2/operators/rnn/recurrent_network_op.cc.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import core
from caffe2.python import utils as caffe2_utils

from caffe2_recurrent.arguments import AUTO
from caffe2_recurrent.backward.derivation import Backward
from caffe2_recurrent.backward.sparse_gradients import dense_operators
from caffe2_recurrent.operator_arguments import BACKWARD_STEP_NET, INITIAL, PARAMETERS, RENAMED
from caffe2_recurrent.operators import GRADIENT_OPERATOR, OPERATOR, gradient_name, operator_beside
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.wiring import own_prefix

POSITIONS = "outputs_with_grads"
PYTHON_POSITIONS = "python_outputs_with_grads"
SEQUENCE_GRADIENTS = "sequence_gradients"


def gradient_arguments(backward: Backward, positions: Optional[Tuple[int, ...]]) -> Dict[str, Any]:
    """The arguments that say which outputs pass gradients back; `positions` is None for 'auto'."""
    sequences = backward.step_net.outer_sequences
    if positions is not None and len(sequences) == 1 and backward.net is not None:
        return {POSITIONS: list(positions)}
    flags = [int(not backward.with_gradient.isdisjoint(seen_as)) for seen_as in sequences.values()]
    wanted: Any = AUTO if positions is None else list(positions)
    return {POSITIONS: [], PYTHON_POSITIONS: wanted, SEQUENCE_GRADIENTS: flags}


def _outputs_shown(outputs: Sequence[str]) -> str:
    return "the {} {}".format("output" if len(outputs) == 1 else "outputs", names(outputs))


@core.GradientRegistry.RegisterGradient(OPERATOR)
def make_gradient(
    operator: caffe2_pb2.OperatorDef, output_gradients: Sequence[Any]
) -> Tuple[List[caffe2_pb2.OperatorDef], List[Optional[str]]]:
    """Gradient operators of a RecurrentNetwork operator, and the gradient of each of its inputs or None.

    `output_gradients` holds for each output the name of its gradient, a `GradientSlice`, or None. Raises
    `ValueError` where the operator has no backward step, or a position it lists receives no gradient.
    """
    arguments = {argument.name: argument for argument in operator.arg}
    if BACKWARD_STEP_NET not in arguments:
        if PYTHON_POSITIONS in arguments:
            # Nothing in the step has a gradient: it stops here, as at any such operator.
            return [], [None] * len(operator.input)
        raise ValueError(
            "a gradient reaches {} of a RecurrentNetwork without a backward step; build it without "
            "forward_only, optimize it after AddGradientOperators, or put StopGradient after it".format(
                _outputs_shown(list(_arrived(operator, output_gradients).values()))
            )
        )
    positions = _positions(operator, arguments, output_gradients)
    if not positions:
        # Nothing but the operator's own output has a gradient.
        return [], [None] * len(operator.input)
    incoming, before = _dense_gradients(operator, positions, output_gradients)

    flags = list(arguments[SEQUENCE_GRADIENTS].ints) if SEQUENCE_GRADIENTS in arguments else [1]
    # Of each sequence. The engine finds its gradient by name.
    buffers = [(blob, own_prefix(operator) + gradient_name(blob)) for blob in operator.input[: len(flags)]]
    others = [*arguments[PARAMETERS].ints, *arguments[INITIAL].ints]
    gradient = _gradient_operator(operator, incoming, positions, buffers, others)
    # The engine sizes the gradient of the first sequence alone.
    sized = [
        operator_beside("ConstantFill", [sequence], [buffer], operator, value=0.0) for sequence, buffer in buffers[1:]
    ]
    # Caffe2 renames gradients of blobs with several readers, so the name that it may rename is that of an alias.
    exposed = [
        operator_beside("Alias", [buffer], [gradient_name(sequence)], operator)
        for (sequence, buffer), flag in zip(buffers, flags)
        if flag
    ]
    input_gradients: List[Optional[str]] = [None] * len(operator.input)
    for position in [*(position for position, flag in enumerate(flags) if flag), *others]:
        input_gradients[position] = gradient_name(operator.input[position])
    return [*before, *sized, gradient, *exposed], input_gradients


def _gradient_operator(
    operator: caffe2_pb2.OperatorDef,
    incoming: Sequence[str],
    positions: Sequence[int],
    buffers: Sequence[Tuple[str, str]],
    others: Sequence[int],
) -> caffe2_pb2.OperatorDef:
    """What makes the `buffers`, each of a sequence, and the gradients of inputs, those at the positions `others`.

    `incoming` are the gradients of the outputs at `positions`.
    """
    gradient = caffe2_pb2.OperatorDef(type=GRADIENT_OPERATOR, engine=operator.engine, is_gradient_op=True)
    if operator.HasField("device_option"):
        gradient.device_option.CopyFrom(operator.device_option)
    gradient.input.extend([*incoming, *operator.input, *operator.output])
    first, *later = (buffer for _, buffer in buffers)
    gradient.output.extend([first, *(gradient_name(operator.input[position]) for position in others), *later])
    own = (POSITIONS, PYTHON_POSITIONS, SEQUENCE_GRADIENTS)
    gradient.arg.extend(argument for argument in operator.arg if argument.name not in own)
    gradient.arg.append(caffe2_utils.MakeArgument(POSITIONS, positions))
    for sequence, buffer in buffers:
        gradient.arg.append(caffe2_utils.MakeArgument(gradient_name(sequence) + RENAMED, buffer))
    return gradient


def _arrived(operator: caffe2_pb2.OperatorDef, output_gradients: Sequence[Any]) -> Dict[int, str]:
    outputs = list(operator.output[:-1])
    return {position: output for position, output in enumerate(outputs) if output_gradients[position] is not None}


def _positions(
    operator: caffe2_pb2.OperatorDef, arguments: Dict[str, Any], output_gradients: Sequence[Any]
) -> List[int]:
    arrived = _arrived(operator, output_gradients)
    wanted = arguments.get(PYTHON_POSITIONS, arguments.get(POSITIONS))
    if wanted is not None and wanted.s == AUTO.encode():
        return list(arrived)
    positions = list(wanted.ints) if wanted is not None else []
    problems = Problems("gradient of the RecurrentNetwork in '{}'".format(own_prefix(operator).rstrip("/")))
    if not positions and arrived:
        problems.add(
            "outputs_with_grads is empty, but a gradient reaches {}; list positions {} or pass 'auto'",
            names(arrived.values()),
            tuple(arrived),
        )
    instead = "leave it out or pass 'auto'"
    if arrived:
        instead = "one reaches {}: pass {} or 'auto'".format(names(arrived.values()), tuple(arrived))
    for position in positions:
        if position not in arrived:
            problems.add(
                "outputs_with_grads lists position {}, '{}', but no gradient reaches it; {}",
                position,
                operator.output[position],
                instead,
            )
    problems.raise_if_any()
    return positions


def _dense_gradients(
    operator: caffe2_pb2.OperatorDef, positions: Sequence[int], output_gradients: Sequence[Any]
) -> Tuple[List[str], List[caffe2_pb2.OperatorDef]]:
    """The gradients at `positions` as dense blobs, and the operators that make them dense."""
    dense, operators = [], []
    for position in positions:
        gradient, output = output_gradients[position], operator.output[position]
        if isinstance(gradient, core.GradientSlice):
            target = own_prefix(operator) + gradient_name(output) + "_dense"
            operators += dense_operators(gradient, output, target, operator)
            gradient = target
        dense.append(str(gradient))
    return dense, operators
