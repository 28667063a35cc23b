"""An ONNX graph while it is being built: nodes in order, numbers, inputs and outputs, under names of their own."""

from typing import Any, Dict, Iterable, List, Sequence, Union

import numpy as np

from caffe2_recurrent.blob_names import Names

# Of onnx 1.9, from 2021: the newest operators that are used are Reshape and LSTM, of 14. onnxruntime 1.8 reads both.
OPSET, IR_VERSION = 14, 7

Axes = Sequence[Union[int, str]]


def require_onnx(caller: str) -> Any:
    """The package onnx, imported."""
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise ImportError(
            "{} needs the package onnx: pip install 'caffe2_recurrent[onnx]'".format(caller), name="onnx"
        ) from error
    return onnx


class OnnxGraph:
    """`taken` are the names of inputs and outputs; all others get `prefix` before them, and a number if need be.

    What is added once more with the same inputs is the node that is there already.
    """

    def __init__(self, onnx: Any, prefix: str, taken: Iterable[str]) -> None:
        self._onnx, self._prefix = onnx, prefix
        self._names = Names(taken)
        self._nodes: List[Any] = []
        self._made: Dict[Any, List[str]] = {}
        self._constants: List[Any] = []
        self._numbers: Dict[Any, str] = {}
        self._inputs: Dict[str, Any] = {}
        self._outputs: List[Any] = []
        self.int32: int = onnx.TensorProto.INT32

    def input(self, name: str, kind: str, axes: Axes) -> str:
        """An input of a type of TensorProto; an axis is a number or, where any goes, a letter."""
        self._inputs[name] = self._value(name, kind, axes)
        return name

    def output(self, value: str, name: str, axes: Axes) -> None:
        """Make `value` an output, under the name that the caller knows it by."""
        self._nodes.append(self._onnx.helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(self._value(name, "FLOAT", axes))

    def constant(self, name: str, values: np.ndarray) -> str:
        name = self._names.new(self._prefix + name)
        self._constants.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def number(self, value: Any) -> str:
        """A scalar of numpy, of its own type."""
        return self._small(np.array(value))

    def integers(self, *values: int) -> str:
        """`[len(values)]` int64, as axes and shapes are given."""
        return self._small(np.array(values, dtype=np.int64))

    def add(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node, and give the name of its one output."""
        return self.add_several(kind, inputs, [name], **attributes)[0]

    def add_several(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> List[str]:
        key = (kind, *inputs, str(sorted(attributes.items())))
        if key not in self._made:
            made = [self._names.new(self._prefix + name) for name in outputs]
            self._nodes.append(self._onnx.helper.make_node(kind, inputs, made, name=made[0], **attributes))
            self._made[key] = made
        return self._made[key]

    def _small(self, values: np.ndarray) -> str:
        key = (values.dtype, values.shape, values.tobytes())
        if key not in self._numbers:
            self._numbers[key] = self.constant("number", values)
        return self._numbers[key]

    def model(self, name: str, text: str) -> Any:
        """The finished model, checked by onnx, shapes and types included."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes, name, list(self._inputs.values()), self._outputs, self._constants, doc_string=text
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="caffe2_recurrent",
        )
        self._onnx.checker.check_model(model, full_check=True)
        return model

    def _value(self, name: str, kind: str, axes: Axes) -> Any:
        return self._onnx.helper.make_tensor_value_info(name, getattr(self._onnx.TensorProto, kind), list(axes))
