"""Tokens a pass with prompt lookup, a trie and recycled tokens, by rows of a pass: the device's rule over real answers.

    python -m benchmarks.running_ahead.recycled [--model smollm2-135m-instruct] [--prompts 42] [--tokens 128]
        [--rows 8,16,32] [--json FILE]

The model answers prompts of every task, greedily on the CPU. Then each answer is decoded once more by
`tree_kernels.node_table`'s reference: candidates from the text and from the entries of all that the same owner's passes
have said before, the best of them as rows, and the path that the answer takes. Entries are those of accepted tokens, as
on a device; the first prompts find few. Lookup alone is the same without entries. A trie's tree is one pass late, as
that of a draft that runs ahead; it has learnt all texts before.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, settings_of, show, write_json
from benchmarks.shared.workload import TASK_FILE, folder_of
from benchmarks.widened.runs import PromptCursor, read_tasks
from draft_service.drafters.base import DraftSequence
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from outrider.tree import TokenTree
from target_service.execution.node_tables import build_table
from tree_kernels.node_table import recycling
from tree_kernels.node_table.layout import LOOKUP, TABLE
from tree_kernels.node_table.torch_backend import Nodes, best, candidates, look_up, nodes_of, recycled_nodes, stand

_OWNER = 0
_CPU = torch.device("cpu")
_NO_TREE = Nodes(1, [], [], [], [], [])


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


def drafted(answers: Sequence[Answer]) -> list[list[Nodes]]:
    """A trie's tree behind every token of each answer; all are one tenant's, in their order."""
    drafter, trees = NgramDrafter(TrieConfig()), list[list[Nodes]]()
    drafter.start()
    for number, one in enumerate(answers):
        sequence = DraftSequence(number, list(one.prompt), len(one.prompt), 1 << 20, "all")
        drafter.open(sequence)
        trees.append([])
        for token in one.tokens:
            sequence.token_ids.append(token)
            drafter.advance(sequence, [token])
            trees[-1].append(nodes_from(drafter.propose([sequence])[0], len(sequence.token_ids)))
            # The next tree must not depend on timing.
            drafter.flush()
        drafter.close(sequence)
        drafter.flush()
    drafter.stop()
    return trees


def nodes_from(tree: TokenTree, base: int) -> Nodes:
    """A tree behind the last of `base` tokens, as the device reads it."""
    table, nodes = np.zeros(TABLE, np.int32), np.zeros((4, len(tree)), np.int32)
    nodes[0], nodes[1] = tree.token_ids, tree.parents
    build_table(nodes, np.array(tree.scores), len(tree), 1.0, base, table)
    return nodes_of(torch.from_numpy(table))


def passes(answer: Answer, rows: int, entries: Tensor | None, trees: Sequence[Nodes] = ()) -> int:
    """Passes that decode an answer behind its first token; `entries` are learnt from on the way. `trees` behind each
    token are used one pass late."""
    tokens, done, count, nodes = answer.tokens, 1, 0, _NO_TREE
    while done < len(tokens):
        text = [*answer.prompt, *tokens[:done]]
        place, before, borrowed, is_end = stand(nodes, text, len(text) - 1)
        recycled = recycled_nodes(entries, _OWNER, text[-1]) if is_end and entries is not None else None
        every = candidates(nodes, place, look_up(text, LOOKUP), before, borrowed, recycled)
        kept = best(every, rows - 1)
        nodes = trees[done - 1] if trees else _NO_TREE
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


def measure(answers: Sequence[Answer], trees: Sequence[Sequence[Nodes]], rows: int) -> dict[str, Any]:
    """Tokens a pass with this many rows."""
    tokens = sum(len(one.tokens) - 1 for one in answers)
    found: dict[str, Any] = {"rows": rows}
    for name, recycles, drafts in (
        ("lookup", False, False),
        ("recycled", True, False),
        ("trie", False, True),
        ("trie, recycled", True, True),
    ):
        entries = recycling.empty_entries(_CPU) if recycles else None
        count = sum(passes(one, rows, entries, own if drafts else ()) for one, own in zip(answers, trees, strict=True))
        found[name] = round(tokens / count, 3)
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
    trees = drafted(answers)
    results = [measure(answers, trees, rows) for rows in options.rows]
    show(record_table(results))
    write_json(
        options.json, {**provenance("running_ahead.recycled"), "settings": settings_of(options), "results": results}
    )


if __name__ == "__main__":
    main()
