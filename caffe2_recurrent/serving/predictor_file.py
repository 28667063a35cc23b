"""The file of a net that predicts: Caffe2's own, and whole or as it was."""

import contextlib
import os
from typing import Any, Iterator, Union

from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.predictor import predictor_exporter
from caffe2.python.predictor_constants import predictor_constants

from caffe2_recurrent.files import read_path, replacing
from caffe2_recurrent.loops.loop import laid_out_when_changed
from caffe2_recurrent.loops.surroundings import FREEING, ONE_BY_ONE
from caffe2_recurrent.problems import Problems, given, names
from caffe2_recurrent.rewriting.products.kept_filters import need_one_thread
from caffe2_recurrent.serving.dependencies import accesses_of, from_outside
from caffe2_recurrent.workspace_blobs import is_tensor


def save_predictor(path: Union[str, "os.PathLike[str]"], meta: predictor_exporter.PredictorExportMeta) -> None:
    """Write a net and its parameters, as they are in the current workspace, into a file (a `minidb`).

    Another process needs nothing but Caffe2 to run it:
    `predictor_exporter.prepare_prediction_net(path, "minidb")`. Whatever goes wrong, a file that was there stays.

    Args:
        path: the file.
        meta: Caffe2's `PredictorExportMeta(predict_net=.., parameters=.., inputs=.., outputs=..)`, as for its
            `save_to_db`.

    Raises:
        TypeError: all arguments that are of the wrong type.
        ValueError: blobs that the net reads and that are neither inputs nor parameters, parameters that the workspace
            does not have, outputs that the net does not compute, inputs and outputs without a shape, a type of net for
            which the net would have to be optimised otherwise: all of them.
        OSError, RuntimeError: the file cannot be written.

    Source: `save_to_db` in caffe2/python/predictor/predictor_exporter.py.
    """
    types, values = Problems("save_predictor"), Problems("save_predictor")
    file = read_path(path, types)
    _check_meta_types(meta, types)
    types.raise_if_any(TypeError)
    _check_meta(meta, values)
    values.raise_if_any()
    with replacing(file) as part, _blobs_of_the_exporter_removed():
        # Python's errors name the file; the engine's do not.
        open(part, "wb").close()
        # The exporter makes operators from names, which a scope of the caller's would be put before.
        with core.NameScope("", reset=True):
            predictor_exporter.save_to_db("minidb", part, meta)


def _check_meta_types(meta: Any, types: Problems) -> None:
    if not isinstance(meta, predictor_exporter.PredictorExportMeta):
        types.add("meta must be a PredictorExportMeta; got {}", given(meta))
    elif not isinstance(meta.predict_net, caffe2_pb2.NetDef):
        types.add("the predict_net of meta must be a net; got {}", given(meta.predict_net))


def _check_meta(meta: predictor_exporter.PredictorExportMeta, problems: Problems) -> None:
    known = {*meta.inputs, *meta.parameters}
    accesses = accesses_of(meta.predict_net.op)
    unknown = [blob for blob in from_outside(accesses) if blob not in known]
    if unknown:
        problems.add(
            "the net reads {}, which must be among the parameters (or the inputs); prediction_net lists them",
            names(unknown),
        )
    not_made = [blob for blob in meta.outputs if not any(blob in access.writes for access in accesses)]
    if not_made:
        problems.add("the net does not compute the outputs {}", names(not_made))
    no_tensors = [blob for blob in meta.parameters if not is_tensor(blob)]
    if no_tensors:
        problems.add("there are no values in the workspace for the parameters {}", names(no_tensors))
    shapeless = [blob for blob in meta.inputs + meta.outputs if blob not in meta.shapes and not is_tensor(blob)]
    if shapeless:
        problems.add("run the net once, or give shapes: nothing is known of the shape of {}", names(shapeless))
    kind = meta.net_type or meta.predict_net.type
    if kind == FREEING and any(map(laid_out_when_changed, meta.predict_net.op)):
        problems.add(
            "a net of type {} lets go of what rules have it keep from run to run; give the net its type before "
            "`optimize`",
            FREEING,
        )
    if kind not in ONE_BY_ONE and need_one_thread(meta.predict_net.op):
        problems.add(
            "a net of type {} runs its loops in threads of its own, and their steps were optimised for the one that "
            "calls it; give the net its type before `optimize`",
            kind,
        )


@contextlib.contextmanager
def _blobs_of_the_exporter_removed() -> Iterator[None]:
    """The exporter leaves the description of the net in the workspace."""
    name = predictor_constants.META_NET_DEF
    before = workspace.FetchBlob(name) if workspace.HasBlob(name) else None
    try:
        yield
    finally:
        if before is not None:
            workspace.FeedBlob(name, before)
        elif workspace.HasBlob(name):
            workspace.C.Workspace.current.remove_blob(name)
