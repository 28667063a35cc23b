"""Building into a model so that a failure leaves it as it was."""

import contextlib
import copy
from typing import Any, Callable, Iterator, List

from caffe2.python import core
from caffe2.python.model_helper import ModelHelper

_COUNTERS = ("_next_name_index", "_next_blob_name_ids")
_PARAMETER_LISTS = ("params", "weights", "biases", "_computed_params")


@contextlib.contextmanager
def all_or_nothing(model: ModelHelper) -> Iterator[None]:
    """Take back what a failing block appended to the model's nets and parameters.

    Builders only append, so lengths are all that has to be remembered.
    """
    undo = [_net_reset(model.net), _net_reset(model.param_init_net)]
    undo += [_truncation(getattr(model, name)) for name in _PARAMETER_LISTS]
    undo.append(_mapping_reset(model._parameters_info))
    try:
        yield
    except BaseException:
        for step in undo:
            step()
        raise


def _truncation(items: Any) -> Callable[[], None]:
    length = len(items)

    def truncate() -> None:
        del items[length:]

    return truncate


def _mapping_reset(mapping: Any) -> Callable[[], None]:
    before = list(mapping)

    def reset() -> None:
        for key in set(mapping).difference(before):
            del mapping[key]

    return reset


def _net_reset(net: core.Net) -> Callable[[], None]:
    proto = net.Proto()
    undo: List[Callable[[], None]] = [_truncation(proto.op)]
    undo += [_truncation(proto.external_input), _truncation(proto.external_output)]
    # Older Caffe2 has only the first of these counters.
    counters = {name: copy.copy(net.__dict__[name]) for name in _COUNTERS if name in net.__dict__}

    def reset() -> None:
        for step in undo:
            step()
        net.__dict__.update(counters)
        net._InvalidateLookupTables()

    return reset
