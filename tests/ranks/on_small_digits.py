"""Run an example on a small set in MNIST's place: ``python -m tests.ranks.on_small_digits EXAMPLE …``."""

from __future__ import annotations

import os
import runpy
import sys

import torch

from psgd.experiments import mnist

from ..experiments.small_digits import generate

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    found = mnist.Digits(*generate(600, generator), *generate(200, generator))
    mnist.load = lambda data=None: found
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
