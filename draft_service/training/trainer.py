"""The training loop: batches through the teacher and the unrolled head, and a step of AdamW for each."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.training.batches import Batch, BatchPlan, make_batch
from draft_service.training.config import TrainingConfig
from draft_service.training.loss import soft_cross_entropy
from draft_service.training.optimiser import MasterAdamW, rate_at
from draft_service.training.parallel.group import Group
from draft_service.training.progress import Phase
from draft_service.training.unrolling import Head, lm_heads, lm_inputs
from draft_service.training.validation import Acceptance, Validator
from outrider.distillation import Reader

# Between reports of the losses, each of which waits for the device: steps, or seconds where steps are slow.
_REPORT_STEPS, _REPORT_SECONDS = 20, 10.0


class TrainingDiverged(Exception):
    """The loss is not finite."""


class DevicesDisagree(Exception):
    """The devices that train together read different text, or are at different batches."""


@dataclass(slots=True)
class Progress:
    """The state of training that a checkpoint holds."""

    step: int = 0  # steps done, each of one batch per device
    epoch: int = 0  # the pass that comes next
    index: int = 0  # the batch in it
    fraction: float = 0.0  # share of the training that is done, by steps or by time
    tokens: int = 0  # text tokens read, without padding
    seconds: float = 0.0  # time spent, over all runs
    # One entry per report: step, seconds, tokens, mean loss by step of the unrolling, on the first device.
    losses: list[dict[str, Any]] = field(default_factory=list)
    # One entry each: step, seconds, tokens, and the fields of `Acceptance`.
    validations: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one head. `head` is the copy that computes, and always has the newest weights."""

    def __init__(
        self,
        config: TrainingConfig,
        head: Head,
        reader: Reader,
        plan: BatchPlan,
        validator: Validator,
        group: Group | None = None,
    ) -> None:
        """`head` has the initial weights, in fp32. With a `group`, a step takes a batch on each of its devices, and
        `synchronise` comes before `train` or `train_as_member`."""
        self._config = config
        self._device = reader.weights().lm_head.device
        self.head = copy.deepcopy(head).to(device=self._device, dtype=getattr(torch, config.dtype))
        self._group = group
        average = None if group is None else group.average
        self._optimiser = MasterAdamW(
            self.head, weight_decay=config.weight_decay, clip=config.clip, masters=head, average=average
        )
        self._reader = reader
        self._plan = plan
        self._validator = validator
        self._lm_inputs = torch.compile(lm_inputs, dynamic=False) if config.compile else lm_inputs
        self._per_epoch = plan.per_epoch()
        self._total = max(1, math.ceil(config.epochs * self._per_epoch))
        self._planned: tuple[int, list[tuple[int, NDArray[np.int64]]]] | None = None
        self.progress = Progress()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._optimiser.state(), asdict(self.progress)

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._optimiser.load(tensors)
        self.progress = Progress(**state)

    def synchronise(self, check: Callable[[], None] = lambda: None) -> None:
        """Take over the weights of the group's leader. `check` as in `Group.connect`. Raises `DevicesDisagree` when
        this follower read other text than the leader, or is at another batch; `GroupLost`."""
        group, progress, texts = self._group, self.progress, self._plan.texts
        if group is None:
            return
        group.connect(check)
        own = torch.tensor([len(texts), len(texts.token_ids), progress.step, progress.epoch, progress.index])
        leaders = own.clone()
        group.share(leaders)
        if not torch.equal(own, leaders):
            raise DevicesDisagree("the text or the checkpoint changed while the devices read it")
        self._optimiser.share(group.share)

    def train_as_member(self) -> None:
        """Take part in every step of the leader's `train` until it ends. Raises `GroupLost`."""
        assert self._group is not None, "a follower needs a group"
        for rate in self._group.rates():
            self._step(rate)

    def validate(self, seconds: float = math.inf) -> Acceptance:
        """Measure the head, and add the result to `progress.validations`. `seconds` as in `Validator.measure`."""
        found = self._validator.measure(self.head, seconds)
        progress = self.progress
        where = {"step": progress.step, "seconds": round(progress.seconds, 1), "tokens": progress.tokens}
        progress.validations.append(where | asdict(found))
        return found

    def train(
        self, seconds: float, shown: Phase, on_validated: Callable[[Acceptance], None], until: int | None = None
    ) -> None:
        """Train to the end of the schedule, or up to step `until`. The schedule ends after `seconds`, or with the last
        pass if that comes first. Raises `TrainingDiverged` when the loss is not finite; `GroupLost` when a device of
        the group, which this process leads, was lost."""
        progress, began = self.progress, time.monotonic()
        first, seconds_before = progress.fraction, progress.seconds
        validated = reported = began
        # The longest step: the next one may take as long.
        longest = 0.0
        sums, reported_step = self._no_sums(), progress.step
        while progress.fraction < 1 and progress.step != until:
            rate = rate_at(progress.fraction, self._config.learning_rate, self._config.warmup)
            if self._group is not None:
                self._group.start_step(rate)
            step_began = time.monotonic()
            sums += self._step(rate)
            elapsed, longest = time.monotonic() - began, max(longest, time.monotonic() - step_began)
            # Without time left for another this step is the last; with infinite time this term stays at `first`.
            by_time = 1.0 if elapsed + longest > seconds else first + (1 - first) * elapsed / max(seconds, 1e-9)
            batches = progress.epoch * self._per_epoch + progress.index
            progress.fraction = max(batches / self._total, by_time)
            progress.seconds = seconds_before + elapsed
            due = progress.step % _REPORT_STEPS == 0 or time.monotonic() - reported > _REPORT_SECONDS
            if due or progress.fraction >= 1 or progress.step == until:
                self._report(sums, progress.step - reported_step, shown)
                sums, reported_step, reported = self._no_sums(), progress.step, time.monotonic()
                # The caller does the last validation.
                if progress.fraction < 1 and time.monotonic() - validated > self._config.validation_seconds:
                    on_validated(self.validate())
                    validated = time.monotonic()

    def _no_sums(self) -> Tensor:
        return torch.zeros(self._config.steps, device=self._device)

    def _step(self, rate: float) -> Tensor:
        """One batch. Returns [steps] mean losses, without waiting for the device."""
        batch = self._next_batch()
        with torch.no_grad():
            lesson = self._reader.read(batch.token_ids, batch.distribution_rows, self.head.token_ids)
        losses, total = step_losses(
            self._lm_inputs(self.head, lesson.states, batch.token_ids, self._config.steps),
            lm_heads(self.head),
            lesson.probs,
            batch,
            self._config.decay,
        )
        total.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step(rate)
        self.progress.step += 1
        return losses

    def _next_batch(self) -> Batch:
        rank, size = (0, 1) if self._group is None else (self._group.rank, self._group.size)
        padded, chosen = [self._take() for _ in range(size)][rank]
        rows = self._plan.batch_tokens // padded
        return make_batch(self._plan.texts, chosen, padded, self._config.steps, size=rows).to(self._device)

    def _take(self) -> tuple[int, NDArray[np.int64]]:
        """The plan's next batch, going on to the next pass at the end of one."""
        progress = self.progress
        if self._planned is None or self._planned[0] != progress.epoch:
            self._planned = (progress.epoch, self._plan.batches(progress.epoch))
        batches = self._planned[1]
        padded, chosen = batches[progress.index]
        progress.tokens += int(self._plan.texts.lengths[chosen].sum())
        progress.index += 1
        if progress.index == len(batches):
            progress.epoch, progress.index = progress.epoch + 1, 0
        return padded, chosen

    def _report(self, sums: Tensor, count: int, shown: Phase) -> None:
        """Record and show the mean losses of the last `count` steps, given their sums."""
        progress = self.progress
        means = [round(value / max(1, count), 4) for value in sums.tolist()]
        if not all(map(math.isfinite, means)):
            raise TrainingDiverged(f"the loss is {means} after {progress.step} steps: try a lower --learning-rate")
        seconds = round(progress.seconds, 1)
        progress.losses.append({"step": progress.step, "seconds": seconds, "tokens": progress.tokens, "loss": means})
        rate = progress.tokens / max(1e-9, progress.seconds)
        losses = " ".join(f"{value:.3f}" for value in means)
        accepted = progress.validations[-1]["mean_length"] if progress.validations else 0.0
        shown.update(
            progress.fraction,
            f"step {progress.step}, {rate:,.0f} tokens/s, loss {losses}, accepted length {accepted:.2f}",
        )


def step_losses(
    lm_input: Tensor, lm_heads: Sequence[Tensor], probs: Tensor, batch: Batch, decay: float
) -> tuple[Tensor, Tensor]:
    """Mean loss of every step [steps], without gradient, and their average weighted by `decay` ** step.

    Args:
        lm_input: [steps, B, L, H] from `lm_inputs`.
        lm_heads: [V', H] of each step, or one for all of them.
        probs: [N, V'] of `Reader.read`, for `batch.distribution_rows`.
    """
    device, steps = lm_input.device, len(batch.counts)
    counts = torch.tensor([max(1, count) for count in batch.counts], dtype=torch.float32)
    shares = decay ** torch.arange(steps, dtype=torch.float32)
    each = (shares / shares.sum() / counts).to(device, non_blocking=True)
    # Computed on the host, which would have to wait for the device to count rows.
    step_of = torch.repeat_interleave(torch.arange(steps), torch.tensor(batch.counts)).to(device, non_blocking=True)
    rows = lm_input.flatten(0, 2).index_select(0, batch.rows)
    weights = each.index_select(0, step_of)
    sizes = batch.rows_of_heads(len(lm_heads))
    pieces = (torch.split(whole, sizes) for whole in (rows, batch.distributions, weights))
    losses = (
        soft_cross_entropy(own, lm_head, probs, distributions, own_weights)
        for lm_head, own, distributions, own_weights in zip(lm_heads, *pieces, strict=True)
    )
    totals, row_losses = zip(*losses, strict=True)
    means = torch.zeros(steps, device=device).index_add_(0, step_of, torch.cat(row_losses))
    return means / counts.to(device, non_blocking=True), torch.stack(totals).sum()
