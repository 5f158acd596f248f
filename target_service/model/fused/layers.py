"""Decoder layers of few launches, in place of the modules of a transformers model: five for few rows, nine for many.

For families whose layers are built like Llama's: two RMSNorms, projections that `joined_linears` has joined, norms of
heads or none, rotary embedding of whole heads, SiLU. `preparing` decides which layers are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from target_service.model.fused.joined_linears import JointLinear
from tree_kernels.linear import HeadForm, HeadRows, Norm, RowLinears

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
# Of Qwen3, beside those.
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SCALED = "outrider_scaled_rows"


class _Product(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Weights of one decoder layer, [out, in] each, and its norms over the hidden size."""

    index: int
    head_width: int
    scaling: float
    input_norm: Norm
    qkv: _Product
    heads: HeadForm
    out: _Product
    inner_norm: Norm
    gate_up: Tensor
    down: _Product


def parts_of(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer that is built like Llama's and whose products are joined, else None."""
    children = dict(layer.named_children())
    if set(children) != _LAYER_PARTS:
        return None
    attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
    form = _head_form(attention)
    if form is None or set(attention) - _HEAD_NORMS != _ATTENTION_PARTS or set(mlp) != _MLP_PARTS:
        return None
    norms = [norm_of(children[name]) for name in ("input_layernorm", "post_attention_layernorm")]
    joint = [attention["q_proj"], mlp["gate_proj"]]
    last = [attention["o_proj"], mlp["down_proj"]]
    plain = all(type(one) is JointLinear for one in joint) and all(type(one) is nn.Linear for one in last)
    owner: Any = children["self_attn"]
    if not plain or None in norms or not all(hasattr(owner, name) for name in ("layer_idx", "scaling", "head_dim")):
        return None
    qkv, gate_up = (_Product(one.joint_weight, one.joint_bias) for one in cast(list[JointLinear], joint))
    out, down = (_Product(one.weight.detach(), one.bias) for one in cast(list[nn.Linear], last))
    if gate_up.bias is not None:
        return None
    input_norm, inner_norm = cast(list[Norm], norms)
    numbers = int(owner.layer_idx), int(owner.head_dim), float(owner.scaling)
    return LayerParts(*numbers, input_norm, qkv, form, out, inner_norm, gate_up.weight, down)


def _head_form(attention: dict[str, nn.Module]) -> HeadForm | None:
    """What is done to the heads of an attention with these children, None where they seem to be something else."""
    if not _HEAD_NORMS & set(attention):
        return HeadForm()
    query_norm, key_norm = (norm_of(attention[name]) if name in attention else None for name in ("q_norm", "k_norm"))
    return None if query_norm is None or key_norm is None else HeadForm(query_norm, key_norm)


def norm_of(module: nn.Module) -> Norm | None:
    """The RMSNorm that a module seems to be, else None."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float) or len(list(module.parameters())) != 1:
        return None
    return Norm(weight.detach(), epsilon)


@dataclass(frozen=True, slots=True)
class LinearsByRows:
    """What computes the linear layers of a pass."""

    # (maximum of rows, what computes up to so many), rising. Passes of more rows run the model's own code.
    ranges: tuple[tuple[float, RowLinears], ...]

    def of(self, rows: int) -> RowLinears | None:
        """What computes a pass of `rows`; None where the model's own code does, as for a pass without rows."""
        return next((linears for most, linears in self.ranges if 0 < rows <= most), None)


class FusedLayer(nn.Module):
    """A decoder layer computed by the `RowLinears` for its number of rows; without them or a step, by its own code.

    The hidden rows that it returns carry, as an attribute, the first half of the norm that reads them next.
    """

    def __init__(self, plain: nn.Module, parts: LayerParts, linears: LinearsByRows) -> None:
        super().__init__()
        self.plain, self.parts, self.linears = plain, parts, linears
        # Of the layer after this one.
        self.next_norm: Norm | None = None

    def __getattr__(self, name: str) -> Any:
        # What a model's own code reads of its layers besides calling them.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, R, H] -> [1, R, H], with the arguments of a transformers layer and the step of `runner.attend`."""
        step = kwargs.get("outrider_step")
        linears = self.linears.of(hidden_states.shape[1])
        if step is None or args or kwargs.get("attention_mask") is not None or linears is None:
            return self.plain(hidden_states, *args, **kwargs)
        parts, hidden = self.parts, hidden_states[0]
        scaled = getattr(hidden_states, _SCALED, None) or linears.scale_rows(hidden, parts.input_norm)
        keys, values = step.cache.keys[parts.index], step.cache.values[parts.index]
        cosines, sines = kwargs["position_embeddings"]
        heads = HeadRows(cosines[0], sines[0], step.slots, keys, values)
        # Attention leaves the memory idle: the weight that is multiplied after it is fetched meanwhile.
        query = linears.rotary_linear(scaled, *parts.qkv, heads, parts.out.weight, parts.heads)
        attended = step.attention.run(step.plan, query, keys, values, parts.scaling).flatten(1)
        hidden, scaled = linears.add_linear(attended, parts.out.weight, parts.out.bias, hidden, parts.inner_norm, None)
        assert scaled is not None
        gated = linears.gated_linear(scaled, parts.gate_up)
        output, scaled = linears.add_linear(gated, parts.down.weight, parts.down.bias, hidden, self.next_norm)
        output = output.unsqueeze(0)
        setattr(output, _SCALED, scaled)
        return output


class FusedNorm(nn.Module):
    """The norm after the last layer in one launch; where `linears` has none for the rows, by its own code."""

    def __init__(self, plain: nn.Module, norm: Norm, linears: LinearsByRows) -> None:
        super().__init__()
        self.plain = plain
        self._norm, self._linears = norm, linears

    def forward(self, hidden_states: Tensor) -> Any:
        """[1, R, H] -> [1, R, H]."""
        linears = self._linears.of(hidden_states.shape[1])
        if hidden_states.shape[0] != 1 or linears is None:
            return self.plain(hidden_states)
        return linears.norm_rows(hidden_states[0], self._norm).unsqueeze(0)


class RowsHead(nn.Module):
    """The language model head, computed so that no result depends on the number of rows."""

    def __init__(self, plain: nn.Linear, linears: RowLinears) -> None:
        super().__init__()
        self.plain = plain
        self._linears = linears

    @property
    def weight(self) -> Tensor:
        """[V, H]."""
        return self.plain.weight

    def forward(self, rows: Tensor) -> Tensor:
        """[1, R, H] -> [1, R, V]."""
        return self._linears.add_linear(rows[0], self.plain.weight, self.plain.bias)[0].unsqueeze(0)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, made once by the model's own code, which takes a dozen launches."""

    def __init__(self, plain: nn.Module, positions: int, like: Tensor) -> None:
        """For positions below `positions`, in the dtype and on the device of `like`."""
        super().__init__()
        with torch.inference_mode():
            every = torch.arange(positions, device=like.device).unsqueeze(0)
            cosines, sines = plain(like.new_empty(1, 1, 1), every)
        self._cosines, self._sines = cosines[0], sines[0]

    def forward(self, _hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[1, R] integers -> [1, R, D] cosines and sines."""
        return nn.functional.embedding(position_ids, self._cosines), nn.functional.embedding(position_ids, self._sines)
