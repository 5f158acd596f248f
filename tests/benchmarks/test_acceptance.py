"""Conversations held with a tiny model: what is counted, and that every drafter leaves the text as it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from medusa_heads import make_heads
from teaching_model import save_teaching_model

from benchmarks.drafters.acceptance import agreement, by_task, parse, tables, target_config
from benchmarks.drafters.acceptance_drafters import NAMES, DrafterSet
from benchmarks.drafters.acceptance_run import Distribution, Talk
from benchmarks.shared.random_model import read_shape, write_head, write_model
from benchmarks.shared.workload import PromptTurns
from draft_service.medusa.checkpoint import save_heads
from outrider.sampling import VerificationMode
from target_service.model.loading.loader import load_runner
from target_service.model.runner import ModelRunner

GREEDY = Distribution(0.0, VerificationMode.GREEDY)
COUPLED = Distribution(1.0, VerificationMode.COUPLED)
CONVERSATIONS = [PromptTurns("chat", ("ab", "cd")), PromptTurns("code", ("ab",)), PromptTurns("code", ("xyz",))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model of few layers with the tokenizer of bytes, whose ids are fewer than the model's, its EAGLE head, and its
    Medusa heads."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = save_teaching_model(folder / "teacher")
    config = read_shape("tiny")
    config.vocab_size = 9001
    write_model(folder / "model", config, str(tokenizer), "cpu")
    write_head(folder / "head", config, "cpu")
    wide, layers = config.hidden_size, config.num_hidden_layers
    save_heads(
        make_heads(target_hidden_size=wide, vocab_size=9001, draft_vocab_size=9001, target_layers=layers),
        folder / "medusa",
    )
    return folder / "model", folder / "head", folder / "medusa"


@pytest.fixture(scope="module")
def options(folders: tuple[Path, Path, Path]):  # type: ignore[no-untyped-def]
    model, head, medusa = map(str, folders)
    words = [
        "--model",
        model,
        "--head",
        head,
        "--medusa",
        medusa,
        "--concurrency",
        "2",
        "--max-tokens",
        "12",
        "--dtype",
        "float32",
    ]
    return parse([*words, "--target", '{"kv_tokens": 2048}'])


@pytest.fixture(scope="module")
def runner(options) -> ModelRunner:  # type: ignore[no-untyped-def]
    return load_runner(target_config(options))


def talk_of(runner: ModelRunner, options, name: str, distribution: Distribution) -> Talk:  # type: ignore[no-untyped-def]
    drafters = DrafterSet(options.head, options.model, "cpu", "float32", tree_steps=3, topk=3, medusa=options.medusa)
    talk = Talk(runner, target_config(options), drafters.make(name), CONVERSATIONS)
    talk.run(distribution, options.max_tokens, options.concurrency)
    return talk


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_every_drafter_holds_the_same_conversations(runner: ModelRunner, options, distribution: Distribution) -> None:  # type: ignore[no-untyped-def]
    talks = [talk_of(runner, options, name, distribution) for name in NAMES]
    assert [agreement(talk, talks[0]) for talk in talks] == [1.0] * len(NAMES)
    for talk in talks:
        assert talk.outputs.keys() == {(0, 0), (0, 1), (1, 0), (2, 0)}
        figures = by_task(talk)["all"]
        assert figures["answers"] == 4
        # The token that ends a prompt's reading is not of a verified step.
        assert figures["tokens"] == sum(len(output) - 1 for output in talk.outputs.values())
        assert figures["tokens"] == figures["steps"] + round(sum(figures["reached_by_depth"]) * figures["steps"])


def test_a_trie_learns_from_prompt_to_prompt(runner: ModelRunner, options) -> None:  # type: ignore[no-untyped-def]
    """Two conversations begin alike and are said one after the other."""
    talk = Talk(
        runner,
        target_config(options),
        DrafterSet("", options.model, "cpu", "float32").make("trie"),
        [PromptTurns("a", ("ab",)), PromptTurns("b", ("ab",))],
    )
    talk.run(GREEDY, 40, 1)
    assert talk.tallies["a"].figures()["tokens_per_step"] == 1.0
    assert talk.tallies["b"].figures()["tokens_per_step"] > 2.0


def test_tables_have_a_row_for_each_task(runner: ModelRunner, options) -> None:  # type: ignore[no-untyped-def]
    talk = talk_of(runner, options, "trie", GREEDY)
    written = tables([{"drafter": "trie", "temperature": 0.0, "mode": "greedy", "tasks": by_task(talk)}])
    assert [line.split("|")[1].strip() for line in written.splitlines() if line.startswith("| ")] == [
        "task",
        "chat",
        "code",
        "all",
    ]


def test_random_weights_say_what_their_shift_says(runner: ModelRunner, options) -> None:  # type: ignore[no-untyped-def]
    said = talk_of(runner, options, "trie", GREEDY).outputs[1, 0]
    assert all((after - token) % 9001 == 7907 for token, after in itertools.pairwise(said))
    assert max(said) > 259, "ids that the tokenizer does not have"
