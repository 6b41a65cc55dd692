"""Finished runs of a benchmark on disk, a file for each: a command that was stopped continues where it was."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiments.store import write_bytes
from .isolate import Row, plain


class Record:
    """Rows of finished runs, found by all that they depend on.

    Args:
        folder: folder of the files; None keeps nothing
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, name: str, identity: Mapping[str, Any]) -> list[Row] | None:
        """Rows of a run with the same identity; None if there are none, or if the file is damaged."""
        if self.folder is None:
            return None
        try:
            found = json.loads(self._path(name, identity).read_bytes())
            if found["run"] != dict(identity):
                return None
            return [{key: math.nan if value is None else value for key, value in row.items()} for row in found["rows"]]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def save(self, name: str, identity: Mapping[str, Any], rows: Sequence[Row]) -> None:
        if self.folder is not None:
            content = json.dumps({"run": dict(identity), "rows": [dict(plain(row)) for row in rows]}, indent=1)
            write_bytes(self._path(name, identity), content.encode())

    def _path(self, name: str, identity: Mapping[str, Any]) -> Path:
        key = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:12]
        assert self.folder is not None
        return self.folder / (re.sub(r"[^\w.-]+", "-", name) + f"-{key}.json")
