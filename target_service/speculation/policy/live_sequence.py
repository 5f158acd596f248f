"""A sequence with what the engine needs to run it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from target_service.core.sequence import Sequence, SequenceRequest, SequenceTotals
from target_service.core.stopping import StopChecker
from target_service.grammars.triggers import FormTrigger
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier
from target_service.speculation.policy.tree_cuts import SequenceRecord
from target_service.speculation.prediction import PredictedAnswer


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence with its verifier, stop checker and draft records."""

    sequence: Sequence
    verifier: SequenceVerifier
    stops: StopChecker
    record: SequenceRecord
    # The answer that the caller expects, and how well it predicts.
    prediction: PredictedAnswer | None = None
    predicted_record: SequenceRecord = field(default_factory=SequenceRecord)
    # What looks for the beginning of a form in the output, as long as it has not begun.
    trigger: FormTrigger | None = None

    @classmethod
    def of(cls, sequence_id: int, request: SequenceRequest, runner: ModelRunner) -> LiveSequence:
        """A new sequence, to be run by `runner`."""
        totals = SequenceTotals(prompt_tokens=len(request.token_ids))
        token_ids, prediction = list(request.token_ids), request.prediction
        sequence = Sequence(sequence_id, request, token_ids, totals)
        return cls(
            sequence,
            SequenceVerifier(request, runner.end_token_ids),
            StopChecker(request.sampling, runner.end_token_ids, request.max_tokens, runner.tokenizer, token_ids),
            SequenceRecord(),
            PredictedAnswer(prediction, token_ids, len(token_ids)) if prediction else None,
        )

    def begin_form(self, end_token_ids: tuple[int, ...]) -> None:
        """Hold the output to its form from here on: `trigger` has found where it begins."""
        assert self.trigger is not None, "it has found the form's beginning"
        request = self.sequence.request
        sampling = replace(request.sampling, structured_output=self.trigger.form)
        self.sequence.request = replace(request, sampling=sampling, triggered_form=None)
        self.verifier = SequenceVerifier(self.sequence.request, end_token_ids)
        self.verifier.grammar = self.trigger.begun(self.sequence.output)
        self.stops.begin_form()
        self.trigger = None

    def stop_drafting(self) -> None:
        """Allow no drafted rows from now on, nor those of a prediction."""
        self.sequence.request = replace(self.sequence.request, speculate=False, prediction=())
        self.prediction = None
