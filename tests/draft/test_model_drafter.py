"""A language model as drafter: the trees of its own forward pass, whatever was read and rejected before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_tiny
from eagle_drafting import COUPLED, GREEDY, plain_growth, same_tree
from engine_harness import make_runner, plain, request, run
from static_drafting import StaticDrafting, settings_of, static_kv  # noqa: F401
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.causal_lm.drafter import ModelConfig, ModelDrafter
from draft_service.drafters.base import DraftSequence, FeatureDrafter
from draft_service.in_process import InprocessLink
from outrider.drafting.events import DraftEvents
from outrider.errors import NotSupported
from outrider.sampling import LOSSLESS_MODES, SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.wire.frames import DraftLink

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
FAMILIES = {"llama": {}, "qwen3": {"head_dim": 16}, "olmo2": {}, "granite": {"attention_multiplier": 0.2}}


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
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double().softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_is_that_of_the_models_own_forward(family: str, folders: dict[str, Path]) -> None:
    model = make_tiny(family, **FAMILIES[family])
    drafter = make_drafter(folders[family], max_rows=4)
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
    drafter.close(sequence)
    drafter.close(sequence)
    assert drafter.stats() == {
        "model_cache_used_tokens": 0,
        "model_read_rows_total": 30,
        "model_cache_full_total": 0,
    }


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
    said = [plain(make_tiny(), one) for one in wanted]

    def connect(events: DraftEvents) -> DraftLink:
        drafter = make_drafter(folders["llama"], topk=1, race_sharpness=8.0, race_entrants=VOCABULARY)
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
    make_tiny("granite", logits_scaling=3.0).save_pretrained(tmp_path / "scaled")
    with pytest.raises(NotSupported, match="logits_scaling"):
        ModelDrafter(ModelConfig(draft_model=str(tmp_path / "scaled")))
    make_tiny("mistral", sliding_window=4).save_pretrained(tmp_path / "sliding")
    with pytest.raises(NotSupported, match="not plain causal"):
        make_drafter(tmp_path / "sliding")
    weights = tmp_path / "sliding" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(NotSupported, match="sliding cannot be loaded"):
        make_drafter(tmp_path / "sliding")


def test_it_wants_no_features(folders: dict[str, Path]) -> None:
    drafter = ModelDrafter(ModelConfig(draft_model=str(folders["llama"]), **SETTINGS))
    assert not isinstance(drafter, FeatureDrafter)
    assert drafter.vocabulary_size == VOCABULARY and drafter.max_context == TINY["max_position_embeddings"] - 4
