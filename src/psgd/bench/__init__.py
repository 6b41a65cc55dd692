"""Benchmarks: what the optimizer costs and what it gains, compared with others; one module each.

A new one is a module with a ``BENCHMARK``: how a ``Plan`` becomes tasks (generators of rows, at the top of a module),
and how their outcomes become a table and a picture. The framework handles processes, time limits, failures and files.
"""

from __future__ import annotations

from . import defaults, dense, dist, fit, kron, lm, minimize, problems, step
from .benchmark import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (dense, kron, step, problems, lm, fit, dist, minimize, defaults)
}
