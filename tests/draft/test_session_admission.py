"""Who may open what, over all streams of a service."""

from __future__ import annotations

import pytest
from scripted_drafter import VOCABULARY, ScriptedDrafter, opening, step

from draft_service.session import ProposeSession, SequenceAdmission
from outrider.errors import Draining, PermissionDenied, QuotaExceeded, WrongVocabulary


def make(
    drafter: ScriptedDrafter | None = None, admission: SequenceAdmission | None = None, credit: int = 100
) -> ProposeSession:
    session = ProposeSession(drafter or ScriptedDrafter(), admission or SequenceAdmission(10_000), "default")
    session.grant(credit)
    return session


def test_sequences_are_counted_over_all_streams() -> None:
    admission, drafter = SequenceAdmission(2), ScriptedDrafter()
    one, other = make(drafter, admission), make(drafter, admission)
    one.open(opening(1))
    other.open(opening(1))
    with pytest.raises(QuotaExceeded):
        other.open(opening(2))
    one.end()
    other.open(opening(2))
    assert admission.sequences == 2


def test_a_draining_service_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    admission = SequenceAdmission(9)
    session = make(admission=admission)
    session.open(opening(1))
    admission.draining = True
    with pytest.raises(Draining):
        session.open(opening(2))
    session.advance(step(1, 13))
    assert session.propose_growth()[0].base_step == 1


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(WrongVocabulary):
        make(admission=SequenceAdmission(9, VOCABULARY + 1)).open(opening())
    make(admission=SequenceAdmission(9, VOCABULARY)).open(opening())


@pytest.mark.parametrize(
    ("caller", "allowed"), [("acme", True), ("target", True), ("other", False), ("default", False)]
)
def test_with_tokens_a_caller_acts_for_itself_unless_it_is_the_target(caller: str, allowed: bool) -> None:
    session = ProposeSession(ScriptedDrafter(), SequenceAdmission(9, trusted_tenant="target"), caller)
    if allowed:
        session.open(opening(tenant="acme"))
        return
    with pytest.raises(PermissionDenied):
        session.open(opening(tenant="acme"))
    assert len(session) == 0
