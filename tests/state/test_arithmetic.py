"""Products that a processor has to emulate: told when the optimizer is made, where they are slow."""

from __future__ import annotations

import pytest
import torch

from psgd import PSGD, PSGDWarning
from psgd.state import arithmetic

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("machine", "kernels", "instructions", "expected"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),
        ("x86_64", False, True, False),
        ("aarch64", True, False, True),
        ("aarch64", False, False, False),
    ],
)
def test_a_cpu_needs_kernels_and_instructions(monkeypatch, machine: str, kernels: bool, instructions: bool, expected):
    monkeypatch.setattr(arithmetic.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: kernels)
    assert arithmetic.has_bfloat16(CPU) == expected


def test_a_torch_that_does_not_say_is_believed(monkeypatch):
    monkeypatch.setattr(arithmetic.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert arithmetic.has_bfloat16(CPU)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_it_from_ampere_on(monkeypatch, capability, expected: bool):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert arithmetic.has_bfloat16(GPU) == expected


@pytest.mark.parametrize("has_it", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_only_products_that_are_emulated_are_told(monkeypatch, recwarn, has_it: bool, dtype):
    monkeypatch.setattr(arithmetic, "has_bfloat16", lambda device: has_it)
    params = [torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)]
    PSGD(params, precond_dtype=dtype)
    said = [str(each.message) for each in recwarn if issubclass(each.category, PSGDWarning)]
    assert len(said) == (dtype == torch.bfloat16 and not has_it)
    assert all("precond_dtype=torch.bfloat16: products of bfloat16 are emulated on this cpu" in each for each in said)
