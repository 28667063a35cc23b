"""An LSTM in a Python that needs no Caffe2 and not this package: what `bench.py --other` starts and times in turn.

    PYTHON other_interpreter.py torch
    PYTHON other_interpreter.py onnxruntime

Every line that comes in is a request in JSON, and each is answered by one line:

    {"do": "hello"}                                                   {"versions": {"python": "3.11.7", ...}}
    {"do": "prepare", "shape": [T, N, I, D], "training": true,
     "threads": 2, "values": FILE}                                    {}
    {"do": "run", "repeats": 3}                                       {"seconds": 0.0123}
    {"do": "results", "file": FILE}                                   {"shapes": {"hidden_all": [T, N, D], ...}}
    {"do": "quit"}                                                    (it ends)

and by {"error": "..."} if it fails. FILE has float32 numbers, one array after the other: the `value_shapes` in their
order, or the results in the order of the answer. Gates are in Caffe2's order: input, forget, output, cell.

torch alone is enough for `torch`; `onnxruntime` also wants onnx and numpy.
"""

import argparse
import collections
import ctypes
import json
import os
import platform
import re
import sys
import time
from typing import IO, Any, Callable, Dict, Iterable, Sequence, Tuple

Size = Tuple[int, ...]
Request = Dict[str, Any]
Results = Dict[str, Tuple[Size, bytes]]  # dimensions and numbers, by name

FLOAT = 4  # bytes
LONGEST_LINE = 200  # of an error
# Out of Caffe2's order i, f, o, g.
TORCH_GATES = (0, 1, 3, 2)
ONNX_GATES = (0, 2, 1, 3)

# Of what is timed, so much runs before, off the clock, and once at least, unless that takes so many seconds.
WARMING_UP = 0.25
WARM_BY_ITSELF = 0.1
CALM = 0.005
CALM_SHARE = 0.2
CALM_AT_LATEST = 1.0


def value_shapes(steps: int, batch: int, dim_in: int, dim: int) -> Dict[str, Size]:
    """What goes into a pass, by name. A forward pass takes the gradient as well, and does not look at it."""
    return collections.OrderedDict(
        [
            ("x", (steps, batch, dim_in)),
            ("hidden", (batch, dim)),
            ("cell", (batch, dim)),
            ("i2h_w", (4 * dim, dim_in)),
            ("i2h_b", (4 * dim,)),
            ("gates_t_w", (4 * dim, dim)),
            ("gates_t_b", (4 * dim,)),
            ("gradient_0", (steps, batch, dim)),
        ]
    )


def calm_down() -> None:
    """Wait until no thread of this process is at work.

    Threads that have run out of work look out for more for a while before they sleep, on a core that who is timed next
    would like to have.
    """
    deadline = time.perf_counter() + CALM_AT_LATEST
    while True:
        wall, used = time.perf_counter(), time.process_time()
        time.sleep(CALM)
        now = time.perf_counter()
        if time.process_time() - used < CALM_SHARE * (now - wall) or now > deadline:
            return


def clocked(run: Callable[[int], object]) -> Callable[[int], float]:
    """A function of repeats that says how many seconds they took.

    Before that it runs, off the clock, a part as often, and once at least: others have had the caches, and its own
    threads sleep. What took long the last time is warm soon enough.
    """
    last = 0.0

    def timed(repeats: int) -> float:
        nonlocal last
        if last < WARM_BY_ITSELF:
            run(max(1, int(WARMING_UP * repeats)))
        start = time.perf_counter()
        run(repeats)
        seconds = time.perf_counter() - start
        last = seconds / repeats
        return seconds

    return timed


def first_line(error: BaseException) -> str:
    """What went wrong, in a line without places of this machine."""
    text = str(error).strip().splitlines()
    line = "{}: {}".format(type(error).__name__, text[0]) if text else type(error).__name__
    return without_folders(line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + " ...")


def without_folders(text: str) -> str:
    return re.sub(r"(?<![\w.])~?(?:/[\w.+@-]+)+/", "", text)


class TorchLSTM:
    """`torch.nn.LSTM`: forward alone, or forward and backward to all parameters and the input."""

    def __init__(self, shape: Sequence[int], training: bool, values: Dict[str, bytes]) -> None:
        import torch

        self._torch, self._training = torch, training
        tensors = {name: self._tensor(values[name], size) for name, size in value_shapes(*shape).items()}
        _, _, dim_in, dim = shape
        self._lstm = torch.nn.LSTM(dim_in, dim)
        self._parameters = collections.OrderedDict(
            [
                ("i2h_w", self._lstm.weight_ih_l0),
                ("i2h_b", self._lstm.bias_ih_l0),
                ("gates_t_w", self._lstm.weight_hh_l0),
                ("gates_t_b", self._lstm.bias_hh_l0),
            ]
        )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._reordered(tensors[name]))
        self._lstm.train(training)
        self._x = tensors["x"].requires_grad_(training)
        self._states = tensors["hidden"].unsqueeze(0), tensors["cell"].unsqueeze(0)
        self._gradient = tensors["gradient_0"]

    @staticmethod
    def versions() -> Dict[str, str]:
        import torch

        return {"torch": torch.__version__}

    @staticmethod
    def set_threads(threads: int) -> None:
        import torch

        torch.set_num_threads(threads)

    def run(self, repeats: int) -> None:
        one_pass = self._train if self._training else self._forward
        for _ in range(repeats):
            one_pass()

    def results(self) -> Results:
        """With gates in Caffe2's order."""
        output = self._train() if self._training else self._forward()
        found = collections.OrderedDict([("hidden_all", output)])
        if self._training:
            found["gradient of x"] = self._x.grad
            for name, parameter in self._parameters.items():
                found["gradient of " + name] = self._reordered(parameter.grad)
        return collections.OrderedDict((name, self._bytes(tensor)) for name, tensor in found.items())

    def _train(self) -> Any:
        self._x.grad = None
        for parameter in self._parameters.values():
            parameter.grad = None
        output, _ = self._lstm(self._x, self._states)
        output.backward(self._gradient)
        return output

    def _forward(self) -> Any:
        with self._torch.no_grad():
            return self._lstm(self._x, self._states)[0]

    def _reordered(self, tensor: Any) -> Any:
        # The swap of two gates is its own inverse.
        parts = tensor.chunk(4, 0)
        return self._torch.cat([parts[gate] for gate in TORCH_GATES], 0)

    def _tensor(self, data: bytes, size: Size) -> Any:
        if hasattr(self._torch, "frombuffer"):
            flat = self._torch.frombuffer(bytearray(data), dtype=self._torch.float32)
        else:
            flat = self._torch.FloatTensor(self._torch.FloatStorage.from_buffer(data, byte_order=sys.byteorder))
        # A copy lies where torch wants its tensors to begin.
        return flat.reshape(size).clone()

    def _bytes(self, tensor: Any) -> Tuple[Size, bytes]:
        tensor = tensor.detach().contiguous()
        # There may be no numpy to convert it with.
        return tuple(tensor.shape), ctypes.string_at(tensor.data_ptr(), FLOAT * tensor.numel())


class OnnxLSTM:
    """ONNX's LSTM operator, forward, in onnxruntime."""

    threads = 1

    def __init__(self, shape: Sequence[int], training: bool, values: Dict[str, bytes]) -> None:
        import numpy as np
        import onnxruntime

        if training:
            raise ValueError("onnxruntime has a forward pass only")
        arrays = {
            name: np.frombuffer(values[name], np.float32).reshape(size) for name, size in value_shapes(*shape).items()
        }
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            self._model(shape, arrays), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {
            "x": arrays["x"],
            "hidden": arrays["hidden"][np.newaxis],
            "cell": arrays["cell"][np.newaxis],
        }

    @staticmethod
    def versions() -> Dict[str, str]:
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__}

    @classmethod
    def set_threads(cls, threads: int) -> None:
        # A session keeps those it was made with.
        cls.threads = threads

    def run(self, repeats: int) -> None:
        session, inputs = self._session, self._inputs
        for _ in range(repeats):
            session.run(None, inputs)

    def results(self) -> Results:
        output = self._session.run(None, self._inputs)[0][:, 0]
        return collections.OrderedDict([("hidden_all", (output.shape, output.tobytes()))])

    @staticmethod
    def _model(shape: Sequence[int], arrays: Dict[str, Any]) -> bytes:
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        steps, batch, dim_in, dim = shape

        def reordered(array: Any) -> Any:
            return np.concatenate([np.split(array, 4)[gate] for gate in ONNX_GATES])[np.newaxis]

        biases = [reordered(arrays[name]) for name in ("i2h_b", "gates_t_b")]
        constants = {
            "w": reordered(arrays["i2h_w"]),
            "r": reordered(arrays["gates_t_w"]),
            "b": np.concatenate(biases, axis=1),
        }
        graph = helper.make_graph(
            [helper.make_node("LSTM", ["x", "w", "r", "b", "", "hidden", "cell"], ["hidden_all"], hidden_size=dim)],
            "lstm",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
                for name, size in (
                    ("x", [steps, batch, dim_in]),
                    ("hidden", [1, batch, dim]),
                    ("cell", [1, batch, dim]),
                )
            ],
            [helper.make_tensor_value_info("hidden_all", TensorProto.FLOAT, [steps, 1, batch, dim])],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        # Versions that runtimes of many years understand.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=7)
        return model.SerializeToString()


KINDS = {"torch": TorchLSTM, "onnxruntime": OnnxLSTM}


class Server:
    """Answers requests; see the module."""

    def __init__(self, kind: str) -> None:
        self._kind, self._layer, self._timed = KINDS[kind], None, None  # type: Any, Any, Any

    def answer(self, request: Request) -> Dict[str, Any]:
        answers = {"hello": self._hello, "prepare": self._prepare, "run": self._run, "results": self._results}
        return answers[request["do"]](request)

    def _hello(self, request: Request) -> Dict[str, Any]:
        return {"versions": dict(self._kind.versions(), python=platform.python_version())}

    def _prepare(self, request: Request) -> Dict[str, Any]:
        # Let go of the last one before the next one needs the memory.
        self._layer = self._timed = None
        self._kind.set_threads(request["threads"])
        self._layer = self._kind(
            request["shape"], request["training"], read_values(request["values"], request["shape"])
        )
        self._timed = clocked(self._layer.run)
        return {}

    def _run(self, request: Request) -> Dict[str, Any]:
        seconds = self._timed(request["repeats"])
        calm_down()
        return {"seconds": seconds}

    def _results(self, request: Request) -> Dict[str, Any]:
        results = self._layer.results()
        with open(request["file"], "wb") as file:
            for _, data in results.values():
                file.write(data)
        return {"shapes": {name: list(size) for name, (size, _) in results.items()}}


def read_values(path: str, shape: Sequence[int]) -> Dict[str, bytes]:
    with open(path, "rb") as file:
        return {name: file.read(FLOAT * elements(size)) for name, size in value_shapes(*shape).items()}


def elements(size: Size) -> int:
    product = 1
    for dim in size:
        product *= dim
    return product


def serve(server: Server, requests: Iterable[str], answers: IO[str]) -> None:
    for line in requests:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        try:
            answer = server.answer(request)
        except Exception as error:
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time an LSTM on request; started by bench.py --other.")
    parser.add_argument("kind", choices=sorted(KINDS))
    kind = parser.parse_args().kind
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Server(kind), sys.stdin, answers)


if __name__ == "__main__":
    main()
