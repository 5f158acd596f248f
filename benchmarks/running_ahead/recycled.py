"""Tokens a pass with prompt lookup, a trie and recycled tokens, by rows of a pass: the device's rule over real answers.

    python -m benchmarks.running_ahead.recycled [--model smollm2-135m-instruct] [--prompts 42] [--tokens 128]
        [--rows 1x8,1x16,1x32,8x64,32x96] [--json FILE]

The model answers prompts of every task, greedily on the CPU. Then each answer is decoded once more by
`tree_kernels.node_table`'s reference: candidates from the text and from the entries of all that the same owner's passes
have said before, the best of them as rows, and the path that the answer takes. Entries are those of accepted tokens, as
on a device; the first prompts find few. Lookup alone is the same without entries. A trie's tree is one pass late, as
that of a draft that runs ahead; it has learnt all texts before.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from tree_kernels.node_table.layout import KEPT, LOOKUP, TABLE
from tree_kernels.node_table.torch_backend import (
    NodeCandidate,
    Nodes,
    best,
    bound_for,
    candidates,
    look_up,
    nodes_of,
    recycled_nodes,
    stand,
)

_OWNER = 0
_CPU = torch.device("cpu")
_NO_TREE = Nodes(1, [], [], [], [], [])
_ROWS = "1x8,1x16,1x32,1x48,8x32,8x64,32x64,32x96,32x128"


class RecordedAnswer(NamedTuple):
    """A prompt and the tokens behind it, and the entry [ENTRY] of every token that one of these follows."""

    prompt: Sequence[int]
    tokens: list[int]
    entries: list[Tensor]


@torch.inference_mode()
def recorded(model: Any, prompt: Sequence[int], count: int) -> RecordedAnswer:
    """`count` greedy tokens."""
    tokens, entries, past, fed = list[int](), list[Tensor](), None, list(prompt)
    for _ in range(count):
        out = model(torch.tensor([fed]), past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[0, -1]
        entries.append(recycling.entry_of(_OWNER, fed[-1], logits))
        fed = [int(logits.argmax())]
        tokens += fed
    return RecordedAnswer(prompt, tokens, entries)


def drafted(answers: Sequence[RecordedAnswer]) -> list[list[Nodes]]:
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


@dataclass
class _ReplayedAnswer:
    """An answer that is decoded once more, a trie's trees behind each of its tokens if it has any, and the tree that
    the next pass has, one pass late."""

    answer: RecordedAnswer
    trees: Sequence[Nodes]
    done: int = 1
    nodes: Nodes = _NO_TREE

    def candidates(self, entries: Tensor | None, most: int) -> list[NodeCandidate]:
        """The best rows of the next pass."""
        text = [*self.answer.prompt, *self.answer.tokens[: self.done]]
        place, before, reused, is_end = stand(self.nodes, text, len(text) - 1)
        recycled = recycled_nodes(entries, _OWNER, text[-1]) if is_end and entries is not None else None
        every = candidates(self.nodes, place, look_up(text, LOOKUP), before, reused, recycled)
        self.nodes = self.trees[self.done - 1] if self.trees else _NO_TREE
        return best(every, most)

    def verify(self, rows: Iterable[NodeCandidate], entries: Tensor | None) -> int:
        """The tokens that a pass with these rows makes, which `entries` learn."""
        tokens, at, accepted = self.answer.tokens[self.done :], -1, 0
        below = {(one.parent, one.token): one.number for one in reversed(list(rows))}
        while accepted < len(tokens) and (at, tokens[accepted]) in below:
            at = below[at, tokens[accepted]]
            accepted += 1
        if entries is not None:
            for entry in self.answer.entries[self.done : self.done + accepted + 1]:
                entries[recycling.place_of(_OWNER, int(entry[1]))] = entry
        made = min(accepted + 1, len(tokens))
        self.done += made
        return made


def tokens_a_pass(waiting: Iterable[_ReplayedAnswer], sequences: int, rows: int, entries: Tensor | None) -> float:
    """Tokens of a sequence in a pass of so many sequences, which share `rows` rows with their roots; until fewer are
    left."""
    line, running, passes, tokens = iter(waiting), list[_ReplayedAnswer](), 0, 0
    while True:
        running = [one for one in running if one.done < len(one.answer.tokens)]
        running += itertools.islice(line, sequences - len(running))
        if len(running) < sequences:
            return round(tokens / passes, 3)
        kept = [one.candidates(entries, min(KEPT, rows - sequences)) for one in running]
        bound = bound_for([each.key for own in kept for each in own], rows - sequences)
        tokens += sum(
            one.verify((each for each in own if each.key < bound), entries)
            for one, own in zip(running, kept, strict=True)
        )
        passes += sequences


def measure(
    answers: Sequence[RecordedAnswer], trees: Sequence[Sequence[Nodes]], sequences: int, rows: int
) -> dict[str, Any]:
    """Tokens of a sequence in a pass, by what drafts."""
    found: dict[str, Any] = {"sequences": sequences, "rows": rows}
    for name, recycles, drafts in (
        ("lookup", False, False),
        ("recycled", True, False),
        ("trie", False, True),
        ("trie, recycled", True, True),
    ):
        entries = recycling.empty_entries(_CPU) if recycles else None
        line = (_ReplayedAnswer(one, own if drafts else ()) for one, own in zip(answers, trees, strict=True))
        found[name] = tokens_a_pass(line, sequences, rows, entries)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=42, help="of all tasks in turn")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument(
        "--rows", default=_ROWS, type=comma_separated(str), help="sequences of a pass and their rows, roots included"
    )
    options: argparse.Namespace = parser.parse_args()
    folder = folder_of(options.model)
    tasks = read_tasks(AutoTokenizer.from_pretrained(folder), TASK_FILE, 1500)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = PromptCursor(tasks).next_prompts(options.prompts, options.tokens, 0.0)
    answers = [recorded(model, one.prompt, options.tokens) for one in asked]
    trees = drafted(answers)
    results = [measure(answers, trees, *map(int, one.split("x"))) for one in options.rows]
    show(record_table(results))
    write_json(
        options.json, {**provenance("running_ahead.recycled"), "settings": settings_of(options), "results": results}
    )


if __name__ == "__main__":
    main()
