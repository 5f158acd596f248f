"""KV events of `TargetService.SubscribeKvEvents` as OpenEngine has them, and where they can be had."""

from __future__ import annotations

import socket

from outrider.openengine import openengine_pb2 as pb
from outrider.v1 import target_pb2

_WILDCARDS = ("", "*", "0.0.0.0", "::")


def batch_of(batch: target_pb2.SubscribeKvEventsResponse, medium: pb.StorageMedium.ValueType) -> pb.KvEventBatch:
    """A batch with the same number. The tenants of blocks are left out: OpenEngine knows none."""
    return pb.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp_unix_nanos=batch.timestamp_ns,
        data_parallel_rank=0,
        events=[_event(event, medium) for event in batch.events],
    )


def medium_of(device: str) -> pb.StorageMedium.ValueType:
    """Where pages are. There is no name for the memory of a processor that no device reads."""
    return pb.STORAGE_MEDIUM_GPU if device.startswith("cuda") else pb.STORAGE_MEDIUM_UNSPECIFIED


def source_at(address: str, peer: str, kept: int) -> pb.KvEventSource:
    """The source of events of a server that listens on `address`, for a caller at `peer`. It replays `kept` batches."""
    source = pb.KvEventSource(
        transport="grpc", data_parallel_rank=0, encoding="protobuf", schema_version=1, buffer_steps=kept
    )
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host in _WILDCARDS:
        host = _host_towards(peer)
    # A socket of this machine has no host.
    if host and port.isdigit():
        source.endpoint_addr.CopyFrom(pb.KvEndpoint(host=host, port=int(port), protocol="grpc"))
    return source


def _host_towards(peer: str) -> str:
    """The address from which this machine reaches a caller, whom gRPC names as ipv4:HOST:PORT; empty if unknown."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    families = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
    if kind not in families:
        return ""
    try:
        # Sends nothing: the system looks up its route.
        with socket.socket(families[kind], socket.SOCK_DGRAM) as route:
            route.connect((host, 1))
            return str(route.getsockname()[0])
    except OSError:
        return ""


def _event(event: target_pb2.KvEvent, medium: pb.StorageMedium.ValueType) -> pb.KvEvent:
    kind = event.WhichOneof("event")
    if kind == "cleared":
        return pb.KvEvent(all_blocks_cleared=pb.AllBlocksCleared())
    if kind == "removed":
        hashes = map(_hash, event.removed.block_hashes)
        return pb.KvEvent(block_removed=pb.BlockRemoved(block_hashes=hashes, medium=medium))
    stored = event.stored
    return pb.KvEvent(
        block_stored=pb.BlockStored(
            block_hashes=map(_hash, stored.block_hashes),
            parent_block_hash=_hash(stored.parent_block_hash) if stored.HasField("parent_block_hash") else None,
            token_ids=stored.token_ids,
            block_size=stored.block_size,
            medium=medium,
        )
    )


def _hash(number: int) -> pb.KvBlockHash:
    """A hash as Dynamo's sidecar reads them: the digits of its 64 bits as a signed number."""
    signed = number - 2**64 if number >= 2**63 else number
    return pb.KvBlockHash(value=str(signed).encode(), encoding="decimal_int64")
