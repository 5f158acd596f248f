"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), over a cache of latents or of expanded keys and values.

With latents in the cache, the product that expands them is absorbed into queries and outputs
(`tree_kernels.latent_attention`). A pass's cache decides which of the two it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tree_kernels.attention import PLAIN
from tree_kernels.compiled_layers import uncompiled
from tree_kernels.latent_attention import (
    HeadProjections,
    LatentRows,
    RotaryAngles,
    absorb_into,
    expanded_values,
    norm_rope_write,
)
from tree_kernels.latent_attention.norm_rope import rotated
from tree_models.layers.linear import Linear
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass, UncachedPass, attend, cache_keys
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles, scaled_queries
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot
from tree_models.spec import LatentSpec, NormSpec


class LatentHeads(nn.Module):
    """See `LatentSpec`. The products that make latents are one."""

    def __init__(
        self, spec: LatentSpec, hidden_size: int, layer: int, place: Placement, cache_layer: int | None = None
    ) -> None:
        """`cache_layer` counts layers with latents or keys and values, if others have none."""
        super().__init__()
        self.spec, self.layer, self.variant = spec, layer, PLAIN
        self.cache_layer = layer if cache_layer is None else cache_layer
        queries = spec.heads * spec.query_width
        latents = spec.latent + spec.rotary.width
        norm = NormSpec("rms", spec.latent_epsilon)
        if spec.query_latent is None:
            # Their biases differ, so they are two products.
            self.query: Linear | None = Linear(hidden_size, [queries], place)
            self.latents = Linear(hidden_size, [latents], place, bias=spec.bias)
            self.query_latent_norm = self.query_expanding = None
        else:
            self.query = None
            self.latents = Linear(hidden_size, [spec.query_latent, latents], place, bias=spec.bias)
            self.query_latent_norm = Normalization(norm, spec.query_latent, place)
            self.query_expanding = Linear(spec.query_latent, [queries], place)
        self.latent_norm = Normalization(replace(norm, scale=spec.latent_scale), spec.latent, place)
        # Absorbed, it is not multiplied as a whole.
        whole = replace(place, packed=False) if place.latent else place
        self.expanding = Linear(spec.latent, [spec.heads * (spec.plain + spec.value)], whole)
        self.out = Linear(spec.heads * spec.value, [hidden_size], place, bias=spec.bias)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass | UncachedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        assert angles is not None, "latent attention is described with rotary embedding"
        query, vectors = self._products(rows)
        if angles.query_scale is not None:
            query = scaled_queries(query, angles.query_scale)
        attended = self._attend(query, vectors, angles, step)
        output: Tensor = self.out(attended)
        return output

    def cache_rows(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> None:
        """Write the latents, or expanded keys and values, of rows [R, H] as `forward` does, and attend to none."""
        assert angles is not None, "latent attention is described with rotary embedding"
        query, vectors = self._products(rows)
        rotary = self._rotary(angles)
        if self._keeps_latents(step):
            self._cache_latents(query, vectors, rotary, step)
        else:
            _, key, value = self._expanded(query, vectors, rotary)
            cache_keys(self, key, value, step)

    def _products(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [R, heads, N + P], and latents beside rotary keys [R, L + P]."""
        product: Tensor = self.latents(rows)
        if self.query is not None:
            query, vectors = self.query(rows), product
        else:
            assert self.query_latent_norm is not None and self.query_expanding is not None
            width = product.shape[1] - self.spec.latent - self.spec.rotary.width
            query = self.query_expanding(self.query_latent_norm(product[:, :width]))
            vectors = product[:, width:]
        return query.view(len(rows), self.spec.heads, -1), vectors

    @uncompiled
    def _attend(self, query: Tensor, vectors: Tensor, angles: Angles, step: PagedPass | UncachedPass) -> Tensor:
        """[R, heads * V]. Not compiled: layers differ in their number, and not in the parts around it."""
        rotary = self._rotary(angles)
        if isinstance(step, PagedPass) and self._keeps_latents(step):
            return self._attend_latents(query, vectors, rotary, step)
        attended: Tensor = attend(self, *self._expanded(query, vectors, rotary), step)
        return attended.flatten(1)

    def _rotary(self, angles: Angles) -> RotaryAngles:
        half = self.spec.rotary.width // 2
        interleaved = self.spec.rotary.interleaved
        return RotaryAngles(angles.cosines[:, :half], angles.sines[:, :half], interleaved, pairs_out=False)

    def _keeps_latents(self, step: PagedPass) -> bool:
        return not step.cache.values[self.cache_layer].shape[-1]

    def _attend_latents(self, query: Tensor, vectors: Tensor, rotary: RotaryAngles, step: PagedPass) -> Tensor:
        spec, weight = self.spec, self.expanding.plain
        assert weight is not None
        projections = HeadProjections.of(weight.weight, spec.heads, spec.plain)
        absorbed, cache = self._cache_latents(query, vectors, rotary, step)
        absorb_into(absorbed, query[..., : spec.plain], projections)
        attended = step.attention.run(step.plan, absorbed, cache, spec.latent, spec.scaling)
        return expanded_values(attended, projections).flatten(1)

    def _cache_latents(
        self, query: Tensor, vectors: Tensor, rotary: RotaryAngles, step: PagedPass
    ) -> tuple[Tensor, Tensor]:
        """Write latents and turned keys to the cache [pages, page_size, L + P], which is returned behind queries
        [R, heads, L + P] whose turned part is written."""
        norm = self.latent_norm.weight
        assert norm is not None
        rows = LatentRows(vectors, query, norm, self.spec.latent_epsilon)
        absorbed = query.new_empty(len(query), self.spec.heads, vectors.shape[-1])
        cache: Tensor = step.cache.keys[self.cache_layer].squeeze(2)
        norm_rope_write(rows, rotary, cache, step.slots, absorbed)
        return absorbed, cache

    def _expanded(self, query: Tensor, vectors: Tensor, rotary: RotaryAngles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [R, heads, N + P], and values [R, heads, V]."""
        spec = self.spec
        query = torch.cat([query[..., : spec.plain], rotated(query[..., spec.plain :], rotary)], dim=-1)
        turned = rotated(vectors[:, spec.latent :], rotary)[:, None].expand(-1, spec.heads, -1)
        expanded: Tensor = self.expanding(self.latent_norm(vectors[:, : spec.latent]))
        expanded = expanded.view(len(query), spec.heads, -1)
        key = torch.cat([expanded[..., : spec.plain], turned], dim=-1)
        return query, key, expanded[..., spec.plain :].contiguous()

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        if self.query is not None:
            yield from self.query.slots([of(names.query)], copy)
            yield from self.latents.slots([of(names.latent)], copy)
        else:
            assert self.query_latent_norm is not None and self.query_expanding is not None
            yield from self.latents.slots([of(names.query_latent), of(names.latent)], copy)
            yield from self.query_latent_norm.slots(of(names.query_latent_norm), copy)
            yield from self.query_expanding.slots([of(names.query_expanding)], copy)
        yield from self.latent_norm.slots(of(names.latent_norm), copy)
        yield from self.expanding.slots([of(names.expanding)], copy)
        yield from self.out.slots([of(names.out)], copy)
