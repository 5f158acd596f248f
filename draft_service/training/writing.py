"""Generates training text with the teacher until there is enough or time is over, in this process or in several."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus
from draft_service.training.parallel.followers import shared_cores
from draft_service.training.progress import Budget, Phase
from outrider.distillation import Teacher, WritingOrder, WrittenText
from outrider.processes.python import module_command
from outrider.settings import SettingsError, json_lines, read_text

# Between checks of several writers. Chosen, not measured: below the time within which nothing new is saved, and far
# above the milliseconds that listing their files takes.
_POLL_SECONDS = 0.5


class WriterFailed(Exception):
    """All writer processes have ended, and some failed; each has reported why."""


def read_prompts(path: str) -> tuple[tuple[str, ...], ...]:
    """User turns of every conversation in a file: JSON lines with `turns`, or a prompt per line. Empty without a path.
    Raises `SettingsError` when the file cannot be read, or a line has another form."""
    if not path:
        return ()
    try:
        text = read_text(path)
    except SettingsError as error:
        raise SettingsError(f"--prompts {error}") from None
    if not path.endswith(".jsonl"):
        return tuple((line.strip(),) for line in text.splitlines() if line.strip())
    conversations = []
    for where, row in json_lines(path, text):
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise SettingsError(f"{where}: needs an object with `turns`, a list of texts")
        conversations.append(tuple(turns))
    return tuple(conversations)


def write_here(
    teacher: Teacher, config: TrainingConfig, corpus: Corpus, seconds: float, shown: Callable[[], None], writer: int = 0
) -> None:
    """Write in this process. When it is interrupted, finished texts are saved."""
    deadline, saved = time.monotonic() + seconds, time.monotonic()
    # Updated with the text of other writers at each save.
    missing = config.token_goal - corpus.tokens
    waiting: list[WrittenText] = []
    order = WritingOrder(
        conversations=read_prompts(config.prompts),
        sampled_prompts=config.sampled_prompts,
        temperatures=config.temperature_list,
        max_length=config.max_length,
        max_prompt=config.max_prompt,
        max_answer=config.max_answer,
        turns=config.turns,
        sequences=config.sequences_at_once,
        seed=config.seed,
        first=corpus.next_number(writer, config.writers_at_once),
        stride=config.writers_at_once,
        seconds=seconds,
    )
    texts = teacher.write(order)
    try:
        for text in texts:
            waiting.append(text)
            missing -= len(text.token_ids)
            # A killed process loses this text. Chosen, not measured: every save makes one more file, which each writer
            # then counts and training reads, and until the next save writers do not notice that the goal is reached.
            if time.monotonic() - saved > 2.0:
                corpus.add(waiting, writer)
                waiting, saved = [], time.monotonic()
                missing = config.token_goal - corpus.tokens
                shown()
            if time.monotonic() > deadline or missing <= 0:
                break
    finally:
        if waiting:
            corpus.add(waiting, writer)
        # Frees the engine's memory.
        close = getattr(texts, "close", None)
        if close is not None:
            close()


def write_texts(teacher: Teacher, config: TrainingConfig, corpus: Corpus, budget: Budget, shown: Phase) -> None:
    """Write text until there is enough or its share of the budget is over. Raises `WriterFailed` when all of several
    writers have ended, and some failed; `SettingsError` as `Teacher.write`."""
    seconds, before, began = budget.part(config.writing_share), corpus.tokens, time.monotonic()

    def show() -> None:
        written, elapsed = corpus.tokens, time.monotonic() - began
        by_time = elapsed / seconds if seconds > 0 else 1.0
        rate = (written - before) / max(1e-9, elapsed)
        shown.update(max(written / config.token_goal, by_time), f"{written:,} tokens, {rate:,.0f} tokens/s")

    if corpus.tokens >= config.token_goal or seconds <= 0:
        return
    if config.writers_at_once == 1:
        write_here(teacher, config, corpus, seconds, show)
        return
    deadline = began + seconds
    states: list[int | None] = [None]
    with _writers(config, seconds) as processes:
        while time.monotonic() < deadline and corpus.tokens < config.token_goal:
            states = [process.poll() for process in processes]
            if None not in states:
                break
            show()
            time.sleep(_POLL_SECONDS)
        if any(states) and None not in states:
            raise WriterFailed(f"the writers ended with status {states}")


@contextlib.contextmanager
def _writers(config: TrainingConfig, seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of `worker.main`, terminated at the end of the block."""
    command = module_command("draft_service.training.worker", "write", json.dumps(asdict(config)))
    environment = shared_cores(config.writers_at_once)
    processes = [
        subprocess.Popen([*command, str(writer), str(seconds)], env=environment)
        for writer in range(config.writers_at_once)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
