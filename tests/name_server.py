"""A name server on loopback: A records of one zone, by dnspython."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset

# Whoever asks asks again at once: addresses change in the middle of a test.
_TTL_SECONDS = 0


class NameServer(asyncio.DatagramProtocol):
    """Answers over UDP. `records` has the addresses of each name, which ends with a dot."""

    def __init__(self, records: dict[str, list[str]]) -> None:
        self.records = records
        self.port = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        question = query.question[0]
        found = self.records.get(question.name.to_text().lower(), [])
        if found and question.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(question.name, _TTL_SECONDS, "IN", "A", *found))
        self._transport.sendto(answer.to_wire(), peer)


@asynccontextmanager
async def name_server(records: dict[str, list[str]]) -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(records), ("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
