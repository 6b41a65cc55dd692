"""Whether there are kernels at all."""

from __future__ import annotations

import pytest
import torch

from psgd.ops import factors as kernels
from psgd.ops import triton as compiled
from tests.ops.test_factors import on


def test_without_triton_or_a_gpu_there_are_no_kernels(monkeypatch):
    assert not compiled.ready(torch.device("cpu"), "scaled")
    monkeypatch.setattr(compiled, "triton", None)
    assert not compiled.ready(torch.device("cuda"), "scaled")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_where_nothing_can_be_compiled_torch_does_it(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(compiled, "_compiling", {})
    monkeypatch.setattr(compiled, "_failed", set())
    monkeypatch.setattr(compiled, "_trials", {"scaled": [fail]})
    compiled.prepare.cache_clear()
    with pytest.warns(UserWarning, match=r"without Triton on cuda:0.*no compiler"):
        assert not compiled.ready(device, "scaled")
    assert not compiled.ready(device, "scaled")  # and says so once
    v, scale = on("cuda", 2, 3, 4), on("cuda", 2, 3, 1, seed=1)
    assert torch.equal(kernels.scaled(v, scale, torch.empty_like(v)), v * scale)
    compiled.prepare.cache_clear()
