"""The stages of `outrider train-head`: text, draft vocabulary, training, saving."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.eagle.head import EagleHead
from draft_service.training.batches import BatchPlan
from draft_service.training.building import initial_head, new_head, new_shape, save, with_vocabulary
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Texts, answer_counts, choose_tokens, coverage
from draft_service.training.parallel.followers import followers
from draft_service.training.parallel.group import Group
from draft_service.training.progress import Budget, phase
from draft_service.training.run_folder import RunFolder
from draft_service.training.trainer import Progress, Trainer
from draft_service.training.unrolling import Head
from draft_service.training.validation import DEPTH, Acceptance, Validator, hold_out
from draft_service.training.writing import read_prompts, write_texts
from outrider.devices import check_device, choose_device
from outrider.distillation import Teacher, TeacherSettings, load_teacher
from outrider.machine import describe_machine, describe_versions
from outrider.settings import SettingsError

log = logging.getLogger(__name__)
# Packages whose versions are recorded beside the usual ones.
_PACKAGES = ("triton", "safetensors")


def train_head(config: TrainingConfig, command: Sequence[str]) -> Path:
    """Write text, train a head on it, and save it with its record; returns its folder. Raises `SettingsError` for
    settings that do not fit the model, the machine or the run; `WriterFailed`, `TrainingDiverged`, `FollowerFailed`."""
    budget = Budget(60.0 * config.minutes)
    for device in config.devices:
        check_device(device)
    choose_device(config.devices[0])
    folder = RunFolder(config)
    # Checked before a writer loads the model.
    if not read_prompts(config.prompts) and not config.sampled_prompts:
        raise SettingsError(f"--prompts {config.prompts}: it holds no prompt, and none are to be sampled")
    teacher = load_teacher(config.teacher, TeacherSettings(config.model, config.devices[0], config.dtype))
    if config.max_length > teacher.facts.max_context:
        raise SettingsError(f"--max-length is more than the model's context of {teacher.facts.max_context}")
    first = initial_head(config, teacher.facts)
    corpus = folder.create()
    if not folder.written and not config.text:
        with phase("writing") as shown:
            write_texts(teacher, config, corpus, budget, shown)
    texts = corpus.load()
    if not (texts.temperatures == 0).any() or len(texts) < 2:
        raise SettingsError(
            f"{len(texts)} texts were written, too few to train and to validate: "
            "--resume goes on, with more --tokens or --minutes"
        )
    counts = answer_counts(texts, teacher.facts.vocab_size)
    if not folder.written:
        kept = None if config.new_vocabulary else first
        folder.save_tokens(choose_tokens(counts, config.vocabulary) if kept is None else kept.token_ids)
    log.info(
        "%d texts of %d tokens in %.0f s; the head's tokens cover %.2f %% of the answers",
        *(len(texts), len(texts.token_ids), budget.elapsed, 100 * coverage(counts, folder.tokens())),
    )
    run = _TrainingRun(config, command, budget, folder, texts, counts, {"writing": budget.elapsed})
    run.train(teacher, first)
    return config.out_folder


def follow(config: TrainingConfig, group: Group) -> None:
    """Take part in `train_head` on a device other than the first: every step with the leader, and nothing else.
    `config` is the leader's, with `resume`, since the run's folder exists. Raises `GroupLost`, `DevicesDisagree`."""
    device = config.devices[group.rank]
    choose_device(device)
    folder = RunFolder(config)
    teacher = load_teacher(config.teacher, TeacherSettings(config.model, device, config.dtype))
    first = initial_head(config, teacher.facts)
    trainer = _trainer(config, folder, folder.corpus().load(), teacher, first, group)
    trainer.synchronise()
    trainer.train_as_member()


def _trainer(
    config: TrainingConfig,
    folder: RunFolder,
    texts: Texts,
    teacher: Teacher,
    first: Head | None,
    group: Group | None,
) -> Trainer:
    """The trainer at the last checkpoint, or at the start. `first` takes the place of a new head."""
    facts, tokens = teacher.facts, folder.tokens()
    size = facts.vocab_size if tokens is None else len(tokens)
    shape = new_shape(config, facts, size) if first is None else first.config
    reader = teacher.reader(shape.layers_of(facts.num_layers))
    trained, held = hold_out(texts, config.validation, len(config.temperature_list))
    if not len(trained):
        raise SettingsError("too little text was written to train on: give it more --tokens or --minutes")
    plans = [BatchPlan(part, config.batch_tokens, config.max_length, config.seed) for part in (trained, held)]
    validator = Validator(reader, plans[1], config.steps if config.kind == "medusa" else DEPTH)
    head = new_head(shape, tokens, reader.weights(), config.seed) if first is None else first
    if config.new_vocabulary and isinstance(head, EagleHead):
        head = with_vocabulary(head, tokens, reader.weights().lm_head)
    trainer = Trainer(config, head, reader, plans[0], validator, group)
    checkpoint = folder.checkpoint()
    if checkpoint is not None:
        trainer.load(*checkpoint)
    return trainer


@dataclass(frozen=True, slots=True)
class _TrainingRun:
    """Training, and what its record needs. `seconds` is the time that each part took so far."""

    config: TrainingConfig
    command: Sequence[str]
    budget: Budget
    folder: RunFolder
    texts: Texts
    counts: NDArray[np.int64]
    seconds: dict[str, float]

    def train(self, teacher: Teacher, first: Head | None) -> None:
        """Train from the last checkpoint, or from the start, to the end. `first` takes the place of a new head."""
        config = self.config
        # Started first: followers load the teacher while this process does.
        settings = json.dumps(asdict(replace(config, resume=True)))
        several = len(config.devices) > 1
        # The module runs on each device but the first; it calls `follow`.
        worker = "draft_service.training.worker"
        with followers(worker, settings, config.devices) if several else contextlib.nullcontext() as beside:
            group = None if beside is None else beside.group
            trainer = _trainer(config, self.folder, self.texts, teacher, first, group)
            began = time.monotonic()
            # Of the time that is left after writing, what one validation may take, of which a run has two at least.
            # Chosen, not measured: most of the time is for training.
            trainer.validate(0.1 * max(0.0, self.budget.part(1.0)))
            # Reserved of --minutes for the last validation and saving: this multiple of the first validation's time,
            # plus seconds.
            reserve = 3.0 + 2.0 * (time.monotonic() - began)
            if beside is not None:
                trainer.synchronise(beside.check)
            with phase("training") as shown:
                trainer.train(
                    self.budget.part(1.0) - reserve, shown, lambda acceptance: self._save(trainer, acceptance)
                )
        self.seconds["training"] = trainer.progress.seconds
        self._save(trainer, trainer.validate())

    def _save(self, trainer: Trainer, acceptance: Acceptance) -> None:
        """Save a checkpoint, and the head if none was better before or training is over."""
        reached = " ".join(f"{share:.3f}" for share in acceptance.reached)
        log.info("held-out text: accepted length %.3f, reached by depth %s", acceptance.mean_length, reached)
        self.folder.save_checkpoint(*trainer.state())
        best = max(one["mean_length"] for one in trainer.progress.validations)
        if acceptance.mean_length < best and trainer.progress.fraction < 1:
            log.info("head not saved: an earlier one reached %.3f", best)
            return
        self.seconds["all"] = self.budget.elapsed
        save(trainer.head, self.config.out_folder, self._record(trainer.head, trainer.progress))

    def _record(self, head: Head, progress: Progress) -> dict[str, Any]:
        """The contents of training.json."""
        # Losses in a record, at most.
        step = max(1, -(-len(progress.losses) // 200))
        return {
            "model": self.config.model,
            "command": list(self.command),
            "finished": progress.fraction >= 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine() | _gpus(self.config.devices),
            "versions": describe_versions(_PACKAGES),
            "text": {
                "texts": len(self.texts),
                "tokens": len(self.texts.token_ids),
                "answer_tokens": int(self.counts.sum()),
                "mean_length": round(len(self.texts.token_ids) / max(1, len(self.texts)), 1),
                "vocabulary_coverage": round(coverage(self.counts, head.token_ids), 5),
            },
            "training": {
                "steps": progress.step,
                "passes": round(progress.tokens / max(1, len(self.texts.token_ids)), 2),
                "tokens_read": progress.tokens,
                "tokens_per_second": round(progress.tokens / max(1e-9, progress.seconds)),
            },
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "parameters": sum(one.numel() for one in head.parameters() if one.requires_grad),
            "acceptance": progress.validations[-1] if progress.validations else None,
            "validations": progress.validations,
            "losses": progress.losses[::step],
            "settings": asdict(self.config),
        }


def _gpus(devices: Sequence[str]) -> dict[str, Any]:
    """The first GPU's name and memory used, and the number of GPUs; empty on a CPU."""
    if not devices[0].startswith("cuda"):
        return {}
    used = torch.cuda.max_memory_reserved(devices[0]) / 2**30
    return {"gpu": torch.cuda.get_device_name(devices[0]), "gpus": len(devices), "gpu_gib_used": round(used, 1)}
