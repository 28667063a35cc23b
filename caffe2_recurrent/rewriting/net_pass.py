"""The pass: every rule over every loop of a net, and the net changed at once at the end."""

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from caffe2.proto import caffe2_pb2

from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.loops.reading import read_loops
from caffe2_recurrent.loops.sizes import Sizes
from caffe2_recurrent.loops.tensor_names import changed_by, names_of_tensors
from caffe2_recurrent.operator_arguments import has_nets
from caffe2_recurrent.operators import GRADIENT_OPERATOR, LINK, OPERATOR, is_backward_of
from caffe2_recurrent.rewriting import exposed_gradients, memory_names, passes, turning, unchanged_weights
from caffe2_recurrent.rewriting.products import kept_filters, thread_numbers
from caffe2_recurrent.rewriting.promises import Promises
from caffe2_recurrent.rewriting.report import Refusal, Report, Rewrite
from caffe2_recurrent.rewriting.rule import Rule
from caffe2_recurrent.rewriting.steps import own_state, step_shapes
from caffe2_recurrent.rewriting.steps.rows import with_rows
from caffe2_recurrent.rewriting.trials import trial

Operators = List[caffe2_pb2.OperatorDef]
# The rule that makes a backward pass a loop, so that either has two step workspaces at most.
BACKWARD_LOOP = "backward_loop"


class Rewritten(NamedTuple):
    """`places` are, for each of the `operators`, the position of that in whose place it stands."""

    operators: Operators
    places: List[int]
    report: Report


def rewritten(
    net: caffe2_pb2.NetDef,
    rules: Sequence[Rule],
    sizes: Sizes,
    even_if_slower: bool,
    dry_run: bool,
    trials: bool,
    promises: Promises,
    have_company: bool = False,
) -> Rewritten:
    """The operators that `net` has with its loops rewritten, and what was done. `net` is left as it is.

    `have_company`: whatever its type says, several of its loops are going to run at the same time.
    """
    loops = read_loops(net)
    rewrites: List[Rewrite] = []
    refusals: List[Refusal] = []
    changed: Dict[int, Loop] = {}
    for position, loop in loops.items():
        loop.surroundings.has_company |= have_company
        reason = _out_of_reach(loop) or _mistakable(loop, net)
        if reason is not None:
            refusals.append(Refusal("all", loop.name, loop.forward.type, reason))
            continue
        _tell(loop, rules, sizes, promises)
        with trial.trying(trials):
            loop.turns = not even_if_slower and turning.pays(loop, rules, sizes)
            made, left = passes.apply_all(rules, loop, sizes, even_if_slower)
        rewrites += made
        refusals += left
        if made:
            memory_names.set_apart(loop)
            changed[position] = loop
    operators, places = _assembled(net, changed)
    names = tuple(loop.name for loop in loops.values())
    chosen = tuple(rule.name for rule in rules)
    without = tuple(loop.name for loop in changed.values() if loop.gradient is None and loop.has_backward_step)
    report = Report(names, chosen, tuple(rewrites), tuple(refusals), dry_run, trials, without)
    return Rewritten(operators, places, report)


def _tell(loop: Loop, rules: Sequence[Rule], sizes: Sizes, promises: Promises) -> None:
    """What rules ask the loop for."""
    # What rules put there does not tell, but blobs keep what they hold.
    loop.known.rows |= with_rows(loop, sizes)
    loop.known.columns.update(step_shapes.columns(loop, sizes))
    loop.rules = frozenset(rule.name for rule in rules)
    loop.may_keep = _what_may_be_kept(loop, promises)


def _assembled(net: caffe2_pb2.NetDef, changed: Mapping[int, Loop]) -> Tuple[Operators, List[int]]:
    """The operators of `net` with those loops, by their positions, in the place of the ones there, and their places."""
    differentiated = {loop.forward.output[-1]: loop for loop in changed.values() if loop.gradient is not None}
    around = {
        position: taking_its_place
        for loop in changed.values()
        for products in (loop.surroundings.of_references, loop.surroundings.products)
        for position, taking_its_place in products.items()
        if taking_its_place != [net.op[position]]
    }
    operators: Operators = []
    places: List[int] = []
    for position, operator in enumerate(net.op):
        if position in around:
            operators += waiting(around[position], [operator])
        elif position in changed:
            loop = changed[position]
            # What made a sequence may be gone, and the loop read what it read.
            sources = [net.op[source] for source in loop.surroundings.products if net.op[source].type == "FC"]
            operators += waiting(unchanged_weights.guarded(loop, passes.around_forward(loop)), [operator, *sources])
        elif operator.type == GRADIENT_OPERATOR and operator.input[-1] in differentiated:
            operators += waiting(passes.around_gradient(differentiated[operator.input[-1]]), [operator])
        else:
            operators.append(operator)
        places += [position] * (len(operators) - len(places))
    exposed_gradients.keep_order(operators)
    return operators, places


def waiting(made: Operators, before: Operators) -> Operators:
    """`made`, which takes the place of the operators `before`, and waits for all that these have waited for."""
    waits_for = dict.fromkeys(blob for operator in before for blob in operator.control_input)
    for operator in made:
        known = {*operator.input, *operator.control_input}
        operator.control_input.extend(blob for blob in waits_for if blob not in known)
    return made


def _what_may_be_kept(loop: Loop, promises: Promises) -> Keeping:
    of_weights = Keeping.WEIGHTS if unchanged_weights.may_be_kept(loop) else Keeping.NOTHING
    if of_weights and promises.constant_weights:
        of_weights |= Keeping.FOR_GOOD
    is_for_two = BACKWARD_LOOP in loop.rules if loop.gradient is not None else not loop.has_backward_step
    if not promises.constant_threads and thread_numbers.matter():
        return of_weights
    of_threads = Keeping.PLANS | (Keeping.NUMBER if loop.surroundings.is_in_order else Keeping.NOTHING)
    return of_weights | of_threads | (Keeping.FILTERS if is_for_two else Keeping.NOTHING)


def _out_of_reach(loop: Loop) -> Optional[str]:
    if loop.chained:
        return "an earlier `optimize` has made the operators of its steps a chain"
    if any(map(kept_filters.are_in, loop.steps)):
        return "an earlier `optimize` has made its products, whose results it reads where oneDNN leaves them"
    if any(operator.type == LINK for operator in loop.operators):
        return "it is a backward pass that has been made a loop of its own"
    if loop.forward.device_option.device_type != caffe2_pb2.DeviceOption().device_type:
        return "it does not run on a CPU, and the rules are made for CPUs"
    if any(window != 1 for given in loop.forward.arg if given.name == "link_window" for window in given.ints):
        return "its steps see windows of several slices"
    own = {link.inner for link in loop.all_links} | {loop.timestep}
    outside = (loop.written - own) & {*loop.net.external_input, *loop.inputs, *loop.surroundings.busy}
    if outside:
        return "its steps write to '{}', which is a blob outside of them too".format(min(outside))
    state = own_state.found(loop)
    if state is not None:
        return "{}, and what that gives depends on how many operators the steps have".format(state)
    inside = [operator.type for operators in loop.steps for operator in operators if has_nets(operator)]
    if inside:
        return "its steps have operators that run nets ({}), and rules do not look into these".format(inside[0])
    return None


def _mistakable(loop: Loop, net: caffe2_pb2.NetDef) -> Optional[str]:
    """Why it is not certain which operators belong together; a loop and its gradient share their step workspaces."""
    if any(is_backward_of(operator, loop.forward) for operator in net.op):
        return "its backward pass has been made a loop of its own, which fits its steps as they are"
    if loop.gradient is None:
        return None
    workspaces = loop.workspaces
    changed = _written_between(net, *loop.outer_operators) & loop.references
    if changed:
        return "'{}' is written between the loop and its gradient operator".format(min(changed))
    if sum(operator.type == OPERATOR and operator.output[-1] == workspaces for operator in net.op) > 1:
        return "another loop has the same step workspaces, '{}'".format(workspaces)
    if sum(operator.type == GRADIENT_OPERATOR and operator.input[-1] == workspaces for operator in net.op) > 1:
        return "it has several gradient operators"
    return None


def _written_between(net: caffe2_pb2.NetDef, first: caffe2_pb2.OperatorDef, last: caffe2_pb2.OperatorDef) -> Set[str]:
    operators = list(net.op)
    between = operators[operators.index(first) + 1 : operators.index(last)]
    return changed_by(between, names_of_tensors(net))
