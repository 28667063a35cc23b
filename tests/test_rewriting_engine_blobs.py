"""`engine_blobs`: which blobs operators make for themselves, and what they are called when another one is renamed."""

import numpy as np
import pytest
from caffe2.python import core, workspace

from caffe2_recurrent.rewriting.engine_blobs import CONVOLUTION_BUFFERS, is_of_engine, renamed


@pytest.mark.parametrize("blob", ["layer/x_cpu_output_blob_Scale", *CONVOLUTION_BUFFERS])
def test_blobs_of_the_engine(blob):
    assert is_of_engine(blob)


@pytest.mark.parametrize("blob", ["layer/x", "layer/cpu_output", "buffer"])
def test_blobs_of_a_net(blob):
    assert not is_of_engine(blob)


def test_what_is_named_after_a_blob_goes_with_it():
    names = {"x": "x_shared", "y_cpu_output_blob_Scale": "nothing"}
    assert renamed("x_cpu_output_blob_Scale", names) == "x_shared_cpu_output_blob_Scale"
    assert renamed("y_cpu_output_blob_Scale", names) == "y_cpu_output_blob_Scale"
    assert [renamed(blob, names) for blob in CONVOLUTION_BUFFERS] == list(CONVOLUTION_BUFFERS)


@pytest.mark.usefixtures("nnpack_products")
def test_the_names_are_those_of_this_caffe2():
    """A convolution by NNPACK makes its blobs where it is made."""
    net = core.Net("convolution")
    net.Conv(["image", "image"], ["result"], kernel=1, engine="NNPACK")
    workspace.FeedBlob("image", np.ones((1, 1, 1, 1), dtype=np.float32))
    workspace.RunNetOnce(net)
    assert set(CONVOLUTION_BUFFERS) <= set(workspace.Blobs())
