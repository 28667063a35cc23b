"""A loop in readable text."""

from typing import Iterator, List, NamedTuple, Optional, Sequence

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.viewing.kept import STEP_NUMBER_BYTES, Place, StepBlob
from caffe2_recurrent.viewing.operator_text import arguments_text, device_text, type_text
from caffe2_recurrent.viewing.source import SeenLoop
from caffe2_recurrent.viewing.structure import Executor, Output, Reference, SequenceInput, State, View
from caffe2_recurrent.viewing.tensors import Tensor

UNKNOWN = "?"
NONE = "none"
# What the engine takes where nothing is set.
THREADS, STREAMS = 4, 2
INDENT = "  "


class Section(NamedTuple):
    title: str
    lines: List[str]


def loop_text(loop: SeenLoop) -> str:
    lines = ["loop '{}'".format(loop.structure.name)] + [INDENT + fact for fact in _facts(loop)]
    for section in _sections(loop):
        lines.append(INDENT + section.title)
        lines += [2 * INDENT + line for line in section.lines or [NONE]]
    return "\n".join(lines)


def _facts(loop: SeenLoop) -> Iterator[str]:
    structure, sizes = loop.structure, loop.sizes
    yield "T = {} steps, N = {} sequences".format(_or_unknown(sizes.steps), _or_unknown(sizes.batch))
    if sizes.missing:
        yield "sizes shown as ? follow from shapes of {}".format(", ".join(sizes.missing))
    if not loop.has_forward:
        yield "its forward operator is not here; if that was optimised, it links and shares more than is shown"
    if structure.backward_pass_of is not None:
        yield "it is the backward pass of the loop with the step workspaces '{}'".format(structure.backward_pass_of)
    elif loop.backward_pass is not None:
        yield "it has no backward step: its backward pass is the loop '{}'".format(loop.backward_pass)
    elif structure.backward is None:
        yield "forward only: it has no backward step"
    elif not structure.backward.in_net:
        yield "it has a backward step; its gradient operator is not here"


def _sections(loop: SeenLoop) -> Iterator[Section]:
    structure, backward = loop.structure, loop.structure.backward
    yield Section("sequences", [_sequence(loop, sequence) for sequence in structure.sequences])
    yield Section("states", [line for state in structure.states for line in _state(loop, state)])
    with_gradient = [reference for reference in structure.references if reference.outer_gradient is not None]
    without = [reference for reference in structure.references if reference.outer_gradient is None]
    yield Section("references with a gradient", [_reference(loop, reference) for reference in with_gradient])
    yield Section("references without a gradient", [_reference(loop, reference) for reference in without])
    if structure.shown:
        yield Section("slices of blobs of the net", [_shown(loop, view) for view in structure.shown])
    written = ["{} is written in slices by the steps".format(_outer(loop, blob)) for blob in structure.written]
    yield Section("outputs", written + [_output(loop, output) for output in structure.outputs])
    yield Section(_kept_title(loop), _kept(loop))
    if backward is not None:
        yield Section("computed again by the backward step", [_step_blob(blob) for blob in _computed_again(loop)])
    yield from _elsewhere(loop)
    yield Section("how it runs", _run(loop))
    yield Section("step net '{}'".format(structure.step_name), _operators(structure.operators))
    if backward is not None:
        yield Section("backward step net '{}'".format(backward.name), _operators(backward.operators))


def _sequence(loop: SeenLoop, sequence: SequenceInput) -> str:
    view = sequence.view
    overwritten = ", overwritten by the step" if view.inner in loop.structure.computed else ""
    return "{} is {}{}; {}, {}".format(
        view.inner,
        view.outer + view.places,
        overwritten,
        _outer(loop, view.outer),
        _gradient(sequence.outer_gradient),
    )


def _state(loop: SeenLoop, state: State) -> Iterator[str]:
    before, after = (", ".join(view.inner for view in views) for views in (state.before, state.after))
    yield "{} {} -> {}".format(before, _shape(loop.sizes.inner.get(state.before[0].inner)), after)
    places = " and ".join(view.places for view in [*state.before, *state.after])
    values = loop.sizes.outer.get(state.outer_states)
    yield INDENT + "are {} of {}, {}".format(places, _outer(loop, state.outer_states), _bytes_of(values))
    yield INDENT + "initial value {}, {}".format(_outer(loop, state.outer_initial), _gradient(state.outer_gradient))


def _reference(loop: SeenLoop, reference: Reference) -> str:
    shown = _outer(loop, reference.outer)
    return shown if reference.outer_gradient is None else "{}; gradient {}".format(shown, reference.outer_gradient)


def _shown(loop: SeenLoop, view: View) -> str:
    return "{} is {}; {}".format(_inner(loop, view.inner), view.outer + view.places, _outer(loop, view.outer))


def _output(loop: SeenLoop, output: Output) -> str:
    if output.receives is None:
        gradient = "any gradient that reaches it goes back"
    elif not output.receives:
        gradient = "no gradient goes back from it"
    else:
        gradient = "its gradient{} goes back".format(" " + output.outer_gradient if output.outer_gradient else "")
    return "{} is {}; {}".format(_outer(loop, output.outer), output.outer_states + output.places, gradient)


def _kept_title(loop: SeenLoop) -> str:
    if loop.structure.backward is not None:
        return "each step keeps, in a workspace of its own"
    if loop.memory.workspaces == 1:
        return "the steps share one workspace, which holds"
    return "the steps take turns in {} workspaces; each holds".format(_or_unknown(loop.memory.workspaces))


def _kept(loop: SeenLoop) -> List[str]:
    memory = loop.memory
    lines = []
    for blob in memory.kept:
        unread = loop.structure.backward is not None and not blob.read_back
        lines.append(_step_blob(blob) + ("; the backward step does not read it" if unread else ""))
    lines.append("the step's number, {} bytes".format(STEP_NUMBER_BYTES))
    lines.append(
        "together {} a step, {} in {} steps".format(
            _bytes(memory.bytes_per_step), _bytes(memory.total_bytes), _or_unknown(loop.sizes.steps)
        )
    )
    return lines


def _computed_again(loop: SeenLoop) -> List[StepBlob]:
    return [blob for blob in loop.memory.blobs if blob.computed_again]


def _elsewhere(loop: SeenLoop) -> Iterator[Section]:
    """What a step computes and neither keeps, nor computes again, nor passes on as a state."""
    structure = loop.structure
    if structure.buffers:
        lines = ["{} is {}".format(_inner(loop, view.inner), view.outer + view.places) for view in structure.buffers]
        yield Section("kept in blobs of the net", lines)
    once = [blob for blob in loop.memory.blobs if not blob.computed_again]
    shared = [blob for blob in once if blob.place is Place.SHARED]
    if shared:
        lines = [_step_blob(blob) + ("; " + STALE if blob.read_back else "") for blob in shared]
        yield Section("in memory that all steps share", lines)
    of_net = [blob for blob in once if blob.place is Place.NET]
    if of_net:
        lines = [_step_blob(blob) + ("; " + STALE if blob.read_back else "") for blob in of_net]
        yield Section("in blobs that the net has by the same name, for all steps", lines)


STALE = "the backward step reads it, and finds what the last step left there"


def _run(loop: SeenLoop) -> List[str]:
    structure = loop.structure
    on_cpu = structure.device.device_type == caffe2_pb2.CPU
    lines = ["on " + device_text(structure.device), "step number in {}".format(structure.timestep)]
    if structure.chained:
        lines.append("the operators of a step in a chain, each waiting for the one before")
    executor = _executor(structure.executor, on_cpu)
    backward = structure.backward and _executor(structure.backward.executor, on_cpu)
    if backward in (None, executor):
        return lines + ["RNN executor: " + executor]
    return lines + ["RNN executor, forward: " + executor, "RNN executor, backward: {}".format(backward)]


def _executor(executor: Executor, on_cpu: bool) -> str:
    if not executor.enabled:
        return "off, one operator after the other"
    if on_cpu:
        return _setting(executor.threads, THREADS, "threads")
    return _setting(executor.streams, STREAMS, "streams")


def _setting(value: Optional[int], default: int, what: str) -> str:
    return "on, {} {} by default".format(default, what) if value is None else "on, {} {}".format(value, what)


def _operators(operators: Sequence[caffe2_pb2.OperatorDef]) -> List[str]:
    place = len(str(len(operators) - 1))
    width = max((len(type_text(operator)) for operator in operators), default=0)
    lines = []
    for position, operator in enumerate(operators):
        arguments = arguments_text(operator)
        lines.append(
            "{:>{}}  {:<{}}  {} -> {}{}".format(
                position,
                place,
                type_text(operator),
                width,
                ", ".join(operator.input),
                ", ".join(operator.output),
                "  ({})".format(arguments) if arguments else "",
            )
        )
    return lines


def _outer(loop: SeenLoop, blob: str) -> str:
    return "{} {}".format(blob, _shape(loop.sizes.outer.get(blob)))


def _inner(loop: SeenLoop, blob: str) -> str:
    return "{} {}".format(blob, _shape(loop.sizes.inner.get(blob)))


def _step_blob(blob: StepBlob) -> str:
    kind = "" if blob.tensor is None or blob.tensor.kind is None else " " + blob.tensor.kind.name
    return "{} {}{}, {}".format(blob.inner, _shape(blob.tensor), kind, _bytes(blob.bytes))


def _shape(tensor: Optional[Tensor]) -> str:
    return "[{}]".format(UNKNOWN if tensor is None else ", ".join(map(str, tensor.shape)))


def _gradient(blob: Optional[str]) -> str:
    return "no gradient" if blob is None else "gradient " + blob


def _bytes_of(tensor: Optional[Tensor]) -> str:
    return _bytes(None if tensor is None else tensor.bytes)


def _bytes(size: Optional[int]) -> str:
    return "{} bytes".format(UNKNOWN if size is None else "{:,}".format(size))


def _or_unknown(number: Optional[int]) -> str:
    return UNKNOWN if number is None else str(number)
