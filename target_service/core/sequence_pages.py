"""Pages that sequences hold and share, how many of the free ones drafted rows may take, and who gives way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from target_service.core.kv_cache import KVCache
from target_service.core.schedule import Schedule
from target_service.core.sequence import Sequence, SequenceState
from tree_kernels.pages import OutOfPages
from tree_kernels.prefix_tree import PageChange, PageStates, PrefixNode, PrefixTree
from tree_kernels.recurrence import KeptStates

# Tokens that a prompt is read from, at least, for its state to be kept behind its last page: that takes a pass of its
# own for the rest of the page, some hundredth of the time of so many tokens on a CPU. Chosen.
_LONG_PROMPT = 512


class PrefixStates(Protocol):
    """The hidden states that a drafter reads, kept beside the pages of their tokens: a sequence that resumes behind a
    shared prefix computes none of it."""

    def most_without(self, sequence: Sequence) -> int:
        """Tokens that the sequence may skip without their states."""
        ...

    def most_read_again(self, sequence: Sequence) -> float:
        """Tokens beyond those that the sequence may at most read again, although they are in its pages, for the states
        that are not kept of them."""
        ...

    def of_page(self, sequence: Sequence, start: int, stop: int) -> PageStates | None:
        """The states of tokens `start` .. `stop`, to be kept; None where they are not known."""
        ...

    def resume(self, sequence: Sequence, start: int, pages: SequenceOf[PageStates]) -> bool:
        """Give the sequence the states of pages from token `start` on; False where they have another form than is sent
        now."""
        ...


class SequencePages:
    """Gives sequences pages of the KV cache and takes them back.

    Pages whose text is known are shared: a sequence begins behind the pages that hold its first tokens already, and its
    own become available to others as they are filled.

    Layers with a window keep a page in a frame from when it is reserved until no row sees it any more. A sequence
    begins behind a prefix only where its last window is in frames, where pages stay until others need these.

    Known tokens come before drafted rows: pages that running sequences need to read what is known are kept free for
    them, and so are those of an arrival that drafted rows alone keep out.
    """

    def __init__(
        self, cache: KVCache, *, shares: bool = False, states: PrefixStates | None = None, records: bool = False
    ) -> None:
        """`shares` keeps a tree of prefixes, whose changes it `records`; where layers keep states, only if copies of
        them are kept too. `states` may be set later, while no sequence holds pages."""
        self._cache = cache
        recurrent = cache.recurrent
        shares = shares and (recurrent is None or len(recurrent.kept_slots) > 0)
        self.prefixes = PrefixTree(cache, records=records) if shares else None
        self.kept = KeptStates(recurrent) if self.prefixes is not None and recurrent is not None else None
        if self.prefixes is not None and self.kept is not None:
            self.prefixes.when_forgotten(self.kept.forget_page)
        self.states = states
        # Pages that the next in line needs; 0 if it would not fit without drafted rows either.
        self.kept_out = 0

    @property
    def scarce(self) -> bool:
        """Whether pages that drafted rows did not need are worth giving back: an arrival waits for them, or fewer are
        free than are in use. Else the next pass is spared taking them again."""
        frames = self._cache.frames
        few_frames = frames is not None and frames.free_frames < frames.used_frames
        return bool(self.kept_out) or few_frames or self._cache.free_pages < self._cache.used_pages

    @property
    def state_bytes(self) -> int:
        """Bytes of hidden states beside shared pages."""
        return self.prefixes.state_bytes if self.prefixes is not None else 0

    def held(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence has pages for `tokens`, as nearly all have in nearly every step."""
        return len(sequence.pages) * self._cache.page_size >= tokens

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Reserve pages for `tokens` of the sequence, or raise `OutOfPages` and change nothing."""
        missing, frames = self._missing(sequence, tokens), self._cache.frames
        if missing <= 0:
            return
        if frames is not None and missing > frames.free_frames:
            raise OutOfPages(f"expected {missing} free frames, have {frames.free_frames}")
        last = sequence.pages[-1] if sequence.pages else None
        recurrent = self._cache.recurrent if not sequence.state_slot else None
        if recurrent is not None and not recurrent.free_slots:
            raise OutOfPages("every slot of recurrent states has a sequence")
        pages = self._cache.allocate(missing, after=last)
        if frames is not None:
            frames.hold(pages)
        sequence.pages.extend(pages)
        if recurrent is not None:
            sequence.state_slot = recurrent.allocate_slot()

    def lacking(self, wanted: int, reserved: int, rows: int) -> tuple[int, int]:
        """Pages, and frames of layers with a window, that are missing for an arrival of `wanted` pages beside
        `reserved` ones, which reads up to `rows` at a time."""
        frames = self._cache.frames
        pages = wanted + reserved - self._cache.free_pages
        if frames is None:
            return pages, 0
        within = min(wanted, frames.pages_within(rows), frames.frames)
        return pages, within + min(reserved, frames.frames - within) - frames.free_frames

    def reserve_for_drafts(self, tokens: Iterable[tuple[Sequence, int]], running: Iterable[Sequence]) -> bool:
        """Reserve pages for drafted rows: for so many tokens of each of these sequences. False, and nothing is changed,
        where known tokens of `running` or an arrival need them."""
        wanted = [(sequence, count) for sequence, count in tokens if not self.held(sequence, count)]
        if not wanted:
            return not self.kept_out
        missing = sum([self._missing(sequence, count) for sequence, count in wanted])
        unread = sum([self._unread(one) for one in running if one.state is SequenceState.PREFILL])
        if missing > self._cache.free_pages - self.kept_out - unread:
            return False
        if self._cache.frames is not None and missing > self._cache.frames.free_frames:
            return False
        for sequence, count in wanted:
            self.reserve(sequence, count)
        return True

    def reserve_behind_trees(self, schedule: Schedule, max_context: int) -> bool:
        """Reserve pages for drafted tokens that the step under way may accept. False if they do not fit."""
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            drafts = sequence.pending_drafts
            if sequence.length + drafts > max_context:
                return False
            tokens = sequence.kv_length + chunk.count + drafts
            if self.held(sequence, tokens):
                continue
            try:
                self.reserve(sequence, tokens)
            except OutOfPages:
                return False
        return True

    def note_arrival(self, wanted: int, running: Iterable[Sequence]) -> None:
        """Note that the next in line has to wait for `wanted` pages. If they would be free without drafted rows, none
        are reserved for those, until `forget_arrival`."""
        for_drafts = sum(max(0, len(one.pages) - self._cache.pages_for(one.length)) for one in running)
        self.kept_out = wanted if wanted <= self._cache.free_pages + for_drafts else 0

    def forget_arrival(self) -> None:
        """Let drafted rows have pages again, also while others wait."""
        self.kept_out = 0

    def spare_rows(self, sequence: Sequence) -> int:
        """Rows past the known tokens that fit the sequence's pages and the free ones."""
        free, frames = self._cache.free_pages, self._cache.frames
        if frames is not None:
            free = min(free, frames.free_frames)
        return (len(sequence.pages) + free) * self._cache.page_size - sequence.length

    def trim(self, sequence: Sequence, keys: int = 0) -> None:
        """Release pages that hold neither a committed token nor one of the first `keys` keys, which a pass under way
        may write."""
        keep = self._cache.pages_for(max(len(sequence.token_ids), keys))
        if len(sequence.pages) > keep:
            self._release(sequence, keep)

    def leave_windows(self, sequence: Sequence, computed: int) -> None:
        """Have layers with a window drop what no row behind the sequence's `computed` keys sees: by committed tokens,
        whatever the size of trees."""
        frames = self._cache.frames
        if frames is None:
            return
        first = frames.first_page(computed)
        if first > sequence.window_start:
            frames.drop(sequence.pages[sequence.window_start : first], self._cache.is_cached)
            sequence.window_start = first

    def share_between_tenants(self, token_ids: SequenceOf[int]) -> None:
        """Let all tenants share pages of this text. Only before the first sequence."""
        if self.prefixes is not None:
            self.prefixes.publish(token_ids)

    def cached_pages(self, sequence: Sequence) -> int:
        """Pages that `resume` would find."""
        if self.prefixes is None:
            return 0
        tokens = sequence.token_ids
        return len(self._usable(self.prefixes.match(sequence.request.tenant, tokens, len(tokens) - 1)))

    def resume(self, sequence: Sequence) -> None:
        """Share the pages that hold the sequence's first tokens. Its last token is always read: a pass makes the next
        one of it. Only for a sequence that holds no pages."""
        if self.prefixes is None or sequence.pending is not None:
            # Its tokens are not all known: the step under way samples more.
            return
        tokens, tenant = sequence.token_ids, sequence.request.tenant
        # Log-probabilities of a prompt are made of its tokens' own rows.
        most = max(0, sequence.scored_tokens - 1) if sequence.unscored else len(tokens) - 1
        known = self.prefixes.match(tenant, tokens, most) if sequence.request.reuses_pages else []
        recurrent = self._cache.recurrent
        has_slot = recurrent is None or recurrent.free_slots > 0
        nodes = self._with_states(sequence, self._usable(known) if has_slot else [])
        if not sequence.totals.preemptions:
            # Later it finds pages of its own.
            sequence.totals.queried_tokens = len(tokens)
            sequence.totals.cached_tokens = len(nodes) * self._cache.page_size
        if nodes:
            pages = [node.page for node in nodes]
            self._cache.share(pages)
            if (frames := self._cache.frames) is not None:
                sequence.window_start = frames.first_page(len(pages) * self._cache.page_size)
                frames.hold(pages[sequence.window_start :])
            self.prefixes.use(nodes[-1])
            sequence.pages.extend(pages)
            sequence.prefix, sequence.prefix_pages = nodes[-1], len(pages)
            sequence.kv_length = len(pages) * self._cache.page_size
        if self.kept is not None and recurrent is not None:
            if nodes:
                sequence.state_slot = recurrent.allocate_slot()
                self.kept.restore(nodes[-1], sequence.state_slot)
            self._request_copies(self.kept, sequence, len(known))

    def _request_copies(self, kept: KeptStates, sequence: Sequence, known: int) -> None:
        """Have states kept where the sequence's text parts from what is in the tree, whose first `known` pages it has
        too; at the end of what all tenants share; and behind a long prompt."""
        assert self.prefixes is not None
        tokens, size = sequence.token_ids, self._cache.page_size
        last = (len(tokens) - 1) // size * size
        for end in (known * size, min(last, self.prefixes.public_tokens(tokens))):
            if end > sequence.kv_length:
                kept.request_copy(sequence.sequence_id, end)
        if last - sequence.kv_length >= _LONG_PROMPT:
            kept.request_copy(sequence.sequence_id, last, shared=False)

    def rows_until_state(self, sequence: Sequence, count: int) -> int:
        """Of `count` known tokens as many as the sequence may read in one pass: none behind where its state is to be
        kept."""
        kept = self.kept
        return count if kept is None else kept.rows_until_copy(sequence.sequence_id, sequence.kv_length, count)

    def keep_states(self, launched: Schedule) -> None:
        """Keep the states of sequences that are to be kept where a step ends that was just launched, and have those
        that generate keep theirs of page ends."""
        recurrent = self._cache.recurrent
        if (kept := self.kept) is None or recurrent is None:
            return
        for chunk in launched.chunks:
            sequence, count = chunk.sequence, chunk.count
            kept.copy_if_requested(sequence.sequence_id, sequence.kv_length + count, sequence.state_slot)
            if chunk.reaches_root:
                # Rows that are no more than a tree has are not part of the state yet.
                of_state = sequence.kv_length + (count if count > recurrent.window else 0)
                kept.follow(sequence.sequence_id, sequence.state_slot, of_state)

    def can_wait_for(self, other: Sequence, pages: int) -> bool:
        """Whether a sequence that begins with the same pages can go on from them once the other has filled these."""
        tokens = pages * self._cache.page_size
        if self.kept is not None and other.kv_length < tokens:
            self.kept.request_copy(other.sequence_id, tokens)
        return self.kept is None or other.kv_length < tokens

    def _usable(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """As many of the first nodes as a sequence may begin behind."""
        nodes = self._within_windows(nodes)
        while self.kept is not None:
            kept = self.kept.usable(nodes)
            nodes = self._within_windows(kept)
            if len(nodes) == len(kept):
                break
        return nodes

    def _within_windows(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """As many of the first nodes as a sequence may begin behind: layers with a window need the last of them."""
        frames = self._cache.frames
        if frames is None:
            return nodes
        usable = unbroken = 0
        for count, node in enumerate(nodes, start=1):
            unbroken = unbroken + 1 if frames.has(node.page) else 0
            if count - unbroken <= frames.first_page(count * self._cache.page_size):
                usable = count
        return nodes[:usable]

    def _with_states(self, sequence: Sequence, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """As many of the first usable nodes as the sequence may skip, its drafter's states included."""
        if self.states is None or not nodes:
            return nodes
        without = max(0, self.states.most_without(sequence)) // self._cache.page_size
        count = without
        while count < len(nodes) and nodes[count].states is not None:
            count += 1
        if (len(nodes) - count) * self._cache.page_size > self.states.most_read_again(sequence):
            return nodes
        nodes, skipped = self._usable(nodes[:count]), self._usable(nodes[:without])
        found = [node.states for node in nodes[without:] if node.states is not None]
        if found and self.states.resume(sequence, without * self._cache.page_size, found):
            return nodes
        return skipped

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Let others share the pages whose `computed` keys are final, where the token behind a page is known."""
        if self.prefixes is None:
            return
        size, tokens = self._cache.page_size, sequence.token_ids
        filled = min(computed, len(tokens) - 1) // size
        while sequence.prefix_pages < filled:
            place = sequence.prefix_pages
            start, own = place * size, sequence.pages[place]
            node = self.prefixes.insert(sequence.request.tenant, sequence.prefix, tokens[start : start + size], own)
            if node.page != own:
                # Another sequence read the same text at the same time. One page stays, so that what holds a node
                # holds all above it.
                self._cache.share([node.page])
                if self._cache.frames is not None and place >= sequence.window_start:
                    self._cache.frames.hand_over(own, node.page)
                self._cache.release([own])
                sequence.pages[place] = node.page
            if self.states is not None and node.states is None:
                states = self.states.of_page(sequence, start, start + size)
                if states is not None:
                    self.prefixes.keep_states(node, states)
            sequence.prefix, sequence.prefix_pages = node, place + 1
            if self.kept is not None:
                self.kept.attach(sequence.sequence_id, node, start + size)

    def release(self, sequence: Sequence, *, keeps_state: bool = True) -> None:
        """Take all that the sequence holds. Its state behind the last page in the tree is kept, unless passes have left
        it unusable."""
        if self.prefixes is not None and sequence.prefix is not None:
            self.prefixes.use(sequence.prefix)
        if self.kept is not None:
            node, tokens = sequence.prefix if keeps_state else None, sequence.prefix_pages * self._cache.page_size
            self.kept.forget_sequence(sequence.sequence_id, sequence.state_slot, node, tokens)
        if self._cache.recurrent is not None and sequence.state_slot:
            self._cache.recurrent.release_slot(sequence.state_slot)
            sequence.state_slot = 0
        self._release(sequence, 0)
        sequence.kv_length, sequence.prefix, sequence.prefix_pages, sequence.window_start = 0, None, 0, 0
        sequence.common_page = -1

    def pop_changes(self) -> list[PageChange]:
        """What changed in the tree of prefixes since the last call, where that is recorded."""
        return self.prefixes.pop_changes() if self.prefixes is not None else []

    def forget_prefixes(self) -> None:
        """Share no page that was filled until now. Only while no sequence holds pages."""
        if self.prefixes is not None:
            self.prefixes.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every page is free or owned by these sequences and the tree, as often as it is
        counted."""
        cached, held = self.prefixes.pages() if self.prefixes is not None else [], list(sequences)
        self._cache.check_integrity([sequence.pages for sequence in held], cached)
        if self._cache.frames is not None:
            self._cache.frames.check_integrity([one.pages[one.window_start :] for one in held], cached)
        if self._cache.recurrent is not None:
            self._cache.recurrent.check_slots([one.state_slot for one in held if one.pages])
        if self.kept is not None:
            self.kept.check_integrity()

    def _release(self, sequence: Sequence, keep: int) -> None:
        """Give back all but the sequence's first `keep` pages."""
        pages = sequence.pages[keep:]
        if self._cache.frames is not None:
            self._cache.frames.drop(sequence.pages[max(keep, sequence.window_start) :], self._cache.is_cached)
        self._cache.release(pages)
        del sequence.pages[keep:]

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return self._cache.pages_for(tokens) - len(sequence.pages)

    def _unread(self, sequence: Sequence) -> int:
        """Pages that a sequence that reads lacks for its known tokens."""
        return max(0, self._missing(sequence, len(sequence.token_ids)))


def order_of_preemption(
    running: SequenceOf[Sequence], is_idle: Callable[[Sequence], bool]
) -> Iterator[tuple[Sequence, float]]:
    """Running sequences with pages in the order in which they give way, and the pages that their tenant holds for its
    weight without them.

    Idle ones go first, which wait for their client's tree; then always the youngest of the tenant that holds most for
    its weight. The oldest of all that are not idle is not among them, so that it ends some day.
    """
    for idle in (True, False):
        held = Counter[str]()
        lines: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in running:
            held[sequence.request.tenant] += len(sequence.pages)
            if is_idle(sequence) is idle:
                lines[sequence.request.tenant].append(sequence)
        if not idle and lines:
            # Ids rise in order of arrival.
            oldest = min((line[0] for line in lines.values()), key=lambda one: one.sequence_id)
            lines[oldest.request.tenant].remove(oldest)
        weights = {tenant: line[0].request.limits.weight for tenant, line in lines.items() if line}
        while weights:
            tenant = max(weights, key=lambda name: held[name] / weights[name])
            victim = lines[tenant].pop()
            held[tenant] -= len(victim.pages)
            if victim.pages:
                yield victim, held[tenant] / weights[tenant]
            if not lines[tenant]:
                del weights[tenant]
