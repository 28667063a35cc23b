"""What each step's workspace keeps, in bytes, seen through `retrieve_step_blobs`."""

import re

from caffe2.python import workspace

from caffe2_recurrent import retrieve_step_blobs


def owned_bytes(net, prefix="kept"):
    """For each step workspace of the loops in `net` the bytes of what is no view into an outer blob."""
    linked = {
        blob.decode()
        for operator in net.Proto().op
        if operator.type == "RecurrentNetwork"
        for argument in operator.arg
        if argument.name == "link_internal"
        for blob in argument.strings
    }
    owned = {}
    for name in retrieve_step_blobs(net, prefix):
        name = name.decode()
        # The executor keeps the step number in a blob whose own name ends in a number.
        match = re.match(re.escape(prefix) + r"_(.*_rnnexec_t\d+?|.*?)(\d+)$", name)
        blob, step = match.group(1), int(match.group(2))
        if "_rnnexec_t" in blob:
            step = _step_of_executor_blob(name, prefix)
        owned.setdefault(step, 0)
        if blob not in linked:
            owned[step] += workspace.FetchBlob(name).nbytes
    return [owned[step] for step in sorted(owned)]


def _step_of_executor_blob(name, prefix):
    """`<prefix>_timestep_rnnexec_t<step><workspace>`: where each step has its own workspace, both are the same."""
    digits = re.search(r"_rnnexec_t(\d+)$", name).group(1)
    half = len(digits) // 2
    return int(digits[half:])
