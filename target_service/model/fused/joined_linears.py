"""Linear layers that read the same input as one matrix product, on a GPU and without forking model files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

# Children of one parent that the served families give the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JointLinear(nn.Module):
    """One of several linear layers whose weights lie in one tensor. Input [..., in], output [..., out].

    Compiled by `compile_shared`, each sibling takes its part of the product with all weights, which is computed once.
    Run eagerly, it multiplies with its own part only.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> None:
        """`weight` [all outputs, in] and `bias` [all outputs]; this layer's outputs are start .. stop."""
        super().__init__()
        self.register_buffer("joint_weight", weight, persistent=False)
        self.register_buffer("joint_bias", bias, persistent=False)
        self.joint_weight: Tensor
        self.joint_bias: Tensor | None
        self.start, self.stop = start, stop
        self.in_features, self.out_features = weight.shape[1], stop - start

    @property
    def weight(self) -> Tensor:
        return self.joint_weight[self.start : self.stop]

    def forward(self, rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return nn.functional.linear(rows, self.joint_weight, self.joint_bias)[..., self.start : self.stop]
        bias = None if self.joint_bias is None else self.joint_bias[self.start : self.stop]
        return nn.functional.linear(rows, self.weight, bias)


def join_linears(model: PreTrainedModel) -> None:
    """Join siblings of `model`, in place and for good. For inference only."""
    with torch.no_grad():
        for parent, names in itertools.product(list(model.modules()), _SIBLINGS):
            if linears := siblings(parent, names):
                weight, bias = joined_parameters(linears)
                start = 0
                for name, linear in zip(names, linears, strict=True):
                    setattr(parent, name, JointLinear(weight, bias, start, start + linear.out_features))
                    start += linear.out_features


def siblings(parent: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The children of these names, if all are plain linear layers of the same input width; none otherwise.

    Nor where some have a bias and some do not, which no served family has: those would need a bias of zeros.
    """
    children = [getattr(parent, name, None) for name in names]
    # Subclasses compute something else.
    linears = [child for child in children if type(child) is nn.Linear]
    alike = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
    return linears if alike and len(linears) == len(names) else []


def joined_parameters(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [all outputs, in] and bias [all outputs] of `siblings`."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return torch.cat([linear.weight for linear in linears]), bias


def compile_shared(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend for `torch.compile`: the default one behind `share_products`, which it does not do itself."""
    # The import takes a second, and a CPU never needs it.
    from torch._inductor.compile_fx import compile_fx

    share_products(graph)
    return cast(Callable[..., Any], compile_fx(graph, inputs))


def share_products(graph: fx.GraphModule) -> None:
    """Keep one of all linear layers with the same input, weight and bias."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not nn.functional.linear:
            continue
        kept = first.setdefault((*node.args, *sorted(node.kwargs.items())), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.graph.erase_node(node)
    graph.recompile()
