"""How long the engine's thread takes for the masks of passes of forms, in wall time, without an engine and a device.

    python -m benchmarks.host.mask_time [--cases 1x16,8x8,32x2] [--passes 121] [--json FILE]

Each of so many sequences is somewhere in an answer of seven fields, with the tokens of SmolLM2, and drafts a chain: in
every second pass so many rows of its answer, else its root alone. No output goes on, but by one token at first.
Timed are `follow` (rows of trees, and tokens that grammars read), `masks` (computing them, and which rows are reached)
and `expected` (text that may follow, all of it known after the first passes). Medians are over passes with drafted
rows. Other processes on the machine show here: the thread waits for others that compute masks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.engine.sampling_parameters import FORM
from benchmarks.host.form_time import END, MODEL
from benchmarks.host.simulated_forms import form_answer
from benchmarks.shared.report import (
    comma_separated,
    median_and_spread,
    parser_of,
    provenance,
    record_table,
    settings_of,
    show,
    write_json,
)
from target_service.grammars.compiling import Grammars
from target_service.grammars.following import FollowedGrammar, FollowedTree, masks_of
from target_service.grammars.row_masks import TreeRows
from target_service.model.loading.store import resolve
from target_service.text.loading import load_tokenizer

VOCABULARY = 49152
# As of a pass.
_MOST_EXPECTED, _MASKS = 160, 24


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Add the microseconds of what is done within to `times`."""
    begin = time.perf_counter()
    yield
    times.append(1e6 * (time.perf_counter() - begin))


def measure(sequences: int, rows: int, passes: int) -> dict[str, Any]:
    """Microseconds of a pass by what is done."""
    tokenizer, dice = load_tokenizer(resolve(MODEL)), random.Random(1)
    grammars = Grammars(tokenizer, VOCABULARY, (END,))
    outputs = list[tuple[FollowedGrammar, list[int], int]]()
    form = FORM.structured_output
    assert form is not None, "it is one"
    for _ in range(sequences):
        answer = tokenizer.encode(form_answer(dice))
        outputs.append((grammars.followed(form, "t"), answer, dice.randrange(2, len(answer) - rows)))
    room = np.zeros((1 + sequences * rows, -(-VOCABULARY // 32)), np.int32)
    times: dict[str, list[float]] = {"follow": [], "masks": [], "expected": []}
    for number in range(passes):
        with timed(times["follow"]):
            trees = list[FollowedTree]()
            for grammar, answer, first in outputs:
                end = first + int(number > 0)
                drafted = rows if number % 2 else 1
                tree = TreeRows(answer[end - 1 : end - 1 + drafted], [0, *range(drafted - 1)])
                trees.append(grammar.follow(tree, answer[:end], may_be_late=True))
        with timed(times["masks"]):
            masks_of(trees, room)
        with timed(times["expected"]):
            for grammar, _, _ in outputs:
                grammar.expected(_MOST_EXPECTED, _MASKS)
    figures = {}
    for phase, each in times.items():
        # Those with drafted rows, without the first ones.
        median, spread = median_and_spread(each[3::2])
        figures[phase] = {"median": round(median, 1), "spread": round(spread, 1), "n": len(each[3::2])}
    return {"sequences": sequences, "rows_each": rows, "microseconds": figures}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default="1x16,8x8,32x2", type=comma_separated(str))
    parser.add_argument("--passes", type=int, default=121)
    options = parser.parse_args()
    results = []
    for case in options.cases:
        sequences, rows = map(int, case.split("x"))
        results.append(measure(sequences, rows, options.passes))
        table = [{"phase": phase, **each} for phase, each in results[-1]["microseconds"].items()]
        show(f"{sequences} sequences with chains of {rows} rows, microseconds of a pass\n{record_table(table)}")
    document = {**provenance("host.mask_time", ["llguidance"]), "settings": settings_of(options), "results": results}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
