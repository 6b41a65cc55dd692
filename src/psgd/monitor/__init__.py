"""A look inside training: loss, steps of ``Q``, its condition, how well it fits, and steps of the parameters.

``Monitor`` records them at every so many steps, in a CSV file, for TensorBoard, or by a function of yours. ``psgd
watch`` shows such a file while it grows, and ``psgd report`` has its curves. ``snapshot`` looks once.
"""

from .files import TensorBoard
from .history import History, HistoryError, read
from .record import BlockRecord, Record
from .watcher import Monitor, snapshot

__all__ = ["BlockRecord", "History", "HistoryError", "Monitor", "Record", "TensorBoard", "read", "snapshot"]
