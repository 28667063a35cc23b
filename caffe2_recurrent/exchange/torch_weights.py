"""An LSTM's weights to and from `torch.nn.LSTM`."""

import collections.abc
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np

from caffe2_recurrent.arguments import outer_name
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.exchange.caffe2_blobs import feed_weights, fetch_sizes, fetch_weights
from caffe2_recurrent.exchange.layout import (
    BIASES,
    CAFFE2,
    TORCH,
    LoopWeights,
    StackSizes,
    check_one_size,
    reordered,
    sizes_of,
)
from caffe2_recurrent.exchange.lstm_in_net import find_shared
from caffe2_recurrent.nets import AnyNet, read_net
from caffe2_recurrent.problems import Problems, given, given_array, names

# What a loop's entries in a state dict end in, by direction.
DIRECTIONS = ("", "_reverse")
# As torch calls them; it need not be there.
BOOL, DENSE = "torch.bool", "torch.strided"


def lstm_to_torch(net: AnyNet, scope: str, prefix: str = "") -> Dict[str, np.ndarray]:
    """The weights of an LSTM as the state dict of a `torch.nn.LSTM`, in numpy.

    In layer k, and with `_reverse` behind the name in its backward direction:

        weight_ih_l<k>  [4 D, width]  is  i2h_w
        weight_hh_l<k>  [4 D, D]          gates_t_w
        bias_ih_l<k>    [4 D]             i2h_b, with forget_bias added to the forget gate
        bias_hh_l<k>    [4 D]             gates_t_b

    with gates in the order input, forget, cell, output there, and input, forget, output, cell here. `width` is dim_in,
    above the first layer D or, with two directions, 2 D with the forward one first.

    Args:
        net: a model, its net or a `NetDef`, with the LSTM as it was built; `optimize` comes later. Layers, directions
            and forget_bias are read from its operators, the values from the workspace.
        scope: under which the LSTM was built, below the current `NameScope`.
        prefix: what the names start with, such as `encoder.` in a module of which the LSTM is a part.

    Returns:
        The entries in the order of torch, all copies. With `torch.from_numpy` around each, `load_state_dict` of
        `torch.nn.LSTM(dim_in, D, layers, bidirectional=...)` takes them. All numbers are those of the blobs but where
        forget_bias is not 0, which is added in float32. Initial states are arguments in torch and not among them.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: no such LSTM in the net, blobs that are missing or do not fit, layers of several sizes; all of them.

    Source of the layout: the attributes of `torch.nn.LSTM`, and LSTMUnit in caffe2/operators/lstm_unit_op.h.
    """
    checks = Checks("lstm_to_torch")
    proto, scope = read_net("net", net, checks.types), checks.scope(scope)
    _check_prefix(prefix, checks)
    checks.done()
    assert proto is not None
    lstm = find_shared(proto, outer_name(scope), checks.values)
    weights = fetch_weights(lstm, checks.values)
    sizes = sizes_of(weights, lstm.directions)
    check_one_size(sizes, "torch.nn.LSTM", checks.values)
    checks.done()
    return {
        key: reordered(getattr(loop, name), CAFFE2, TORCH)
        for keys, loop in zip(_keys(sizes, prefix), weights)
        for name, key in keys.items()
    }


def lstm_from_torch(net: AnyNet, scope: str, state: Any, prefix: str = "") -> None:
    """Set the weights of an LSTM in the workspace to those of a `torch.nn.LSTM`.

    The reverse of `lstm_to_torch`, entry by entry: `i2h_b` becomes `bias_ih` less forget_bias in the forget gate. With
    a forget_bias of 0 going there and back changes no bit; else it may change the forget gate of `i2h_b` by the
    rounding of a sum and a difference in float32, and nothing else.

    Args:
        net, scope, prefix: as in `lstm_to_torch`. The LSTM has the layers, directions and sizes of the module, and its
            parameters are in the workspace: run param_init_net before, not after.
        state: a `torch.nn.LSTM`, a module that holds one, or a state dict with tensors or arrays; torch itself is not
            needed for a dict of arrays. A module made with `bias=False` has biases of 0. Entries that do not start
            with `prefix` are left alone.

    The blobs are written as float32, on the device of the current `DeviceScope`.

    Raises:
        TypeError: all arguments that are of the wrong type, and all entries that are no real numbers in memory, as
            sparse and quantized tensors are.
        ValueError: no such LSTM in the net; names that are missing or unknown, shapes that do not fit, blobs that are
            not in the workspace, numbers beyond float32, all of them. Nothing has been written then.

    Source: as for `lstm_to_torch`.
    """
    checks = Checks("lstm_from_torch")
    proto, scope = read_net("net", net, checks.types), checks.scope(scope)
    _check_prefix(prefix, checks)
    arrays = _read_state(state, str(prefix), checks)
    checks.done()
    assert proto is not None
    lstm = find_shared(proto, outer_name(scope), checks.values)
    sizes = fetch_sizes(lstm, checks.values)
    check_one_size(sizes, "torch.nn.LSTM", checks.values)
    _check_entries(arrays, sizes, prefix, checks.values)
    checks.done()
    weights = [
        LoopWeights(
            **{
                name: reordered(arrays.get(keys[name], np.zeros(shape, np.float32)), TORCH, CAFFE2)
                for name, shape in shapes.items()
            }
        )
        for keys, shapes in zip(_keys(sizes, prefix), sizes.shapes())
    ]
    feed_weights(lstm, weights, checks.values)


def _keys(sizes: StackSizes, prefix: str) -> List[Dict[str, str]]:
    """What each field of each loop is called in a state dict."""
    return [
        {name: "{}{}_l{}{}".format(prefix, name, layer, DIRECTIONS[direction]) for name in LoopWeights._fields}
        for layer, direction in sizes.places()
    ]


def _check_prefix(prefix: Any, checks: Checks) -> None:
    if not isinstance(prefix, str):
        checks.types.add("prefix must be a string; got {}", given(prefix))


def _read_state(state: Any, prefix: str, checks: Checks) -> Dict[str, np.ndarray]:
    """The entries under `prefix` as arrays."""
    entries = state.state_dict() if hasattr(state, "state_dict") and not isinstance(state, type) else state
    if not isinstance(entries, collections.abc.Mapping):
        checks.types.add("state must be a torch.nn.LSTM or a state dict; got {}", given(state))
        return {}
    arrays = {}
    for key, value in entries.items():
        if not str(key).startswith(prefix):
            continue
        array = _as_array(value)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            text = "state['{}'] must be a tensor or an array of real numbers{}; got {}"
            checks.types.add(text, key, _instead(value), given_array(value))
        arrays[str(key)] = array
    return arrays


def _as_array(value: Any) -> Any:
    """A tensor of floats or integers as an array, whichever its device and width, or the value as it is."""
    # Of complex numbers torch would leave out a part, and bools would be numbers.
    if not hasattr(value, "detach") or value.is_complex() or str(value.dtype) == BOOL or _instead(value):
        return value
    # To some widths numpy has no equal; and what shows numbers with another sign has a memory of its own then.
    return value.detach().cpu().double().clone().numpy()


def _instead(value: Any) -> str:
    """Of a tensor whose numbers do not lie in memory, one behind the other, what to give in its place."""
    if getattr(value, "is_meta", False):
        return ", and on the device meta there are none: load the module first"
    if getattr(value, "is_quantized", False):
        return ": use value.dequantize()"
    return "" if str(getattr(value, "layout", DENSE)) == DENSE else ": use value.to_dense()"


def _check_entries(arrays: Mapping[str, np.ndarray], sizes: StackSizes, prefix: str, problems: Problems) -> None:
    shapes = {
        keys[name]: shape
        for keys, by_name in zip(_keys(sizes, prefix), sizes.shapes())
        for name, shape in by_name.items()
    }
    biases = {keys[name] for keys in _keys(sizes, prefix) for name in BIASES}
    optional = biases if biases.isdisjoint(arrays) else set()
    missing = [key for key in shapes if key not in arrays and key not in optional]
    unknown = [key for key in arrays if key not in shapes]
    if missing:
        problems.add("state lacks {}", names(missing))
    if unknown:
        problems.add("state has {}, which this LSTM does not have; {}", names(unknown), _prefix_hint(unknown, missing))
    of_gru = {key: (shape[0] // 4 * 3, *shape[1:]) for key, shape in shapes.items()}
    if all(key in arrays and arrays[key].shape == shape for key, shape in of_gru.items()):
        problems.add("state has the weights of a torch.nn.GRU: those of 3 gates, where an LSTM has 4")
        return
    for key in shapes:
        if key in arrays and arrays[key].shape != shapes[key]:
            problems.add(
                "state['{}'] has shape {}; this LSTM takes {}", key, list(arrays[key].shape), list(shapes[key])
            )


def _prefix_hint(unknown: Sequence[str], missing: Sequence[str]) -> str:
    """The prefix with which the unknown entries are those that are missing, if there is one."""
    first = missing[0] if missing else ""
    prefixes = [key[: -len(first)] for key in unknown if first and key.endswith("." + first)]
    fitting = [prefix for prefix in prefixes if all(prefix + key in unknown for key in missing)]
    if fitting:
        return "do you mean {}?".format(" or ".join("prefix='{}'".format(prefix) for prefix in fitting))
    return "with a prefix, other entries are left alone"
