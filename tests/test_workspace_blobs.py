"""Tests of what is seen of blobs without fetching them."""

import numpy as np
import pytest
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace

from caffe2_recurrent import workspace_blobs

ARRAYS = {
    "matrix": np.ones((2, 3), np.float32),
    "scalar": np.array(1, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "double": np.ones(2, np.float64),
    "half": np.ones(2, np.float16),
    "int32": np.ones(2, np.int32),
    "int64": np.ones((1, 2), np.int64),
    "uint8": np.ones(2, np.uint8),
    "bool": np.ones(2, np.bool_),
    "strings": np.array([b"a", b"bc"], dtype=np.object_),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_tensors(name):
    workspace.FeedBlob("x", ARRAYS[name])
    assert workspace_blobs.is_tensor("x")
    assert workspace_blobs.shape("x") == ARRAYS[name].shape
    assert workspace_blobs.kind("x") == ARRAYS[name].dtype
    np.testing.assert_array_equal(workspace.FetchBlob("x"), ARRAYS[name])


def fill(kind):
    """Puts into the blob `x` what is no tensor, or none yet."""
    if kind == "text":
        workspace.FeedBlob("x", "text")
    elif kind == "created":
        workspace.C.Workspace.current.create_blob("x")
    elif kind == "mutex":
        workspace.RunOperatorOnce(core.CreateOperator("CreateMutex", [], ["x"]))
    elif kind == "not written":
        workspace.FeedBlob("y", ARRAYS["matrix"])
        workspace.RunOperatorOnce(core.CreateOperator("Dropout", ["y"], ["z", "x"], is_test=1))
    elif kind == "failed":
        workspace.FeedBlob("y", ARRAYS["matrix"])
        with pytest.raises(RuntimeError):
            workspace.RunOperatorOnce(core.CreateOperator("Reshape", ["y"], ["x", "z"], shape=[5]))
    elif kind == "int8":
        workspace.FeedBlob("y", ARRAYS["matrix"])
        quantize = core.CreateOperator("Int8Quantize", ["y"], ["x"], Y_scale=1.0, Y_zero_point=0)
        workspace.RunOperatorOnce(quantize)


@pytest.mark.parametrize("kind", ["nothing", "text", "created", "mutex", "not written", "failed", "int8"])
def test_what_is_no_tensor(kind):
    fill(kind)
    before = workspace.Blobs()
    assert not workspace_blobs.is_tensor("x")
    assert workspace_blobs.shape("x") is None
    assert workspace_blobs.kind("x") is None
    assert workspace.Blobs() == before


def test_what_is_laid_out_for_onednn():
    if not getattr(workspace.C, "use_mkldnn", False):
        pytest.skip("this Caffe2 has no oneDNN")
    workspace.FeedBlob("y", ARRAYS["matrix"])
    device = core.DeviceOption(caffe2_pb2.IDEEP)
    workspace.RunOperatorOnce(core.CreateOperator("CopyCPUToIDEEP", ["y"], ["x"], device_option=device))
    assert workspace_blobs.shape("x") == (2, 3)
    assert workspace_blobs.kind("x") == np.float32


def test_tensors_are_not_fetched(monkeypatch):
    workspace.FeedBlob("x", ARRAYS["matrix"])
    monkeypatch.setattr(workspace, "FetchBlob", None)
    assert workspace_blobs.shape("x") == (2, 3)
    assert workspace_blobs.kind("x") == np.float32


def test_elements_that_numpy_does_not_know(monkeypatch):
    class Unknown:
        shape = (2, 3)

        @property
        def data(self):
            raise RuntimeError("This tensor's data type is not supported")

    monkeypatch.setattr(workspace_blobs, "_tensor", lambda blob: Unknown())
    assert workspace_blobs.shape("x") == (2, 3)
    assert workspace_blobs.kind("x") is None


@pytest.mark.gpu
def test_a_tensor_of_a_gpu_stays_what_it_is():
    workspace.FeedBlob("x", ARRAYS["matrix"], core.DeviceOption(caffe2_pb2.CUDA, 0))
    assert workspace_blobs.shape("x") == (2, 3)
    assert workspace_blobs.kind("x") == np.float32
    np.testing.assert_array_equal(workspace.FetchBlob("x"), ARRAYS["matrix"])
