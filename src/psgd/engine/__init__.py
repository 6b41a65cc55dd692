"""Fast steps: blocks of one shape are stacked, a bucket of stacks moves at once, and CUDA graphs replay whole steps."""

from . import flags
from .autocast import without_autocast
from .bucket import Bucket
from .direction import Direction, Room
from .motion import Motion
from .recorder import Recorder
from .stack import Stack
from .tensors import Pairs, Tensors
from .work import Work

__all__ = [
    "Bucket",
    "Direction",
    "Motion",
    "Pairs",
    "Recorder",
    "Room",
    "Stack",
    "Tensors",
    "Work",
    "flags",
    "without_autocast",
]
