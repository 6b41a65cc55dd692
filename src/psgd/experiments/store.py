"""Finished runs on disk, so that a command that was stopped can continue; and atomic writing of files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from .run import Result, Run


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file such that there is always all of the new one or all of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is for its owner alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Store:
    """Finished runs of one directory, a file for each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "runs"

    def load(self, run: Run) -> Result | None:
        """Result of a run with the same identity; None if the file is missing or damaged."""
        try:
            found = json.loads((self.directory / f"{run.key}.json").read_bytes())
            rows = [{str(name): float(value) for name, value in row.items()} for row in found["rows"]]
            if found["run"] != run.identity or not rows:
                return None
            return Result(run.label, run.seed, run.settings, rows, float(found["seconds"]), dict(found["environment"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def save(self, run: Run, result: Result) -> None:
        content = {
            "run": run.identity,
            "environment": dict(result.environment),
            "seconds": result.seconds,
            "rows": result.rows,
        }
        write_bytes(self.directory / f"{run.key}.json", json.dumps(content).encode())
