"""Writes text with the engine, many sequences at once: prompts sampled from the model, and its answers.

Prompts are sampled as in Magpie (arXiv 2406.08464): an instruction-tuned model that is given its chat template up to
the content of the user's turn generates what a user might write. No data set is needed, and all text is the target's.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from outrider.distillation import TeacherSettings, WritingOrder, WrittenText
from outrider.sampling import FinishReason, SamplingParams
from outrider.settings import SettingsError
from target_service.config import MAX_SEQUENCES, TargetConfig
from target_service.core.sequence import SequenceFailed, SequenceFinished, SequenceRequest
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.model.loading.loader import load_runner
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.text.chat_template import ChatTemplate, Ending, TemplateFailed
from target_service.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)
# Stands for the content of the user's turn in a rendered template; no template contains it.
_MARK = "\ue000outrider\ue000"
# Tokens. An answer with room for fewer is not begun.
_LEAST_ANSWER = 8

Turn = tuple[str, str]


class ChatTexts:
    """The chat template as token ids. Without one, texts are continued as they are."""

    def __init__(self, tokenizer: ModelTokenizer, *, sampled: bool) -> None:
        """Raises `SettingsError` when prompts are to be `sampled` and no template encloses the user's turn."""
        self._tokenizer = tokenizer
        self.templated = bool(tokenizer.chat_template)
        self.opening: tuple[int, ...] = ()
        self.user_ends: tuple[int, ...] = ()
        if not sampled:
            return
        if not self.templated:
            raise SettingsError("the model has no chat template to sample prompts from: name a file with --prompts")
        before, _, after = self._render([("user", _MARK)]).partition(_MARK)
        self.opening, closing = self._encode(before), self._encode(after)
        if not self.opening or not closing:
            raise SettingsError("the model's chat template does not enclose the user's turn: name a file of prompts")
        self.user_ends = closing[:1]

    def next_opening(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of a conversation up to the content of the next user turn."""
        return self._encode(self._render([*turns, ("user", _MARK)]).partition(_MARK)[0])

    def prompt(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of a conversation up to the content of the assistant's answer."""
        if not self.templated:
            return tuple(self._tokenizer.encode("\n".join(content for _, content in turns), begin=True))
        return self._encode(self._render(turns, Ending.ANSWER))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens and surrounding spaces."""
        return self._tokenizer.decode(token_ids).strip()

    def _render(self, turns: Sequence[Turn], ending: Ending = Ending.CLOSED) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            template = ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_tokens)
            return template.render(messages, now=datetime.now(), ending=ending)
        except TemplateFailed as error:
            raise SettingsError(str(error)) from None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))


def writing_runner(settings: TeacherSettings, sequences: int, max_length: int) -> ModelRunner:
    """The model with room for `sequences` of `max_length` tokens each; on a GPU its steps are captured. Raises
    `SettingsError` for more sequences than a step may have, or texts longer than the model's context; `ModelRefused`
    for a model that cannot be served."""
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise SettingsError(f"1 to {MAX_SEQUENCES} sequences can be written at once, not {sequences}")
    page = TargetConfig.page_size
    config = TargetConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_running=sequences,
        max_step_rows=_step_rows(sequences),
        kv_tokens=sequences * page * (-(-max_length // page) + 2),
        max_context=max_length,
        # Writing only has steps of many rows, which are captured below.
        capture_seconds=0.0,
    )
    runner = load_runner(config)
    if runner.max_context < max_length:
        raise SettingsError(f"texts of {max_length} tokens do not fit the model's context of {runner.max_context}")
    if runner.device.type != "cuda":
        return runner
    # Only here: Triton may be absent.
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions

    captured = CapturedRunner(runner, CaptureOptions(_step_rows(sequences), sequences))
    wide = [
        bucket
        for bucket in captured.buckets
        if bucket.sequences == min(bucket.rows, sequences) and bucket.rows >= min(sequences, 64)
    ]
    captured.capture(reversed(wide))
    captured.keep_to_captured()
    return captured


def _step_rows(sequences: int) -> int:
    return max(2 * sequences, 128)


@dataclass(slots=True)
class _Task:
    """A text under way: user turns, given or sampled, and the answers to them."""

    number: int
    temperature: float
    unanswered: deque[str]  # user turns that have no answer yet
    to_sample: int = 0  # how many user turns are still to be sampled
    conversation: list[Turn] = field(default_factory=list)
    prompt_length: int = 0
    sampling: bool = False  # whether a user turn is being sampled
    live: LiveSequence | None = None


class TextWriter:
    """Keeps the engine full of texts and yields them as they end."""

    def __init__(self, runner: ModelRunner, order: WritingOrder, chat: ChatTexts) -> None:
        rows = _step_rows(order.sequences)
        config = TargetConfig(max_running=order.sequences, max_step_rows=rows, prefill_chunk=rows, max_draft_nodes=0)
        # Not warmed up: no request waits, and much of what would be compiled is not needed here.
        steps = (
            DeviceSteps(runner, max_sequences=order.sequences, max_rows=rows) if runner.device.type == "cuda" else None
        )
        self._loop = EngineLoop(runner, config, steps=steps)
        self._order = order
        self._chat = chat
        self._numbers = itertools.count(order.first, order.stride)
        self._ids = itertools.count(1)
        self._under_way: dict[int, _Task] = {}
        self._prompts_seen: set[int] = set()
        self._exhausted = False

    def texts(self) -> Iterator[WrittenText]:
        """The texts until the order's time is over. A text may take longer than that, and none may ever be whole."""
        deadline = time.monotonic() + self._order.seconds
        while time.monotonic() < deadline:
            while len(self._under_way) < self._order.sequences and not self._exhausted:
                self._begin(next(self._numbers))
            if not self._under_way:
                return
            for event in self._loop.step() or ():
                if isinstance(event, SequenceFailed):
                    log.warning("a text was given up: %s", event.error)
                    del self._under_way[event.sequence_id]
                elif isinstance(event, SequenceFinished):
                    text = self._ended(self._under_way.pop(event.sequence_id), event.finish.reason)
                    if text is not None:
                        yield text

    def _begin(self, number: int) -> None:
        temperatures = self._order.temperatures
        temperature = temperatures[number % len(temperatures)]
        given = number // len(temperatures)
        if given < len(self._order.conversations):
            self._answer(_Task(number, temperature, deque(self._order.conversations[given])))
        elif self._order.sampled_prompts:
            task = _Task(number, temperature, deque(), to_sample=1 + given % self._order.turns)
            self._sample_prompt(task, self._chat.opening)
        else:
            self._exhausted = True

    def _sample_prompt(self, task: _Task, opening: tuple[int, ...]) -> None:
        """Sample the next user turn from the model; without room for one the conversation ends."""
        sampling = SamplingParams(temperature=1.0, stop_token_ids=self._chat.user_ends)
        room = self._order.max_length - len(opening) - _LEAST_ANSWER
        if room > 0:
            task.to_sample -= 1
            task.sampling = True
            self._submit(task, opening, sampling, min(self._order.max_prompt, room))
        elif not task.conversation:
            raise SettingsError(f"texts of {self._order.max_length} tokens have no room for the chat template")

    def _answer(self, task: _Task) -> None:
        """Answer the next user turn; a text without room for an answer is dropped."""
        task.conversation.append(("user", task.unanswered.popleft()))
        prompt = self._chat.prompt(task.conversation)
        room = self._order.max_length - len(prompt)
        if prompt and room >= _LEAST_ANSWER:
            task.prompt_length = len(prompt)
            sampling = SamplingParams(temperature=task.temperature)
            self._submit(task, prompt, sampling, min(self._order.max_answer, room))

    def _submit(self, task: _Task, prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> None:
        # 64 bits that differ for every part of every text.
        parts = np.random.SeedSequence((self._order.seed, task.number, len(task.conversation)))
        seed = int(parts.generate_state(1, np.uint64)[0])
        request = SequenceRequest(prompt, sampling, sampling.mode(), seed, max_tokens, speculate=False)
        sequence_id = next(self._ids)
        task.live = self._loop.make(sequence_id, request)
        self._under_way[sequence_id] = task
        self._loop.add(task.live)

    def _ended(self, task: _Task, reason: FinishReason) -> WrittenText | None:
        """The text that ended with an answer; None after a user turn, which is answered next or dropped."""
        assert task.live is not None
        sequence = task.live.sequence
        whole = reason is not FinishReason.LENGTH
        if task.sampling:
            task.sampling = False
            prompt = self._chat.text(sequence.output[:-1])
            prompt_hash = hash(prompt)
            if whole and prompt and prompt_hash not in self._prompts_seen:
                self._prompts_seen.add(prompt_hash)
                task.unanswered.append(prompt)
                self._answer(task)
            return None
        text = WrittenText(task.number, tuple(sequence.token_ids), task.prompt_length, task.temperature)
        # A later answer is a text of its own, whose prompt is all that came before.
        task.conversation.append(("assistant", self._chat.text(sequence.output)))
        if whole and task.unanswered:
            self._answer(task)
        elif whole and task.to_sample:
            self._sample_prompt(task, self._chat.next_opening(task.conversation))
        return text
