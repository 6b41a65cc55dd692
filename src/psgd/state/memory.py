"""Free memory of devices, so that an error can be raised before an allocation fails."""

from __future__ import annotations

import re
from pathlib import Path

import torch

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device, or None if it is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    if device.type == "cpu":
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
    return None


def readable(size: float) -> str:
    """Number of bytes as text in binary units.

    >>> readable(1536)
    '1.5 KiB'
    """
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def parse(text: str) -> int | None:
    """Number of bytes from a text such as "4 GiB"; None if the text is not a size.

    ``GiB``, ``G`` and ``g`` are binary units, ``GB`` is a decimal one.

    >>> parse("1.5 KiB"), parse("4g") == parse("4 GiB"), parse("4GB")
    (1536, True, 4000000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)\s*", text.lower())
    if found is None:
        return None
    prefix, unit = found[2], found[3]
    power = 0 if prefix is None else 1 + "kmgt".index(prefix)
    return int(float(found[1]) * (1000 if unit == "b" else 1024) ** power)
