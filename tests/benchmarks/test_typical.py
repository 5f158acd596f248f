"""The benchmark of typical acceptance on a tiny model: its figures are what the answers say."""

from __future__ import annotations

import math
from pathlib import Path

from teaching_model import save_teaching_model

from benchmarks.drafters.typical import differences, distributions, measure, parse
from benchmarks.shared.random_model import read_shape, write_head, write_model
from benchmarks.shared.workload import PromptTurns
from outrider.sampling import TypicalAcceptance, VerificationMode


def test_how_answers_depart() -> None:
    own = {(0, 0): [1, 2, 3, 4], (1, 0): [5, 6], (2, 0): [7]}
    found = {(0, 0): [1, 2, 9, 4, 5], (1, 0): [5, 6], (2, 0): [8, 8]}
    assert differences(found, own) == {
        "same_answers": 1,
        "first_difference_median": 2,
        "different_places_share": round(2 / 7, 4),
    }


def test_at_temperature_zero_there_is_one_mode() -> None:
    assert [one.mode for one in distributions(0.0, [0.09])] == [VerificationMode.GREEDY]
    assert [one.typical for one in distributions(0.7, [0.09, 0.25])[1:]] == [
        TypicalAcceptance(0.09, 0.3),
        TypicalAcceptance(0.25, 0.5),
    ]


def test_every_mode_answers_the_same_prompts(tmp_path: Path) -> None:
    tokenizer = save_teaching_model(tmp_path / "teacher")
    config = read_shape("tiny")
    config.vocab_size = 9001
    write_model(tmp_path / "model", config, str(tokenizer), "cpu")
    write_head(tmp_path / "head", config, "cpu")
    words = ["--model", str(tmp_path / "model"), "--head", str(tmp_path / "head"), "--dtype", "float32"]
    options = parse([*words, "--temperatures", "0,3", "--max-tokens", "12", "--target", '{"kv_tokens": 2048}'])
    results = measure(options, [PromptTurns("a", ("ab",)), PromptTurns("b", ("xyz",))])
    assert [one["mode"] for one in results] == ["plain", "greedy", "plain", "coupled", "typical"]
    for one in results:
        assert (one["answers"], one["tokens"]) == (2, 2 * 11)
        assert one["tokens_per_second"] > 0
        assert -math.log(9001) * 3 < one["mean_logprob"] < 0
    greedy, coupled, typical = (one for one in results if one["mode"] != "plain")
    assert greedy["same_answers"] == coupled["same_answers"] == 2
    assert greedy["lossy_share"] == coupled["lossy_share"] == 0.0
    assert all(one["tokens_per_step"] == 1.0 for one in results if one["mode"] == "plain")
    assert 0.0 <= typical["lossy_share"] <= 1.0
    # Text that has not departed is the model's own, and text that has is not.
    assert (typical["same_answers"] == 2) == (typical["lossy_share"] == 0.0)
