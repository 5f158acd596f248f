"""An EAGLE drafter with the cost of a real head and SIMULATED acceptance, at given rates, for shapes without real
weights.

    python -m benchmarks.engine.simulated_drafter --answers FILE --rates 0.8,0.8 --listen ADDRESS --head FOLDER ...

runs it as a draft service; `simulated_acceptance.py` starts that.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.runtime import prepare_grpc, switch_threads_often

prepare_grpc()

# gRPC reads its environment as it is imported.
from benchmarks.shared.report import comma_separated, write_json  # noqa: E402
from draft_service.config import DraftConfig  # noqa: E402
from draft_service.drafters.base import DraftSequence  # noqa: E402
from draft_service.eagle.config import EagleConfig  # noqa: E402
from draft_service.eagle.drafter import EagleDrafter  # noqa: E402
from draft_service.service import serve  # noqa: E402
from outrider.runtime import run  # noqa: E402
from outrider.tree import TokenTree  # noqa: E402

Answers = dict[tuple[int, ...], tuple[int, ...]]


def write_answers(path: Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Write prompts and the answers of a plain run."""
    write_json(path, [[list(prompt), list(answer)] for prompt, answer in answers])


def read_answers(path: Path) -> Answers:
    return {tuple(prompt): tuple(answer) for prompt, answer in json.loads(path.read_text())}


@dataclass(slots=True)
class _Script:
    """The expected output of a sequence, and how many of its tokens have been committed."""

    answer: Sequence[int]
    rng: random.Random
    committed: int = 0
    # The target committed another token: from then on every draft is wrong.
    departed: bool = False


@dataclass
class Simulation:
    """Rewrites trees so that the right continuation is in them at the given rates.

    Attributes:
        rates: [d]: probability that the node at depth d + 1 is right, given that its parent is; the last one stands
            for all that lie deeper.
        vocabulary_size: of the target.
    """

    rates: Sequence[float]
    vocabulary_size: int
    scripts: dict[int, _Script] = field(default_factory=dict)

    def rewrite(self, tree: TokenTree, script: _Script) -> TokenTree:
        """The same shape with other tokens: the likeliest path is right down to a random depth, all else is wrong.

        Nodes on that path are scored with their rate, and their siblings share the rest.
        """
        path, ahead = likeliest_path(tree), [] if script.departed else list(script.answer[script.committed :])
        tokens, scores = list(tree.token_ids), list(tree.scores)
        right = True
        for depth, row in enumerate(path):
            rate = self.rates[min(depth, len(self.rates) - 1)]
            right = right and depth < len(ahead) and script.rng.random() < rate
            parent = tree.parents[row]
            siblings = [other for other in tree.children[parent] if other != row]
            if depth < len(ahead):
                self._place(tokens, row, siblings, ahead[depth], right=right)
            scores[row] = rate
            for other in siblings:
                scores[other] = (1.0 - rate) / len(siblings)
        return TokenTree(tree.token_ids[:1] + tuple(tokens[1:]), tree.parents, tuple(scores))

    def _place(self, tokens: list[int], row: int, siblings: Sequence[int], token: int, *, right: bool) -> None:
        """Give `row` the `token` if it is right, and else take it from all siblings. Siblings stay different."""
        taken = {tokens[other] for other in (row, *siblings)} | {token}
        spare = next(one for one in range(self.vocabulary_size) if one not in taken)
        for other in (row, *siblings):
            if tokens[other] == token:
                tokens[other] = spare
        if right:
            tokens[row] = token


def likeliest_path(tree: TokenTree) -> list[int]:
    """Rows from the root's first child down, always the first child."""
    path, row = [], 0
    while tree.children[row]:
        row = tree.children[row][0]
        path.append(row)
    return path


class SimulatedDrafter(EagleDrafter):
    """See the module. Sequences are found by their prompts; the file of answers is read when one is new."""

    name = "eagle_simulated"

    def __init__(self, config: EagleConfig, answers: Path, rates: Sequence[float], delay: float = 0.0) -> None:
        """Trees are returned `delay` seconds late, as over a longer network."""
        super().__init__(config)
        self._delay = delay
        self._path = answers
        self._answers: Answers = {}
        self._simulation = Simulation(rates, self.vocabulary_size)

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        prompt = tuple(sequence.token_ids[: sequence.prompt_length])
        if prompt not in self._answers and self._path.exists():
            self._answers = read_answers(self._path)
        # The warm-up's sequence, and any without a plain run, has no answer and gets wrong drafts.
        script = _Script(self._answers.get(prompt, ()), random.Random(str(prompt[:8])))
        self._simulation.scripts[id(sequence)] = script
        self._follow(script, sequence.token_ids[sequence.prompt_length :])

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        super().advance(sequence, committed)
        self._follow(self._simulation.scripts[id(sequence)], committed)

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        self._simulation.scripts.pop(id(sequence), None)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = super().propose(sequences)
        scripts = [self._simulation.scripts[id(sequence)] for sequence in sequences]
        if self._delay:
            time.sleep(self._delay)
        return [self._simulation.rewrite(tree, script) for tree, script in zip(trees, scripts, strict=True)]

    def stats(self) -> Mapping[str, float]:
        departed = sum(script.departed for script in self._simulation.scripts.values())
        return {**super().stats(), "simulated_sequences_left": departed}

    @staticmethod
    def _follow(script: _Script, committed: Sequence[int]) -> None:
        expected = script.answer[script.committed : script.committed + len(committed)]
        script.departed = script.departed or tuple(expected) != tuple(committed)
        script.committed += len(committed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--rates", required=True, type=comma_separated(float))
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--eagle", required=True, type=json.loads, help="settings of the EAGLE drafter, as JSON")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    switch_threads_often()
    config = EagleConfig(**options.eagle)
    drafter = SimulatedDrafter(config, options.answers, options.rates, options.delay_ms / 1e3)
    return run(serve(DraftConfig(listen=options.listen), drafter))


if __name__ == "__main__":
    sys.exit(main())
