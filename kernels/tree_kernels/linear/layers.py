"""Linear layers together with what a decoder layer does before and after them.

A norm is done in two halves: the operation that makes the hidden rows also makes `ScaledRows`, the rows times the
norm's weight and the sums of their squares; the one that multiplies them divides its result by their root mean square.
So a decoder layer is four launches and its attention:

    rotary_linear, attention, add_linear, gated_linear, add_linear

What families do differently between products is given as `forms`. Norms that need a whole row at once, those of a
product and LayerNorm, take a launch of their own.

`RowLinears` defines them all in PyTorch. On a GPU `TritonLinears` does them in kernels of few rows; `CublasLinears`
takes cuBLAS's products for many rows, with a launch behind each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.linear.forms import (
    LLAMA_HEADS,
    PLAIN_GATE,
    PLAIN_SUM,
    SILU,
    Activation,
    ActivationKind,
    GateForm,
    HeadForm,
    SumForm,
)
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadInput, HeadInputs, HeadRows, Norm, ScaledRows
from tree_kernels.paging import write_kv


class RowLinears:
    """The linear layers in PyTorch, in fp32 and rounded at the end: the definition of what the kernels compute.

    A weight is a tensor of the rows' dtype, or an `Int8Weight`: int8, weight-only, one scale a row (W8A16).
    """

    def norm_rows(self, hidden: Tensor, norm: Norm, into: Tensor | None = None) -> Tensor:
        """The norm of `hidden` [R, H], in fp32 and rounded once. No row's result depends on the others. `into` [R, H],
        last dimension contiguous, is where it is written; None for new memory."""
        output = normed(hidden, norm).to(hidden.dtype)
        return output if into is None else into.copy_(output)

    def copy_rows(self, rows: Tensor, into: Tensor) -> None:
        """Copy [R, H] to `into`, which has that shape; the last dimension of both is contiguous."""
        into.copy_(rows)

    def scale_rows(self, hidden: Tensor, norm: Norm) -> ScaledRows:
        """The first half of a norm of `hidden` [R, H], or all of it where it has no halves."""
        if not norm.halves:
            return ScaledRows(self.norm_rows(hidden, norm), None, norm.epsilon)
        wide = hidden.float()
        rows = (wide * norm.weight.float()).to(hidden.dtype)
        return ScaledRows(rows, (wide * wide).sum(1, keepdim=True), norm.epsilon)

    def head_input(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, of: HeadInputs, sources: Tensor | None = None
    ) -> HeadInput:
        """What a draft head's first layer reads, each norm in fp32 and rounded once, for [R] integers each and features
        [R, H], last dimension contiguous, of the embedding's dtype. With `sources` [R] integers features are [any, H],
        and these the rows' places among them."""
        if sources is not None:
            features = features.index_select(0, sources)
        embeddings = functional.embedding(token_ids, of.embedding)
        normed = self.norm_rows(embeddings, of.embedding_norm), self.norm_rows(features, of.feature_norm)
        angles = positions[:, None] * of.frequencies
        return HeadInput(torch.cat(normed, dim=1), angles.cos() * of.scaling, angles.sin() * of.scaling, features)

    def add_linear(
        self,
        rows: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        form: SumForm = PLAIN_SUM,
        into: Tensor | None = None,
    ) -> tuple[Tensor, ScaledRows | None]:
        """A linear layer, the residual added, and the first half of the norm that reads the sum next: [R, N] in the
        rows' dtype, and its `ScaledRows` where a norm was given. Raises `ValueError` for dtypes or strides that do not
        fit.

        Args:
            rows: [R, K], last dimension contiguous.
            weight: [N, K], contiguous.
            bias: [N].
            residual: [R, N], contiguous.
            norm: over N.
            form: how product and residual are added.
            into: [R, N], where the output is written; None for new memory.
        """
        output = _sum(_product(rows, weight, bias), residual, form).to(rows.dtype)
        if into is not None:
            output = into.copy_(output)
        return output, None if norm is None else self.scale_rows(output, norm)

    def add_rows(
        self, rows: Tensor, residual: Tensor | None = None, norm: Norm | None = None, form: SumForm = PLAIN_SUM
    ) -> tuple[Tensor, ScaledRows | None]:
        """What `add_linear` does to a product, of a product [R, N] that is made; the norm behind it may be whole."""
        output = _sum(rows.float(), residual, form).to(rows.dtype)
        return output, None if norm is None else self.scale_rows(output, norm)

    def gated_linear(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None = None, activation: Activation = SILU
    ) -> Tensor:
        """[R, N]: activation(gate) * up of the normed rows [R, K]; `weight` [2 * N, K] is that of gate above that of
        up, and so is `bias` [2 * N]."""
        return self._activated(rows, weight, bias, activation, gated=True)

    def activated_linear(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None = None, activation: Activation = SILU
    ) -> Tensor:
        """[R, N]: activation(up) of the normed rows [R, K], for an MLP without a gate. `weight` [N, K], `bias` [N]."""
        return self._activated(rows, weight, bias, activation, gated=False)

    def _activated(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Tensor:
        """`gated_linear`, or `activated_linear`."""
        total = _scaled_product(rows, weight, bias)
        if not gated:
            return activated(total, activation).to(rows.rows.dtype)
        gate, up = total.chunk(2, dim=1)
        return (activated(gate, activation) * up).to(rows.rows.dtype)

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm = LLAMA_HEADS,
    ) -> Tensor:
        """Queries [R, Hq, D], keys and values of the normed rows; queries and keys normed and rotated, keys and values
        cached. Raises `ValueError` on a GPU where D is no multiple of a tile's columns, or a tensor is not contiguous.

        Args:
            rows: [R, K], contiguous as all tensors are.
            weight: [(Hq + 2 * Hkv) * D, K], that of queries above that of keys above that of values.
            bias: [(Hq + 2 * Hkv) * D].
            heads: angles, slots and caches of the rows.
            form: norms of heads, and which numbers are rotated together. Caches of no heads are those of a layer
                without keys, whose queries are made alone.
        """
        kv_heads, width = heads.key_cache.shape[-2:]
        total = _scaled_product(rows, weight, bias).unflatten(1, (-1, width))  # type: ignore[no-untyped-call]
        count = total.shape[1] - 2 * kv_heads
        query, key, value = total[:, :count], total[:, count : count + kv_heads], total[:, count + kv_heads :]
        if form.value_epsilon:
            value = functional.rms_norm(value, (width,), None, form.value_epsilon)
        query, key = (
            rotated_heads(_normed_heads(part, norm), heads.cosines, heads.sines, form.interleaved).to(rows.rows.dtype)
            for part, norm in ((query, form.query_norm), (key, form.key_norm))
        )
        if kv_heads:
            write_kv(key, value.to(rows.rows.dtype), heads.key_cache, heads.value_cache, heads.slots)
        return query if heads.queries is None else heads.room_for_queries(rows.rows, count).copy_(query)


def _sum(total: Tensor, residual: Tensor | None, form: SumForm) -> Tensor:
    """A product [R, N] in fp32, joined to the residual [R, N]."""
    if form.norm is not None:
        total = normed(total, form.norm)
    total = total * form.multiplier
    return total if residual is None else total + residual


def normed(rows: Tensor, norm: Norm) -> Tensor:
    """The norm of `rows` [..., H] in fp32."""
    wide = rows.float()
    if norm.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight.float()
    return wide if norm.bias is None else wide + norm.bias.float()


def activated(numbers: Tensor, activation: Activation) -> Tensor:
    """The activation of `numbers`, fp32 of any shape; the result has the same."""
    kind = activation.kind
    if kind is ActivationKind.NONE:
        return numbers
    if kind is ActivationKind.SILU:
        return functional.silu(numbers)
    if kind is ActivationKind.RELU:
        return functional.relu(numbers)
    if kind is ActivationKind.RELU2:
        return functional.relu(numbers).square()
    if kind is ActivationKind.SIGMOID:
        return torch.sigmoid(numbers)
    if kind is ActivationKind.SOFTPLUS:
        return functional.softplus(numbers)
    if kind is ActivationKind.QUICK_GELU:
        return numbers * torch.sigmoid(1.702 * numbers)
    if kind is ActivationKind.XIELU:
        assert activation.parameters is not None, "see `Activation`"
        positive, negative, beta, epsilon = activation.parameters.float().unbind()
        below = (torch.expm1(torch.minimum(numbers, epsilon)) - numbers) * negative
        return torch.where(numbers > 0, positive * numbers * numbers, below) + beta * numbers
    return functional.gelu(numbers, approximate="tanh" if kind is ActivationKind.GELU_TANH else "none")


def gated(gate: Tensor, up: Tensor, activate: Callable[[Tensor], Tensor], form: GateForm = PLAIN_GATE) -> Tensor:
    """What down reads of `gate` and `up`, of one shape."""
    if form.limit and not form.limits_activated:
        gate = gate.clamp(max=form.limit)
    gate = activate(gate)
    if form.limit:
        up = up.clamp(-form.limit, form.limit)
        gate = gate.clamp(max=form.limit) if form.limits_activated else gate
    return gate * (up + form.offset if form.offset else up)


def rotated_heads(heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of the first T numbers of `heads` [R, H, D], by angles as in `HeadRows` [R, T]; in fp32."""
    width = cosines.shape[1]
    turning, rest = heads[..., :width].float(), heads[..., width:].float()
    if interleaved:
        turning = torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1)
    left, right = turning.chunk(2, dim=-1)
    turned = turning * cosines.float()[:, None] + torch.cat((-right, left), dim=-1) * sines.float()[:, None]
    if interleaved:
        turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def _normed_heads(heads: Tensor, norm: Norm | None) -> Tensor:
    """`heads` [R, H, D] normed each by itself, or all together where the norm is as wide."""
    if norm is None:
        return heads
    if norm.weight.numel() == heads.shape[-1]:
        return normed(heads, norm)
    return normed(heads.flatten(1), norm).view_as(heads)


def _scaled_product(rows: ScaledRows, weight: Weight, bias: Tensor | None) -> Tensor:
    """[R, N] of normed rows [R, K], in fp32."""
    total = _product(rows.rows, weight) * rows.scale
    return total if bias is None else total + bias.float()


def _product(rows: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """[R, N] of rows [R, K], in fp32."""
    wide = weight.dequantized() if isinstance(weight, Int8Weight) else weight.float()
    product: Tensor = functional.linear(rows.float(), wide, None if bias is None else bias.float())
    return product
