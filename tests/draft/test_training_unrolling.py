"""The unrolled head against the head run one row at a time, as it drafts; and the loss against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_drafting import states_of, text
from eagle_heads import DRAFT, KINDS, PlainHead, make_head
from torch import Tensor

from draft_service.eagle.head import EagleHead
from draft_service.training.loss import most_probable, soft_cross_entropy
from draft_service.training.unrolling import unroll

STEPS, LENGTH = 4, 9
FUSED = {name: changes for name, changes in KINDS.items() if changes.get("kind") != "eagle"}
FUSED["window of a whole text"] = {"window": LENGTH}


def gradient_of(head: EagleHead) -> Tensor | None:
    """That of what fuses the target's states."""
    assert head.projection.fc is not None
    return head.projection.fc.weight.grad


def plain_logits(head: EagleHead, tokens: list[int], states: Tensor, root: int, step: int) -> Tensor:
    """[V'] what the head says `step` nodes below token `root`, had all guesses before been the text's tokens."""
    plain = PlainHead(head)
    plain.read(tokens, states[:root])
    rows = list(range(root))
    for below in range(1, step + 1):
        feature = plain.rows[rows[-1]].feature
        # At the rotary position after its parent's, behind the target's own rows and its ancestors.
        rows.append(plain.add(tokens[root + below], feature, root - 1 + below, rows))
    return plain.rows[rows[-1]].logits


@pytest.mark.parametrize("changes", FUSED.values(), ids=FUSED.keys())
def test_every_row_of_every_step_says_what_a_draft_from_there_would(changes: dict[str, Any]) -> None:
    head = make_head(**changes)
    texts = torch.tensor([text(LENGTH, seed=1), text(LENGTH, seed=2)])
    states = torch.stack([states_of(head, LENGTH, seed=1), states_of(head, LENGTH, seed=2)])
    logits = head.logits(unroll(head, states, texts, STEPS))
    assert logits.shape == (STEPS, 2, LENGTH, head.config.draft_vocab_size)
    for place in range(2):
        for step in range(STEPS):
            for row in range(LENGTH - 1 - step):
                expected = plain_logits(head, texts[place].tolist(), states[place], row + 1, step)
                torch.testing.assert_close(
                    logits[step, place, row].double(), expected, rtol=1e-4, atol=1e-4, msg=f"{place} {step} {row}"
                )


def test_what_follows_a_text_changes_nothing_in_it() -> None:
    head = make_head()
    tokens, states = torch.tensor([text(LENGTH)]), states_of(head, LENGTH)[None]
    longer = torch.cat([tokens, torch.full((1, 7), 3)], dim=1)
    more = torch.cat([states, torch.randn(1, 7, states.shape[-1])], dim=1)
    short, padded = unroll(head, states, tokens, 3), unroll(head, more, longer, 3)
    for step in range(3):
        rows = LENGTH - 1 - step
        torch.testing.assert_close(padded[step, :, :rows], short[step, :, :rows], rtol=1e-4, atol=1e-5)


def test_every_step_has_a_gradient_through_the_features_of_the_steps_before() -> None:
    head = make_head().requires_grad_(True)
    tokens, states = torch.tensor([text(LENGTH)]), states_of(head, LENGTH)[None]
    for step in range(3):
        head.zero_grad()
        unroll(head, states, tokens, 3)[step].sum().backward()
        gradient = gradient_of(head)
        assert gradient is not None and float(gradient.abs().sum()) > 0, step


def test_the_unrolled_head_compiles_as_one_graph() -> None:
    head = make_head(fc_norm=True, norm_output=True).requires_grad_(True)
    tokens, states = torch.tensor([text(LENGTH)]), states_of(head, LENGTH)[None]
    compiled = torch.compile(unroll, dynamic=False, backend="aot_eager", fullgraph=True)
    found = compiled(head, states, tokens, 2)
    torch.testing.assert_close(found, unroll(head, states, tokens, 2))
    found.sum().backward()
    assert head.lm_head.weight.grad is None
    assert gradient_of(head) is not None


# One more row than a piece holds, so that pieces are joined.
@pytest.mark.parametrize("rows", [5, 8193], ids=["one piece", "two pieces"])
def test_the_loss_and_its_gradients_are_those_of_plain_autograd(rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    lm_input = torch.randn(rows, 6, generator=generator, requires_grad=True)
    lm_head = torch.randn(DRAFT, 6, generator=generator, requires_grad=True)
    # Of a larger vocabulary: they sum to less than one.
    probs = torch.randn(11, DRAFT + 20, generator=generator).softmax(-1)[:, :DRAFT]
    distributions = torch.randint(11, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)

    expected_rows = -(probs[distributions] * (lm_input @ lm_head.T).log_softmax(-1)).sum(-1)
    expected = torch.autograd.grad((expected_rows * weights).sum() * 3, (lm_input, lm_head))
    total, row_losses = soft_cross_entropy(lm_input, lm_head, probs, distributions, weights)
    found = torch.autograd.grad(total * 3, (lm_input, lm_head))

    torch.testing.assert_close(row_losses, expected_rows.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, (expected_rows * weights).sum(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)
    assert not row_losses.requires_grad


def test_the_most_probable_token_is_the_largest_logit() -> None:
    lm_input, lm_head = torch.eye(4)[[2, 0, 3]], torch.eye(4)
    assert most_probable(lm_input, lm_head).tolist() == [2, 0, 3]


def test_a_head_in_half_precision_keeps_its_rotary_frequencies() -> None:
    head = make_head()
    (exact,), (rounded,) = (one.angles(torch.tensor([1000])) for one in (head, make_head().to(torch.bfloat16)))
    assert torch.equal(rounded.cosines, exact.cosines) and torch.equal(rounded.sines, exact.sines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_unrolls_and_learns_as_a_cpu_does(dtype: torch.dtype) -> None:
    """Heads as wide as fused kernels take them; in half precision, as near to full precision as a CPU comes in it."""
    head = make_head(head_dim=16, num_heads=4, num_kv_heads=2).requires_grad_(True)
    length, steps = 128, 3
    tokens, states = torch.tensor([text(length)]), states_of(head, length)[None]
    probs = torch.randn(length, DRAFT, generator=torch.Generator().manual_seed(1)).softmax(-1)
    distributions, weights = torch.arange(100).repeat(steps), torch.full((100 * steps,), 0.01)
    rows = torch.cat([step * length + torch.arange(100) for step in range(steps)])
    found = []
    for device, kind in (("cpu", torch.float32), ("cpu", dtype), ("cuda", dtype)):
        head.zero_grad()
        own = head.to(device=device, dtype=kind)
        lm_input = unroll(own, states.to(device, kind), tokens.to(device), steps).flatten(0, 2)[rows.to(device)]
        distribution = probs.to(device, kind)
        total, row_losses = soft_cross_entropy(
            lm_input, own.lm_head.weight, distribution, distributions.to(device), weights.to(device)
        )
        total.backward()
        gradient = gradient_of(own)
        assert gradient is not None
        found.append((row_losses.cpu(), gradient.float().cpu()))
    (rows_exact, gradient_exact), of_cpu, of_gpu = found
    # Rounding to 8 bits of mantissa, three steps deep, moves gradients by 0.3 of their norm on a CPU too.
    for exact, here, there in zip((rows_exact, gradient_exact), of_cpu, of_gpu, strict=True):
        assert (there - exact).norm() <= 1.5 * (here - exact).norm() + 1e-3 * exact.norm()
