"""The loss of a row: its definition against PyTorch's own, the kernel against the definition, and who is trusted."""

from __future__ import annotations

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from torch import Tensor

from tree_kernels.cross_entropy import dispatch, soft_cross_entropy_


def example(rows: int = 6, vocabulary: int = 33) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocabulary, generator=generator)
    # Of a larger vocabulary: they sum to less than one.
    probs = torch.randn(4, vocabulary + 9, generator=generator).softmax(-1)[:, :vocabulary]
    return logits, probs, torch.randint(4, (rows,), generator=generator), torch.rand(rows, generator=generator)


def test_the_definition_is_cross_entropy_and_its_gradient() -> None:
    logits, probs, distributions, weights = example()
    leaf = logits.clone().requires_grad_(True)
    expected = -(probs[distributions] * leaf.log_softmax(-1)).sum(-1)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), leaf)
    found = logits.clone()
    torch.testing.assert_close(soft_cross_entropy_(found, probs, distributions, None), expected.detach())
    assert torch.equal(found, logits)
    torch.testing.assert_close(soft_cross_entropy_(found, probs, distributions, weights), expected.detach())
    torch.testing.assert_close(found, gradient)


def test_the_kernel_computes_the_definition_in_the_interpreter() -> None:
    found = work("cross_entropy_worker.py", **INTERPRETED)
    assert len(found) == 16
    for name, differences in found.items():
        # A loss is the small difference of products with logits of 100; gradients in bf16 may differ in its last bit.
        assert differences["loss"] < 1e-4, name
        assert differences["gradient"] < (5e-6 if name.startswith("float32") else 2**-7), name
        assert (differences["moved"] > 1) == name.endswith("weighted"), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_computes_the_definition_on_a_gpu() -> None:
    for name, differences in work("cross_entropy_worker.py").items():
        assert differences["loss"] < 1e-4, name
        assert differences["gradient"] < (1e-4 if name.startswith("float32") else 5e-3), name
    assert dispatch._trusted(torch.device("cuda"), torch.bfloat16, torch.bfloat16)


def test_the_kernel_compiles_for_a_gpu() -> None:
    needed = compiled("cross_entropy_compiling_worker.py")
    assert len(needed) == 4
    # Sums over a row travel between warps, and nothing else.
    assert max(needed.values()) < 4096


@pytest.mark.parametrize("failure", ["raises", "differs", "is NaN"])
def test_a_kernel_that_fails_or_differs_is_not_trusted(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    plain = soft_cross_entropy_

    def broken(*given: Tensor, backend: str) -> Tensor:
        losses = plain(*given, backend="torch")
        if backend == "triton" and failure == "raises":
            raise RuntimeError("no such device")
        if backend == "triton":
            given[0][3, 7] = 100.0 if failure == "differs" else float("nan")
        return losses

    trial = (torch.device("cpu"), torch.float32, torch.float32)
    monkeypatch.setattr(dispatch, "soft_cross_entropy_", lambda *given, **_: plain(*given, backend="torch"))
    assert dispatch._trusted.__wrapped__(*trial)
    monkeypatch.setattr(dispatch, "soft_cross_entropy_", broken)
    assert not dispatch._trusted.__wrapped__(*trial)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "triton"],
)
def test_a_trial_without_memory_is_made_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    plain, full = soft_cross_entropy_, True

    def sometimes(*given: Tensor, backend: str) -> Tensor:
        if backend == "triton" and full:
            raise error
        return plain(*given, backend="torch")

    trial = (torch.device("cpu"), torch.float32, torch.float32)
    monkeypatch.setattr(dispatch, "soft_cross_entropy_", sometimes)
    dispatch._trusted.cache_clear()
    assert not dispatch._trusts(*trial)
    full = False
    assert dispatch._trusts(*trial)
    dispatch._trusted.cache_clear()
