"""Mean accepted length, by task, drafter and temperature: tokens for each verified step, the bonus token included.

    python -m benchmarks.drafters.acceptance --head FOLDER [--model MODEL] [--device cuda]
        [--drafters trie,eagle_chain,eagle_tree,merged] [--temperatures 0,1] [--rejection] [--json FILE]
        [--medusa FOLDER, for the drafters medusa_chain, medusa_tree]

The model answers every conversation of `prompts.jsonl`, at most `--max-tokens` a turn; second turns follow the model's
own first answers. Engine and drafter run in one process, `concurrency` sequences at a time, so that no draft is late;
every drafted row is verified (at most 64 of a sequence, the root included) and drafting is never switched off. So
acceptance is measured, not speed. T = 0 is GREEDY; T = 1 is COUPLED with fixed seeds and, with `--rejection`,
REJECTION, which uses at most 15 drafted rows.

Each drafter's run at each temperature begins with an empty trie, which learns from prompts and answers as in service:
later prompts of a task profit from earlier ones, in the order of the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drafters.acceptance_drafters import EAGLE, MEDUSA, NAMES, TREE_NODES, DrafterSet
from benchmarks.drafters.acceptance_run import Distribution, Talk
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, markdown_table, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import PromptTurns, first_of_each_task, folder_of, read_conversations
from outrider.sampling import VerificationMode
from target_service.assembly import load_model
from target_service.config import TargetConfig

_ALL = "all"
# Prompt rows of one step beside the whole trees of all sequences: trees that are cut for a prompt would accept less.
_PROMPT_ROWS = 1024


def distributions(options: argparse.Namespace) -> list[Distribution]:
    found = []
    for temperature in options.temperatures:
        found.append(Distribution(temperature, VerificationMode.COUPLED if temperature else VerificationMode.GREEDY))
        if temperature and options.rejection:
            found.append(Distribution(temperature, VerificationMode.REJECTION))
    return found


def target_config(options: argparse.Namespace) -> TargetConfig:
    """Steps with room for all trees, and drafts that are never switched off."""
    settings: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        # `Talk` links the drafter; this only has to name some draft.
        "draft": "inprocess:eagle",
        "draft_head": options.head,
        "row_budget": "all",
        "speculative_disable_queue_size": 1 << 20,
        "max_draft_nodes": TREE_NODES,
        "max_running": options.concurrency,
        "max_waiting": 1 << 20,
        "max_step_rows": options.concurrency * (TREE_NODES + 1) + _PROMPT_ROWS,
        "prefill_chunk": _PROMPT_ROWS,
    }
    return TargetConfig(**(settings | options.target))


def agreement(talk: Talk, first: Talk) -> float:
    """Share of answers that equal those of the first drafter: all, except after near-ties in bfloat16."""
    common = talk.outputs.keys() & first.outputs.keys()
    return round(sum(talk.outputs[key] == first.outputs[key] for key in common) / max(1, len(common)), 4)


def by_task(talk: Talk) -> dict[str, dict[str, Any]]:
    return {task: tally.figures() for task, tally in (*talk.tallies.items(), (_ALL, talk.total))}


def measure(options: argparse.Namespace, conversations: Sequence[PromptTurns]) -> list[dict[str, Any]]:
    """A result for every distribution and drafter; the model is loaded once."""
    config = target_config(options)
    runner = load_model(config)
    drafters = DrafterSet(
        options.head,
        folder_of(options.model),
        options.draft_device or options.device,
        options.dtype,
        options.chain_steps,
        options.tree_steps,
        options.topk,
        options.cuda_graphs,
        options.gumbel_sharpness,
        options.medusa,
    )
    results = []
    for distribution in distributions(options):
        first: Talk | None = None
        for name in options.drafters:
            talk = Talk(runner, config, drafters.make(name), conversations)
            begin = time.perf_counter()
            talk.run(distribution, options.max_tokens, options.concurrency)
            seconds = time.perf_counter() - begin
            first = first or talk
            result = {
                "drafter": name,
                "temperature": distribution.temperature,
                "mode": distribution.mode.value,
                "tasks": by_task(talk),
                "drafter_stats": talk.drafter_stats,
                "seconds": round(seconds, 2),
                "same_outputs_as_first": agreement(talk, first),
            }
            results.append(result)
            whole = result["tasks"][_ALL]
            show(
                f"{distribution.name:16s} {name:12s} {whole['tokens_per_step']:.3f} tokens/step over {whole['steps']} "
                f"steps, {whole['drafted_rows_per_step']:.1f} rows drafted, {seconds:.1f} s"
            )
    return results


def tables(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table for each distribution, with a row for each task and a column for each drafter."""
    parts = []
    for temperature, mode in dict.fromkeys((one["temperature"], one["mode"]) for one in results):
        chosen = [one for one in results if (one["temperature"], one["mode"]) == (temperature, mode)]
        rows = [
            [task.replace("_", " "), *(f"{one['tasks'][task]['tokens_per_step']:.2f}" for one in chosen)]
            for task in chosen[0]["tasks"]
        ]
        head = ["task", *(one["drafter"].replace("_", " ") for one in chosen)]
        parts += [f"T = {temperature:g}, {mode.upper()}\n", markdown_table(head, rows)]
    return "\n".join(parts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--head", default="", help="folder of an EAGLE head")
    parser.add_argument("--medusa", default="", help="folder of Medusa heads")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--drafters", default=",".join(("trie", *EAGLE)), type=comma_separated(str))
    parser.add_argument("--temperatures", default="0,1", type=comma_separated(float))
    parser.add_argument("--rejection", action="store_true", help="also REJECTION, at temperatures above 0")
    parser.add_argument("--limit", type=int, default=0, help="conversations of each task; 0 for all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--chain-steps", type=int, default=DrafterSet.chain_steps)
    parser.add_argument("--tree-steps", type=int, default=DrafterSet.tree_steps)
    parser.add_argument("--topk", type=int, default=DrafterSet.topk)
    parser.add_argument("--gumbel-sharpness", type=float, default=DrafterSet.gumbel_sharpness, help="of COUPLED trees")
    parser.add_argument("--draft-device", default="", help="of the head; the target's when empty")
    parser.add_argument("--cuda-graphs", action="store_true", help="draft with captured passes")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    if set(options.drafters) - set(NAMES):
        parser.error(f"drafters are {', '.join(NAMES)}")
    if not options.head and set(options.drafters) & set(EAGLE):
        parser.error(f"{', '.join(EAGLE)} need --head")
    if not options.medusa and set(options.drafters) & set(MEDUSA):
        parser.error(f"{', '.join(MEDUSA)} need --medusa")
    return options


def main() -> None:
    options = parse()
    results = measure(options, first_of_each_task(read_conversations(), options.limit))
    show("\n" + tables(results))
    if options.markdown is not None:
        options.markdown.write_text(tables(results))
    write_json(options.json, {"machine": describe(), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
