"""A head for a target: its shape, its initial weights, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_service.checkpoints.facts import HeadShape, same_tokenizer
from draft_service.checkpoints.files import fill
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.medusa.checkpoint import MedusaCheckpoint, save_heads
from draft_service.medusa.head import MedusaHead, MedusaShape
from draft_service.training.config import TrainingConfig
from draft_service.training.unrolling import Head
from outrider.distillation import TeacherFacts, TeacherWeights
from outrider.errors import NotSupported, UnknownModel
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError
from tree_models.layers.norm import Normalization


def new_head_config(config: TrainingConfig, facts: TeacherFacts, draft_vocab_size: int) -> HeadConfig:
    """The shape of a new EAGLE-3 head: that of the target's layers, but for what the settings change. Raises
    `SettingsError` where attention heads do not divide the width."""
    hidden = config.hidden or facts.hidden_size
    heads, kv_heads, head_dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    intermediate = config.intermediate or facts.intermediate_size
    if hidden != facts.hidden_size:
        if hidden % head_dim:
            raise SettingsError(f"--hidden must be a multiple of {head_dim}, the width of an attention head")
        group = heads // kv_heads
        heads = hidden // head_dim
        kv_heads = heads // group if heads % group == 0 else heads
        # The MLP of a head with another width than its target is 8/3 of that width, rounded up to a multiple of this.
        # Chosen, not measured: multiples of 8 fill the tiles of tensor cores, and Llama's 256 would add an eighth to a
        # width of 256.
        intermediate = config.intermediate or -(-8 * hidden // 3 // 64) * 64
    newer = config.style == "eagle3.1"
    return HeadConfig(
        kind="eagle3",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=facts.hidden_size,
        num_layers=config.layers,
        num_features=3,
        max_positions=facts.max_context,
        # No farther than it learns from: behind 3,000 tokens a head that had read 1,024 at most made 1.86 tokens a pass
        # without a window and 2.50 with one (`benchmarks/results/2026-11-29-h200-windowed-head.md`).
        window=config.max_length,
        rms_norm_eps=facts.rms_norm_eps,
        rope=dict(facts.rope),
        fc_norm=newer,
        norm_output=newer,
        tied_lm_head=config.tied,
        target=facts.model,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        feature_layers=_feature_layers(facts.num_layers),
    )


def new_shape(config: TrainingConfig, facts: TeacherFacts, draft_vocab_size: int) -> HeadConfig | MedusaShape:
    """The shape of a new head of `config.kind`. Raises `SettingsError`, see `new_head_config`."""
    if config.kind != "medusa":
        return new_head_config(config, facts, draft_vocab_size)
    return MedusaShape(
        target_hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_heads=config.steps,
        num_layers=config.layers,
        target=facts.model,
        target_layers=facts.num_layers,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
    )


def save(head: Head, folder: Path, record: Mapping[str, Any]) -> None:
    """Save a head in the layout that its kind is published in, with the record of its training."""
    if isinstance(head, MedusaHead):
        save_heads(head, folder, record)
    else:
        save_head(head, folder, record, embedding=head.config.hidden_size != head.config.target_hidden_size)


def _feature_layers(target_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high layer. Saved heads name them, so that no reader has to derive them."""
    low, middle, high = 1, target_layers // 2 - 1, target_layers - 4
    if low <= middle <= high:
        return low, middle, high
    # A small target: the first, the middle and the last but one.
    return 0, max(0, target_layers // 2 - 1), max(0, target_layers - 2)


def new_head(shape: HeadShape, tokens: Tensor | None, weights: TeacherWeights, seed: int) -> Head:
    """A new head in fp32 on the CPU. `tokens` [V'] are the target ids of its vocabulary, None for all."""
    if isinstance(shape, MedusaShape):
        return new_medusa_head(shape, tokens, weights.lm_head)
    assert isinstance(shape, HeadConfig), "no other kind is trained"
    return new_eagle_head(shape, tokens, weights, seed)


def new_medusa_head(shape: MedusaShape, tokens: Tensor | None, lm_head: Tensor) -> MedusaHead:
    """Medusa heads that start as the target's lm_head, with residual blocks of zeros (arXiv 2401.10774, section 2.1).
    So all of them first predict the target's next token, and learn to look further ahead from there. A block of zeros
    has a gradient, since that of `silu` at 0 is one half."""
    heads = MedusaHead(shape, tokens)
    rows = lm_head.float().cpu()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
        for own in heads.lm_heads:
            own.weight.copy_(rows if tokens is None else rows[tokens])
    return heads.requires_grad_(True)


def new_eagle_head(shape: HeadConfig, tokens: Tensor | None, weights: TeacherWeights, seed: int) -> EagleHead:
    """An EAGLE-3 head that starts as the target's lm_head over its high layer, plus small noise. Its token embedding is
    the target's and is not trained, nor is a tied lm_head. Where the head has another width than the target, embedding,
    lm_head and features are mapped by the same random orthonormal matrix."""
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(shape, tokens)
    lm_head, embedding = weights.lm_head.float().cpu(), weights.embedding.float().cpu()
    into = _subspace(shape.target_hidden_size, shape.hidden_size, generator)
    with torch.no_grad():
        _randomise(head, generator)
        rows = lm_head if tokens is None else lm_head[tokens]
        head.embedding.copy_(embedding if into is None else embedding @ into)
        head.lm_head.weight.copy_(rows if into is None else rows @ into)
        # Scaled down, so that an untrained head is not overconfident: with the target's own norm and scale, the loss of
        # SmolLM2-135M's head started at 12 to 18 instead of 7, and was still higher after 42 steps.
        scale = head.lm_head.weight.norm(dim=1).mean()
        # A tied lm_head is not changed; scaling the norm before it gives the same distribution.
        (_weight_of(head.norm) if shape.tied_lm_head else head.lm_head.weight).div_(scale)
        # The high layer comes last; its state passes through unchanged at first.
        through = torch.eye(shape.hidden_size) if into is None else into.T
        assert head.projection.fc is not None, "EAGLE-3 heads have one"
        head.projection.fc.weight[:, -shape.target_hidden_size :].add_(through)
    return _trained(head)


def initial_head(config: TrainingConfig, facts: TeacherFacts) -> Head | None:
    """The head of `--init` in fp32 on the CPU, ready to be trained for this teacher; None without that setting. Raises
    `SettingsError` when there is no such head, or it is for another target or of another kind."""
    if not config.init:
        return None
    medusa = config.kind == "medusa"
    try:
        target = TargetCheckpoint(model_source(config.model))
        head = (MedusaCheckpoint if medusa else EagleCheckpoint)(head_source(config.init)).load(target=target)
        head.config.layers_of(facts.num_layers)
    except (NotSupported, UnknownModel, OSError) as error:
        raise SettingsError(f"--init {config.init}: {error}") from None
    of_kind = isinstance(head, MedusaHead) or head.config.kind == "eagle3"
    if not of_kind or not same_tokenizer(head.config.tokenizer_fingerprint, facts.tokenizer_fingerprint):
        kind = "Medusa heads" if medusa else "EAGLE-3 head"
        raise SettingsError(f"--init {config.init}: no {kind} for this model's tokenizer")
    head.config = replace(head.config, target=facts.model, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    if isinstance(head, EagleHead):
        return _trained(deepened(head, config.layers, config.seed) if config.layers > len(head.layers) else head)
    head.requires_grad_(True).train()
    if head.config.num_heads != config.steps:
        raise SettingsError(f"--init {config.init} has {head.config.num_heads} heads: pass that as --steps")
    head.config = replace(head.config, target_layers=facts.num_layers)
    return head


def deepened(head: EagleHead, layers: int, seed: int) -> EagleHead:
    """A copy of the head with `layers` layers in all. Those added at the end output zeros at first, so that its
    predictions are the same."""
    assert isinstance(head.config, HeadConfig), "an MTP module is not trained"
    deeper = EagleHead(replace(head.config, num_layers=layers), head.token_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for added in deeper.layers[len(head.layers) :]:
            _randomise(added, generator)
            for last in ("attention.out", "mlp.down"):
                for parameter in added.get_submodule(last).parameters():
                    parameter.zero_()
    deeper.load_state_dict(head.state_dict(), strict=False)
    return deeper


def with_vocabulary(head: EagleHead, tokens: Tensor | None, target_lm_head: Tensor) -> EagleHead:
    """A copy of the head, in fp32 on the CPU, to be trained with the ascending `tokens` [V'], None for all.

    Tokens that it had keep their rows of the lm_head. New ones start with the rows of `target_lm_head` [vocab_size,
    target_hidden_size], mapped linearly as fits the rows that both have. Raises `SettingsError` when its lm_head is the
    target's, or has another width.
    """
    if head.config.tied_lm_head or head.config.hidden_size != head.config.target_hidden_size:
        raise SettingsError("--new-vocabulary takes a head of the target's width with an lm_head of its own")
    rows = target_lm_head.double().cpu()
    every = torch.arange(len(rows))
    before = every if head.token_ids is None else head.token_ids.cpu()
    after = every if tokens is None else tokens
    known, own = rows[before], head.lm_head.weight.detach().double()
    # Least squares of `known @ mapping = own`, regularised where the target's rows do not span a direction.
    square = known.T @ known
    # As a share of the mean square of the target's rows. Chosen, not measured: small beside 1, large beside rounding.
    square.diagonal().add_(1e-3 * square.diagonal().mean())
    mapping = torch.linalg.solve(square, known.T @ own)
    lm_head = rows @ mapping
    lm_head[before] = own
    copied = EagleHead(replace(head.config, draft_vocab_size=len(after)), tokens)
    fill(copied.slots(), head.weights() | {"lm_head.weight": lm_head[after]})
    return _trained(copied)


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices get random numbers; the weights of norms are ones, biases zeros."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            # Standard deviation of initial weights: `initializer_range` of Llama's configuration in transformers.
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _weight_of(norm: Normalization | None) -> Tensor:
    assert norm is not None and norm.weight is not None, "EAGLE-3 heads have one"
    return norm.weight


def _trained(head: EagleHead) -> EagleHead:
    """The head made ready for training, from which the weights that are the target's are excluded."""
    head.requires_grad_(True).train()
    head.embedding.requires_grad_(False)
    if head.config.tied_lm_head:
        head.lm_head.weight.requires_grad_(False)
    return head


def _subspace(wide: int, narrow: int, generator: torch.Generator) -> Tensor | None:
    """[wide, narrow] with orthonormal columns, or with orthonormal rows where narrow > wide; None for equal widths."""
    if wide == narrow:
        return None
    large, small = max(wide, narrow), min(wide, narrow)
    columns: Tensor = torch.linalg.qr(torch.randn(large, small, generator=generator))[0]
    return columns if wide == large else columns.T
