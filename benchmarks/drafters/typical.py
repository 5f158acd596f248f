"""Typical acceptance beside the lossless modes: tokens a step, speed, and how far the text departs.

    python -m benchmarks.drafters.typical [--temperatures 0,0.7,1] [--limit 2] [--json FILE]

The first turns of `prompts.jsonl` are answered one at a time, with the head that comes with Outrider, engine and draft
in one process; every drafted row is verified, and drafting is never switched off. Each answer has the same seed in
every mode. delta is sqrt(epsilon), as in Medusa. Figures of each mode:

- tokens_per_step, and tokens_per_second of decoding alone, by the engine's clock;
- lossy_share: share of tokens that are accepted drafts which the model would not have drawn there;
- compared with plain decoding by the same seeds, answer by answer: the number of equal answers, the median place of the
  first token that differs, and the share of places that differ, up to the shorter one's end;
- mean_logprob of the tokens under the model, in float32 at the temperature at which they were sampled. Plain decoding's
  is that of the model's own text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.drafters.acceptance import parse as parse_acceptance
from benchmarks.drafters.acceptance import target_config
from benchmarks.drafters.acceptance_drafters import DrafterSet
from benchmarks.drafters.acceptance_run import Distribution, Talk
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import (
    PromptTurns,
    first_of_each_task,
    first_turn_tokens,
    folder_of,
    read_conversations,
)
from outrider.sampling import TypicalAcceptance, VerificationMode
from target_service.assembly import load_model
from target_service.model.runner import ModelRunner

DRAFTER = "eagle_tree"
PLAIN = "plain"
Outputs = dict[tuple[int, int], list[int]]


def distributions(temperature: float, epsilons: Sequence[float]) -> list[Distribution]:
    """The distributions that are measured at a temperature, the lossless one first."""
    if not temperature:
        return [Distribution(0.0, VerificationMode.GREEDY)]
    rules = [TypicalAcceptance(epsilon, math.sqrt(epsilon)) for epsilon in epsilons]
    typical = [Distribution(temperature, VerificationMode.TYPICAL, rule) for rule in rules]
    return [Distribution(temperature, VerificationMode.COUPLED), *typical]


def differences(found: Outputs, own: Outputs) -> dict[str, float]:
    """How answers differ from those of plain decoding with the same key."""
    firsts, places, different, same = list[int](), 0, 0, 0
    for key, tokens in own.items():
        pairs = list(zip(found[key], tokens, strict=False))
        unequal = [place for place, (one, other) in enumerate(pairs) if one != other]
        same += found[key] == tokens
        places += len(pairs)
        different += len(unequal)
        firsts.append(unequal[0] if unequal else len(pairs))
    return {
        "same_answers": same,
        "first_difference_median": median(firsts),
        "different_places_share": round(different / places, 4),
    }


class Judge:
    """The model in float32, for the probability of a text."""

    def __init__(self, folder: str, tokenizer: Any, conversations: Sequence[PromptTurns]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._prompts = [first_turn_tokens(tokenizer, one) for one in conversations]

    @torch.inference_mode()
    def mean_logprob(self, outputs: Outputs, temperature: float) -> float:
        """Mean over all tokens, in nats, at the temperature; for 0 at temperature 1."""
        total, count = 0.0, 0
        for (index, _), tokens in outputs.items():
            ids = torch.tensor([[*self._prompts[index], *tokens]])
            logits = self._model(ids).logits[0, -len(tokens) - 1 : -1].double()
            logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            total += float(logprobs.gather(1, torch.tensor(tokens)[:, None]).sum())
            count += len(tokens)
        return round(total / count, 4)


def result_of(name: str, distribution: Distribution, talk: Talk) -> dict[str, Any]:
    """The figures of one mode, all tasks together."""
    whole = talk.total
    rule = {"epsilon": distribution.typical.epsilon, "delta": distribution.typical.delta}
    return {
        "mode": name,
        "temperature": distribution.temperature,
        **(rule if distribution.mode is VerificationMode.TYPICAL else {}),
        **whole.figures(),
        "tokens_per_second": round(whole.tokens / whole.decode_ns * 1e9, 2),
        "lossy_share": round(whole.lossy_tokens / (whole.tokens + whole.answers), 4),
    }


def measure(options: argparse.Namespace, conversations: Sequence[PromptTurns]) -> list[dict[str, Any]]:
    """A result for each mode at each temperature, and for plain decoding; the model is loaded once.

    The file is written after each temperature.
    """
    known = parse_acceptance(["--head", options.head, "--concurrency", "1", "--dtype", options.dtype])
    known.model, known.target = options.model, {"max_draft_nodes": options.rows} | options.target
    config, folder = target_config(known), folder_of(options.model)
    runner: ModelRunner = load_model(config)
    drafters = DrafterSet(options.head, folder, "cpu", options.dtype, tree_steps=options.levels, topk=options.topk)
    judge = Judge(folder, runner.tokenizer, conversations)

    def talk_of(distribution: Distribution, *, drafted: bool = True) -> Talk:
        known.target["speculation"] = drafted
        talk = Talk(runner, target_config(known), drafters.make(DRAFTER), conversations)
        talk.run(distribution, options.max_tokens, 1)
        return talk

    results = []
    for temperature in options.temperatures:
        chosen = distributions(temperature, options.epsilons)
        own = talk_of(chosen[0], drafted=False)
        results.append(result_of(PLAIN, chosen[0], own))
        results[-1]["mean_logprob"] = judge.mean_logprob(own.outputs, temperature)
        for distribution in chosen:
            talk = talk_of(distribution)
            result = result_of(distribution.mode.value, distribution, talk) | differences(talk.outputs, own.outputs)
            result["mean_logprob"] = judge.mean_logprob(talk.outputs, temperature)
            results.append(result)
        for result in results[-len(chosen) - 1 :]:
            show(json.dumps(result))
        write_json(options.json, {"machine": describe(), "settings": settings_of(options), "results": results})
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="smollm2-135m-instruct", help="a name or folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--temperatures", default=[0.0, 0.7, 1.0], type=comma_separated(float))
    parser.add_argument("--epsilons", default=[TypicalAcceptance().epsilon], type=comma_separated(float))
    parser.add_argument("--tasks", default="", type=comma_separated(str), help="tasks to keep; all when empty")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task; 0 for all")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--levels", type=int, default=4, help="of a tree")
    parser.add_argument("--topk", type=int, default=4, help="nodes that each level expands")
    parser.add_argument("--rows", type=int, default=12, help="drafted rows that are verified in a step")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    kept = [one for one in read_conversations() if not options.tasks or one.task in options.tasks]
    chosen = first_of_each_task(kept, options.limit)
    measure(options, [PromptTurns(one.task, one.turns[:1]) for one in chosen])


if __name__ == "__main__":
    main()
