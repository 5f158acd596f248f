"""Gemma 4's assistant: its folder is read whole or refused, and it drafts what transformers drafts with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from assistants import TARGETS, AloneAssistant, assisted_runner, chain_of, make_assistant
from conftest import make_tiny
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from windowed_models import VOCABULARY, WINDOWED, windowed_model

from draft_service.drafters.base import DraftSequence, create
from outrider.drafting.link import prepare_draft, prepare_in_pass
from outrider.errors import NotSupported
from outrider.heads import HeadRefused
from outrider.settings import SettingsError
from target_service.config import TargetConfig
from target_service.preflight import check_settings
from tree_models.in_pass import PassTarget
from tree_models.layers.paged import CacheShape

CHAIN = "--num-steps 4 --topk 1 --num-draft-tokens 4 --min-score 0 --dtype float32"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", TARGETS)
def test_it_drafts_what_transformers_drafts(name: str, page_size: int, tmp_path: Path) -> None:
    """A chain behind texts shorter and longer than windows, and its probabilities."""
    target, rng = windowed_model(name), random.Random(3)
    assistant = make_assistant(target, tmp_path)
    alone = AloneAssistant(assisted_runner(target, tmp_path, CHAIN, page_size=page_size, num_pages=1024 // page_size))
    for length in (2, 3, 6, 7, 8, 20, 37):
        text = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        tokens, probs = chain_of(assistant, target, text, 4)
        tree = alone.tree_of(text)
        assert (list(tree.token_ids[1:]), tree.parents) == (tokens, (0, 0, 1, 2, 3)), length
        assert tree.scores[1:] == pytest.approx(probs, rel=1e-4), length


def test_it_drafts_tokens_of_clusters(tmp_path: Path) -> None:
    """Where it has logits of a part of the vocabulary alone."""
    model_type, settings = WINDOWED["gemma4"]
    target = make_tiny(model_type, **settings | {"vocab_size": 210, "vocab_size_per_layer_input": 210})
    assistant = make_assistant(target, tmp_path, ordered=True)
    alone = AloneAssistant(assisted_runner(target, tmp_path, CHAIN))
    rng = random.Random(3)
    texts = [[rng.randrange(3, 210) for _ in range(length)] for length in (3, 9, 30)]
    drafted = [list(alone.tree_of(text).token_ids[1:]) for text in texts]
    assert drafted == [chain_of(assistant, target, text, 4)[0] for text in texts]
    wide = "--num-steps 1 --topk 60 --num-draft-tokens 60 --min-score 0"
    # Five clusters of ten.
    assert AloneAssistant(assisted_runner(target, tmp_path, wide)).tree_of(texts[0]).drafted == 50


def test_nothing_is_drafted_before_the_keys_are_there(tmp_path: Path) -> None:
    target = windowed_model("gemma4")
    make_assistant(target, tmp_path)
    alone = AloneAssistant(assisted_runner(target, tmp_path, CHAIN))
    drafter = alone._drafter
    tree = alone.tree_of([5, 6, 7, 8])
    assert tree.drafted == 4
    missing = drafter._misses
    sequence = DraftSequence(2, [5, 6, 7, 8, 9], 1, VOCABULARY)
    drafter.open(sequence)
    assert sequence.features is not None
    sequence.features.append(torch.zeros(4, target.config.hidden_size), 0)
    # Those of the text before.
    (tree,) = drafter.propose([sequence])
    assert (tree.drafted, drafter._misses) == (0, missing + 1)


def changed_folder(folder: Path, change: Callable[[Tensors], object], **settings: Any) -> Path:
    """A copy with other tensors, and other entries of config.json."""
    other = folder / "changed"
    other.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | settings))
    return other


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        (lambda all: all.pop("model.norm.weight"), {}, "missing are model.norm.weight"),
        (lambda all: all.pop("post_projection.weight"), {}, "missing are post_projection.weight"),
        (lambda all: all.update(extra=torch.zeros(1)), {}, "left over are extra"),
        (
            lambda all: all.update({"pre_projection.weight": torch.zeros(3, 3)}),
            {},
            r"pre_projection.weight is \[3, 3\]",
        ),
        (lambda _: None, {"use_ordered_embeddings": True}, "missing are masked_embedding.token_ordering"),
        (
            lambda all: all.update({"masked_embedding.token_ordering": torch.zeros(VOCABULARY, dtype=torch.int64)}),
            {"use_ordered_embeddings": True},
            "token_ordering is no order of 211 tokens",
        ),
        (lambda _: None, {"model_type": "gemma4_text"}, "is no assistant of Gemma 4"),
        (lambda _: None, {"text_config": None}, "no text_config"),
    ],
)
def test_a_folder_that_is_not_whole(
    change: Callable[[Tensors], object], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    target = windowed_model("gemma4")
    make_assistant(target, tmp_path)
    with pytest.raises((HeadRefused, SettingsError), match=problem) as refused:
        assisted_runner(target, changed_folder(tmp_path, change, **settings))
    assert "\n" not in str(refused.value)


def test_keys_that_nobody_reads_are_ignored(tmp_path: Path) -> None:
    """Of layers without keys, as the targets' checkpoints have them; and one of two tied tensors may be missing."""
    target = windowed_model("gemma4")
    assistant = make_assistant(target, tmp_path)

    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(3, 3)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    alone = AloneAssistant(assisted_runner(target, changed_folder(tmp_path, change), CHAIN))
    assert list(alone.tree_of([5, 6, 7]).token_ids[1:]) == chain_of(assistant, target, [5, 6, 7], 4)[0]


def target_like(model: PreTrainedModel) -> PassTarget:
    width, device = model.config.hidden_size, torch.device("cpu")
    shapes, windows = [CacheShape(2, 16, 16), CacheShape(2, 24, 24)], [5, None]
    return PassTarget(
        6,
        3,
        False,
        width,
        VOCABULARY,
        "",
        device,
        torch.float32,
        (),
        shapes,
        windows,
        lambda ids, _: torch.zeros(len(ids)),
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vocabulary_size": 32000}, "211 tokens, its target 32000"),
        ({"hidden_size": 4096}, "wide, the target's are 4096"),
        ({"embed": None}, "not of several ranks"),
        ({"windows": [None, None]}, "no layers of type sliding_attention"),
        ({"cache_shapes": [CacheShape(2, 16, 16), CacheShape(2, 32, 32)]}, "2 keys 24 wide"),
    ],
)
def test_a_target_that_it_does_not_fit(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    target = windowed_model("gemma4")
    make_assistant(target, tmp_path)
    make = prepare_in_pass(f"inpass:assistant --head {tmp_path}", "")
    make(target_like(target))
    with pytest.raises(NotSupported, match=problem):
        make(target_like(target)._replace(**change))


def test_a_draft_service_has_nothing_for_it_to_read() -> None:
    with pytest.raises(SettingsError, match="in the target's passes alone: outrider target --draft 'inpass:assistant"):
        create("assistant")
    with pytest.raises(SettingsError, match="in the target's passes alone"):
        prepare_draft("inprocess:assistant --head some/head")
    with pytest.raises(SettingsError, match="needs a head"):
        prepare_in_pass("inpass:assistant", "")


def test_devices_on_which_it_drafts() -> None:
    usual = {"draft": "inpass:assistant --head some/head", "listen": "127.0.0.1:0"}
    for device in ("cpu", "cuda:0"):
        check_settings(TargetConfig(device=device, **usual))
    with pytest.raises(SettingsError, match="needs captured steps on a GPU"):
        check_settings(TargetConfig(device="cuda:0", attention="flashinfer", **usual))
