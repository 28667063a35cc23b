"""Looking at loops: `describe` in text, `draw` in a picture.

net or operator -> loops (source.py) -> structure (structure.py), sizes (loop_sizes.py), memory (kept.py)
    -> text (text.py)
    -> graph (graph.py) -> DOT (dot.py) -> file (drawing.py)
"""

from caffe2_recurrent.viewing.description import Description, describe
from caffe2_recurrent.viewing.drawing import draw

__all__ = ["Description", "describe", "draw"]
