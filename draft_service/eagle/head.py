"""An EAGLE head: the part that the target may run (`Projection`), and the part that drafts. Also used for MTP modules.

Symbols: R rows, H is the head's hidden size, W the target's, F the captured states of one token, V' the draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.checkpoints.vocabulary import check_token_ids
from draft_service.eagle.head_config import LayeredShape
from draft_service.eagle.head_share import share_of_head
from draft_service.neural.network import RowOutput
from tree_kernels.linear import HeadInputs, Norm, RowLinears, ScaledRows, row_linears
from tree_models.fused.forms import FinalRows
from tree_models.fused.mixers import norm_of
from tree_models.fused.preparing import LayerOptions, prepare_layers, quantized_rows
from tree_models.layers.decoder import LayerStack
from tree_models.layers.linear import Linear
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass, UncachedPass
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles
from tree_models.slots import Copy, WeightSlot, in_place, published
from tree_models.spec import AttentionSpec, MLPSpec

# How heads are made, trained and saved.
IN_FP32 = Placement(torch.device("cpu"), torch.float32)


class Projection(nn.Module):
    """Fuses a token's captured hidden states into one feature: norms, then `fc`. The identity except for EAGLE-3.

    A separate module so that the target can run it and send one vector per token. Weights: `fc.weight` [H, F * W], and
    optionally `fc.bias` [H], `fc_norm.{i}.weight` [W] or `input_norm.weight` [F * W].
    """

    def __init__(self, config: LayeredShape, place: Placement) -> None:
        super().__init__()
        self.input_width = joined = config.num_features * config.target_hidden_size
        self._features = config.num_features
        fused = config.is_projected
        self.fc = Linear(joined, [config.hidden_size], place, bias=config.fc_bias) if fused else None
        self.input_norm = Normalization(config.norm, joined, place) if config.norm_before_fc else None
        norms = range(config.num_features if config.fc_norm else 0)
        self.fc_norm = nn.ModuleList(Normalization(config.norm, config.target_hidden_size, place) for _ in norms)
        # What norms each captured state in one launch, and what multiplies few rows by a copy of `fc` in int8.
        self._launched: tuple[RowLinears, list[Norm]] | None = None
        self._quantized: FinalRows | None = None

    def prepare(self, linears: RowLinears, *, int8: bool) -> None:
        """Norm captured states [R, F * W] by `linears`, where that computes such norms; with `int8` it multiplies few
        rows by a copy of `fc` in int8."""
        norms = [found for norm in self.fc_norm if isinstance(norm, Normalization) and (found := norm_of(norm))]
        self._launched = (linears, norms) if len(norms) == self._features else None
        product = None if self.fc is None else self.fc.plain
        self._quantized = quantized_rows(product, linears) if int8 and product is not None else None

    def forward(self, states: Tensor) -> Tensor:
        """[.., F * W], the captured states side by side, to features [.., H]."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            states = self._normed(states.chunk(self._features, dim=-1))
        if self.fc is None:
            return states
        product = None if self._quantized is None or states.dim() > 2 else self._quantized.head(states)
        return self.fc(states) if product is None else product

    def _normed(self, parts: Sequence[Tensor]) -> Tensor:
        """[.., F * W]: the captured states [.., W], each normed."""
        if self._launched is None or parts[0].dim() > 2:
            return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        linears, norms = self._launched
        rows, width = parts[0].shape
        output = parts[0].new_empty(rows, len(norms), width)
        for place, (norm, part) in enumerate(zip(norms, parts, strict=True)):
            linears.norm_rows(part, norm, output[:, place])
        return output.flatten(1)

    def slots(self, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the weights."""
        if self.fc is not None:
            yield from self.fc.slots(["fc"], copy)
        named = [("input_norm", self.input_norm), *((f"fc_norm.{i}", norm) for i, norm in enumerate(self.fc_norm))]
        for name, norm in named:
            if isinstance(norm, Normalization):
                yield from norm.slots(name, copy)


class EagleHead(LayerStack):
    """A head in Outrider's own form, whichever layout it was loaded from.

    Position i pairs the feature of token i with the embedding of token i + 1, at rotary position i, and predicts token
    i + 2. Features of committed tokens are the target's; those of drafted tokens are the head's own (`RowOutput`).

    `embedding` [vocab_size, H] is the target's unless the head has its own. `token_ids` [V'] are the target ids of the
    draft vocabulary, or None for the whole vocabulary. With ranks this one has its part of the layers and of the
    lm_head, see `head_share`, and all ranks run the same passes.
    """

    def __init__(
        self,
        config: LayeredShape,
        token_ids: Tensor | None = None,
        place: Placement = IN_FP32,
        kept: int = 0,
    ) -> None:
        """Weights are unwritten until every slot of `slots` has been. Raises `HeadRefused` if the vocabularies do not
        fit, and `FamilyRefused` for layers that are not computed, or that the ranks of `place` cannot divide.

        Args:
            token_ids: [draft_vocab_size] int64 in ascending order; None for the whole vocabulary.
            kept: layers of other heads that come before these in the cache.
        """
        check_token_ids(config, token_ids)
        share = share_of_head(config, place.ranks)
        super().__init__(share.layers, config.hidden_size, config.max_positions, place, kept)
        width, kind = config.hidden_size, config.kind
        self.config, self.cuts = config, share.cuts
        self.projection = Projection(config, place)
        self.embedding = place.empty(config.vocab_size, width)
        self.token_norm, self.feature_norm = (
            None if kind == "eagle" else Normalization(config.norm, width, place) for _ in range(2)
        )
        # EAGLE-1, EAGLE-2 and MTP fuse embedding and feature here.
        self.fc = None if kind == "eagle3" else Linear(2 * width, [width], place, bias=config.fc_bias)
        self.norm = None if kind == "eagle" else Normalization(config.norm, width, place)
        self.lm_head = Linear(width, [share.tokens], place)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.token_ids: Tensor | None
        # What makes an EAGLE-3 head's input in one launch.
        self._launched: tuple[RowLinears, HeadInputs] | None = None

    def share(self, weights: Iterable[nn.Parameter]) -> None:
        """Keep no copy of an embedding or an lm_head that is equal to one of these, which then must not change apart
        from the target. Before `prepare`."""
        product = self.lm_head.plain
        for weight in weights:
            if _equal(self.embedding, weight):
                self.embedding = weight
            if product is not None and _equal(product.weight, weight):
                product.weight = weight

    def prepare(self, *, int8: bool) -> None:
        """Make passes over a cache run by few launches, where the head is on a GPU in half precision; with `int8`,
        those of few rows with copies of the weights in int8."""
        weight = self.embedding
        if not weight.is_cuda or weight.element_size() != 2:
            return
        prepare_layers(self, self.norm, self.lm_head, LayerOptions(compiled=False, int8=int8))
        self.prepare_input(int8=int8)

    def prepare_input(self, *, int8: bool = False) -> None:
        """Norm captured states, and make an EAGLE-3 head's input, in one launch each; the latter where the first layer
        is computed so. With `int8` features of few rows come from a copy of their weight in int8."""
        weight, linears = self.embedding, row_linears(self.embedding.device)
        self.projection.prepare(linears, int8=int8)
        norms, attention = (self.token_norm, self.feature_norm), self.layer_specs[0].attention
        token_norm, feature_norm = (None if norm is None else norm_of(norm) for norm in norms)
        if self.forms[0] is None or self.fc is not None or token_norm is None or feature_norm is None:
            return
        assert isinstance(attention, AttentionSpec) and attention.rotary is not None, "as in EAGLE-3"
        turning = attention.rotary
        frequencies = torch.tensor(turning.frequencies * 2, dtype=torch.float32, device=weight.device)
        inputs = HeadInputs(weight.detach(), token_norm, feature_norm, frequencies, turning.scaling)
        self._launched = linears, inputs

    @property
    def ends_at_once(self) -> bool:
        """Whether a pass of few rows over a cache may be of launches that do nothing
        (`tree_kernels.conditional_launch`): no other launch of it takes an index from what they leave unwritten, as
        the choice of experts would."""
        return self._launched is not None and all(isinstance(spec.mlp, MLPSpec) for spec in self.layer_specs)

    def project(self, states: Tensor) -> Tensor:
        """Captured hidden states [.., F * W], layers side by side, to features [.., H]."""
        features: Tensor = self.projection(states)
        return features

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor,
        positions: Tensor,
        step: PagedPass | UncachedPass,
        sources: Tensor | None = None,
    ) -> RowOutput:
        """One pass over rows of a token, [R] target ids, and the feature [R, H] of the token before it, whose index is
        in `positions` [R]. Features are the target's, after `project`, or those of an earlier pass; with `sources` [R]
        integers they are [any, H], and these the rows' places among them."""
        hidden, given, angles = self._input(token_ids, features, positions, sources, cached=isinstance(step, PagedPass))
        rows = self.compute_layers(hidden, angles, step, given)
        if self.norm is None:
            return RowOutput(rows, rows)
        normed = None if self.final_form is None else self.final_form.norm(rows)
        if normed is None:
            normed = self.norm(rows)
        return RowOutput(normed if self.config.norm_output else rows, normed)

    def read_rows(self, token_ids: Tensor, features: Tensor, positions: Tensor, step: PagedPass) -> None:
        """Write what later rows read of such rows, as `forward` does, without their output."""
        hidden, given, angles = self._input(token_ids, features, positions, None, cached=True)
        self.cache_rows(hidden, angles, step, given)

    def logits(self, lm_input: Tensor) -> Tensor:
        """[.., H] to logits [.., V'] over the draft vocabulary, or the rank's part of it."""
        logits = None if self.final_form is None else self.final_form.head(lm_input)
        return self.lm_head(lm_input) if logits is None else logits

    def slots(self, copy: Copy = Tensor.copy_) -> list[WeightSlot]:
        """Slots of every weight, by the names of `draft_service.eagle.layouts.neutral_name`."""
        names, eagle3 = self.config.names, self.config.kind == "eagle3"
        slots = [in_place(f"{names.embedding}.weight", self.embedding, copy), *self.projection.slots(copy)]
        if self.fc is not None:
            slots += self.fc.slots(["fc"], copy)
        norms = ("layers.0.input_layernorm", "layers.0.hidden_norm") if eagle3 else ("token_norm", "feature_norm")
        for name, norm in zip((*norms, "norm"), (self.token_norm, self.feature_norm, self.norm), strict=True):
            slots += [] if norm is None else norm.slots(name, copy)
        for index, layer in enumerate(self.layers):
            slots += layer.slots(names, index, copy)
        return slots + list(self.lm_head.slots(["lm_head"], copy))

    def weights(self) -> dict[str, Tensor]:
        """Every weight by the names of `slots`, in the head's own memory."""
        return published(self.slots())

    def _input(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, sources: Tensor | None, *, cached: bool
    ) -> tuple[Tensor, ScaledRows | None, list[Angles]]:
        """[R, H] the first layer's residual, what its attention reads [R, 2 * H] if that is another, and angles."""
        read, features, angles = self._paired(token_ids, features, positions, sources, cached=cached)
        if self.fc is not None:
            return self.fc(read), None, angles
        # The second half is the normed feature.
        before = read[:, features.shape[-1] :] if self.config.norm_before_residual else features
        return before.contiguous(), ScaledRows(read, None, 0.0), angles

    def _paired(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, sources: Tensor | None, *, cached: bool
    ) -> tuple[Tensor, Tensor, list[Angles]]:
        """[R, 2 * H] the embedding beside the feature, each normed where the head does that; the rows' features; and
        angles."""
        if self._launched is not None and cached:
            linears, inputs = self._launched
            made = linears.head_input(token_ids, features, positions, inputs, sources)
            return made.rows, made.features, [Angles(made.cosines, made.sines)]
        if sources is not None:
            features = features.index_select(0, sources)
        embeddings, normed = functional.embedding(token_ids, self.embedding).to(features.dtype), features
        if self.token_norm is not None and self.feature_norm is not None:
            embeddings, normed = self.token_norm(embeddings), self.feature_norm(features)
        return torch.cat([embeddings, normed], dim=-1), features, self.angles(positions)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two weights are equal in type, place and values."""
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
