"""Packages that need not be installed: their tests are skipped, or fail under ``make test-integrations``."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from types import ModuleType

import pytest

#: set by ``make test-integrations``, where everything has been installed and nothing may be skipped
MUST_RUN = os.environ.get("PSGD_INTEGRATIONS") == "1"


def needs(name: str) -> ModuleType:
    """The package, or a test that is skipped; whatever it warns of while it is imported is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if MUST_RUN:
            return importlib.import_module(name)
        return pytest.importorskip(name, reason=f"{name} is not installed; `make test-integrations` installs it")


def needs_inductor() -> None:
    """What ``torch.compile`` does by default: it takes long, and a C++ compiler, which pip cannot install."""
    if not MUST_RUN:
        pytest.skip("torch.compile takes long; `make test-integrations` runs it")
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        pytest.skip("torch.compile needs a C++ compiler on a CPU, and there is none")
