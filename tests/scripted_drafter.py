"""A drafter whose guesses are known beforehand, and a listener that remembers what a link delivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from waits import HUNG_SECONDS

from draft_service.drafters.base import CorpusGrowth, DraftSequence, tree_limits
from outrider.drafting.events import Connected, Disconnected, DraftEvent, Grown, Lost, SequenceFailure
from outrider.errors import OutriderError, QuotaExceeded, UnknownCorpus
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from outrider.wire.frames import CorpusInfo, DraftInfo, OpenSequence, SequenceAdvance, SequenceGrowth, TreeLimits

VOCABULARY = 1000
CORPUS_QUOTA = 100


class ScriptedDrafter:
    """Guesses that counting goes on: from root r, a chain r+1, r+2, ... beside one wrong child r+500."""

    name = "scripted"
    vocabulary_size = 0

    def __init__(self, nodes: int = 4, max_context: int = 64) -> None:
        self.limits = TreeLimits(nodes, nodes)
        self.max_context = max_context
        self.open_sequences: set[int] = set()
        self.batches: list[int] = []
        self.refuses: OutriderError | None = None
        self.fails = False
        self.learnt: dict[tuple[str, str], list[int]] = {}
        self.started = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def open(self, sequence: DraftSequence) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.open_sequences.add(id(sequence))

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        assert tuple(sequence.token_ids[-len(committed) :]) == tuple(committed)

    def close(self, sequence: DraftSequence) -> None:
        self.open_sequences.discard(id(sequence))

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        if self.fails:
            raise IndexError("a bug in the drafter")
        self.batches.append(len(sequences))
        return [self._tree(sequence) for sequence in sequences]

    def _tree(self, sequence: DraftSequence) -> TokenTree:
        nodes = tree_limits(self.limits, sequence.limits).max_nodes
        if not nodes:
            return TokenTree.root_only(sequence.root)
        tokens = [sequence.root, sequence.root + 500, *(sequence.root + i for i in range(1, nodes))]
        parents = [0, 0, 0, *range(2, nodes)][: nodes + 1]
        distributions = {}
        if sequence.mode is VerificationMode.REJECTION:
            distributions = {0: DraftDistribution((tokens[1], sequence.root + 1), (1, 3))}
            if nodes > 2:
                distributions[2] = DraftDistribution((sequence.root + 2,), (1,))
        scores = (1.0, *(0.5 for _ in range(nodes)))
        return TokenTree(tuple(tokens[: nodes + 1]), tuple(parents), scores, distributions)

    def add_corpus(self, tenant: str, corpus: str, token_ids: Sequence[int]) -> CorpusGrowth:
        known = self.learnt.setdefault((tenant, corpus), [])
        fits = token_ids[: CORPUS_QUOTA - len(known)]
        known.extend(fits)
        if len(fits) < len(token_ids):
            raise QuotaExceeded("the corpus is full", limit=CORPUS_QUOTA)
        return CorpusGrowth(len(fits), len(known))

    def corpora(self, tenant: str) -> list[CorpusInfo]:
        known = sorted(self.learnt.items(), key=lambda item: item[0][1])
        return [self._described(*names, len(said)) for names, said in known if names[1] or names[0] == tenant]

    def delete_corpus(self, tenant: str | None, corpus: str) -> CorpusInfo:
        for owner, name in list(self.learnt):
            if name == corpus and tenant in (None, owner):
                return self._described(owner, name, len(self.learnt.pop((owner, name))))
        raise UnknownCorpus("no corpus of that name was added")

    def _described(self, owner: str, name: str, tokens: int) -> CorpusInfo:
        return CorpusInfo(name, owner, tokens, documents=1, nodes=tokens, bytes=40 * tokens)

    def stats(self) -> Mapping[str, float]:
        return {}


def opening(sequence_id: int = 1, token_ids: Iterable[int] = (10, 11, 12), **fields: object) -> OpenSequence:
    """An open with everything a test does not care about filled in."""
    token_ids = tuple(token_ids)
    defaults: dict[str, object] = {
        "prompt_length": len(token_ids),
        "step": 0,
        "seed": 1,
        "mode": VerificationMode.GREEDY,
        "sampling": SamplingParams(),
        "limits": TreeLimits(),
        "vocabulary_size": VOCABULARY,
    }
    return OpenSequence(sequence_id=sequence_id, token_ids=token_ids, **(defaults | fields))  # type: ignore[arg-type]


def step(number: int, *token_ids: int, sequence_id: int = 1) -> SequenceAdvance:
    return SequenceAdvance(sequence_id, number, token_ids)


class Listener:
    """`DraftEvents` that remembers. Threads of links write; a test waits with `until`."""

    def __init__(self) -> None:
        self.growths: list[SequenceGrowth] = []
        self.failures: list[SequenceFailure] = []
        self.infos: list[DraftInfo] = []
        self.losses: list[str] = []
        # Sequences whose draft is gone while others are there.
        self.lost: list[int] = []
        self.connected = False
        self._changed = threading.Condition()

    def _add(self, kind: list[object], values: Iterable[object]) -> None:
        with self._changed:
            kind.extend(values)
            self._changed.notify_all()

    def receive(self, event: DraftEvent) -> None:
        match event:
            case Grown():
                self._add(self.growths, event.growths)  # type: ignore[arg-type]
            case SequenceFailure():
                self._add(self.failures, [event])  # type: ignore[arg-type]
            case Connected():
                self.connected = True
                self._add(self.infos, [event.info])  # type: ignore[arg-type]
            case Disconnected():
                self.connected = False
                self._add(self.losses, [event.reason])  # type: ignore[arg-type]
            case Lost():
                self._add(self.lost, event.sequence_ids)  # type: ignore[arg-type]

    def until(self, condition: Callable[[Listener], object]) -> None:
        """Wait until `condition(self)` holds; fails with what was heard."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), HUNG_SECONDS):
                heard = (len(self.growths), self.failures, len(self.infos), self.losses)
                raise AssertionError(f"it did not come to that; heard {heard}")

    def answered(self, sequence_id: int, base_step: int) -> bool:
        return any((g.sequence_id, g.base_step) == (sequence_id, base_step) for g in self.growths)
