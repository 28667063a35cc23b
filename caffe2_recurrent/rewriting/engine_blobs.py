"""Blobs that operators make for themselves, by names that the engine gives them.

No operator of a net writes them, so that nothing else tells whose memory they are.
"""

from typing import Dict

# An operator of the CPU that runs on oneDNN's device has its result in a blob of this name too.
ON_CPU = "{}_cpu_output_blob_{}"
# What convolutions for the CPU need for themselves, and what locks it. They share both in the workspace in which the
# first of them is made, if they do not find them in one around it. (caffe2/operators/conv_op_shared.cc)
CONVOLUTION_BUFFERS = ("__CAFFE2_SHARED_CONV_BUFFER_CPU__", "__CAFFE2_SHARED_CONV_BUFFER_CPU_MUTEX__")

_MARK = ON_CPU.format("", "")


def is_of_engine(blob: str) -> bool:
    return _MARK in blob or blob in CONVOLUTION_BUFFERS


def named_after(blob: str) -> str:
    """The blob of a net that such a blob is named after; itself if there is none."""
    return blob.partition(_MARK)[0]


def renamed(blob: str, names: Dict[str, str]) -> str:
    """Such a blob, if what it is named after has another name now."""
    base = named_after(blob)
    return names.get(base, base) + blob[len(base) :]
