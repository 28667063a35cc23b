"""The number of OpenMP's threads, where the order of oneDNN's filters depends on it: with AVX-512.

ATen sets it in each thread, to that of MKL's, when it first has much to do there. What oneDNN has planned before that
is for another number. So operators for which that matters come behind one of ATen's that has the number set at once,
whatever its sizes; from then on ATen leaves it alone. In a chain of operators (`chains.py`), which may have a thread of
its own, that is in the first step of each run.

Source: lazy_init_num_threads in ATen's Parallel.h. Which kernels oneDNN takes, and in which order filters lie, it says
where `DNNL_VERBOSE=1` is set: without AVX-512 that is `jit_1x1:avx2` and one order, with 1 to 8 threads.
"""

from typing import Iterable, List

from caffe2.proto import caffe2_pb2
from caffe2.python import core

from caffe2_recurrent import processor
from caffe2_recurrent.loops.loop import Loop
from caffe2_recurrent.loops.parts import Keeping
from caffe2_recurrent.operator_arguments import argument, net_to_read
from caffe2_recurrent.operators import new_operator
from caffe2_recurrent.rewriting.emit import ATEN, aten_is_missing

# It asks for the number whatever its sizes.
SETTING = "softmax"
IN_CHAIN = "number_set_in_chain"


def matter() -> bool:
    """Whether they matter here, as far as is known of the processor."""
    return processor.may_have("avx512f")


def set_at_once(number: str) -> List[caffe2_pb2.OperatorDef]:
    """Operators that have it set, over a new blob `number`; none where it does not matter, or there is no ATen."""
    return setting(number) if matter() else []


def setting(number: str) -> List[caffe2_pb2.OperatorDef]:
    """The same, whether it matters or not."""
    if aten_is_missing():
        return []
    plain = caffe2_pb2.OperatorDef()
    return [
        new_operator("ConstantFill", [], [number], plain, shape=[1], value=1.0),
        new_operator(ATEN, [number], [number + "_alone"], plain, operator=SETTING, dim=0),
    ]


def set_in_chain(loop: Loop) -> None:
    """Let the first step of each run have it set, where steps are a chain: a blob says whether it is to be set."""
    # Made of what each run has, not of weights alone.
    rows = loop.add_number_of_rows()
    blob = loop.add_before("ConstantFill", [rows], "number_is_to_be_set", value=True, dtype=core.DataType.BOOL)
    loop.add_reference(blob)
    loop.made[IN_CHAIN] = blob


def set_in_first_step(loop: Loop) -> List[caffe2_pb2.OperatorDef]:
    """The operators of a step for that, none where it is not to be so."""
    to_be_set = loop.made.get(IN_CHAIN)
    if to_be_set is None:
        return []
    done = new_operator("ConstantFill", [], [to_be_set], loop.forward, shape=[1], value=False, dtype=core.DataType.BOOL)
    setting = caffe2_pb2.NetDef(name=IN_CHAIN, type="simple", op=[*set_at_once(loop.new_blob("number")), done])
    return [new_operator("If", [to_be_set], [to_be_set], loop.forward, then_net=setting)]


def to_be_set(operators: Iterable[caffe2_pb2.OperatorDef]) -> List[str]:
    """The blobs that say so in the operators of a step."""
    return [operator.input[0] for operator in operators if net_to_read(operator, "then_net").name == IN_CHAIN]


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
