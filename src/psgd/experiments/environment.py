"""Software and machine with which a result was computed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__

#: names of entries that describe software, and of those that describe the machine
VERSIONS, MACHINE = ("psgd", "torch", "python"), ("processor", "cores", "device")


def environment(device: str) -> dict[str, Any]:
    """Versions and machine of this process."""
    return {
        "psgd": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def _processor() -> str:
    """Name of the processor, which ``platform`` does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def together(environments: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Entries with the given names; if they differ, all of them in one text."""
    seen = list(environments)
    distinct = {name: list(dict.fromkeys(found[name] for found in seen)) for name in names}
    return {
        name: values[0] if len(values) == 1 else " and ".join(map(str, values)) for name, values in distinct.items()
    }
