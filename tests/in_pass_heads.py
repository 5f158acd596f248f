"""Tiny EAGLE heads, MTP modules and assistants behind the passes of a tiny target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from assistants import AloneAssistant, assisted_runner, make_assistant
from conftest import make_tiny
from eagle_drafting import make_drafter
from eagle_heads import fuse, make_head
from latent_models import V3
from mtp_modules import PUBLISHED, write
from recurrent_models import DELTA, EXPERTS
from transformers import PreTrainedModel
from windowed_models import windowed_model

from draft_service.assistant.config import AssistantConfig
from draft_service.eagle.checkpoint import make_head as head_from
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadDrafter
from draft_service.in_pass import InPassHead
from draft_service.mtp.drafter import MtpConfig, MtpDrafter
from draft_service.neural.config import NeuralConfig
from draft_service.neural.cuda_graphs.pass_drafter import PassDrafter, shape_for
from outrider.drafting.link import prepare_in_pass
from target_service.model.runner import ModelRunner, runner_over
from target_service.model.support import description_of
from tree_kernels.node_table.layout import NODES
from tree_models.building import build
from tree_models.in_pass import PassTarget, pass_target
from tree_models.layers.placing import Placement
from tree_models.rank_group import RankGroup
from tree_models.reference import published_tensors

VOCABULARY, LAYERS = 211, (0, 1, 2)
SETTINGS: dict[str, Any] = {
    "num_steps": 4, "topk": 3, "num_draft_tokens": 63, "min_score": 0.0, "dtype": "float32", "gumbel_candidates": 211,
    "kv_tokens": 4096, "cuda_graphs": True,
}  # fmt: skip
_GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
# By the layout of the module, the family of its target and its settings. MiMo's layers are Qwen2's.
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", V3),
    "glm4_moe": ("glm4_moe", _GLM_EXPERTS | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "mimo": ("qwen2", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16,
            "moe_layer_start_index": 1, "moe_layer_end_index": 1, "head_dim": 12,
        },
    ),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"partial_rotary_factor": 0.5}),
}  # fmt: skip
KINDS = ("eagle", *MODULES, "assistant")


class Heads(NamedTuple):
    """A target, and what drafts for it."""

    model: PreTrainedModel
    behind: Callable[[PassTarget], PassDrafter]  # its passes
    layers: tuple[int, ...]  # whose outputs are read
    # The same in a draft service, or on the host, with trees as behind passes of so many sequences.
    alone: Callable[[int], HeadDrafter | AloneAssistant]


def head_of(
    model: PreTrainedModel,
    kept: int = 0,
    ranks: RankGroup | None = None,
    tokens: int | None = None,
    head_width: int = 12,
) -> EagleHead:
    """A head on the model's device, whose layer comes behind `kept` others in the cache, with a window; or a rank's
    part of it. It drafts the first `tokens` of the model's, or all."""
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    made = make_head(
        hidden_size=width, target_hidden_size=width, vocab_size=vocabulary, draft_vocab_size=vocabulary,
        feature_layers=LAYERS, head_dim=head_width, window=24,
    )  # fmt: skip
    place = Placement(model.device, model.dtype, ranks=ranks)
    return head_from(made.config, made.weights(), place, None, range(tokens) if tokens else None, kept)


def in_pass_head(
    model: PreTrainedModel, ranks: RankGroup | None = None, tokens: int | None = None, *, fused: bool = False
) -> InPassHead:
    """A head behind passes of the model, whose layers all have keys and values, as in `head_of`; `fused` on a CPU as
    on a GPU."""
    head = head_of(model, model.config.num_hidden_layers, ranks, tokens)
    if fused:
        fuse(head)
    return InPassHead(head, LAYERS, EagleConfig(**SETTINGS))


class Drafted(NamedTuple):
    """A tree as it stands in a node table. Its paths are of a token after another at each level, from the root's
    children on."""

    base: int
    root: int
    paths: set[tuple[int, ...]]


def tree_in(table: torch.Tensor) -> Drafted:
    base, count = table[:2].tolist()
    tokens, parents, ends, depths, costs = table[2:].view(5, NODES)[:, :count].tolist()
    paths = [()] * count
    for place in range(1, count):
        assert parents[place] < place <= ends[place] - 1 < count and costs[place] > costs[parents[place]]
        assert depths[place] == depths[parents[place]] + 1
        paths[place] = (*paths[parents[place]], tokens[place])
    assert len(set(paths)) == count, "siblings differ"
    return Drafted(base, tokens[0], set(paths[1:]))


def recorded(drafter: PassDrafter) -> list[Drafted]:
    """Every tree that it leaves in a table from now on."""
    drafted, grow = list[Drafted](), drafter.grow

    def grow_and_note(sequences: int, step: Any, to: Any, *, coupled: bool) -> None:
        grow(sequences, step, to, coupled=coupled)
        bases = drafter.trees_for(sequences).tails.bases.tolist()
        slots = to.table_slots[: len(bases)].tolist()
        drafted.extend(tree_in(to.tables[slot]) for slot, base in zip(slots, bases, strict=True) if base)

    drafter.grow = grow_and_note  # type: ignore[method-assign]
    return drafted


def drafting_runner(heads: Heads, **sizes: Any) -> ModelRunner:
    """A runner behind whose passes the heads draft, on the model's device; `sizes` as in `runner_over`."""
    description, model = description_of(heads.model.config), heads.model
    assert description is not None
    place = Placement(model.device, model.dtype, latent=True)
    decoder = build(description, published_tensors(model), place)
    return runner_over(decoder, in_pass=heads.behind(pass_target(decoder, "")), **sizes)


def heads_of(name: str, folder: Path) -> Heads:
    """Of one of the `KINDS`; a target with a module is written to the folder."""
    if name == "assistant":
        return assistant_heads(folder)
    return eagle_heads(make_tiny()) if name == "eagle" else module_heads(name, folder)


def assistant_heads(folder: Path) -> Heads:
    """An assistant of random weights for a Gemma 4 with windows."""
    model = windowed_model("gemma4")
    make_assistant(model, folder)
    flags = _flags(SETTINGS)
    config = AssistantConfig(**SETTINGS)

    def alone(sequences: int) -> AloneAssistant:
        return AloneAssistant(assisted_runner(model, folder, _flags(_alone(config, sequences))))

    layers = (model.config.num_hidden_layers,)
    return Heads(model, prepare_in_pass(f"inpass:assistant --head {folder} {flags}", ""), layers, alone)


def eagle_heads(model: PreTrainedModel) -> Heads:
    """An EAGLE head of random weights for a tiny Llama of two layers."""
    return Heads(
        model,
        lambda _: in_pass_head(model, fused=model.device.type == "cpu"),
        LAYERS,
        lambda sequences: make_drafter(head_of(model), **_alone(EagleConfig(**SETTINGS), sequences)),
    )


def module_heads(layout: str, folder: Path) -> Heads:
    """An MTP module in the checkpoint of a target, which is written."""
    family, settings = MODULES[layout]
    model = make_tiny(family, **settings)
    write_module(model, layout, folder)
    own = {"base_model": str(folder), "feature_dtype": "float32"}
    config = MtpConfig(**(SETTINGS | own))

    def alone(sequences: int) -> HeadDrafter:
        drafter = MtpDrafter(replace(config, **_alone(config, sequences)))
        drafter.start()
        return drafter

    flags = _flags(SETTINGS)
    layers = model.config.num_hidden_layers - (layout == "mimo")
    return Heads(model, prepare_in_pass(f"inpass:mtp {flags}", str(folder)), (layers,), alone)


def write_module(model: PreTrainedModel, layout: str, folder: Path) -> None:
    """Write a target's checkpoint with a module of random weights, around a layer as the target's last that attends."""
    torch.manual_seed(7)
    source, width = published_tensors(model), model.config.hidden_size
    tensors = {name: source.read(name) for name in source.stored}
    attending = {int(name.split(".")[2]) for name in tensors if ".self_attn." in name}
    # ERNIE's has no experts, as the target's first.
    last = min(attending) if layout == "ernie4_5_moe" else max(attending)
    names = PUBLISHED.get(layout, PUBLISHED["deepseek_v3"])
    if names.first:
        names = replace(names, first=model.config.num_hidden_layers)
    prefix = f"model.layers.{last}."
    module = {names.of(names.layer, 0) + n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    module |= {f"{names.of(norm, 0)}.weight": torch.rand(width) + 0.5 - names.offset for norm in names.norms}
    module[f"{names.of(names.joining, 0)}.weight"] = torch.randn(width, 2 * width) * 0.3
    write(folder, model.config.to_dict() | {"model_type": layout}, tensors | module)


def _flags(settings: dict[str, Any]) -> str:
    """Settings but that of captured trees as flags of a command line."""
    named = {name: value for name, value in settings.items() if name != "cuda_graphs"}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())


def _alone(config: NeuralConfig, sequences: int) -> dict[str, Any]:
    """Settings of a draft service that grows trees as behind passes of so many sequences."""
    shape = shape_for(config.tree, sequences)
    return SETTINGS | {"cuda_graphs": False, "num_steps": shape.num_steps, "frontier": shape.width}
