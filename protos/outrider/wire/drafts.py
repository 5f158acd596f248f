"""Frames of draft.proto to plain values and back; the rules are those of `outrider.wire.trees`.

One frame holds parts of many sequences. Each part is converted by itself, so a bad part fails only its own sequence.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from operator import gt

from outrider.errors import InvalidField, OutriderError, PositionOutOfRange, check_most
from outrider.sampling import VerificationMode
from outrider.tree import MAX_ROWS, DraftDistribution
from outrider.v1 import draft_pb2
from outrider.wire import trees
from outrider.wire.frames import (
    MAX_NODES,
    CorpusInfo,
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceGrowth,
    TreeLimits,
    is_self_contained,
)
from outrider.wire.hidden_states import request_from_pb, request_to_pb, vectors_from_pb, vectors_to_pb
from outrider.wire.same_names import message_of, shared_fields, value_of

# Node ids are uint32 on the wire; at two growths of 1,023 a step they last for 2 million steps.
MAX_NODE_ID = 2**32 - 1


def limits_from_pb(pb: draft_pb2.TreeLimits, field_path: str = "limits") -> TreeLimits:
    """Checked limits; 0 means the draft's own."""
    if pb.max_nodes > MAX_NODES:
        raise InvalidField(f"{field_path}.max_nodes", f"is more than {MAX_NODES}")
    return TreeLimits(pb.max_nodes, pb.max_depth)


def limits_to_pb(limits: TreeLimits) -> draft_pb2.TreeLimits:
    return message_of(draft_pb2.TreeLimits, limits)


def open_from_pb(pb: draft_pb2.OpenSequence, max_context: int) -> OpenSequence:
    """A checked open. Token ids must be below the vocabulary size that the open itself declares. Raises
    `PositionOutOfRange` for more token ids than `max_context`, before any is read."""
    if len(pb.token_ids) > max_context:
        raise PositionOutOfRange("the sequence is longer than the drafter follows", limit=max_context)
    vocabulary_size = pb.vocabulary_size
    if vocabulary_size < 1:
        raise InvalidField("open.vocabulary_size", "must be at least 1")
    trees.check_vocabulary_size(vocabulary_size, "open.vocabulary_size")
    token_ids = tuple(pb.token_ids)
    if not token_ids:
        raise InvalidField("open.token_ids", "needs at least 1 entry")
    trees.check_token_ids(token_ids, vocabulary_size, "open.token_ids")
    if not 1 <= pb.prompt_length <= len(token_ids):
        raise InvalidField("open.prompt_length", f"is not in 1..{len(token_ids)}")
    check_most("open.traceparent", len(pb.traceparent), 128, "characters")
    sampling = trees.sampling_from_pb(pb.sampling, vocabulary_size, "open.sampling")
    asked = trees.mode_from_pb(pb.mode, "open.mode")
    if asked is VerificationMode.TYPICAL:
        raise InvalidField("open.mode", "takes drafts of GREEDY; nothing is drafted for TYPICAL")
    return value_of(
        OpenSequence,
        pb,
        token_ids=token_ids,
        mode=sampling.mode() if asked is None else asked,
        sampling=sampling,
        limits=limits_from_pb(pb.limits, "open.limits"),
        tenant=trees.tenant_from_pb(pb.tenant, "open.tenant"),
        corpus=trees.name_from_pb(pb.corpus, "open.corpus"),
    )


def open_to_pb(sequence: OpenSequence) -> draft_pb2.OpenSequence:
    return message_of(
        draft_pb2.OpenSequence,
        sequence,
        mode=trees.mode_to_pb(sequence.mode),
        sampling=trees.sampling_to_pb(sequence.sampling),
        limits=limits_to_pb(sequence.limits),
    )


def advance_from_pb(
    pb: draft_pb2.SequenceAdvance, vocabulary_size: int, field_path: str = "advance"
) -> SequenceAdvance:
    """A checked advance of one sequence with this vocabulary."""
    token_ids = tuple(pb.token_ids)
    if not 1 <= len(token_ids) <= MAX_ROWS:
        raise InvalidField(f"{field_path}.token_ids", f"needs 1 to {MAX_ROWS} entries, has {len(token_ids)}")
    # Field paths are built only for errors: every step has such a frame, and most are valid.
    if max(token_ids) >= vocabulary_size:
        trees.check_token_ids(token_ids, vocabulary_size, f"{field_path}.token_ids")
    features = vectors_from_pb(pb.features, f"{field_path}.features") if pb.HasField("features") else None
    return SequenceAdvance(pb.sequence_id, pb.step, token_ids, features)


def advance_to_pb(advance: SequenceAdvance) -> draft_pb2.SequenceAdvance:
    return draft_pb2.SequenceAdvance(
        sequence_id=advance.sequence_id,
        step=advance.step,
        token_ids=advance.token_ids,
        features=None if advance.features is None else vectors_to_pb(advance.features),
    )


def growth_from_pb(pb: draft_pb2.SequenceGrowth, vocabulary_size: int, field_path: str = "growth") -> SequenceGrowth:
    """A growth with valid shape, ids and numbers. Whether its ids fit the tree is checked by `GrowingTree`."""
    # A slice copies a whole field in C; iteration makes a call for each entry.
    token_ids, parent_ids, scores = tuple(pb.token_ids[:]), tuple(pb.parent_ids[:]), tuple(pb.scores[:])
    nodes, first = len(token_ids), pb.first_node_id
    check_most(f"{field_path}.token_ids", nodes, MAX_NODES)
    check_most(f"{field_path}.distributions", len(pb.distributions), MAX_ROWS)
    if len(parent_ids) != nodes:
        raise InvalidField(f"{field_path}.parent_ids", f"needs {nodes} entries, has {len(parent_ids)}")
    if len(scores) != nodes:
        raise InvalidField(f"{field_path}.scores", f"needs {nodes} entries, has {len(scores)}")
    if not 1 <= first <= MAX_NODE_ID - nodes:
        raise InvalidField(f"{field_path}.first_node_id", f"is not in 1..{MAX_NODE_ID - nodes}")
    # Passes that run in C, for every growth; a sum that holds a NaN is NaN.
    valid = not nodes or (
        max(token_ids) < vocabulary_size
        and all(map(gt, range(first, first + nodes), parent_ids))
        and min(scores) >= 0.0
        and max(scores) <= 1.0
        and isfinite(sum(scores))
    )
    if not valid:
        trees.check_token_ids(token_ids, vocabulary_size, f"{field_path}.token_ids")
        for i, (parent, score) in enumerate(zip(parent_ids, scores, strict=True)):
            if parent >= first + i:
                raise InvalidField(f"{field_path}.parent_ids[{i}]", "is not an earlier node")
            # Written so that NaN fails.
            if not 0.0 <= score <= 1.0:
                raise InvalidField(f"{field_path}.scores[{i}]", "is not in [0, 1]")
    distributions: dict[int, DraftDistribution] = {}
    if pb.distributions:
        distributions = trees.distributions_from_pb(pb.distributions, vocabulary_size, f"{field_path}.distributions")
        if max(distributions) >= first + nodes:
            raise InvalidField(f"{field_path}.distributions", "names a node that was never given")
    contained = is_self_contained(parent_ids, first)
    return SequenceGrowth(
        pb.sequence_id, pb.base_step, first, parent_ids, token_ids, scores, distributions, pb.replaces, contained
    )


def growth_to_pb(growth: SequenceGrowth) -> draft_pb2.SequenceGrowth:
    return draft_pb2.SequenceGrowth(
        sequence_id=growth.sequence_id,
        base_step=growth.base_step,
        first_node_id=growth.first_node_id,
        parent_ids=growth.parent_ids,
        token_ids=growth.token_ids,
        scores=growth.scores,
        distributions=trees.distributions_to_pb(growth.distributions),
        replaces=growth.replaces,
    )


def failure_to_pb(sequence_id: int, error: OutriderError) -> draft_pb2.SequenceStatus:
    return draft_pb2.SequenceStatus(sequence_id=sequence_id, status=trees.status_of(error))


def info_from_pb(pb: draft_pb2.GetDraftInfoResponse) -> DraftInfo:
    """A draft's description of itself, within bounds."""
    check_most("drafter", len(pb.drafter), 64, "characters")
    trees.check_vocabulary_size(pb.vocabulary_size, "vocabulary_size")
    features = request_from_pb(pb.features) if pb.HasField("features") else None
    return value_of(DraftInfo, pb, limits=limits_from_pb(pb.limits), features=features)


def info_to_pb(info: DraftInfo) -> draft_pb2.GetDraftInfoResponse:
    # Nodes that a draft says it has at most: older targets refuse one that says more, and newer ones ask for all.
    limits = replace(info.limits, max_nodes=min(info.limits.max_nodes, 255))
    features = None if info.features is None else request_to_pb(info.features)
    return message_of(draft_pb2.GetDraftInfoResponse, info, limits=limits_to_pb(limits), features=features)


def corpus_to_pb(corpus: CorpusInfo) -> draft_pb2.Corpus:
    same = shared_fields(draft_pb2.Corpus, corpus)
    return draft_pb2.Corpus(corpus=corpus.name, tenant=corpus.owner, shared=corpus.shared, **same)


def corpus_from_pb(pb: draft_pb2.Corpus) -> CorpusInfo:
    return value_of(CorpusInfo, pb, name=pb.corpus, owner=pb.tenant)
