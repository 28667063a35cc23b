"""Operators in front of a loop that depend on weights alone: run in the first run, and when the weights have changed.

    operators  =>  is this the first run of the net, or is a weight not equal to its copy?
                   if so: copies of the weights; operators

Or in the first run alone, where the caller promises that the weights stay. What they make stays in its blobs. The names
of these end in a hash of the operators, so that no net finds there what others have made.
"""

import zlib
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.blob_names import names_of
from caffe2_recurrent.loops.loop import Loop, name_steps_by_content
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.operator_arguments import nets_of
from caffe2_recurrent.operators import OPERATOR, read_before_written, renamed
from caffe2_recurrent.problems import names
from caffe2_recurrent.rewriting import engine_blobs, kept_results
from caffe2_recurrent.rewriting.same_weights import DISTANCE

RULE = "unchanged_weights"

Operators = List[caffe2_pb2.OperatorDef]


def why_not(loop: Loop) -> Optional[str]:
    """Why what is made of weights has to be made in each run of the loop."""
    missing = kept_results.missing(DISTANCE)
    if missing:
        return "this Caffe2 has no {}".format(names(missing))
    if loop.gradient is not None:
        return "it is trained, and its weights change from run to run"
    if loop.has_backward_step:
        return "its step has a backward step: it may be trained"
    if loop.surroundings.net_frees:
        return "a net of this type lets go of blobs that nothing reads any more"
    return None


def may_be_kept(loop: Loop) -> bool:
    """Whether the rule that this is about is to be applied, and can be to what is made of weights."""
    return RULE in loop.rules and why_not(loop) is None


def may_keep_of(loop: Loop, sizes: Sizes, blob: str) -> bool:
    """Whether what is made of `blob` may be kept: it is one of the weights, or made of them alone."""
    if Keeping.WEIGHTS not in loop.may_keep:
        return False
    made = made_of(loop, found(loop, sizes))
    return _is_weight(loop, sizes, blob) or any(blob in operator.output for operator in made)


def found(loop: Loop, sizes: Sizes) -> Tuple[str, ...]:
    """The weights that operators in front of the loop depend on which depend on nothing else.

    Whoever runs the net feeds them, and they are no sequence, no initial state, and nothing else with a size for each
    sequence, as lengths and the outputs of an encoder are: these are others in each run.
    """
    weights = [blob for blob in read_before_written(loop.before) if _is_weight(loop, sizes, blob)]
    return tuple(read_before_written(made_of(loop, weights)))


def _is_weight(loop: Loop, sizes: Sizes, blob: str) -> bool:
    varying = {*(link.outer for link in loop.links), *(state.outer_initial for state in loop.states)}
    if blob not in loop.surroundings.fed or blob in varying:
        return False
    shape, batch = sizes.shape(blob), sizes.batch(loop)
    return sizes.is_parameter(blob) or (shape is not None and batch is not None and batch not in shape)


def made_of(loop: Loop, weights: Iterable[str]) -> Operators:
    """The operators in front of the loop that depend on `weights` alone."""
    known = set(weights)
    made: Operators = []
    for operator in loop.before:
        if known.issuperset(operator.input) and not kept_results.tells_runs_apart(operator):
            made.append(operator)
            known.update(operator.output)
        elif not known.isdisjoint(blob for blob in operator.output if blob != loop.workspaces):
            # What is changed in its place in each run would be changed twice in the second. Where there were step
            # workspaces the engine makes new ones, however often something else is put.
            return []
    return made


def guarded(loop: Loop, operators: Operators) -> Operators:
    """`operators`, which take the place of the forward operator; those that the loop's weights alone decide about run
    when these have changed."""
    made = made_of(loop, loop.weights) if loop.weights else []
    return when_changed(loop, loop.weights, made, without(operators, made)) if made else operators


def when_changed(loop: Loop, weights: Mapping[str, str], made: Operators, rest: Operators) -> Operators:
    """`made`, to be run when `weights` have changed, and `rest`, which reads what it makes.

    With the weights comes how they are compared (`same_weights.way`), unless they are not (`Keeping.FOR_GOOD`).
    """
    ending = "_{:08x}".format(zlib.crc32(caffe2_pb2.NetDef(op=made).SerializeToString()))
    written = {blob for operator in made for blob in operator.output}
    read = dict.fromkeys(blob for operator in rest for blob in names_of(operator) if blob in written)
    results = {blob: loop.new_blob(blob + ending) for blob in read if not engine_blobs.is_of_engine(blob)}
    results.update({blob: engine_blobs.renamed(blob, results) for blob in read if blob not in results})
    laid_out = [renamed(operator, results) for operator in made]
    if Keeping.FOR_GOOD in loop.may_keep:
        missing = loop.new_blob("kept_missing" + ending)
        guarded = kept_results.when_missing(loop, list(weights), laid_out, list(results.values()), missing)
    else:
        copies = {weight: loop.new_blob(weight + "_seen" + ending) for weight in weights}
        guarded = kept_results.when_changed(loop, weights, copies, laid_out, list(results.values()))
    return [*guarded, *(_reading(operator, results) for operator in rest)]


def _reading(operator: caffe2_pb2.OperatorDef, results: Dict[str, str]) -> caffe2_pb2.OperatorDef:
    """The operator, of the results by their new names; step nets that read others are called otherwise, too."""
    made = renamed(operator, results)
    _name_steps(made)
    return made


def _name_steps(operator: caffe2_pb2.OperatorDef) -> None:
    if operator.type == OPERATOR:
        name_steps_by_content(operator)
    for net in nets_of(operator):
        for inner in net.op:
            _name_steps(inner)


def without(operators: Operators, others: Operators) -> Operators:
    return [operator for operator in operators if not any(operator is other for other in others)]
