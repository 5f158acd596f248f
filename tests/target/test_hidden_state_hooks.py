"""Taps keep what layers put out, of every served family whose layers can be found, and stop when they are taken off."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from eagle_heads import make_head
from engine_harness import plain, request
from hidden_states import states_of
from recurrent_models import RECURRENT
from transformers import PreTrainedModel
from waits import HUNG_SECONDS
from windowed_models import WINDOWED

from benchmarks.shared.loaded_models import runner_for
from draft_service.eagle.checkpoint import save_head
from outrider.errors import NotSupported
from target_service.assembly import assemble, load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceEvent, StepVerdict
from target_service.model.forward import ForwardInput
from target_service.model.hidden_state_hooks import LayerHooks
from target_service.model.preparing import prepare_network
from target_service.model.runner import ModelRunner
from target_service.preflight import EngineRefused, prepared_draft
from target_service.speculation.hidden_states.sending import Features
from tree_kernels.attention import AttentionBatch
from tree_models.fused.preparing import MAX_ROWS, LayerOptions


def taken(hooks: LayerHooks, rows: int) -> torch.Tensor:
    states = hooks.copy_states(rows)
    assert states is not None
    return states


def forward(runner: ModelRunner, tokens: Sequence[int]) -> None:
    rows = len(tokens)
    pages = range(-(-rows // 4))
    runner.forward(ForwardInput.of_sequence(tuple(tokens), range(rows), pages, runner.cache))


def runner_of(model: PreTrainedModel) -> ModelRunner:
    return runner_for(model, None, num_pages=40, page_size=4)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "bitnet"])
def test_states_are_those_that_transformers_tells_of(model_type: str) -> None:
    model = make_tiny(model_type, num_hidden_layers=4)
    runner = runner_of(copy.deepcopy(model))
    hooks = LayerHooks(runner.network, (2, 0, 4), max_rows=16)
    assert hooks.width == 3 * 48
    for length in (9, 3):
        tokens = list(range(3, 3 + length))
        forward(runner, tokens)
        torch.testing.assert_close(taken(hooks, length), states_of(model, tokens, (2, 0, 4)), rtol=1e-4, atol=1e-4)


NEWER = {
    "gpt_oss": WINDOWED["gpt_oss"],
    "gemma4": WINDOWED["gemma4"],
    "gemma4, experts": WINDOWED["gemma4, experts"],
    "qwen3_moe": WINDOWED["qwen3_moe, windows"],
    "qwen3_next": RECURRENT["qwen3_next"],
    "nemotron_h": RECURRENT["nemotron_h"],
    "lfm2": RECURRENT["lfm2"],
}


@pytest.mark.parametrize("name", NEWER)
def test_states_of_newer_families_are_those_that_transformers_tells_of(name: str) -> None:
    """Windows, sinks, experts, added inputs, states and layers of one half; of each the first layer, one within, and
    what the last norm makes."""
    model_type, settings = NEWER[name]
    model = make_tiny(model_type, **settings)
    layers = (0, model.config.num_hidden_layers // 2, model.config.num_hidden_layers)
    runner = runner_of(copy.deepcopy(model))
    hooks = LayerHooks(runner.network, layers, max_rows=16)
    tokens = list(range(3, 12))
    forward(runner, tokens)
    torch.testing.assert_close(taken(hooks, 9), states_of(model, tokens, layers), rtol=1e-4, atol=1e-4)


def test_what_was_taken_is_not_overwritten_by_the_next_pass() -> None:
    runner = runner_of(make_tiny())
    hooks = LayerHooks(runner.network, (0,), max_rows=8)
    forward(runner, [3, 4, 5])
    first = taken(hooks, 3)
    kept = first.clone()
    forward(runner, [9, 8, 7])
    assert torch.equal(first, kept) and not torch.equal(taken(hooks, 3), kept)


@pytest.mark.parametrize("rows", [6, MAX_ROWS + 3])
def test_layers_that_were_fused_are_read_too(rows: int) -> None:
    """As captured steps have them: few rows through kernels, more through the layer's own code."""
    plain, fused = (runner_for(make_tiny(), None, num_pages=40, page_size=4) for _ in range(2))
    assert prepare_network(fused.network, LayerOptions(compiled=False)) == 2
    tokens = tuple(range(3, 3 + rows))
    pages = tuple(range(-(-rows // 4)))
    attention = AttentionBatch((0, rows), (0,), (pages,), 4, (None,))
    batch = ForwardInput(tokens, tuple(range(rows)), tuple(range(rows)), attention, (rows - 1,))
    found = []
    for runner in (plain, fused):
        runner.hook((0, 1, 2))
        assert runner.hooks is not None
        logits = runner.forward(batch)
        found.append((taken(runner.hooks, rows), logits))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][0][:, :48], states_of(make_tiny(), tokens, (0,)), rtol=1e-4, atol=1e-4)


def test_longer_passes_get_room_where_memory_may_move() -> None:
    model, tokens = make_tiny(), list(range(3, 43))
    runner = runner_of(model)
    growing = LayerHooks(runner.network, (0,), max_rows=8)
    fixed = LayerHooks(runner.network, (1,), max_rows=8, grows=False)
    forward(runner, tokens)
    torch.testing.assert_close(taken(growing, 40), states_of(model, tokens, (0,)), rtol=1e-4, atol=1e-4)
    assert fixed.copy_states(40) is None
    forward(runner, tokens[:8])
    assert len(taken(fixed, 8)) == 8


@pytest.mark.parametrize("model_type", ["llama", "bitnet"])
def test_taken_off_they_keep_nothing(model_type: str) -> None:
    runner = runner_of(make_tiny(model_type))
    hooks = LayerHooks(runner.network, (0, 2), max_rows=8)
    hooks.remove()
    forward(runner, [3, 4])
    assert not taken(hooks, 2).any()


@pytest.mark.parametrize(
    ("model_type", "layer", "reason"),
    [("llama", 3, "layer 3"), ("llama", -1, "layer -1"), ("ctrl", 0, "cannot be found")],
    ids=["past the last", "negative", "another kind of model"],
)
def test_layers_that_are_not_there_are_refused(model_type: str, layer: int, reason: str) -> None:
    changes: dict[str, Any] = {"num_key_value_heads": 4} if model_type == "ctrl" else {}
    with pytest.raises(NotSupported, match=reason):
        LayerHooks(runner_of(make_tiny(model_type, **changes)).network, (layer,), max_rows=8)


class TestHeadSetting:
    @pytest.fixture
    def model_folder(self, tmp_path: Path, byte_tokenizer: Any) -> Path:
        make_tiny(vocab_size=300).save_pretrained(tmp_path / "model")
        byte_tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def head_folder(self, tmp_path: Path, **changes: Any) -> str:
        shape: dict[str, Any] = {"target_hidden_size": 48, "num_features": 2, "feature_layers": (0, 2)}
        return str(save_head(make_head(**(shape | changes)), tmp_path / "head", embedding=True))

    def load(self, model: Path, tmp_path: Path, **changes: Any) -> Any:
        head = self.head_folder(tmp_path, **changes)
        return load_model(TargetConfig(model=str(model), dtype="bfloat16", kv_tokens=64, draft_head=head))

    def test_a_runner_knows_the_head_from_the_start(self, model_folder: Path, tmp_path: Path) -> None:
        runner = self.load(model_folder, tmp_path)
        assert runner.draft_head.layers == (0, 2)
        projection = runner.draft_head.projection
        assert projection.width == 16 and projection.fc_weight.dtype is torch.bfloat16
        features = Features(runner, keep=4)
        assert runner.hooks.layers == (0, 2) and features.after_launch(5) is not None

    def test_a_head_that_does_not_fit_is_said_at_start(self, model_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(EngineRefused, match="layers"):
            self.load(model_folder, tmp_path, feature_layers=(0, 7))

    def test_a_folder_without_a_head_is_said_at_start(self, model_folder: Path) -> None:
        config = TargetConfig(model=str(model_folder), kv_tokens=64, draft_head=str(model_folder))
        with pytest.raises(EngineRefused, match="no EAGLE head"):
            load_model(config)

    def test_an_engine_feeds_the_head_that_drafts_in_its_process(
        self, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = self.head_folder(tmp_path, vocab_size=300, draft_vocab_size=300)
        monkeypatch.setenv("OUTRIDER_EAGLE_HEAD", head)
        config = TargetConfig(
            model=str(model_folder),
            dtype="float32",
            kv_tokens=256,
            draft="inprocess:eagle",
            draft_head=head,
            row_budget="all",
        )
        assembled = assemble(config, load_model(config), None, prepared_draft(config))
        assert assembled.engine.draft_info is None
        said: list[int] = []
        ended = threading.Event()

        def deliver(events: list[SequenceEvent]) -> None:
            for event in events:
                if isinstance(event, StepVerdict):
                    said.extend(event.token_ids)
                else:
                    ended.set()

        assembled.engine.start(deliver)
        wanted = request([5, 9, 40, 7], 20)
        assembled.engine.submit(wanted)
        assert ended.wait(HUNG_SECONDS)
        features = assembled.engine._loop.features
        assembled.stop()
        assert tuple(said) == plain(make_tiny(vocab_size=300), wanted)
        # One for each token but the last, which nothing was said after, and the one before it.
        assert features.sent_vectors == 4 + 20 - 2 and features.sent_bytes == 2 * 16 * features.sent_vectors
