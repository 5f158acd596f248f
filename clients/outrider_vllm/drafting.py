"""The draft's trees of the requests that vLLM runs, over one stream of `Propose`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.drafting.draft_tree import GrowingTree
from outrider.drafting.events import Connected, Disconnected, Lost, SequenceFailure
from outrider.drafting.inbox import DraftInbox, QueuedEvent
from outrider.drafting.latency import DraftLatency
from outrider.errors import InvalidField
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import MAX_ROWS
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceGrowth, TreeLimits
from outrider_vllm.config import ProposerConfig
from outrider_vllm.tracking import Seen, Tokens, TrackedRequest

# vLLM shows and formats what is below its own name, and nothing else.
log = logging.getLogger("vllm.outrider")


class _OpenRequest(NamedTuple):
    """A request at the draft. `token_ids` begin with the last token that the open had: a tree looks no further back."""

    token_ids: list[int]
    tree: GrowingTree


class RequestDrafts(DraftInbox):
    """The draft's tree of each request. A late, dead or lying draft costs speed and nothing else. All but the inbox
    belongs to the thread that proposes."""

    def __init__(self, config: ProposerConfig, vocabulary_size: int) -> None:
        super().__init__()
        self._config = config
        self._vocabulary_size = vocabulary_size
        # Whether there is a draft that can draft for vLLM.
        self.connected = False
        self._open_requests: dict[int, _OpenRequest] = {}
        # Requests that the draft does not take.
        self._refused: set[int] = set()
        self._latency = DraftLatency(config.failures_to_open)
        self._sent_at = 0.0
        self.late = 0

    def follow(self, seen: Iterable[tuple[Seen, Tokens, int]]) -> None:
        """Open or advance every request of a step at the draft. `seen` has, for each, what the tracker saw, its whole
        text [length], and how many of its tokens are the step's."""
        self.listen()
        if self._link is None or not self.connected:
            return
        advances: list[SequenceAdvance] = []
        for one, text, sampled in seen:
            number = one.request.number
            followed = self._open_requests.get(number)
            if number in self._refused:
                continue
            if followed is None or len(one.fresh) > MAX_ROWS:
                self._open(number, text, max(1, len(text) - sampled))
            elif len(one.fresh) and self._are_tokens(number, one.fresh):
                tokens = one.fresh.tolist()
                followed.token_ids.extend(tokens)
                followed.tree.move_root(len(tokens))
                advances.append(SequenceAdvance(number, followed.tree.step, tuple(tokens)))
        self._sent_at = time.monotonic()
        if advances:
            self._link.advance(advances)

    def _open(self, number: int, text: Tokens, prompt_length: int) -> None:
        assert self._link is not None
        if not self._are_tokens(number, text):
            return
        token_ids = text.tolist()
        followed = token_ids[-1:]
        self._open_requests[number] = _OpenRequest(followed, GrowingTree(followed, 0))
        self._link.open(
            OpenSequence(
                sequence_id=number,
                token_ids=tuple(token_ids),
                prompt_length=prompt_length,
                step=0,
                seed=0,
                # A proposer cannot see how vLLM samples. A chain that was not drawn is accepted by the target's own
                # probabilities, so the most probable tokens are the best at any temperature.
                mode=VerificationMode.GREEDY,
                sampling=SamplingParams(),
                limits=TreeLimits(),
                vocabulary_size=self._vocabulary_size,
                tenant=self._config.tenant,
                corpus=self._config.corpus,
            )
        )

    def _are_tokens(self, number: int, token_ids: Tokens) -> bool:
        """Whether every id is one of the vocabulary; if not, as in a prompt of embeddings, nothing is drafted."""
        if int(token_ids.min()) >= 0 and int(token_ids.max()) < self._vocabulary_size:
            return True
        self._refuse(number)
        return False

    def wait_for(self, requests: Sequence[TrackedRequest], deadline: float) -> None:
        """Wait until the draft has answered for each request, to a time of the monotonic clock at most; not at all for
        a draft that was late lately."""
        self.listen()
        if not self._latency.waiting_pays:
            return
        while awaited := self._awaited(requests):
            # A draft that sends something else all the time is no less late.
            if time.monotonic() >= deadline or not self.wait_until(deadline):
                # A prompt may take long to read.
                if any(tree.step for tree in awaited):
                    self._latency.late()
                    self.late += 1
                return
            self.listen()

    def _awaited(self, requests: Sequence[TrackedRequest]) -> list[GrowingTree]:
        """The trees of requests that the draft has not answered yet."""
        followed = (self._open_requests.get(request.number) for request in requests)
        return [one.tree for one in followed if one is not None and not one.tree.answered]

    def chain(self, request: TrackedRequest, max_tokens: int) -> list[int]:
        """The best chain that is known below the request's last token, of at most `max_tokens`; empty for none."""
        followed = self._open_requests.get(request.number)
        if followed is None or max_tokens < 1:
            return []
        tree = followed.tree
        try:
            tree.settle()
        except InvalidField as error:
            self._fault(request.number, error)
            return []
        return best_chain(tree.token_ids, tree.parents, tree.scores, max_tokens)

    def close(self, requests: Iterable[TrackedRequest]) -> None:
        """Forget requests, here and at the draft."""
        numbers = [request.number for request in requests]
        self._refused.difference_update(numbers)
        closed = [number for number in numbers if self._open_requests.pop(number, None) is not None]
        if closed and self._link is not None and self.connected:
            self._link.close(closed)

    def _refuse(self, number: int) -> None:
        """Draft no more for a request, until it is closed."""
        self._refused.add(number)
        if self._open_requests.pop(number, None) is not None and self._link is not None and self.connected:
            self._link.close([number])

    def _fault(self, number: int, error: InvalidField) -> None:
        log.warning("a malformed growth ends drafting for its request: %s", error)
        self._refuse(number)

    def _cut_off(self, reason: str) -> None:
        log.error("the draft is cut off: %s", reason)
        self._open_requests.clear()
        if self._link is not None:
            self._link.cut_off(reason)

    def _handle(self, event: QueuedEvent) -> None:
        match event:
            case SequenceGrowth():
                self._graft(event)
            case SequenceFailure():
                log.info("the draft does not follow a request: %s", event.message)
                if self._open_requests.pop(event.sequence_id, None) is not None:
                    self._refused.add(event.sequence_id)
            case Connected():
                # Every request is opened again when its text is seen next.
                self._open_requests.clear()
                self._refused.clear()
                self.connected = _can_draft(event.info)
                self._latency.expect_first_answer()
            case Lost():
                for number in event.sequence_ids:
                    self._open_requests.pop(number, None)
            case Disconnected():
                log.warning("no draft: %s", event.reason)
                self.connected = False
                self._open_requests.clear()

    def _graft(self, growth: SequenceGrowth) -> None:
        followed = self._open_requests.get(growth.sequence_id)
        if followed is None:
            # Closed while the growth was on its way.
            return
        tree = followed.tree
        try:
            awaited = not tree.answered
            tree.hold(growth)
        except InvalidField as error:
            self._fault(growth.sequence_id, error)
            return
        if awaited and tree.answered and self.received_at - self._sent_at <= self._config.wait_seconds:
            self._latency.in_time()


def _can_draft(info: DraftInfo) -> bool:
    """Whether the draft can do without hidden states, of which vLLM gives none."""
    if info.features is not None and info.features.required:
        log.warning("draft %s is not used: it needs hidden states, and vLLM gives a proposer none", info.drafter)
        return False
    log.info("draft %s is connected", info.drafter)
    return True


def best_chain(token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float], max_tokens: int) -> list[int]:
    """The path of at most `max_tokens` nodes below the root of which most tokens are expected to be accepted.

    Args:
        token_ids: [nodes] token of each node; node 0 is the root, which is not part of the chain.
        parents: [nodes] the parent of each node, an earlier one; of the root, itself.
        scores: [nodes] in [0, 1], the probability that a node is accepted given that its parent is.

    Returns:
        Token ids from the root's child down. The expected tokens of a path are the sum, over its nodes, of the
        probability that all nodes down to that one are accepted; of two equal paths the first to be named counts.
    """
    probabilities, expected, depths = [1.0], [0.0], [0]
    best = 0
    for node in range(1, len(token_ids)):
        parent = parents[node]
        probabilities.append(probabilities[parent] * scores[node])
        expected.append(expected[parent] + probabilities[node])
        depths.append(depths[parent] + 1)
        if depths[node] <= max_tokens and expected[node] > expected[best]:
            best = node
    chain: list[int] = []
    while best:
        chain.append(token_ids[best])
        best = parents[best]
    return chain[::-1]
