"""Names that must differ on the two sides of the loop, and in its two directions.

The workspace of a step finds blobs of the net around it by name, and writes to them: a blob that the step takes for its
own and that exists outside under the same name is one blob for all steps, and for the net. Forward and backward step
share a workspace as well.
"""

import re
from typing import Callable, Dict, FrozenSet, Iterable, Sequence

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent.operators import gradient_name
from caffe2_recurrent.problems import Problems, names
from caffe2_recurrent.step_net import StepNet

# What Caffe2 calls the gradients that it is about to add up, and the sparse ones that it has put together.
PART_OF_SUM = re.compile(r"_?(.+_grad)(?:_indices|_values)?(?:_autosplit_\d+|_(?:indices|values)_concat(?:_split)?)$")


def check_step(net: core.Net, step_net: StepNet, remedy: str, problems: Problems) -> None:
    """What a step computes or is linked to must be no blob of `net`, nor one that the loop reads."""
    declared = frozenset(step_net.proto.external_input)
    own = [step_net.timestep, *step_net.linked, *(blob for blob in step_net.writes if blob not in declared)]
    _check_not_outside(net, own, remedy, problems, frozenset(step_net.outer_inputs))


def check_step_gradients(
    net: core.Net,
    step_net: StepNet,
    gradients: Sequence[str],
    parameter_gradients: Iterable[str],
    remedy: str,
    problems: Problems,
) -> None:
    """What the backward step writes or is linked to must be no blob of the step, nor of `net`."""
    forward = frozenset(step_net.writes).union(step_net.proto.external_input)
    clashing = [blob for blob in gradients if blob in forward]
    if clashing:
        problems.add(
            "the step net has {}, names that its backward step needs for gradients; rename them", names(clashing)
        )
    # The engine renames the gradients of parameters within the step.
    renamed = frozenset(parameter_gradients).union(forward)
    _check_not_outside(net, [blob for blob in gradients if blob not in renamed], remedy, problems)


def check_made(step_net: StepNet, made: Sequence[str], problems: Problems) -> None:
    """What the operator makes outside must carry no name of a blob that it reads or that a step has for itself."""
    read = frozenset(step_net.outer_inputs)
    for blob in made:
        if blob in read:
            problems.add("the loop reads '{}' and would make a blob of that name; give it a Copy of the blob", blob)
    inner = frozenset(step_net.linked).union(step_net.writes)
    clashing = [blob for blob in made if blob in inner]
    if clashing:
        problems.add(
            "the step net has {}, names that the loop needs outside; rename them in the step net", names(clashing)
        )


def _check_not_outside(
    net: core.Net, blobs: Iterable[str], remedy: str, problems: Problems, outer_inputs: FrozenSet[str] = frozenset()
) -> None:
    clashing = [blob for blob in dict.fromkeys(blobs) if blob in outer_inputs or net.BlobIsDefined(blob)]
    if clashing:
        problems.add(
            "the step net computes or receives {}, of which net '{}' has a blob of the same name; "
            "all steps would share that one: {}",
            names(clashing),
            net.Name(),
            remedy,
        )


def rename_gradients(
    operators: Iterable[caffe2_pb2.OperatorDef], step_net: StepNet, read_outside: Callable[[str], bool]
) -> Dict[str, str]:
    """Give gradients of references other names than Caffe2 gives them outside; returns the new names.

        _w_grad_autosplit_0    =>    _w_grad_autosplit_0_in_step
        x_grad                 =>    x_grad_in_step

    The former are parts that the step adds up, of references of which `read_outside` says that the net may add up
    gradients too. The latter is that of a reference which is a sequence as well: the engine looks for the gradient of
    a sequence by that name.
    """
    references = {gradient_name(reference): reference for reference in step_net.references}
    sequences = frozenset(map(gradient_name, step_net.outer_sequences)).intersection(references)
    renamed: Dict[str, str] = {}
    for operator in operators:
        for output in operator.output:
            part = PART_OF_SUM.match(output)
            reference = references.get(part.group(1)) if part else None
            if output in sequences or (reference is not None and read_outside(reference)):
                renamed[output] = output + "_in_step"
    for operator in operators if renamed else ():
        for blobs in (operator.input, operator.output):
            if not renamed.keys().isdisjoint(blobs):
                blobs[:] = [renamed.get(blob, blob) for blob in blobs]
    return renamed
