"""The engine's step workspaces, seen from Python."""

from typing import List

from caffe2.python import core, workspace

from caffe2_recurrent.gradient_maker import OPERATOR


def retrieve_step_blobs(net: core.Net, prefix: str = "rnn") -> List[bytes]:
    """Copy what each step's workspace holds into the current workspace; call it after the net has run.

    Args:
        net: a net with RecurrentNetwork operators.
        prefix: a step's blob `b` becomes `<prefix>_b<step>`; linked blobs are copied as well.

    Returns:
        The names of the blobs made, as Caffe2 stores strings: bytes.

    Source: caffe2/operators/rnn/recurrent_network_blob_fetcher_op.h.
    """
    found: List[bytes] = []
    workspaces = [operator.output[-1] for operator in net.Proto().op if operator.type == OPERATOR]
    for count, step_workspaces in enumerate(workspaces, start=1):
        listing = "{}_{}".format(prefix, count)
        workspace.RunOperatorOnce(
            core.CreateOperator(
                "RecurrentNetworkBlobFetcher",
                [core.BlobReference(step_workspaces)],
                [core.BlobReference(listing)],
                prefix=prefix,
            )
        )
        found.extend(workspace.FetchBlob(listing).tolist())
    return found
