"""Layers that the compiler takes: one compiled layer serves all that are alike, and every pass of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from target_service.model.runner import PassContext

ATTENTION = "of_this_test"


def test_a_pass_compiles_layers_once_for_its_rows() -> None:
    rows = (4, 8, 4, 8)
    made: list[Any] = []
    seen: list[PassContext] = []

    def compiled(graph: Any, _: Any) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(_: Any, queries: Tensor, *__: Any, outrider_step: PassContext, **___: Any) -> tuple[Tensor, None]:
        seen.append(outrider_step)
        return queries.transpose(1, 2).contiguous(), None

    counts = []
    for layers in (2, 5):
        torch.compiler.reset()
        made.clear()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=layers, **sizes)).eval()
        AttentionInterface.register(ATTENTION, attend)
        model.set_attn_implementation(ATTENTION)
        for layer in model.model.layers:
            layer.compile(backend=compiled, dynamic=False)
        for count in rows:
            # Each pass has another plan, other slots and, after an exchange, another cache.
            parts: list[Any] = [object(), object(), torch.arange(count), object()]
            step, ids = PassContext(*parts), torch.arange(count)[None]
            with torch.inference_mode():
                model(input_ids=ids, position_ids=ids, use_cache=False, outrider_step=step)
            assert seen[-layers:] == [step] * layers
        counts.append(len(made))
    assert counts[0] == counts[1] > 0
    assert counts[0] <= 4 * len({*rows})
