"""Tokens a pass with prompt lookup and recycled tokens, by rows of a pass: the device's own rule over real answers.

    python -m benchmarks.running_ahead.recycled [--model smollm2-135m-instruct] [--prompts 42] [--tokens 128]
        [--rows 8,16,32] [--json FILE]

The model answers prompts of every task, greedily on the CPU. Then each answer is decoded once more by
`tree_kernels.node_table`'s reference: candidates from the text and from the entries of all that the same owner's passes
have said before, the best of them as rows, and the path that the answer takes. Entries are those of accepted tokens, as
on a device; the first prompts find few. Lookup alone is the same without entries.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, settings_of, show, write_json
from benchmarks.shared.workload import TASK_FILE, folder_of
from benchmarks.widened.runs import PromptCursor, read_tasks
from tree_kernels.node_table import recycling
from tree_kernels.node_table.layout import LOOKUP
from tree_kernels.node_table.torch_backend import Nodes, best, candidates, look_up, recycled_nodes

_OWNER = 0
_CPU = torch.device("cpu")


class Answer(NamedTuple):
    """A prompt and the tokens behind it, and the entry [ENTRY] of every token that one of these follows."""

    prompt: Sequence[int]
    tokens: list[int]
    entries: list[Tensor]


@torch.inference_mode()
def recorded(model: Any, prompt: Sequence[int], count: int) -> Answer:
    """`count` greedy tokens."""
    tokens, entries, past, fed = list[int](), list[Tensor](), None, list(prompt)
    for _ in range(count):
        out = model(torch.tensor([fed]), past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[0, -1]
        entries.append(recycling.entry_of(_OWNER, fed[-1], logits))
        fed = [int(logits.argmax())]
        tokens += fed
    return Answer(prompt, tokens, entries)


def passes(answer: Answer, rows: int, entries: Tensor | None) -> int:
    """Passes that decode an answer behind its first token; `entries` are learnt from on the way."""
    tokens, done, count = answer.tokens, 1, 0
    while done < len(tokens):
        text = [*answer.prompt, *tokens[:done]]
        nodes, place = Nodes(1, [], [], [], [], []), -1
        if entries is not None:
            nodes, place = recycled_nodes(entries, _OWNER, text[-1]), 0
        kept = best(candidates(nodes, place, look_up(text, LOOKUP)), rows - 1)
        below = {(one.parent, one.token): one.number for one in reversed(kept)}
        at, accepted = -1, 0
        while done + accepted < len(tokens) and (at, tokens[done + accepted]) in below:
            at = below[at, tokens[done + accepted]]
            accepted += 1
        if entries is not None:
            for entry in answer.entries[done : done + accepted + 1]:
                entries[recycling.place_of(_OWNER, int(entry[1]))] = entry
        done, count = done + accepted + 1, count + 1
    return count


def measure(answers: Sequence[Answer], rows: int) -> dict[str, Any]:
    """Tokens a pass with this many rows."""
    tokens = sum(len(one.tokens) - 1 for one in answers)
    found: dict[str, Any] = {"rows": rows}
    for name, entries in (("lookup", None), ("recycled", recycling.empty_entries(_CPU))):
        found[name] = round(tokens / sum(passes(one, rows, entries) for one in answers), 3)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=42, help="of all tasks in turn")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--rows", default="8,16,32", type=comma_separated(int), help="of a pass, the root's included")
    options: argparse.Namespace = parser.parse_args()
    folder = folder_of(options.model)
    tasks = read_tasks(AutoTokenizer.from_pretrained(folder), TASK_FILE, 1500)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = PromptCursor(tasks).take(options.prompts, options.tokens, 0.0)
    answers = [recorded(model, one.prompt, options.tokens) for one in asked]
    results = [measure(answers, rows) for rows in options.rows]
    show(record_table(results))
    write_json(
        options.json, {**provenance("running_ahead.recycled"), "settings": settings_of(options), "results": results}
    )


if __name__ == "__main__":
    main()
