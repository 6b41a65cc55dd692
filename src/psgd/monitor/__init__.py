"""Monitoring of training: loss, steps of ``Q``, its condition, how well it fits, and steps of the parameters.

``Monitor`` records these numbers every ``every`` steps: in a CSV file, in TensorBoard, or by a function of yours. The
command ``psgd watch`` shows a CSV file while it grows, and ``psgd report`` shows its curves. ``snapshot`` measures
once.
"""

from .files import TensorBoard
from .history import History, HistoryError, read
from .record import BlockRecord, Record
from .watcher import Monitor, snapshot

__all__ = ["BlockRecord", "History", "HistoryError", "Monitor", "Record", "TensorBoard", "read", "snapshot"]
