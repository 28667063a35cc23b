"""Our layers with their batch in parts, in a process of their own: what `bench.py` starts and times in turn.

It answers as `other_interpreter.py` does. A number of threads is that of the parts, for each of which OpenMP has one
thread: who else is timed has them all in each operator, and a process should not change their number.
"""

import collections
import sys
from pathlib import Path
from typing import Any, Dict, Sequence, Type

# Started with -E, so that no variable says where the package is.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from caffe2.python import workspace  # noqa: E402

import caffe2_recurrent  # noqa: E402
import other_interpreter  # noqa: E402
from caffe2_recurrent.rewriting.calling_thread import FLAG  # noqa: E402
from layers import CELLS, FORWARD, OPTIMISED, TRAINING, Layer, Shape  # noqa: E402
from measuring import set_threads  # noqa: E402

# What takes no less time so is not timed so.
STAYS = "its batch stays in one part"


class PartedLayer:
    """A `Layer` of the cell, which feeds the numbers that others are sent."""

    cell = ""
    parts = 1

    def __init__(self, shape: Sequence[int], training: bool, values: Dict[str, bytes]) -> None:
        pass_ = TRAINING if training else FORWARD
        self._layer = Layer(self.cell, OPTIMISED, Shape(*shape), pass_, executor=False, batch_parts=self.parts)
        if not self._layer.is_parted:
            self._layer.close()
            raise ValueError(STAYS)
        self.run, self.close = self._layer.run, self._layer.close

    @staticmethod
    def versions() -> Dict[str, str]:
        return {"caffe2_recurrent": caffe2_recurrent.__version__}

    @classmethod
    def set_threads(cls, threads: int) -> None:
        cls.parts = threads
        set_threads(1)

    def results(self) -> Any:
        found = self._layer.results()
        return collections.OrderedDict((name, (value.shape, value.tobytes())) for name, value in found.items())


def kinds() -> Dict[str, Type[PartedLayer]]:
    """What may be asked for, by the name of the cell."""
    return {cell: type("Parted" + cell, (PartedLayer,), {"cell": cell}) for cell in CELLS}


if __name__ == "__main__":
    workspace.GlobalInit(["caffe2", "--caffe2_log_level=2", FLAG])
    other_interpreter.KINDS.update(kinds())
    other_interpreter.main()
