"""How large a tree the target asks a draft for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_harness import request

from outrider.drafting.events import Connected
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftInfo, OpenSequence, TreeLimits
from target_service.config import TargetConfig
from target_service.core.sequence import Sequence, SequenceTotals
from target_service.execution.node_tables import NodeTables
from target_service.speculation.drafts import DraftTrees
from tree_kernels.node_table import Mailboxes


class OpeningLink:
    """Remembers what was opened."""

    def __init__(self) -> None:
        self.opened: list[OpenSequence] = []

    def open(self, sequence: OpenSequence) -> None:
        self.opened.append(sequence)


def limits_asked(mode: VerificationMode, tables: NodeTables | None) -> TreeLimits:
    """Of a request that wants 5 drafted rows at most."""
    features = SimpleNamespace(connect=lambda _: None, hold_vectors=lambda _: None, taken=False)
    config = TargetConfig(draft="any", draft_wait_ms=100.0)
    drafting, link = DraftTrees(config, 100, features, tables), OpeningLink()  # type: ignore[arg-type]
    drafting.attach(link)  # type: ignore[arg-type]
    drafting.receive(Connected(DraftInfo("any", 0, "", TreeLimits(63, 8), 4096, "0")))
    drafting.listen()
    sampling = SamplingParams(temperature=0.0 if mode is VerificationMode.GREEDY else 1.0)
    wanted = request([1, 2, 3], max_draft_nodes=5, mode=mode, sampling=sampling)
    drafting.add(Sequence(1, wanted, [1, 2, 3], SequenceTotals()))
    drafting.open_added()
    return link.opened[0].limits


@pytest.mark.parametrize("mode", [VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.TYPICAL])
def test_a_device_that_chooses_gets_as_large_a_tree_as_the_draft_has(mode: VerificationMode) -> None:
    assert limits_asked(mode, NodeTables(2, Mailboxes(2, torch.device("cpu")))) == TreeLimits()


def test_the_host_gets_what_a_pass_may_verify() -> None:
    tables = NodeTables(2, Mailboxes(2, torch.device("cpu")))
    assert limits_asked(VerificationMode.GREEDY, None) == TreeLimits(max_nodes=5)
    assert limits_asked(VerificationMode.REJECTION, tables) == TreeLimits(max_nodes=5)
