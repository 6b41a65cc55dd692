"""For which matrices there is a kernel; ``test_cuda.py`` has what it computes."""

from __future__ import annotations

import torch

from psgd.ops import triangular


def test_the_kernel_is_for_single_precision_in_the_order_of_memory(monkeypatch):
    Q = torch.eye(4)
    assert not triangular.possible(Q)  # on a CPU
    monkeypatch.setattr(triangular, "ready", lambda device, kernel: True)
    assert triangular.possible(Q)
    assert not triangular.possible(Q.double())
    assert not triangular.possible(torch.ones(4, 8)[:, ::2])
