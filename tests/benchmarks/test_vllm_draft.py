"""The comparison of vLLM's ways to draft, over a stand-in with vLLM's interface: vLLM itself runs on a GPU only."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import vllm_draft
from benchmarks.serving.vllm_draft import Round, compare, engine_options, figures, line, measure, parse


class StandIn:
    """Says the prompt's first token over and over, and has half of what was drafted accepted."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def generate(self, prompts: list[Any], params: int, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.asked.append([one["prompt_token_ids"] for one in prompts])
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[one["prompt_token_ids"][0]] * params)])
            for one in prompts
        ]

    def get_metrics(self) -> list[Any]:
        steps = len(self.asked)
        counts = {"drafts": 10 * steps, "draft_tokens": 40 * steps, "accepted_tokens": 20 * steps}
        found = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counts.items()]
        return [*found, SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[1, 2])]


def test_every_prompt_is_asked_in_every_round_and_by_one_concurrency() -> None:
    options = parse(["--model", "x", "--concurrency", "1,4", "--rounds", "2", "--waves", "3", "--mode", "ngram"])
    llm, prompts = StandIn(), [(place, 1) for place in range(100)]
    first, again, more, last = list(measure(llm, 5, prompts, options))
    assert [(one.concurrency, one.number) for one in (first, again, more, last)] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert first.answers == again.answers == [[place] * 5 for place in range(8)]
    assert more.answers == [[place] * 5 for place in range(8, 20)]
    assert {len(some) for some in llm.asked} == {1, 4}
    assert first.counted == {"drafts": 80, "drafted": 320, "accepted": 160}


def test_figures_are_held_to_plain_decodings_first_round() -> None:
    plain = Round("plain", 2, 0, 4.0, [[1, 2, 3, 4], [5, 6, 7, 8]], {"drafts": 0, "drafted": 0, "accepted": 0})
    other = Round("outrider", 2, 1, 2.0, [[1, 2, 3, 4], [5, 9, 7, 8]], {"drafts": 2, "drafted": 9, "accepted": 5})
    row = figures(other, plain)
    assert (row["tokens_per_second"], row["x_plain"], row["tokens_per_drafted_step"]) == (4.0, 2.0, 3.5)
    assert (row["equal_answers"], row["equal_tokens"]) == (0.5, 5 / 8)
    assert "2.00 x plain" in line(row) and "50%" in line(row)
    assert figures(plain, None)["tokens_per_drafted_step"] is None and "x plain" not in line(figures(plain, None))


@pytest.mark.parametrize("mode", vllm_draft.MODES)
def test_engine_options(mode: str) -> None:
    options = parse(["--model", "x", "--mode", mode, "--draft", "a:1", "--engine", '{"tensor_parallel_size": 2}'])
    settings = engine_options(options)
    assert settings["tensor_parallel_size"] == 2 and not settings["enable_prefix_caching"]
    method = settings.get("speculative_config", {}).get("method")
    assert method == {"plain": None, "ngram": "ngram", "outrider": "custom_class"}[mode]
    assert ("additional_config" in settings) == (mode == "outrider")


def test_settings_are_ones_that_the_proposer_has() -> None:
    from outrider_vllm import ProposerConfig

    settings = engine_options(parse(["--model", "x", "--mode", "outrider", "--draft", "a:1", "--wait-ms", "3"]))
    assert ProposerConfig.of(settings["additional_config"], {}).wait_ms == 3


def test_modes_run_in_processes_of_their_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The commands that are run, with a script in vLLM's place which writes what `run_mode` does."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        "import json, sys\n"
        "given = dict(zip(sys.argv[1:], sys.argv[2:]))\n"
        "mode = given['--mode']\n"
        "if mode == 'ngram': sys.exit(3)\n"
        "assert (given['--draft'] == 'a:1') == True, given\n"
        "one = dict(mode=mode, concurrency=1, number=0, seconds=1.0, answers=[[1, 2]],\n"
        "           counted=dict(drafts=0, drafted=0, accepted=0))\n"
        "open(given['--rounds-file'], 'w').write(json.dumps({'device': 'none'}) + '\\n' + json.dumps(one) + '\\n')\n"
    )
    run = vllm_draft.subprocess.run

    def stand_in(command: list[str], **more: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "benchmarks.serving.vllm_draft"]
        return run([sys.executable, str(script), *command[3:]], **more)

    monkeypatch.setattr(vllm_draft.subprocess, "run", stand_in)
    arguments = ["--model", "x", "--draft", "a:1"]
    document = compare(parse(arguments), arguments)
    assert [row["mode"] for row in document["results"]] == ["plain", "outrider"]
    assert document["machine"]["device"] == "none" and document["results"][1]["x_plain"] == 1.0
    assert "status 3 in mode ngram" in capsys.readouterr().err


def test_a_draft_service_is_started_where_none_is_named() -> None:
    with vllm_draft.draft_service(parse(["--model", "x"])) as address:
        assert address.startswith("unix:")
    nobody = vllm_draft.draft_service(parse(["--model", "x", "--draft-python", "false"]))
    with pytest.raises(RuntimeError, match="exited with status 1"):
        nobody.__enter__()
