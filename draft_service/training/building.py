"""A head for a target: its shape, the weights that it begins with, and where it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draft_service.checkpoints.facts import same_tokenizer
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import load_head, save_head
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.eagle.layers import Layer
from draft_service.medusa.beginning import new_heads
from draft_service.medusa.checkpoint import load_heads, save_heads
from draft_service.medusa.head import MedusaHead, MedusaShape
from draft_service.training.config import TrainingConfig
from draft_service.training.unrolling import Head
from outrider.distillation import TeacherFacts, TeacherWeights
from outrider.errors import NotSupported, UnknownModel
from outrider.heads import head_source
from outrider.model_store import model_source
from outrider.settings import SettingsError

# Of the noise that weights begin with: `initializer_range` of Llama's configuration in transformers.
_DEVIATION = 0.02
# Of the mean square of the target's rows. Chosen, not measured: small beside 1, and large beside rounding.
_RIDGE = 1e-3
# The MLP of a head with a width of its own is 8/3 of that, rounded up to this, as Llama's is to 256. Chosen, not
# measured: below 8 the matrices do not fill the tiles of tensor cores, and 256 adds an eighth at a width of 256.
_MLP_GRAIN = 64


def head_config(config: TrainingConfig, facts: TeacherFacts, draft_vocab_size: int) -> HeadConfig:
    """The head's shape: the target's own layer unless the settings say otherwise.

    Raises:
        SettingsError: attention heads do not divide the width.
    """
    hidden = config.hidden or facts.hidden_size
    heads, kv_heads, head_dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    intermediate = config.intermediate or facts.intermediate_size
    if hidden != facts.hidden_size:
        if hidden % head_dim:
            raise SettingsError(f"--hidden must be a multiple of {head_dim}, the width of an attention head")
        group = heads // kv_heads
        heads = hidden // head_dim
        kv_heads = heads // group if heads % group == 0 else heads
        intermediate = config.intermediate or -(-8 * hidden // 3 // _MLP_GRAIN) * _MLP_GRAIN
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
        rms_norm_eps=facts.rms_norm_eps,
        rope=dict(facts.rope),
        fc_norm=newer,
        norm_output=newer,
        tied_lm_head=config.tied,
        target=facts.model,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        feature_layers=_feature_layers(facts.num_layers),
    )


def medusa_shape(config: TrainingConfig, facts: TeacherFacts, draft_vocab_size: int) -> MedusaShape:
    """As many heads as `--steps`, of the target's width."""
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


def shape_of(config: TrainingConfig, facts: TeacherFacts, draft_vocab_size: int) -> HeadConfig | MedusaShape:
    """The shape of a new head of the kind that is asked for. Raises as `head_config`."""
    return (medusa_shape if config.kind == "medusa" else head_config)(config, facts, draft_vocab_size)


def beginning(
    shape: HeadConfig | MedusaShape, tokens: NDArray[np.int64] | None, weights: TeacherWeights, seed: int
) -> Head:
    """A new head of this shape; `tokens` [V'] are the target ids that it can say, None for all."""
    if isinstance(shape, MedusaShape):
        return new_heads(shape, tokens, weights.lm_head)
    return new_head(shape, tokens, weights, seed)


def save(head: Head, folder: Path, record: Mapping[str, Any]) -> None:
    """In the layout that heads of its kind are published in, with the record of its training."""
    if isinstance(head, MedusaHead):
        save_heads(head, folder, record)
        return
    save_head(head, folder, record, embedding=head.config.hidden_size != head.config.target_hidden_size)


def _feature_layers(target_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high layer, named so that nobody has to count them again."""
    low, middle, high = 1, target_layers // 2 - 1, target_layers - 4
    if low <= middle <= high:
        return low, middle, high
    # Of a small target: the first, the middle and the last but one.
    return 0, max(0, target_layers // 2 - 1), max(0, target_layers - 2)


def new_head(shape: HeadConfig, tokens: NDArray[np.int64] | None, weights: TeacherWeights, seed: int) -> EagleHead:
    """A head in fp32 on the CPU that begins as the target's lm_head over its high layer, and small noise.

    Its token embedding is the target's and stays so, and so does the lm_head where the two are tied. A narrower head
    begins with everything turned into a random subspace of its width, the same everywhere.

    Args:
        tokens: [V'] target ids that the head can say; None for all.
    """
    generator = torch.Generator().manual_seed(seed)
    head = EagleHead(shape, None if tokens is None else torch.from_numpy(tokens))
    lm_head, embedding = weights.lm_head.float().cpu(), weights.embedding.float().cpu()
    into = _subspace(shape.target_hidden_size, shape.hidden_size, generator)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, _DEVIATION, generator=generator)
        rows = lm_head if tokens is None else lm_head[torch.from_numpy(tokens)]
        head.embed_tokens.weight.copy_(embedding if into is None else embedding @ into)
        head.lm_head.weight.copy_(rows if into is None else rows @ into)
        # As sure as it may be of what it has not learnt: with the target's own norm and scale, the loss of
        # SmolLM2-135M's head began at 12 to 18 instead of 7, and was higher still after 42 steps.
        scale = head.lm_head.weight.norm(dim=1).mean()
        # The same distribution, where the lm_head has to stay as it is.
        (cast(nn.RMSNorm, head.norm) if shape.tied_lm_head else head.lm_head).weight.div_(scale)
        # The high layer comes last: what it says goes through unchanged at first.
        through = torch.eye(shape.hidden_size) if into is None else into.T
        cast(nn.Linear, head.projection.fc).weight[:, -shape.target_hidden_size :].add_(through)
    return _kept_from_training(head)


def head_to_begin_with(config: TrainingConfig, facts: TeacherFacts) -> Head | None:
    """The head of `--init` in fp32 on the CPU, as one of this teacher's; None without that setting.

    Raises:
        SettingsError: there is none, or it is for another target or of another kind than is trained here.
    """
    if not config.init:
        return None
    medusa = config.kind == "medusa"
    try:
        target = TargetCheckpoint(model_source(config.model))
        head = (load_heads if medusa else load_head)(head_source(config.init), target=target)
        head.config.layers_of(facts.num_layers)
    except (NotSupported, UnknownModel, OSError) as error:
        raise SettingsError(f"--init {config.init}: {error}") from None
    of_kind = isinstance(head, MedusaHead) or head.config.kind == "eagle3"
    if not of_kind or not same_tokenizer(head.config.tokenizer_fingerprint, facts.tokenizer_fingerprint):
        kind = "Medusa heads" if medusa else "EAGLE-3 head"
        raise SettingsError(f"--init {config.init}: no {kind} for this model's tokenizer")
    head.config = replace(head.config, target=facts.model, tokenizer_fingerprint=facts.tokenizer_fingerprint)
    head.requires_grad_(True).train()
    if isinstance(head, EagleHead):
        deeper = config.layers > head.config.num_layers
        return _kept_from_training(deepened(head, config.layers, config.seed) if deeper else head)
    if head.config.num_heads != config.steps:
        raise SettingsError(f"--init {config.init} has {head.config.num_heads} heads: say so with --steps")
    head.config = replace(head.config, target_layers=facts.num_layers)
    return head


def deepened(head: EagleHead, layers: int, seed: int) -> EagleHead:
    """The same head with layers added behind its own, so many in all: they write nothing at first, so that it says what
    it said, and learn from there."""
    deeper = EagleHead(replace(head.config, num_layers=layers), head.token_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for added in list(deeper.layers)[len(head.layers) :]:
            for parameter in added.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, _DEVIATION, generator=generator)
            added = cast(Layer, added)
            for last in (added.self_attn.o_proj, added.mlp.down_proj):
                for parameter in last.parameters():
                    parameter.zero_()
    deeper.load_state_dict(head.state_dict(), strict=False)
    return deeper


def saying(head: EagleHead, tokens: NDArray[np.int64] | None, target_lm_head: Tensor) -> EagleHead:
    """The same head for other tokens. What it could say before it says as it did; what it could not begins as the
    target says it, turned as the head's own rows are from the target's.

    Args:
        head: in fp32 on the CPU, to be trained.
        tokens: [V'] target ids, rising; None for all.
        target_lm_head: [vocab_size, target_hidden_size].

    Raises:
        SettingsError: its lm_head is the target's, or is of another width.
    """
    if head.config.tied_lm_head or head.config.hidden_size != head.config.target_hidden_size:
        raise SettingsError("--new-vocabulary takes a head of the target's width with an lm_head of its own")
    rows = target_lm_head.double().cpu()
    every = torch.arange(len(rows))
    before = every if head.token_ids is None else head.token_ids.cpu()
    after = every if tokens is None else torch.from_numpy(tokens)
    known, own = rows[before], head.lm_head.weight.detach().double()
    # The least squares of `rows @ turn = own`, held back where the target's rows say nothing of a direction.
    square = known.T @ known
    square.diagonal().add_(_RIDGE * square.diagonal().mean())
    turn = torch.linalg.solve(square, known.T @ own)
    said = rows @ turn
    said[before] = own
    found = EagleHead(replace(head.config, draft_vocab_size=len(after)), None if tokens is None else after)
    kept = {name: tensor for name, tensor in head.state_dict().items() if name != "lm_head.weight"}
    found.load_state_dict(kept, strict=False)
    with torch.no_grad():
        found.lm_head.weight.copy_(said[after])
    return _kept_from_training(found.requires_grad_(True).train())


def _kept_from_training(head: EagleHead) -> EagleHead:
    """What is the target's own stays as it is."""
    head.embed_tokens.weight.requires_grad_(False)
    if head.config.tied_lm_head:
        head.lm_head.weight.requires_grad_(False)
    return head


def _subspace(wide: int, narrow: int, generator: torch.Generator) -> Tensor | None:
    """[wide, narrow] with orthonormal columns, or rows where the head is the wider one; None for equal widths."""
    if wide == narrow:
        return None
    large, small = max(wide, narrow), min(wide, narrow)
    columns: Tensor = torch.linalg.qr(torch.randn(large, small, generator=generator))[0]
    return columns if wide == large else columns.T
