"""A step net run in plain numpy, in float64: the reference that every recurrent net is compared with."""

import numpy as np


def _arguments(operator):
    return {argument.name: argument for argument in operator.arg}


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _fc(operator, x, weights, biases):
    return x @ weights.T + biases


def _lstm_unit(operator, hidden_prev, cell_prev, gates, *rest):
    arguments = _arguments(operator)
    forget_bias = arguments["forget_bias"].f if "forget_bias" in arguments else 0.0
    drop_states = "drop_states" in arguments and bool(arguments["drop_states"].i)
    with_lengths = "sequence_lengths" not in arguments or bool(arguments["sequence_lengths"].i)
    i, f, o, g = np.split(gates, 4, axis=-1)
    cell = _sigmoid(f + forget_bias) * cell_prev + _sigmoid(i) * np.tanh(g)
    hidden = _sigmoid(o) * np.tanh(cell)
    if not with_lengths:
        return hidden, cell
    lengths, timestep = rest
    valid = (timestep.reshape(()) < lengths)[np.newaxis, :, np.newaxis]
    kept = 0.0 if drop_states else 1.0
    return np.where(valid, hidden, kept * hidden_prev), np.where(valid, cell, kept * cell_prev)


def _split(operator, x):
    return tuple(np.split(x, len(operator.output), axis=_arguments(operator)["axis"].i))


def _batch_mat_mul(operator, a, b):
    transposed = [name in _arguments(operator) and _arguments(operator)[name].i for name in ("trans_a", "trans_b")]
    a, b = (np.swapaxes(x, -1, -2) if is_transposed else x for x, is_transposed in zip((a, b), transposed))
    return a @ b


OPERATORS = {
    "Alias": lambda operator, x: x,
    "BatchMatMul": _batch_mat_mul,
    "Cast": lambda operator, x: x.real.astype(np.int64) if _arguments(operator)["to"].i in (2, 10) else x,
    "Concat": lambda operator, *xs: (np.concatenate(xs, axis=_arguments(operator)["axis"].i), None),
    "ConstantFill": lambda operator, x: np.full_like(x, _arguments(operator)["value"].f),
    "Copy": lambda operator, x: x.copy(),
    "FC": _fc,
    "Gather": lambda operator, table, indices: table[indices],
    "LSTMUnit": _lstm_unit,
    "Log": lambda operator, x: np.log(x),
    "Mul": lambda operator, a, b: a * b,
    "Negative": lambda operator, x: -x,
    "Pow": lambda operator, x, *y: x ** (y[0] if y else _arguments(operator)["exponent"].f),
    "ReduceFrontSum": lambda operator, x: x.sum(axis=0),
    "ReduceMean": lambda operator, x: x.mean(axis=tuple(_arguments(operator)["axes"].ints)),
    "Relu": lambda operator, x: np.maximum(x, 0),
    "Scale": lambda operator, x: x * _arguments(operator)["scale"].f,
    "Sigmoid": lambda operator, x: _sigmoid(x),
    "Split": _split,
    "Squeeze": lambda operator, x: np.squeeze(x, axis=tuple(_arguments(operator)["dims"].ints)),
    "ExpandDims": lambda operator, x: np.expand_dims(x, axis=list(_arguments(operator)["dims"].ints)[0]),
    "StopGradient": lambda operator, x: x,
    "Sqr": lambda operator, x: x * x,
    "Sqrt": lambda operator, x: np.sqrt(x),
    "Sum": lambda operator, *xs: sum(xs[1:], xs[0]),
    "Tanh": lambda operator, x: np.tanh(x),
}


def run_step(step_net, blobs):
    """Run the operators of a step net on `blobs`, in place."""
    for operator in step_net.op:
        results = OPERATORS[operator.type](operator, *[blobs[name] for name in operator.input])
        if not isinstance(results, tuple):
            results = (results,)
        blobs.update(zip(operator.output, results))


def run_loop(step_net, inputs, initial, links, timestep, outer):
    """All outputs of the loop, in the order of `recurrent_net`, from the values of the outer blobs."""
    inputs, initial = [tuple(map(str, pair)) for pair in inputs], [tuple(map(str, pair)) for pair in initial]
    links = {str(state): str(output) for state, output in links.items()}
    steps, batch = outer[inputs[0][1]].shape[:2]
    roles = {inner for inner, _ in inputs + initial} | {timestep}
    states = {}
    for inner, name in initial:
        value = outer[name]
        states[inner] = np.broadcast_to(value.reshape((-1,) + value.shape[-1:]), (batch, value.shape[-1]))[np.newaxis]
    history = {inner: [] for inner, _ in initial}
    for t in range(steps):
        blobs = {name: outer[name] for name in step_net.external_input if name not in roles}
        blobs[timestep] = np.array([t], dtype=np.int32)
        blobs.update({inner: outer[name][t : t + 1] for inner, name in inputs})
        blobs.update(states)
        run_step(step_net, blobs)
        states = {inner: blobs[links[inner]] for inner, _ in initial}
        for inner, _ in initial:
            history[inner].append(states[inner])
    outputs = []
    for inner, _ in initial:
        outputs += [np.concatenate(history[inner]), history[inner][-1]]
    return outputs


def numerical_gradients(loss, values, of, step=1e-30):
    """Derivatives of `loss(values)` for each float array named in `of`, by an imaginary step.

    Nothing is subtracted from its like, so that they are exact to rounding, and take one run of `loss` for each number
    (Squire and Trapp, 1998). `loss` must be analytic where it is looked at, and keep complex numbers. Where it gives
    several numbers, the last axis has the derivatives of each.
    """
    numbers = {name: v.astype(np.complex128) if v.dtype.kind == "f" else v for name, v in values.items()}
    several = np.shape(loss(numbers))
    gradients = {}
    for name in of:
        array = numbers[name]
        gradient = np.zeros(array.shape + several)
        for index in np.ndindex(*array.shape):
            array.imag[index] = step
            gradient[index] = loss(numbers).imag / step
            array.imag[index] = 0
        gradients[name] = gradient
    return gradients
