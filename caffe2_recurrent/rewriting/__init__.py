"""Rewriting the loops of a finished net so that they run faster.

    net -> loops (loops/) -> rules (rules/, one idea a file) -> net

A rule states in its docstring what it looks for and what it puts there, and gives a reason where it may not.
"""

import warnings
from typing import Iterable, List, Mapping, Optional, Sequence, Tuple

from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

from caffe2_recurrent.arguments import Blob, read_flag
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.shape_checks import check_shapes, read_shapes
from caffe2_recurrent.loops.sizes import Shape, Sizes, find_sizes
from caffe2_recurrent.loops.surroundings import FREEING
from caffe2_recurrent.nets import AnyNet, init_net_of, read_net
from caffe2_recurrent.operators import LOOPS, opened
from caffe2_recurrent.problems import Problems
from caffe2_recurrent.rewriting.batch_parts.parting import rewritten_in_parts
from caffe2_recurrent.rewriting.net_pass import Rewritten, rewritten
from caffe2_recurrent.rewriting.options import Options, read_options
from caffe2_recurrent.rewriting.report import Refusal, Report, Rewrite

__all__ = ["Refusal", "Report", "Rewrite", "optimize"]

CREATED_BEFORE = (
    "optimize: the engine has a net '{}' already, which stays as it was created; create it anew, as by "
    "workspace.CreateNet(net, overwrite=True)"
)


def optimize(
    model_or_net: AnyNet,
    rules: Optional[Iterable[str]] = None,
    shapes: Optional[Mapping[Blob, Sequence[int]]] = None,
    dry_run: bool = False,
    even_if_slower: bool = False,
    trials: bool = True,
    constant_threads: bool = False,
    without: Optional[Iterable[str]] = None,
    constant_weights: bool = False,
    batch_parts: int = 1,
) -> Report:
    """Rewrite the loops of a finished net, in place, so that they run faster.

    Call it after `AddGradientOperators` and before `CreateNet`. It changes `RecurrentNetwork` operators and their
    gradient operators, whoever built them, and adds operators around them. Inputs, outputs, parameters and gradients
    of the net keep their names and, to float rounding, their values.

    Args:
        model_or_net: a `ModelHelper`, of which `net` is rewritten, a `core.Net`, or a `NetDef` read from a file.
        rules: names of the rules to apply; default all. They follow each other in an order of their own.
        shapes: dimensions of the net's inputs, like `{'x': (20, 128, 40)}`. Some rules pay only from some size on.
            What is not given is taken from the blobs in the workspace, and inferred from there.
        dry_run: change nothing, and report what would be done.
        even_if_slower: apply rules also where they would cost more than they gain, as for very small sizes.
        trials: False to time nothing: what only a trial can tell stays as it is, and on one machine each process
            makes the same net, whose results are the same to the bit with the same number of threads.
        constant_threads: True to promise that all threads that run the net have the same number of OpenMP's threads,
            and none gets another once it has run one. Then, also on processors with AVX-512, oneDNN may lay out filters
            once for all steps of a run, and of later runs while the weights of a net that is not trained stay, have
            products over all steps over rows where they lie, and gradients of weights as transposed convolutions. If
            the promise is not kept there, results may be wrong, or the process may end: oneDNN has planned for another
            number. Without AVX-512 there is nothing to promise; a net that was optimised there is not for processors
            that have it.
        without: names of rules to leave out, default none; like `['unrolled_steps']` for batches of many lengths, as
            what it writes out is for one number of steps.
        constant_weights: True to promise that the weights of loops that are not trained stay what they are in the first
            run of the net, as those of one that serves do. Then nothing is made of them in later runs, and they are not
            compared with copies. Where the promise is not kept, results are neither of the first weights nor of the new
            ones, or runs fail, until the net is created anew.
        batch_parts: how many parts of the batch [T, N, D] are to run side by side, each a loop of its own for some of
            the N sequences, one in the thread that runs the net and the others beside it; default 1. Where a trial
            finds that no faster the batch stays in one; so does that of a loop that has been optimised before. Caffe2
            has to be started with `--caffe2_net_async_run_root_tasks_inline=1`, and with as many of OpenMP's and MKL's
            threads as each part is to have (docs/optimize.md).

    Returns:
        A `Report`: `counts` by rule, `rewrites`, `refusals` with their reasons. `print` it.

    Warns:
        UserWarning: the workspace has a net of that name, which has been created before and stays as it is.

    Raises:
        TypeError, ValueError: all that is wrong with the arguments; the net is as it was.

    Source of what loops may do: RecurrentNetworkOp in caffe2/operators/rnn/recurrent_network_op.h.
    """
    types, values = Problems("optimize"), Problems("optimize")
    proto = read_net("model_or_net", model_or_net, types)
    known_shapes = read_shapes(shapes, types)
    dry_run = read_flag("dry_run", dry_run, types)
    options = read_options(
        rules, even_if_slower, trials, constant_threads, without, constant_weights, batch_parts, types, values
    )
    types.raise_if_any(TypeError)
    assert proto is not None
    if known_shapes:
        check_shapes(known_shapes, proto, init_net_of(model_or_net), list(read_loops(proto).values()), values)
    values.raise_if_any()
    operators, report = _optimised(proto, init_net_of(model_or_net), options, known_shapes, dry_run)
    if report.total and not dry_run:
        if proto.name in workspace.C.nets():
            # Before anything is changed: a warning may be an error.
            warnings.warn(CREATED_BEFORE.format(proto.name), stacklevel=2)
        _replace_operators(proto, operators)
    return report


def optimize_proto(proto: caffe2_pb2.NetDef, options: Options) -> Report:
    """As `optimize`, with arguments that have been checked, of a net on its own."""
    operators, report = _optimised(proto, None, options, {}, False)
    if report.total:
        _replace_operators(proto, operators)
    return report


def _optimised(
    proto: caffe2_pb2.NetDef,
    init_net: Optional[caffe2_pb2.NetDef],
    options: Options,
    shapes: Mapping[str, Shape],
    dry_run: bool,
) -> Tuple[List[caffe2_pb2.OperatorDef], Report]:
    """The operators that are to take the place of those of the net, and what there is to say."""
    rules, even_if_slower, trials, promises, batch_parts = options

    def sizes_of(net: caffe2_pb2.NetDef, more: Mapping[str, Shape]) -> Sizes:
        return find_sizes(net, init_net, {**shapes, **more})

    def rewrite(net: caffe2_pb2.NetDef, sizes: Sizes, have_company: bool = False) -> Rewritten:
        return rewritten(net, rules, sizes, even_if_slower, dry_run, trials, promises, have_company)

    if batch_parts > 1:
        return rewritten_in_parts(proto, batch_parts, sizes_of, rewrite, even_if_slower, trials)
    operators, _, report = rewrite(proto, sizes_of(proto, {}))
    return operators, report


def _replace_operators(proto: caffe2_pb2.NetDef, operators: List[caffe2_pb2.OperatorDef]) -> None:
    if proto.external_input:
        proto.external_input.extend(_undeclared(proto, operators))
    if proto.type == FREEING:
        # Others are freed behind their last readers.
        proto.external_output.extend(_made_by_loops(proto, operators))
    # Some of them are still those of the net.
    before = len(proto.op)
    proto.op.extend(operators)
    del proto.op[:before]


def _made_by_loops(proto: caffe2_pb2.NetDef, operators: List[caffe2_pb2.OperatorDef]) -> List[str]:
    """What loops among `operators`, also inside of others, make, and no operator of `proto` said that it does.

    Loops show states and gradients of these under other names, too, in views that have no share of the memory.
    """
    known = {*proto.external_output, *(blob for operator in proto.op for blob in operator.output)}
    with_loops = (operator for operator in operators if any(inner.type in LOOPS for inner in opened([operator])))
    made = (blob for operator in with_loops for blob in operator.output)
    return list(dict.fromkeys(blob for blob in made if blob not in known))


def _undeclared(proto: caffe2_pb2.NetDef, operators: List[caffe2_pb2.OperatorDef]) -> List[str]:
    """What `operators` read, those of `proto` do not, and nobody says where it is from.

    Steps find blobs by their names alone, which Caffe2's beam search makes use of. Operators of the net do not.
    """
    known = {*proto.external_input, *(blob for operator in proto.op for blob in operator.input)}
    found: List[str] = []
    for operator in operators:
        found += [blob for blob in operator.input if blob not in known]
        known.update(operator.input, operator.output)
    return list(dict.fromkeys(found))
