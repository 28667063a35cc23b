"""The number of OpenMP's threads, where the order of oneDNN's filters depends on it: with AVX-512.

ATen sets it in each thread, to that of MKL's, when it first has much to do there. What oneDNN has planned before that
is for another number. So operators for which that matters come behind one of ATen's that has the number set at once,
whatever its sizes; from then on ATen leaves it alone.

Source: lazy_init_num_threads in ATen's Parallel.h. Which kernels oneDNN takes, and in which order filters lie, it says
where `DNNL_VERBOSE=1` is set: without AVX-512 that is `jit_1x1:avx2` and one order, with 1 to 8 threads.
"""

from typing import List

from caffe2.proto import caffe2_pb2

from caffe2_recurrent import processor
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.operator_arguments import argument
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing

# It asks for the number whatever its sizes.
SETTING = "softmax"


def matter() -> bool:
    """Whether they matter here, as far as is known of the processor."""
    return processor.may_have("avx512f")


def set_at_once(number: str) -> List[caffe2_pb2.OperatorDef]:
    """Operators that have it set, over a new blob `number`; none where it does not matter, or there is no ATen."""
    if not matter() or aten_is_missing():
        return []
    plain = caffe2_pb2.OperatorDef()
    return [
        new_operator("ConstantFill", [], [number], plain, shape=[1], value=1.0),
        new_operator(ATEN, [number], [number + "_alone"], plain, operator=SETTING, dim=0),
    ]


def sets(operator: caffe2_pb2.OperatorDef) -> bool:
    """Whether it has the number set."""
    kind = argument(operator, "operator")
    return operator.type == ATEN and kind is not None and kind.s == SETTING.encode()


def is_set_before(loop: Loop) -> bool:
    """Whether what runs in front of the loop has it set for its steps, too: all runs in one thread."""
    return Keeping.NUMBER in loop.may_keep and matter() and not aten_is_missing()


def add_number_of_rows(loop: Loop) -> str:
    """An outer blob `[1]` that says N. Where that is so, it is what comes of the operator that has it set."""
    rows = loop.add_number_of_rows()
    if not is_set_before(loop):
        return rows
    ones = loop.add_before("ConstantFill", [rows], "ones", input_as_shape=1, value=1.0)
    alone = loop.add_before(ATEN, [ones], "alone", operator=SETTING, dim=0)
    return loop.add_before("Shape", [alone], "number_of_rows_here", axes=[0])
