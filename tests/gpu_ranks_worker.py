"""Answers of a model that two GPUs share, over captured steps, beside those of one GPU over eager steps, as JSON:
`python gpu_ranks_worker.py FOLDER DTYPE [HEAD]`, where a head drafts in the passes. A process has ranks once: what NCCL
holds ends with it."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

from engine_harness import engine_config, knowing_tree, random_tree, request, run

from outrider.runtime import leave
from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.execution.device_executor import DeviceSteps
from target_service.model.loading.loader import load_runner
from target_service.model.ranks.leading import load_ranks

VOCABULARY, ROWS, SEQUENCES, TOKENS = 211, 64, 4, 24
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}


def requests(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 17, 40, 90)]
    return [request(prompt, TOKENS, sampling=sampling) for prompt in prompts]


def config_for(folder: str, dtype: str, head: str = "") -> TargetConfig:
    return TargetConfig(
        model=folder,
        dtype=dtype,
        device="cuda",
        tensor_parallel=2,
        kv_tokens=4096,
        max_step_rows=ROWS,
        max_running=SEQUENCES,
        lookup_tokens=7,
        capture_seconds=30.0,
        draft=f"inpass:eagle --head {head} --num-steps 4 --topk 3 --min-score 0" if head else "",
    )


def main() -> None:
    config = config_for(*sys.argv[1:])
    runner, _ = load_ranks(config)
    assert runner.ranks == 2 and runner.captured_steps[0] > 1
    assert (runner.in_pass is not None and runner.in_pass.divided) == bool(config.draft)
    # Not warmed up, which would compile far more than what is used.
    steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS)
    whole = load_runner(replace(config, tensor_parallel=1, lockstep=True, draft=""))
    settings = {"launch": steps, "stagger": 2, "config": engine_config(max_step_rows=ROWS, max_running=SEQUENCES)}
    found = []
    for name, sampling in SAMPLINGS.items():
        wanted = requests(sampling)
        expected = [one.token_ids for one in run(whole, wanted)]
        texts = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
        knowing = knowing_tree(texts, VOCABULARY, 24, right=0.8)
        for propose, passes in (
            (None, 1),
            (None, 4),
            (random_tree(VOCABULARY, 24), 1),
            (knowing, 1),
            (knowing, 2),
        ):
            outcomes = run(runner, wanted, propose=propose, passes=passes, **settings)  # type: ignore[arg-type]
            found.append(
                {
                    "sampling": name,
                    "alike": [one.token_ids == other for one, other in zip(outcomes, expected, strict=True)],
                    "tokens": [len(one.token_ids) for one in outcomes],
                    "accepted": sum(one.finished.totals.accepted_tokens for one in outcomes),
                    "knowing": propose is knowing,
                }
            )
    json.dump(found, sys.stdout)
    leave(0)


if __name__ == "__main__":
    main()
