"""What is not needed is not imported: a program starts fast, and help comes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import psgd

#: imports torch and then the package, and prints how long both took and which modules came with them
IMPORTS = """
import json, sys, time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
from psgd import PSGD
print(json.dumps([middle - begin, time.perf_counter() - middle, sorted(sys.modules)]))
"""

HELP = """
import contextlib, io, json, sys
from psgd.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as shown:
    code = main(sys.argv[1:])
print(json.dumps([code, shown.getvalue(), sorted(sys.modules)]))
"""


def printed(program: str, *args: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_package_takes_far_less_time_than_torch():
    """The compiler alone would take as long again. If the machine was busy with something else, look once more."""

    def share() -> float:
        of_torch, ours, modules = printed(IMPORTS)
        assert "torch._dynamo" not in modules
        assert "psgd.experiments" not in modules
        return float(ours / of_torch)

    assert share() < 0.4 or share() < 0.4


def test_help_and_version_need_no_torch():
    for option, text in (("--help", "Commands:"), ("--version", psgd.__version__)):
        code, shown, modules = printed(HELP, option)
        assert code == 0
        assert text in shown
        assert not {"torch", "numpy", "matplotlib"} & set(modules)


def test_public_names_are_imported_when_they_are_used():
    homes = [name for names in psgd._HOMES.values() for name in names]
    modules = {"closed_form", "diagnostics", "monitor"}
    assert sorted([*homes, *modules]) == sorted(psgd.__all__)
    assert set(psgd.__all__) <= set(dir(psgd))
    for name in psgd.__all__:
        assert getattr(psgd, name) is not None
    assert psgd.groups.Kronecker is psgd.Kronecker
    assert not hasattr(psgd, "SGDP")
