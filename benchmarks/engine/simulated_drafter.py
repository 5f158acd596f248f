"""An EAGLE drafter that pays what a real head costs and is then right as often as it is told to be: SIMULATED
acceptance, for shapes whose weights are not to be had.

    python -m benchmarks.engine.simulated_drafter --answers FILE --rates 0.8,0.8 --listen ADDRESS --head FOLDER ...

serves it as a draft service does; `simulated_acceptance.py` starts it so.
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
from draft_service.config import DraftConfig  # noqa: E402
from draft_service.drafters.base import DraftSequence  # noqa: E402
from draft_service.eagle.config import EagleConfig  # noqa: E402
from draft_service.eagle.drafter import EagleDrafter  # noqa: E402
from draft_service.service import serve  # noqa: E402
from outrider.runtime import run  # noqa: E402
from outrider.tree import TokenTree  # noqa: E402

Answers = dict[tuple[int, ...], tuple[int, ...]]


def write_answers(path: Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Prompts and what a plain run said to them. In one move, since a drafter may look at any time."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([[list(prompt), list(said)] for prompt, said in answers]))
    partial.rename(path)


def read_answers(path: Path) -> Answers:
    return {tuple(prompt): tuple(said) for prompt, said in json.loads(path.read_text())}


@dataclass(slots=True)
class _Script:
    """What a sequence will say, how much of it was said, and the dice for it."""

    answer: Sequence[int]
    dice: random.Random
    said: int = 0
    # The target said something else: from then on every draft is wrong.
    left: bool = False


@dataclass
class Simulation:
    """Rewrites trees so that the right continuation is in them with the rates asked for.

    Attributes:
        rates: [d]: probability that the node at depth d + 1 is right, given that its parent is; the last one stands
            for all that lie deeper.
        vocabulary_size: of the target.
    """

    rates: Sequence[float]
    vocabulary_size: int
    scripts: dict[int, _Script] = field(default_factory=dict)

    def rewrite(self, tree: TokenTree, script: _Script) -> TokenTree:
        """The tree, with the likeliest path right down to a depth that is drawn, and wrong everywhere else.

        Its shape stays. Nodes on that path are scored with their rate, the others share what it leaves.
        """
        path, ahead = likeliest_path(tree), [] if script.left else list(script.answer[script.said :])
        tokens, scores = list(tree.token_ids), list(tree.scores)
        right = True
        for depth, row in enumerate(path):
            rate = self.rates[min(depth, len(self.rates) - 1)]
            right = right and depth < len(ahead) and script.dice.random() < rate
            parent = tree.parents[row]
            siblings = [other for other in tree.children[parent] if other != row]
            if depth < len(ahead):
                self._place(tokens, row, siblings, ahead[depth], right=right)
            scores[row] = rate
            for other in siblings:
                scores[other] = (1.0 - rate) / len(siblings)
        return TokenTree(tree.token_ids[:1] + tuple(tokens[1:]), tree.parents, tuple(scores))

    def _place(self, tokens: list[int], row: int, siblings: Sequence[int], token: int, *, right: bool) -> None:
        """Let `row` say `token`, or let neither it nor a sibling do; siblings stay different from each other."""
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
    """See the module. Sequences are known by their prompts, whose answers are read from a file when one is new."""

    name = "eagle_simulated"

    def __init__(self, config: EagleConfig, answers: Path, rates: Sequence[float], delay: float = 0.0) -> None:
        """Answers come `delay` seconds later than they are ready, as over a longer way."""
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
        # The warm-up's sequence, and any that was not asked before, has no answer and gets wrong drafts.
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
        left = sum(script.left for script in self._simulation.scripts.values())
        return {**super().stats(), "simulated_sequences_left": left}

    @staticmethod
    def _follow(script: _Script, committed: Sequence[int]) -> None:
        following = script.answer[script.said : script.said + len(committed)]
        script.left = script.left or tuple(following) != tuple(committed)
        script.said += len(committed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--rates", required=True, type=lambda text: [float(one) for one in text.split(",")])
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
