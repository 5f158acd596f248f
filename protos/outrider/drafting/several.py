"""Several drafts for one target: each sequence is followed by one of them, and by another if that is disconnected.

A tenant's sequences go to the draft whose trie holds the tenant's texts while it is connected; otherwise the other
drafts share them (rendezvous hashing: Thaler and Ravishankar, 1998). Drafts that learn nothing share all sequences;
those that keep keys and values of what they have read get what begins with it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.drafting.events import (
    Connected,
    Disconnected,
    DraftEvent,
    DraftEvents,
    Grown,
    Lost,
    Opened,
    SequenceFailure,
)
from outrider.drafting.prefix_homes import PrefixHomes
from outrider.wire.frames import (
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
    StoppableLink,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    """One of the drafts, and the receiver of its events, on its link's thread."""

    address: str
    shared: SeveralDrafts
    offered: DraftInfo | None = None  # what it is while it is connected
    info: DraftInfo | None = None  # the same while it is used
    nodes: int = 0  # nodes received from it since a draft was last cut off
    link: StoppableLink = field(init=False)

    def receive(self, event: DraftEvent) -> None:
        match event:
            case Grown():
                self.shared.grown(self, event.growths)
            case Opened():
                self.shared.opened(self, event)
            case SequenceFailure():
                self.shared.failed(self, event)
            case Connected():
                self.shared.joined(self, event.info)
            case Disconnected():
                self.shared.left(self, event.reason)
            case Lost():
                raise AssertionError(f"a link to one draft loses all or none, not {len(event.sequence_ids)}")


class SeveralDrafts:
    """A `StoppableLink` to all of them. Its receiver sees one draft, connected while any of them is."""

    def __init__(
        self, addresses: Sequence[str], connect: Callable[[str, DraftEvents], StoppableLink], events: DraftEvents
    ) -> None:
        """Start connecting to each address by `connect`. `events` receives `Connected` for the first draft that
        connects, `Disconnected` for the last that disconnects, and `Lost` for those in between."""
        self._events = events
        self._connect = connect
        self._lock = threading.RLock()
        # The description that the receiver was given; None while no draft is connected.
        self._info: DraftInfo | None = None
        self._members: list[_Member] = []
        # Who follows each open sequence.
        self._homes: dict[int, _Member] = {}
        self._prefix_homes = PrefixHomes()
        self.change_addresses(addresses)

    def change_addresses(self, addresses: Sequence[str]) -> None:
        """Start connecting to those that are not named yet, and leave those that are named no longer: the receiver gets
        `Lost` for what they followed. Call it from one thread at a time."""
        # Members send events as soon as they have a link.
        with self._lock:
            known = {member.address: member for member in self._members}
            added = [_Member(address, self) for address in addresses if address not in known]
            members = known | {member.address: member for member in added}
            self._members = [members[address] for address in addresses]
            for member in added:
                member.link = self._connect(member.address, member)
        for member in (member for address, member in known.items() if address not in addresses):
            # Its thread may wait for the lock.
            member.link.stop()
            if member.offered is not None:
                self.left(member, "it is not listed any more")

    def open(self, sequence: OpenSequence) -> None:
        with self._lock:
            member = self._home_of(sequence)
            if member is not None:
                self._homes[sequence.sequence_id] = member
                member.link.open(sequence)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        """Send one frame to each draft that follows any of them."""
        with self._lock:
            for member, ids in self._by_home([one.sequence_id for one in advances]):
                member.link.advance([one for one in advances if one.sequence_id in ids])

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        with self._lock:
            for member, ids in self._by_home([one.sequence_id for one in features]):
                member.link.send_features([one for one in features if one.sequence_id in ids])

    def close(self, sequence_ids: Sequence[int]) -> None:
        with self._lock:
            for member, ids in self._by_home(sequence_ids):
                member.link.close(sorted(ids))
            for sequence_id in sequence_ids:
                self._homes.pop(sequence_id, None)

    def cut_off(self, reason: str) -> None:
        """Cut off the one that sent most. The receiver has given up all sequences, and none is opened again: late
        growth of the old draft would be taken for growth of the new one."""
        with self._lock:
            busiest = max(self._members, key=lambda member: member.nodes, default=None)
            for member in self._members:
                member.nodes = 0
            self.close(list(self._homes))
            if busiest is not None:
                log.error("draft at %s is cut off", busiest.address)
                busiest.link.cut_off(reason)

    def stop(self) -> None:
        for member in self._members:
            member.link.stop()

    # Everything below runs on the links' threads.

    def grown(self, member: _Member, growths: Sequence[SequenceGrowth]) -> None:
        """A draft sent growth. It is dropped for sequences that another draft follows by now."""
        with self._lock:
            own = [one for one in growths if self._homes.get(one.sequence_id) is member]
            member.nodes += sum(len(one.token_ids) for one in growths)
        if own:
            self._events.receive(Grown(own))

    def opened(self, member: _Member, event: Opened) -> None:
        with self._lock:
            own = self._homes.get(event.sequence_id) is member
        if own:
            self._events.receive(event)

    def failed(self, member: _Member, failure: SequenceFailure) -> None:
        with self._lock:
            own = self._homes.get(failure.sequence_id) is member
            if own:
                del self._homes[failure.sequence_id]
        if own:
            self._events.receive(failure)

    def joined(self, member: _Member, info: DraftInfo) -> None:
        """A draft is connected. It is not used while it differs from the first: a target supports one kind."""
        with self._lock:
            member.offered, member.info = info, None
            first = self._take_up()
            if member.info is None:
                log.warning(
                    "draft %s at %s is not used: it is not what the other drafts are", info.drafter, member.address
                )
        if first is not None:
            self._events.receive(Connected(first))

    def left(self, member: _Member, reason: str) -> None:
        with self._lock:
            was_connected, member.info, member.offered = member.info is not None, None, None
            others = any(one.info is not None for one in self._members)
            lost = [each for each, home in self._homes.items() if home is member]
            for sequence_id in lost:
                del self._homes[sequence_id]
            self._prefix_homes.forget(member.address)
            log.warning("no draft at %s: %s", member.address, reason)
            if not others:
                self._info = None
            # Those that were not used beside the last one.
            first = self._take_up()
        if not others:
            self._events.receive(Disconnected(reason))
        elif was_connected and lost:
            self._events.receive(Lost(lost))
        if first is not None:
            self._events.receive(Connected(first))

    def _take_up(self) -> DraftInfo | None:
        """Use every connected draft that is what the first is. Returns the description of a new first one."""
        found: DraftInfo | None = None
        for member in self._members:
            offered = member.offered
            if offered is None or member.info is not None:
                continue
            if self._info is None:
                self._info = found = offered
                self._homes.clear()
            if replace(offered, version=self._info.version) == self._info:
                member.info = offered
                log.info("draft %s at %s is connected", offered.drafter, member.address)
        return found

    def _home_of(self, sequence: OpenSequence) -> _Member | None:
        """The connected draft that shall follow a sequence, if any."""
        connected = [member for member in self._members if member.info is not None]
        if not connected or self._info is None:
            return None
        key = f"{sequence.tenant}\n{sequence.corpus}"
        # Drafters that learn nothing from the sequences they follow, so any of several will do.
        if self._info.drafter in ("eagle", "medusa", "model", "mtp", "prompt_lookup"):
            key = str(sequence.sequence_id)
        home = max(connected, key=lambda member: weight(member.address, key))
        # Of those, drafters that keep keys and values of what they have read.
        if self._info.drafter in ("eagle", "model", "mtp"):
            by_address, text = {member.address: member for member in connected}, (sequence.tenant, sequence.token_ids)
            under_way = [member.address for member in self._homes.values()]
            home = by_address.get(self._prefix_homes.choose(*text, under_way, by_address), home)
            self._prefix_homes.note(*text, home.address)
        return home

    def _by_home(self, sequence_ids: Sequence[int]) -> list[tuple[_Member, set[int]]]:
        """The drafts that follow these sequences, each with the ids that it follows."""
        found: dict[_Member, set[int]] = {}
        for sequence_id in sequence_ids:
            home = self._homes.get(sequence_id)
            if home is not None:
                found.setdefault(home, set()).add(sequence_id)
        return list(found.items())


def weight(address: str, key: str) -> bytes:
    """The rendezvous hash of a draft and a key. Equal on all targets, so that all take a tenant to the same draft."""
    return hashlib.blake2b(f"{address}\n{key}".encode(), digest_size=8).digest()
