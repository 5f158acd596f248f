"""Models with latent attention: what is cached, which form is taken, and that both forms are the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Captured
from conftest import make_tiny
from engine_harness import make_runner
from latent_models import CHECKPOINTS, V2, V3, make_latent
from other_weights import other_weights
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from target_service.assembly import served_model
from target_service.config import TargetConfig
from target_service.core.kv_cache import KVCache
from target_service.model.cuda_graphs.capturing import _cache_of
from target_service.model.forward import ForwardInput
from target_service.model.loading.inspection import inspect
from target_service.model.loading.loader import load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.preparing import prepare_network
from target_service.model.runner import ModelRunner
from target_service.model.support import kv_bytes, kv_shape
from target_service.model.weights.files import read_weights
from target_service.model.weights.slots import weight_slots, write_weights
from tree_kernels.attention import AttentionBatch
from tree_kernels.compiled_layers import compile_layer
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.verification import move_kv
from tree_models.families import FAMILIES
from tree_models.fused.preparing import LayerOptions
from tree_models.layers import latent as latent_layers
from tree_models.layers.decoder import Decoder
from tree_models.layers.latent import LatentHeads
from tree_models.layers.linear import can_pack
from tree_models.reference import published_tensors
from tree_models.slots import specs_of

pytestmark = pytest.mark.pairs

LITE: dict[str, Any] = {
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
}  # fmt: skip
PAGE_SIZE = 4
# Node 3 is a grandchild by way of 1; 2 and 5 are siblings of 1.
TREE = (0, 0, 0, 1, 3, 0, 2)


def rows_of(tokens: Sequence[int], start: int, pages: Sequence[int], parents: Sequence[int] | None) -> ForwardInput:
    """Rows behind `start` keys in these pages."""
    depths = list(range(len(tokens)))
    if parents is not None:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
    slots = [pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(start, start + len(tokens))]
    tree = None if parents is None else tuple(parents)
    attention = AttentionBatch((0, len(tokens)), (start,), (tuple(pages),), PAGE_SIZE, (tree,))
    positions = tuple(start + depth for depth in depths)
    return ForwardInput(tuple(tokens), positions, tuple(slots), attention, tuple(range(len(tokens))))


def text(count: int) -> list[int]:
    return [(7 * i * i + 3 * i + 11) % 211 for i in range(count)]


@torch.inference_mode()
def own(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits of the last token by the model's own attention, which a runner may have changed before."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1:]
    model.set_attn_implementation(before)
    return logits


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


class TestMemory:
    def test_a_latent_takes_at_most_an_eighth_of_its_keys_and_values(self) -> None:
        """At the shape of DeepSeek-V2-Lite in bf16: 31,104 bytes a token beside 276,480."""
        config = AutoConfig.for_model("deepseek_v2", **LITE)
        assert kv_bytes(config, 2, latent=True) == 27 * (512 + 64) * 2 == 31_104
        assert kv_bytes(config, 2, latent=False) == 27 * 16 * (192 + 128) * 2 == 276_480
        caches = []
        for latent in (True, False):
            shape = kv_shape(config, latent=latent)
            widths = shape.heads, shape.key_width, shape.value_width
            caches.append(KVCache(64, 16, [widths] * 27, torch.bfloat16, torch.device("cpu")))
            assert caches[-1].token_bytes == kv_bytes(config, 2, latent=latent)
        pools = [cache.nbytes for cache in caches]
        assert 8 * pools[0] <= pools[1]

    def test_what_is_left_of_a_device_holds_as_many_more_tokens(self) -> None:
        model, free = make_latent("v3"), 1 << 20
        latents, heads = (make_runner(model, 16, 64, latent=latent).cache for latent in (True, False))
        more = _cache_of(latents, free, 1.0)
        assert more.pools[0][1].numel() == 0 and more.nbytes <= free < more.nbytes + 16 * 288
        assert more.num_pages // _cache_of(heads, free, 1.0).num_pages >= 6


class TestForms:
    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_both_are_the_model(self, name: str) -> None:
        model = make_latent(name)
        alone = own_logits(model)
        for latent in (True, False, True):
            runner = runner_for(model, None, num_pages=4, page_size=16, latent=latent)
            assert runner.latent is latent
            check_runner(runner, alone)
            # Whoever asks the model itself is told what it always said.
            close(own_logits(model), alone)

    @pytest.mark.parametrize("model_type", ["glm4_moe_lite", "minicpm3", "youtu", "axk1"])
    def test_other_families_of_the_same_attention(self, model_type: str) -> None:
        """Those without an entry are served expanded, by transformers' layers."""
        model = make_tiny(model_type, **V3)
        alone = own_logits(model)
        runner = runner_for(model, None, num_pages=4, page_size=16)
        assert runner.latent is (model_type in FAMILIES)
        check_runner(runner, alone)

    @pytest.mark.parametrize("attention", ["reference", "torch", "flashinfer"])
    def test_backends_that_have_the_form(self, attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("target_service.model.runner.TreeAttention", lambda *_, **__: "of heads")
        runner = runner_for(make_latent("v3"), None, num_pages=4, page_size=16, attention=attention)
        assert runner.latent is (attention != "flashinfer")

    def test_a_scale_of_another_width_would_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Queries over latents are wider than a head's own: whoever scales by what is multiplied is found out."""
        kept = LatentAttention.run
        monkeypatch.setattr(LatentAttention, "run", lambda *a: kept(*a[:-1], a[2].shape[-1] ** -0.5 / 2))
        model = make_latent("v3")
        alone = own_logits(model)
        with pytest.raises(ValueError, match="differ from its own"):
            check_runner(runner_for(model, None, num_pages=4, page_size=16), alone)


class TestCache:
    @pytest.mark.parametrize("name", ["v2, yarn, query latents, groups", "v3"])
    def test_sequences_share_the_pages_of_what_they_have_in_common(self, name: str) -> None:
        """One batch: a tree behind eight shared keys, and another sequence's chunk behind the same."""
        model = make_latent(name)
        runner = make_runner(model, PAGE_SIZE, 256)
        words, other = text(40), [5, 9, 30]
        runner.forward(rows_of(words[:8], 0, (9, 3), None))
        tree = rows_of(words[8:15], 8, (9, 3, 20, 7), TREE)
        chunk = rows_of(other, 8, (9, 3, 11), None)
        both = AttentionBatch(
            (0, 7, 10), (8, 8), (*tree.attention.pages, *chunk.attention.pages), PAGE_SIZE, (TREE, None)
        )
        tokens, positions = tree.token_ids + chunk.token_ids, tree.positions + chunk.positions
        logits = runner.forward(ForwardInput(tokens, positions, tree.slots + chunk.slots, both, tuple(range(10))))
        close(logits[4:5], own(model, [*words[:8], words[8], words[9], words[11], words[12]]))
        close(logits[9:], own(model, [*words[:8], *other]))

    def test_an_accepted_path_is_moved_and_a_page_copied(self) -> None:
        model = make_latent("v3")
        runner = make_runner(model, PAGE_SIZE, 256)
        words = text(30)
        runner.forward(rows_of(words[:6], 0, (9, 3), None))
        runner.forward(rows_of(words[6:13], 6, (9, 3, 20, 7), TREE))
        # Rows 1, 3 and 4 of the tree are accepted.
        pages = (9, 3, 20, 7)
        slots = [pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(6, 13)]
        caches = [*runner.cache.keys, *runner.cache.values]
        move_kv(caches, [slots[row] for row in (1, 3, 4)], slots[1:4])
        path = [*words[:7], words[7], words[9], words[10]]
        close(runner.forward(rows_of([8], 10, pages, None)), own(model, [*path, 8]))
        # Whole pages to where another sequence goes on.
        copied = (30, 31, 32)
        for source, target in zip(pages, copied, strict=False):
            first, to = source * PAGE_SIZE, target * PAGE_SIZE
            move_kv(caches, list(range(first, first + PAGE_SIZE)), list(range(to, to + PAGE_SIZE)))
        close(runner.forward(rows_of([17], 10, copied, None)), own(model, [*path, 17]))

    @pytest.mark.parametrize("name", ["v2, one query projection", "v3"])
    def test_what_heads_read_is_what_layers_said(self, name: str) -> None:
        model = make_latent(name)
        layers = tuple(range(model.config.num_hidden_layers + 1))
        found = []
        for latent in (True, False):
            runner = make_runner(copy.deepcopy(model), PAGE_SIZE, 256, latent=latent)
            runner.hook(layers)
            runner.forward(rows_of(text(6), 0, (9, 3), None))
            runner.forward(rows_of(text(13)[6:], 6, (9, 3, 20, 7), TREE))
            assert runner.hooks is not None
            found.append(runner.hooks.copy_states(7))
        assert found[0] is not None and found[1] is not None
        close(found[0], found[1])


def exchanged(runner: ModelRunner, model: PreTrainedModel, folder: Path) -> None:
    """Write the model's weights into the runner's."""
    published = published_tensors(model)
    save_file({name: published.read(name).clone() for name in published.stored}, folder / "model.safetensors")
    slots = weight_slots(runner.network)
    write_weights(slots, read_weights(folder, specs_of(slots)), torch.device("cpu"), lambda: None)


class TestServing:
    @pytest.mark.parametrize("prepared", [False, True], ids=["loaded", "prepared"])
    def test_other_weights_are_absorbed_at_once(self, prepared: bool, tmp_path: Path) -> None:
        old = make_latent("v3")
        new = other_weights(old)
        runner = make_runner(old, PAGE_SIZE, 256)
        if prepared:
            prepare_network(runner.network, LayerOptions(compiled=False))
        before = runner.forward(rows_of(text(6), 0, (9, 3), None)).clone()
        exchanged(runner, new, tmp_path)
        after = runner.forward(rows_of(text(6), 0, (9, 3), None))
        close(after[-1:], own(new, text(6)))
        assert not torch.allclose(before, after)

    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_layers_ask_the_device_for_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a capture would fail at, around the two kernels that are one launch each."""
        model = make_latent(name)
        runner = make_runner(model, PAGE_SIZE, 256)
        launches = []

        def kernel(_self: Any, _plan: Any, query: Tensor, _cache: Tensor, latent: int, _scale: float) -> Tensor:
            return query[..., :latent] + 1

        attend_latents = LatentHeads._attend_latents

        def captured(*arguments: Any) -> Tensor:
            with Captured() as mode:
                output = attend_latents(*arguments)
            launches.append(mode.launches)
            return output

        monkeypatch.setattr(LatentAttention, "run", kernel)
        monkeypatch.setattr(latent_layers, "norm_rope_write", lambda *_: None)
        monkeypatch.setattr(LatentHeads, "_attend_latents", captured)
        runner.forward(rows_of(text(6), 0, (9, 3), None))
        assert len(launches) == model.config.num_hidden_layers and min(launches) > 3

    @pytest.mark.parametrize(
        "name", ["v2, one dense layer", pytest.param("v2, one query projection", marks=pytest.mark.full), "v3"]
    )
    def test_compiled_layers_break_at_attention_and_experts_alone(self, name: str) -> None:
        model = make_latent(name)
        runner = make_runner(model, PAGE_SIZE, 256)
        steps = [rows_of(text(6), 0, (9, 3), None), rows_of(text(13)[6:], 6, (9, 3, 20, 7), TREE)]
        expected = [runner.forward(step).clone() for step in steps]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        assert isinstance(runner.network, Decoder)
        for layer in runner.network.layers:
            compile_layer(layer, "eager")
        for step, logits in zip(steps, expected, strict=True):
            close(runner.forward(step), logits)
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert breaks and all("torch.compiler.disable" in reason for reason in breaks), breaks

    @pytest.mark.parametrize("latent_cache", [True, False], ids=["latents", "expanded"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_a_folder_is_served_as_asked(
        self, dtype: str, latent_cache: bool, tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_tiny("deepseek_v2", vocab_size=300, **V2).save_pretrained(tmp_path)
        byte_tokenizer.save_pretrained(tmp_path)
        config = TargetConfig(model=str(tmp_path), dtype=dtype, kv_tokens=128, latent_cache=latent_cache)
        with caplog.at_level(logging.INFO):
            runner = load_runner(config)
        each = runner.dtype.itemsize * 2 * (24 if latent_cache else 4 * 36)
        assert runner.latent is latent_cache and runner.cache.token_bytes == each
        assert served_model(config, runner).kv_token_bytes == each
        kind = "its latents" if latent_cache else "keys and values of all heads"
        assert f"the cache keeps {kind}" in caplog.text and f"{each} bytes a token" in caplog.text
        assert f"{128 * each:,} bytes" in caplog.text
        assert isinstance(runner.network, Decoder)
        attending = runner.network.layers[0].attention
        assert isinstance(attending, LatentHeads)
        packed = attending.expanding.plain is None
        assert packed is (can_pack(runner.dtype, runner.device) and not latent_cache)
        assert "can be served, latents in the cache, 96 bytes a token" in str(inspect(tmp_path))
