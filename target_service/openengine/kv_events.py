"""KV events of `TargetService.SubscribeKvEvents` as OpenEngine has them, and where they can be had."""

from __future__ import annotations

from outrider.openengine import openengine_pb2 as pb
from outrider.v1 import target_pb2


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


def source_at(address: str, kept: int) -> pb.KvEventSource:
    """The source of events of a server that listens on `address` and replays `kept` batches. Behind a wildcard or a
    socket it names no host: it is where the caller asked."""
    source = pb.KvEventSource(
        transport="grpc", data_parallel_rank=0, encoding="protobuf", schema_version=1, buffer_steps=kept
    )
    host, _, port = address.rpartition(":")
    if port.isdigit() and host.strip("[]") not in ("", "*", "0.0.0.0", "::"):
        source.endpoint_addr.CopyFrom(pb.KvEndpoint(host=host.strip("[]"), port=int(port), protocol="grpc"))
    return source


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
