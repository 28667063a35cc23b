"""Running a step net through a builder, and comparing what comes out."""

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

import numpy_loop

TOLERANCE = 2e-4
# Of step nets that several tests have.
REFERENCE_GRADIENTS = {}


def build(builder, step_net, net=None, **options):
    """Add the loop to `net` (a new one by default); returns the net and its outputs."""
    net = net or core.Net("outer")
    merged = dict(step_net.options, **options)
    outputs = builder(
        net,
        step_net.cell,
        step_net.inputs,
        step_net.initial,
        step_net.links,
        timestep=step_net.timestep,
        **merged,
    )
    return net, outputs


def positions(step_net, options=()):
    chosen = dict(step_net.options, **dict(options)).get("outputs_with_grads", (0,))
    return tuple(range(2 * len(step_net.initial))) if chosen == "auto" else tuple(chosen)


def feed(step_net):
    for name, value in step_net.outer.items():
        workspace.FeedBlob(name, value)


def run(builder, step_net, executor=True, rewrite=None, **options):
    """Values of all outputs, and the gradients of all float outer blobs for fixed random output gradients.

    `rewrite` may change the finished net before it is run.
    """
    net, outputs = build(builder, step_net, **options)
    feed(step_net)
    found = {}
    if not dict(step_net.options, **options).get("forward_only"):
        found = _differentiate(net, outputs, output_gradients(step_net, options, reference_outputs(step_net)))
    if rewrite is not None:
        rewrite(net)
    configure(net, executor)
    workspace.RunNetOnce(net)
    gradients = {name: workspace.FetchBlob(str(found[name])) for name in step_net.floats if name in found}
    return [workspace.FetchBlob(output) for output in outputs], gradients


def run_layer(case, model, outputs, executor, rewrite=None):
    """Outputs, gradients by name, and the model: a layer with the values and output gradients of `case`, run once."""
    found = {}
    if not case.options.get("forward_only"):
        seeds = case.output_gradients()
        found = _differentiate(model.net, outputs, {position: seeds[position] for position in case.positions})
    workspace.RunNetOnce(model.param_init_net)
    case.feed()
    if rewrite is not None:
        rewrite(model)
    configure(model.net, executor)
    workspace.RunNetOnce(model.net)
    blobs = {name: core.BlobReference(case.full_name(name)) for name in case.values()}
    gradients = {name: workspace.FetchBlob(str(found[blob])) for name, blob in blobs.items() if blob in found}
    return [workspace.FetchBlob(output) for output in outputs], gradients, model


def _differentiate(net, outputs, seeds):
    """Add gradient operators that start from `seeds` (position of an output -> its gradient); gives all gradients."""
    given = {}
    for position, value in seeds.items():
        name = "given_gradient_{}".format(position)
        workspace.FeedBlob(name, value.astype(np.float32))
        given[outputs[position]] = net.AddExternalInput(name)
    return net.AddGradientOperators(given)


def configure(net, executor):
    for operator in net.Proto().op:
        for argument in operator.arg:
            if argument.name == "enable_rnn_executor":
                argument.i = int(executor)


def doubles(step_net):
    return {
        name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in step_net.outer.items()
    }


def reference_outputs(step_net, outer=None):
    return numpy_loop.run_loop(
        step_net.cell.Proto(),
        step_net.inputs,
        step_net.initial,
        step_net.links,
        "timestep" if step_net.timestep is None else str(step_net.timestep),
        doubles(step_net) if outer is None else outer,
    )


def output_gradients(step_net, options, outputs):
    random = np.random.RandomState(7)
    drawn = [random.rand(*output.shape) + 0.5 for output in outputs]
    return {position: drawn[position] for position in positions(step_net, options)}


def reference_gradients(step_net, **options):
    """Derivatives in float64 of the loss whose output gradients `run` feeds; found once for all tests of a step net."""
    key = _identity(step_net, positions(step_net, options))
    if key not in REFERENCE_GRADIENTS:
        REFERENCE_GRADIENTS[key] = _reference_gradients(step_net, options)
    return dict(REFERENCE_GRADIENTS[key])


def _identity(step_net, seen):
    """All that the derivatives depend on."""
    named = caffe2_pb2.NetDef()
    named.CopyFrom(step_net.cell.Proto())
    named.ClearField("name")
    wiring = repr([(str(inner), str(outer)) for inner, outer in [*step_net.inputs, *step_net.initial]])
    links = repr([(str(state), str(output)) for state, output in step_net.links.items()])
    values = tuple((name, value.shape, value.dtype.str, value.tobytes()) for name, value in step_net.outer.items())
    return named.SerializeToString(), wiring, links, str(step_net.timestep), values, step_net.stopped, seen


def _reference_gradients(step_net, options):
    values = doubles(step_net)
    seeds = output_gradients(step_net, options, reference_outputs(step_net, values))

    def loss(values):
        outputs = reference_outputs(step_net, values)
        return sum((outputs[position] * seed).sum() for position, seed in seeds.items())

    moving = [name for name in step_net.floats if name not in step_net.stopped]
    gradients = numpy_loop.numerical_gradients(loss, values, moving)
    gradients.update({name: np.zeros_like(values[name]) for name in step_net.stopped})
    return gradients


def assert_close(found, expected, what, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=str(what))


def assert_right(builder, step_net, **options):
    """Outputs and gradients equal the numpy loop's."""
    outputs, gradients = run(builder, step_net, **options)
    options.pop("executor", None)
    assert_outputs_and_gradients(step_net, outputs, gradients, **options)


def assert_outputs_and_gradients(step_net, outputs, gradients, **options):
    """What `run` gave equals the numpy loop's; a blob without a gradient has a zero one there."""
    for index, (output, expected) in enumerate(zip(outputs, reference_outputs(step_net))):
        assert_close(output, expected, "output {}".format(index))
    if dict(step_net.options, **options).get("forward_only"):
        return
    for name, expected in reference_gradients(step_net, **options).items():
        assert_close(gradients.get(name, np.zeros_like(expected)), expected, "gradient of {}".format(name))


def differences(ours, theirs):
    """In what two operators differ; step nets are compared operator by operator, their names left out."""
    found = []
    if list(ours.input) != list(theirs.input):
        found.append("inputs")
    if list(ours.output) != list(theirs.output):
        found.append("outputs")
    if ours.type != theirs.type or ours.device_option != theirs.device_option or ours.engine != theirs.engine:
        found.append("type, device or engine")
    our_arguments = {argument.name: argument for argument in ours.arg}
    their_arguments = {argument.name: argument for argument in theirs.arg}
    found.extend(sorted(set(our_arguments) ^ set(their_arguments)))
    for name in sorted(set(our_arguments) & set(their_arguments)):
        mine, other = our_arguments[name], their_arguments[name]
        if name.endswith("step_net"):
            equal = _comparable(mine.n) == _comparable(other.n)
        elif name == "recompute_blobs_on_backward":
            # Caffe2 writes a set here, in the order of its hashes.
            equal = sorted(mine.strings) == sorted(other.strings)
        else:
            equal = mine == other
        if not equal:
            found.append(name)
    return found


def _comparable(step_net):
    """A step net without its name, and without the inputs that Caffe2's builder declares by accident.

    From the second accumulated gradient on, its lookup tables are out of date and it declares the `_accum` blob, which
    the operator before writes, as an external input.
    """
    copy = type(step_net)()
    copy.CopyFrom(step_net)
    copy.ClearField("name")
    written = {output for operator in step_net.op for output in operator.output if output.endswith("_accum")}
    del copy.external_input[:]
    copy.external_input.extend(blob for blob in step_net.external_input if blob not in written)
    return copy
