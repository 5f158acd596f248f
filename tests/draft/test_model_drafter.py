"""A language model as drafter: the trees of its own forward pass, whatever was read and rejected before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from classic_models import CLASSIC
from conftest import TINY, make_tiny
from eagle_drafting import COUPLED, GREEDY, plain_growth, same_tree
from engine_harness import make_runner, plain_each, request, run
from safetensors.torch import load_file, save_file
from scripted_service import byte_tokenizer
from static_drafting import StaticDrafting, settings_of, static_kv  # noqa: F401
from tokenizer_kinds import byte_level, sentence_piece, unigram, word_piece
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from draft_service.causal_lm.drafter import ModelConfig, ModelDrafter
from draft_service.checkpoints.target import folder_fingerprint
from draft_service.drafters.base import DraftSequence, FeatureDrafter, info_of
from draft_service.in_process import InprocessLink, connect
from outrider.drafting.events import DraftEvents
from outrider.errors import NotSupported, WrongVocabulary
from outrider.heads import tokenizer_fingerprint
from outrider.sampling import LOSSLESS_MODES, SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.wire.frames import DraftLink
from target_service.text.loading import load_tokenizer
from tree_kernels.growth import GREEDY_TEMPERATURE

VOCABULARY = TINY["vocab_size"]
SETTINGS: dict[str, Any] = {
    "num_steps": 4,
    "topk": 3,
    "num_draft_tokens": 14,
    "min_score": 0.0,
    "dtype": "float32",
    "kv_tokens": 1024,
    "page_size": 8,
    "captured_sequences": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0},
    # Narrower than trees are deep.
    "mistral": {"sliding_window": 3},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family, changes in FAMILIES.items():
        made[family] = tmp_path_factory.mktemp(family)
        make_tiny(family, **changes).save_pretrained(made[family])
    return made


def make_drafter(folder: Path, **settings: Any) -> ModelDrafter:
    drafter = ModelDrafter(ModelConfig(draft_model=str(folder), **(SETTINGS | settings)))
    drafter.start()
    return drafter


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence_of(tokens: Sequence[int], mode: VerificationMode = GREEDY) -> DraftSequence:
    sampling = SamplingParams(temperature=0.0 if mode is GREEDY else 1.0)
    return DraftSequence(1, list(tokens), 1, VOCABULARY, seed=5, mode=mode, sampling=sampling)


@torch.no_grad()
def distribution_after(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
    return (logits / GREEDY_TEMPERATURE).softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_is_that_of_the_models_own_forward(family: str, folders: dict[str, Path]) -> None:
    model = make_tiny(family, **FAMILIES[family])
    drafter = make_drafter(folders[family], max_rows=4)
    sequence = grow_along(drafter, model)
    drafter.close(sequence)
    drafter.close(sequence)
    assert drafter.stats() == {
        "model_cache_used_tokens": 0,
        "model_read_rows_total": 30,
        "model_cache_full_total": 0,
        "model_prefix_hit_rows_total": 0,
    }


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "falcon, groups", "bloom, twelve heads"])
def test_so_it_is_by_the_plan_of_gpt(name: str, tmp_path: Path) -> None:
    """Positions in a table, up to the longest text that is followed; scores that fall with distance; norms beside each
    other."""
    family, changes = CLASSIC[name]
    longest = "seq_length" if family == "bloom" else "max_position_embeddings"
    model = make_tiny(family, **changes, **{longest: 30 + SETTINGS["num_steps"]})
    model.save_pretrained(tmp_path)
    drafter = make_drafter(tmp_path, max_rows=4)
    assert drafter.max_context == 30
    grow_along(drafter, model)


def grow_along(drafter: ModelDrafter, model: PreTrainedModel) -> DraftSequence:
    """A sequence of thirty tokens, whose trees are the model's own."""
    tokens = text(30)
    sequence = sequence_of(tokens[:6])
    drafter.open(sequence)
    for length in (6, 7, 7, 12, 30):
        sequence.token_ids.extend(tokens[len(sequence.token_ids) : length])
        (tree,) = drafter.propose([sequence])
        while sequence.state.entries < length:
            (tree,) = drafter.propose([sequence])
        context = tokens[:length]
        same_tree(tree, plain_growth(context[-1], lambda path, c=context: distribution_after(model, [*c, *path])))
    return sequence


def test_a_call_reads_a_bounded_number_of_rows(folders: dict[str, Path]) -> None:
    drafter = make_drafter(folders["llama"], max_rows=8)
    long, short = sequence_of(text(30)), sequence_of(text(5, 1))
    read, drafted = [], []
    for sequence in (long, short):
        drafter.open(sequence)
    for _ in range(5):
        trees = drafter.propose([long, short])
        read.append(drafter.stats()["model_read_rows_total"])
        drafted.append([tree.drafted > 0 for tree in trees])
    assert read == [8, 16, 24, 32, 35]
    assert drafted == [[False, True]] * 4 + [[True, True]]
    # What is read in parts is read as at once.
    whole, again = make_drafter(folders["llama"]), sequence_of(long.token_ids)
    whole.open(again)
    same_tree(trees[0], whole.propose([again])[0])


def test_a_batch_is_drafted_as_one_by_one(folders: dict[str, Path]) -> None:
    drafter = make_drafter(folders["llama"])
    sequences = [sequence_of(text(4 + 9 * i, i), mode) for i, mode in enumerate(LOSSLESS_MODES)]
    for sequence in sequences:
        drafter.open(sequence)
    for sequence, tree in zip(sequences, drafter.propose(sequences), strict=True):
        alone = make_drafter(folders["llama"])
        again = sequence_of(sequence.token_ids, sequence.mode)
        alone.open(again)
        same_tree(tree, alone.propose([again])[0])


def draft_alike(drafters: Sequence[ModelDrafter], count: int) -> None:
    """Three rounds over the same sequences, of COUPLED and GREEDY requests: both draft the same trees."""
    followed = [[sequence_of(text(3 + 9 * i, i), [COUPLED, GREEDY][i % 2]) for i in range(count)] for _ in drafters]
    for drafter, sequences in zip(drafters, followed, strict=True):
        for sequence in sequences:
            drafter.open(sequence)
    for step in range(3):
        trees = [drafter.propose(sequences) for drafter, sequences in zip(drafters, followed, strict=True)]
        for expected, found in zip(*trees, strict=True):
            assert expected.drafted
            same_tree(found, expected)
        for sequence in (*followed[0], *followed[1]):
            sequence.token_ids.extend(text(1 + 4 * step, step))


@pytest.mark.usefixtures("static_kv")
@pytest.mark.parametrize("count", [1, 3])
def test_whole_trees_are_those_that_grow_by_level(count: int, folders: dict[str, Path]) -> None:
    drafters = [make_drafter(folders["llama"]), make_drafter(folders["llama"])]
    own = drafters[1]._drafting
    assert own is not None
    config = ModelConfig(draft_model=str(folders["llama"]), **SETTINGS)
    drafters[1]._drafting = StaticDrafting(own.network, config)
    draft_alike(drafters, count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_trees_are_those_of_a_cpu(folders: dict[str, Path]) -> None:
    # Heads of 16, as narrow as Triton's products allow.
    settings = {"page_size": 16}
    drafters = [
        make_drafter(folders["qwen3"], **settings),
        make_drafter(folders["qwen3"], device="cuda", cuda_graphs=True, **settings),
    ]
    draft_alike(drafters, 3)


def test_a_full_cache_costs_drafts_only(folders: dict[str, Path]) -> None:
    drafter = make_drafter(folders["llama"], kv_tokens=64)
    first, second = sequence_of(text(40)), sequence_of(text(30))
    drafter.open(first)
    drafter.open(second)
    trees = drafter.propose([first, second])
    assert trees[0].drafted and not trees[1].drafted
    assert drafter.stats()["model_cache_full_total"] == 1
    drafter.close(first)
    assert drafter.propose([second])[0].drafted


@pytest.mark.usefixtures("static_kv")
@pytest.mark.parametrize("at_once", [False, True], ids=["by level", "at once"])
@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
def test_the_targets_own_twin_is_right_all_the_way(
    mode: VerificationMode, at_once: bool, folders: dict[str, Path], tiny_model: PreTrainedModel
) -> None:
    sampling = SamplingParams(temperature=0.0 if mode is GREEDY else 0.8, seed=4, ignore_eos=True)
    wanted = [request(text(length), 20, sampling=sampling) for length in (3, 17)]
    said = plain_each(make_tiny(), wanted)

    def connect(events: DraftEvents) -> DraftLink:
        drafter = make_drafter(folders["llama"], topk=1, gumbel_sharpness=8.0, gumbel_candidates=VOCABULARY)
        if at_once:
            own = drafter._drafting
            assert own is not None
            drafter._drafting = StaticDrafting(own.network, settings_of(own.shape, 1024, 8, 2048))
        return InprocessLink(drafter, events)

    outcomes = run(make_runner(tiny_model), wanted, connect=connect)
    assert [outcome.token_ids for outcome in outcomes] == said
    # Steps of five tokens: four drafted and the target's own.
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) >= 28


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="draft_model"):
        ModelDrafter(ModelConfig())
    with pytest.raises(NotSupported, match="cannot be loaded"):
        ModelDrafter(ModelConfig(draft_model=str(tmp_path)))
    for family in ("mamba", "mamba2", "recurrent_gemma", "rwkv", "qwen3_next"):
        AutoConfig.for_model(family).save_pretrained(tmp_path / family)
        with pytest.raises(
            NotSupported,
            match=r"cannot draft: (state-space|layers that are not|it has no attention|trees have no states)",
        ) as refused:
            ModelDrafter(ModelConfig(draft_model=str(tmp_path / family)))
        assert "\n" not in refused.value.message
    for name in ("llama3.2:1b", "/absent/model.gguf"):
        with pytest.raises(NotSupported, match="cannot draft"):
            ModelDrafter(ModelConfig(draft_model=name))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_bigcode", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "multi_query": True}),
        ("jetmoe", {"kv_channels": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("bloom", {"n_head": 4, "n_layer": 2}),
        ("falcon", {"multi_query": True, "parallel_attn": True}),
    ],
)
def test_keys_are_as_wide_as_the_models_own(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Configurations name heads in many ways; what is found is compared with the model's own attention."""
    make_tiny(family, **changes).save_pretrained(tmp_path)
    make_drafter(tmp_path).stop()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("xmod", {"is_decoder": True}, "does not run on token ids alone"),
        ("bert", {}, "its tokens see later ones"),
    ],
    ids=["xmod", "bert"],
)
def test_what_runs_otherwise_is_refused_in_one_line(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    make_tiny(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(NotSupported, match=reason) as refused:
        make_drafter(tmp_path)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("spoil", ["cut", "missing", "quantised", "pickled", "fifo"])
def test_a_model_that_is_not_whole_does_not_draft(spoil: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "draft")
    weights = folder / "model.safetensors"
    if spoil == "cut":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif spoil == "missing":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif spoil == "quantised":
        (folder / "quantize_config.json").write_text('{"bits": 4}')
    elif spoil == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    else:
        weights.unlink()
        os.mkfifo(weights)
    with pytest.raises(NotSupported, match="cannot be loaded: ") as refused:
        make_drafter(folder)
    assert "\n" not in refused.value.message


def test_a_draft_with_another_tokenizer_of_the_same_size_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer: Any = byte_tokenizer()
    folder = shutil.copytree(folders["llama"], tmp_path / "draft")
    assert make_drafter(folder).tokenizer_fingerprint == ""
    tokenizer.save_pretrained(folder)
    drafter = make_drafter(folder)
    assert drafter.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert info_of(drafter, VOCABULARY).tokenizer_fingerprint == drafter.tokenizer_fingerprint
    link = connect(f"model --draft-model {folder} --dtype float32 --kv-tokens 1024")
    with pytest.raises(WrongVocabulary, match="another tokenizer"):
        link(cast(Any, None), VOCABULARY, "that of another tokenizer")


@pytest.mark.parametrize("kind", [byte_level, sentence_piece, unigram, word_piece], ids=lambda kind: kind.__name__)
def test_a_folders_tokenizer_is_known_as_its_target_knows_it(kind: Callable[[], Tokenizer], tmp_path: Path) -> None:
    """With tokens that only its settings have: a model had not drafted for its own twin, nor a head for its target."""
    tokenizer = kind()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain = folder_fingerprint(tmp_path)
    more = {tokenizer.get_vocab_size(): {"content": "<|more|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": more}))
    assert folder_fingerprint(tmp_path) == tokenizer_fingerprint(load_tokenizer(tmp_path)) != plain


def test_a_folder_of_words_has_a_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert folder_fingerprint(tmp_path) == tokenizer_fingerprint(load_tokenizer(tmp_path))


def test_it_wants_no_features(folders: dict[str, Path]) -> None:
    drafter = ModelDrafter(ModelConfig(draft_model=str(folders["llama"]), **SETTINGS))
    assert not isinstance(drafter, FeatureDrafter)
    assert drafter.vocabulary_size == VOCABULARY and drafter.max_context == TINY["max_position_embeddings"] - 4
