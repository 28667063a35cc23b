"""An LSTM's weights to and from the one flat blob of cuDNN."""

from typing import Dict, Iterator, List, Tuple

import numpy as np

from caffe2_recurrent.arguments import outer_name
from caffe2_recurrent.checks import Checks
from caffe2_recurrent.exchange.caffe2_blobs import feed_weights, fetch_sizes, fetch_weights
from caffe2_recurrent.exchange.layout import (
    BIASES,
    CAFFE2,
    CUDNN,
    WEIGHTS,
    LoopWeights,
    Shape,
    StackSizes,
    check_one_size,
    reordered,
    sizes_of,
)
from caffe2_recurrent.exchange.lstm_in_net import find_shared
from caffe2_recurrent.nets import AnyNet, read_net
from caffe2_recurrent.problems import given_array


def lstm_to_cudnn(net: AnyNet, scope: str) -> np.ndarray:
    """The weights of an LSTM as the flat blob of `cudnn_LSTM`, `<its scope>/lstm_weight`.

    First all matrices, then all biases; among these, layer by layer, the forward direction before the backward one,
    the side of the input before that of the state, and the gates in the order input, forget, cell, output:

        W_i W_f W_g W_o  U_i U_f U_g U_o   of layer 0       W [D, dim_in], above layer 0 [D, D]; U [D, D]; in rows
        W_i W_f W_g W_o  U_i U_f U_g U_o   of layer 1 ...
        b_i b_f b_g b_o  c_i c_f c_g c_o   of layer 0       b, c [D]
        b_i b_f b_g b_o  c_i c_f c_g c_o   of layer 1 ...

    W is `i2h_w`, U `gates_t_w`, b `i2h_b` with forget_bias added to the forget gate, c `gates_t_b`.

    Args:
        net, scope: as in `lstm_to_torch`.

    Returns:
        float32 `[size]`, a copy; size is 4 (D dim_in + D^2 + 2 D) for the first layer and 4 (2 D^2 + 2 D) for each
        other one. Feed it in a `DeviceScope` of the GPU, after the param_init_net of `cudnn_LSTM`. With two directions
        it is the blob of a `Recurrent` operator with `bidirectional=1`, which `cudnn_LSTM` does not make.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: no such LSTM in the net, blobs that are missing or do not fit, layers of several sizes; all of them.

    Source: caffe2/operators/rnn/recurrent_op_cudnn.cc for the order of the gates, and that the algorithm is cuDNN's
    standard one. Where a gate lies cuDNN's interface leaves open; Keras and MXNet write the order above for it, and
    `conformance/cudnn_check.py` has found it on a GPU with cuDNN 9.19.
    """
    checks = Checks("lstm_to_cudnn")
    proto, scope = read_net("net", net, checks.types), checks.scope(scope)
    checks.done()
    assert proto is not None
    lstm = find_shared(proto, outer_name(scope), checks.values)
    weights = fetch_weights(lstm, checks.values)
    sizes = sizes_of(weights, lstm.directions)
    check_one_size(sizes, "cuDNN", checks.values)
    checks.done()
    parts = [reordered(getattr(weights[loop], name), CAFFE2, CUDNN).ravel() for loop, name, _ in _parts(sizes)]
    return np.concatenate(parts).astype(np.float32)


def lstm_from_cudnn(net: AnyNet, scope: str, flat: np.ndarray) -> None:
    """Set the weights of an LSTM in the workspace to those of a `cudnn_LSTM`, so that it runs on a CPU.

    The reverse of `lstm_to_cudnn`, of which the layout is. Going there and back changes what `lstm_from_torch` says.

    Args:
        net, scope: as in `lstm_from_torch`, an LSTM with the layers and sizes of the `cudnn_LSTM`.
        flat: `[size]`, what `workspace.FetchBlob` gives for `<scope of cudnn_LSTM>/lstm_weight`.

    The blobs are written as float32, on the device of the current `DeviceScope`.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: no such LSTM in the net, blobs that are not in the workspace, a size that does not fit, numbers
            beyond float32. Nothing has been written then.

    Source: as for `lstm_to_cudnn`.
    """
    checks = Checks("lstm_from_cudnn")
    proto, scope = read_net("net", net, checks.types), checks.scope(scope)
    if not isinstance(flat, np.ndarray) or flat.dtype.kind not in "fiu":
        checks.types.add("flat must be a numpy array of real numbers; got {}", given_array(flat))
    checks.done()
    assert proto is not None
    lstm = find_shared(proto, outer_name(scope), checks.values)
    sizes = fetch_sizes(lstm, checks.values)
    check_one_size(sizes, "cuDNN", checks.values)
    parts = list(_parts(sizes))
    ends = np.cumsum([np.prod(shape) for _, _, shape in parts])
    size = int(ends[-1])
    if flat.shape != (size,):
        checks.values.add(
            "flat has shape {}; an LSTM with an input of {}, layers of {} and {} takes {}",
            list(flat.shape),
            sizes.dim_in,
            list(sizes.dims),
            "two directions" if sizes.directions == 2 else "one direction",
            [size],
        )
    checks.done()
    fields: List[Dict[str, np.ndarray]] = [{} for _ in lstm.loops]
    for (loop, name, shape), values in zip(parts, np.split(flat, ends[:-1])):
        fields[loop][name] = reordered(values.reshape(shape), CUDNN, CAFFE2)
    feed_weights(lstm, [LoopWeights(**by_name) for by_name in fields], checks.values)


def _parts(sizes: StackSizes) -> Iterator[Tuple[int, str, Shape]]:
    """(loop, field, shape) of each part of the blob, in its order."""
    shapes = sizes.shapes()
    for kind in (WEIGHTS, BIASES):
        for loop, by_name in enumerate(shapes):
            for name in kind:
                yield loop, name, by_name[name]
