"""Processes that have imported torch before they start.

A new interpreter imports torch and psgd for about four seconds; a fork of one that has done so is there in a moment.
Tests of what another process does, rather than of how it is started, need no more than that.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import BaseContext

#: modules that jobs of tests are found in, and one that torch imports as soon as an optimizer takes a step
MODULES = ["torch._dynamo", "tests.bench.toy", "tests.experiments.runs", "tests.ranks.jobs", "psgd.cli.main"]


def imported_before() -> BaseContext:
    """Context whose processes are forks of one that is started here, imports ``MODULES`` and does nothing else."""
    if sys.platform != "linux":  # torch does not survive a fork everywhere
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    forkserver.ensure_running()
    return context
