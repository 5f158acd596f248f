"""Qwen3-Next's and Qwen3.5's own MTP module drafts trees for a target with recurrent layers, whose output stays plain
decoding's (fp32)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import make_tiny
from draft_process import Service
from engine_harness import Connect, make_runner, plain_each, run
from head_runs import (
    WireRun,
    accepted_in,
    check_chunks_and_preemption,
    check_merged_with_trie,
    drafting,
    wire_loop,
)
from hidden_states import states_of
from mtp_modules import write
from recurrent_models import DELTA, EXPERTS, TURNED
from safetensors.torch import load_file
from taught_heads import HIDDEN, SAMPLINGS, prompts, request_of
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

from draft_service.mtp.checkpoint import MtpCheckpoint
from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from target_service.model.head_projection import read_draft_head
from tree_models.reference import published_tensors

pytestmark = pytest.mark.values


class Family(NamedTuple):
    """A target, and transformers' layer and positions of its module."""

    model_type: str
    settings: dict[str, Any]
    layer: Any
    rotary: Any


FAMILIES = {
    "qwen3_next": Family(
        "qwen3_next", DELTA | EXPERTS | {"partial_rotary_factor": 0.5}, Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding
    ),
    "qwen3_5": Family(
        "qwen3_5_text", DELTA | {"rope_parameters": TURNED}, Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding
    ),
    # Its experts are one tensor, as published.
    "qwen3_5, experts": Family(
        "qwen3_5_moe_text", DELTA | EXPERTS, Qwen3_5MoeDecoderLayer, Qwen3_5MoeTextRotaryEmbedding
    ),
}  # fmt: skip


class Module(nn.Module):
    """The published formula around transformers' own layer, to be taught."""

    def __init__(self, family: Family, teacher: PreTrainedModel) -> None:
        super().__init__()
        config = make_tiny(family.model_type, **family.settings).config
        config._attn_implementation = "eager"
        # The layer that attends.
        self.layer = family.layer(config, 1)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.zero_() if "norm" in name else parameter.normal_(std=0.1)
        self.norms = nn.ParameterList(nn.Parameter(torch.zeros(HIDDEN)) for _ in range(3))
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self._rotary, self._grids = family.rotary(config), 0 if family.model_type == "qwen3_next" else 3
        self._embedding = teacher.get_input_embeddings().weight.detach()
        self._head = teacher.get_output_embeddings().weight.detach()

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, L, H] and logits [B, L, V] of rows of a state and the token behind it."""
        read = torch.cat([self._norm(0, self._embedding[tokens]), self._norm(1, states)], dim=-1)
        rows = self.fc(read)
        mask = torch.full((rows.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        positions = torch.arange(rows.shape[1])[None]
        positions = positions.expand(self._grids, 1, -1) if self._grids else positions
        out = self.layer(rows, attention_mask=mask, position_embeddings=self._rotary(rows, positions))
        hidden = self._norm(2, out[0] if isinstance(out, tuple) else out)
        return hidden, hidden @ self._head.T

    def _norm(self, number: int, rows: Tensor) -> Tensor:
        return functional.rms_norm(rows, (HIDDEN,), 1 + self.norms[number], 1e-6)

    def published(self) -> dict[str, Tensor]:
        """Its tensors by the names of a checkpoint."""
        names = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        found = {f"{name}.weight": norm for name, norm in zip(names, self.norms, strict=True)}
        found |= {f"mtp.layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return {name: one.detach().clone() for name, one in (found | {"mtp.fc.weight": self.fc.weight}).items()}


def teach(module: Module, teacher: PreTrainedModel, steps: int = 50) -> None:
    """What the teacher says to every prompt in every way of sampling, from its states and from the module's own."""
    wanted = [request_of(prompt, sampling) for sampling in SAMPLINGS.values() for prompt in prompts()]
    texts = [[*one.token_ids, *said] for one, said in zip(wanted, plain_each(teacher, wanted), strict=True)]
    longest = max(map(len, texts))
    states = torch.zeros(len(texts), longest, HIDDEN)
    tokens = torch.full((len(texts), longest), -100)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        states[row, : len(text)] = states_of(teacher, text, [teacher.config.num_hidden_layers])
    optimizer = torch.optim.Adam(module.parameters(), lr=4e-3)
    for _ in range(steps):
        loss, read = torch.zeros(()), states
        for depth in (1, 2):
            count = longest - depth - 1
            read, logits = module(tokens[:, depth : depth + count].clamp(min=0), read[:, :count])
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), tokens[:, depth + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@cache
def teacher_of(name: str) -> PreTrainedModel:
    return make_tiny(FAMILIES[name].model_type, **FAMILIES[name].settings)


@cache
def taught(name: str) -> dict[str, Tensor]:
    """The module of a family's target, by published names."""
    torch.manual_seed(5)
    module = Module(FAMILIES[name], teacher_of(name))
    teach(module, teacher_of(name))
    return module.published()


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(name: str, tmp_path: Path) -> Path:
    return checkpoint_of(name, tmp_path)


def checkpoint_of(name: str, folder: Path) -> Path:
    """A target and its module. All experts are one tensor in a module, and one each in the target."""
    model = teacher_of(name)
    source = published_tensors(model)
    tensors = {own: source.read(own) for own in source.stored}
    return write(folder, model.config.to_dict(), tensors | taught(name))


def made(folder: Path, drafters: list[MtpDrafter] | None = None, **settings: Any) -> Connect:
    defaults = {"base_model": str(folder), "num_steps": 4, "dtype": "float32", "gumbel_sharpness": 2.0}
    config = MtpConfig(**(defaults | settings))
    return drafting(lambda: MtpDrafter(config), [] if drafters is None else drafters)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_plain_decoding(name: str, checkpoint: Path, sampling: str) -> None:
    model, wanted = teacher_of(name), [request_of(prompt, SAMPLINGS[sampling]) for prompt in prompts()]
    layers, drafters = model.config.num_hidden_layers, list[MtpDrafter]()
    runner = make_runner(model)
    assert runner.cache.recurrent is not None
    runner.draft_head = read_draft_head(str(checkpoint), layers, HIDDEN)
    assert runner.draft_head.layers == (layers,) and runner.draft_head.projection is None
    expected = plain_each(model, wanted)
    accepted: list[int] = []
    for topk in (1, 4):
        outcomes = run(runner, wanted, connect=made(checkpoint, drafters, topk=topk), stagger=1)
        assert [outcome.token_ids for outcome in outcomes] == expected
        accepted.append(accepted_in(outcomes))
    # 73 to 76 of 96 tokens.
    assert min(accepted) > 60
    assert drafters[0].stats()["mtp_cache_used_tokens"] == 0


def test_experts_may_be_apart_in_a_module_too(tmp_path: Path) -> None:
    """As in Qwen3-Next's; the same module drafts the same."""
    name = "qwen3_5, experts"
    folder = checkpoint_of(name, tmp_path / "joined")
    tensors = load_file(folder / "model.safetensors")
    joined = [tensors.pop(f"mtp.layers.0.mlp.experts.{part}") for part in ("gate_up_proj", "down_proj")]
    for expert, (gate_up, down) in enumerate(zip(*joined, strict=True)):
        parts = zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True)
        tensors |= {f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight": one for part, one in parts}
    apart = write(tmp_path / "apart", teacher_of(name).config.to_dict(), tensors)
    (first,), (second,) = (MtpCheckpoint(one).load() for one in (folder, apart))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("kv_tokens", [2048, 120], ids=["roomy", "preempting"])
def test_chunks_and_preemption_do_not_matter(tmp_path: Path, kv_tokens: int) -> None:
    teacher = teacher_of("qwen3_next")
    check_chunks_and_preemption(teacher, teacher, made(checkpoint_of("qwen3_next", tmp_path)), kv_tokens)


def test_trie_and_module_draft_for_the_same_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of("qwen3_5")
    monkeypatch.setenv("OUTRIDER_MERGED_MERGED_DRAFTERS", "mtp,trie")
    monkeypatch.setenv("OUTRIDER_MTP_BASE_MODEL", str(checkpoint_of("qwen3_5", tmp_path)))
    monkeypatch.setenv("OUTRIDER_MTP_DTYPE", "float32")
    assert check_merged_with_trie(teacher, make_runner(teacher), least=40)["mtp_feature_rows_total"] > 0


def test_over_the_wire_a_module_drafts_for_its_target(tmp_path: Path, service: Service) -> None:
    teacher, folder = teacher_of("qwen3_5, experts"), checkpoint_of("qwen3_5, experts", tmp_path)
    wanted = [request_of(prompt, SAMPLINGS["seeded"]) for prompt in prompts()]
    loop, link = wire_loop(make_runner(teacher), service)
    going = WireRun(loop, service, ("--drafter", "mtp", "--base-model", str(folder), "--dtype", "float32"))
    try:
        going.begin()
        going.add(wanted)
        going.steps()
    finally:
        link.stop()
    assert [tuple(said) for said in going.said.values()] == plain_each(teacher, wanted)
    assert going.accepted > 40
