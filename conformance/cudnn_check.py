"""cuDNN, through any PyTorch with a GPU, on the LSTMs in a file of `cudnn_cases.py`; see there.

For each LSTM: the flat blob is, bit by bit, what cuDNN makes of the same weights; with that blob alone as weights it
computes, bit by bit, what it does for `torch.nn.LSTM`; and these values and their gradients are those that Caffe2
found, as are those of PyTorch's kernels on the GPU without cuDNN. Prints the largest differences; the exit status is 1
where one is too large.
"""

import sys

import numpy as np
import torch

# What float32 leaves of sums of up to 128 products in another order, over a few steps.
TOLERANCE = 5e-6
# cuDNN's products are coarser, though TensorFloat-32 is off: with a single product a step they are up to 5e-6 from what
# PyTorch's kernels find on the same GPU, while sigmoid and tanh alone are as exact as theirs.
CUDNN_TOLERANCE = 5e-5
# The number of an LSTM among cuDNN's cells, as PyTorch's functions take it.
CUDNN_LSTM = 2
EQUAL = {True: "equal", False: "DIFFER"}


def main(arguments):
    """Check the file that is named; returns the exit status."""
    if len(arguments) != 1:
        sys.exit("name the file to read, as cudnn_cases.py wrote it")
    if not torch.cuda.is_available():
        sys.exit("this PyTorch has no GPU to use")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    print(
        "PyTorch {}, cuDNN {}, {}".format(
            torch.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name(0)
        )
    )
    cases = read(arguments[0])
    wrong = [name for name, case in cases.items() if not check(name, case)]
    print("{} of {} LSTMs as expected".format(len(cases) - len(wrong), len(cases)))
    return 1 if wrong or not cases else 0


def read(path):
    """{name of the LSTM: {what: array}}"""
    cases = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            name, what = key.split("|")
            cases.setdefault(name, {})[what] = arrays[key]
    return cases


def check(name, case):
    """Whether cuDNN agrees with all that there is of one LSTM; prints a line."""
    with_cudnn = computed_by_module(case, "cuda")
    with torch.backends.cudnn.flags(enabled=False):
        without = computed_by_module(case, "cuda")
    flat_equal = same_bits({"flat": flattened(case)}, case)
    results_equal = same_bits(computed_from_flat(case), with_cudnn)
    cudnn_difference, difference = largest_difference(with_cudnn, case), largest_difference(without, case)
    print(
        "{}: flat weights {}, results from them {}; largest difference with cuDNN {:.1e}, without {:.1e}".format(
            name, *map(EQUAL.get, (flat_equal, results_equal)), cudnn_difference, difference
        )
    )
    return flat_equal and results_equal and cudnn_difference <= CUDNN_TOLERANCE and difference <= TOLERANCE


def flattened(case):
    """The weights where cuDNN wants them."""
    dim = state_size(case)
    weights = [on_gpu(value) for value in weights_of(case).values()]
    mode = (CUDNN_LSTM, dim, 0, int(case["layers"]), False, int(case["directions"]) == 2)
    return torch._cudnn_rnn_flatten_weight(weights, 4, case["x"].shape[2], *mode).cpu().numpy()


def computed_from_flat(case):
    """What cuDNN makes of the flat blob; the list of weights beside it gives their shapes only and is not a number."""
    dim = state_size(case)
    weights = [torch.full_like(on_gpu(value), float("nan")) for value in weights_of(case).values()]
    hidden, cell = (on_gpu(states_of(case, side)) for side in "hc")
    flat = on_gpu(case["flat"])
    mode = (CUDNN_LSTM, dim, 0, int(case["layers"]), False, 0.0, False, int(case["directions"]) == 2, [], None)
    every, hidden, cell, _, _ = torch._cudnn_rnn(on_gpu(case["x"]), weights, 4, flat, hidden, cell, *mode)
    return by_name(case, every, hidden, cell)


def computed_by_module(case, device):
    """Values and gradients of a `torch.nn.LSTM` on a device, by their names in the case."""
    dim = state_size(case)
    layers, directions = int(case["layers"]), int(case["directions"])
    module = torch.nn.LSTM(case["x"].shape[2], dim, layers, bidirectional=directions == 2)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in weights_of(case).items()})
    module.to(device)
    given = (case["x"], states_of(case, "h"), states_of(case, "c"))
    leaves = [torch.from_numpy(value).to(device).requires_grad_() for value in given]
    every, (hidden, cell) = module(leaves[0], tuple(leaves[1:]))
    seen = (every, side_by_side(hidden, directions), side_by_side(cell, directions))
    seeds = [torch.from_numpy(case["seed_{}".format(n)]).to(device) for n in range(3)]
    sum((output * seed).sum() for output, seed in zip(seen, seeds)).backward()
    gradients = {"gradient/x": leaves[0].grad}
    for side, leaf in zip("hc", leaves[1:]):
        gradients.update(("gradient/{}{}".format(side, loop), part) for loop, part in enumerate(leaf.grad.unbind()))
    gradients.update({"gradient/" + name: parameter.grad for name, parameter in module.named_parameters()})
    return {**by_name(case, every, hidden, cell), **as_arrays(gradients)}


def state_size(case):
    return case["h0"].shape[1]


def weights_of(case):
    """The weights by PyTorch's names, in its order."""
    return {what.split("/")[1]: value for what, value in case.items() if what.startswith("weight/")}


def states_of(case, side):
    """The initial states of a side, `[layers * directions, N, D]`."""
    return np.stack([case["{}{}".format(side, loop)] for loop in range(int(case["layers"]) * int(case["directions"]))])


def side_by_side(states, directions):
    """The states of the last layer as LSTM gives them, `[1, N, directions * D]`."""
    return torch.cat(list(states[-directions:].unbind()), dim=1).unsqueeze(0)


def by_name(case, every, hidden, cell):
    directions = int(case["directions"])
    last = {"hidden_last": side_by_side(hidden, directions), "cell_last": side_by_side(cell, directions)}
    return as_arrays({"hidden_all": every, **last})


def as_arrays(tensors):
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def on_gpu(array):
    return torch.from_numpy(array).cuda()


def same_bits(found, expected):
    """Whether all arrays of `found` are those of `expected`, bit by bit."""
    return all(np.array_equal(value.view(np.int32), expected[name].view(np.int32)) for name, value in found.items())


def largest_difference(found, expected):
    """Beside the largest number of each array, 1 at least; infinite where a number is none."""
    differences = [0.0]
    for name, value in found.items():
        difference = np.abs(value - expected[name]).max() / max(1.0, np.abs(expected[name]).max())
        differences.append(float(difference) if np.isfinite(difference) else float("inf"))
    return max(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
