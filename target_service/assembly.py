"""Builds an engine with its draft from the settings and a loaded model, in either process."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

import torch

from outrider.checkpoints.refusal import first_line
from outrider.devices import check_device
from outrider.drafting.events import DraftEvents
from outrider.drafting.link import Connect
from outrider.errors import NotSupported
from outrider.runtime import in_passing_thread
from outrider.settings import SettingsError
from outrider.wire.frames import StoppableLink
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver
from target_service.core.kv_cache import KVCache
from target_service.engine.engine import Engine
from target_service.model.forward import Attention
from target_service.model.loading.loader import load_runner
from target_service.model.ranks.leading import load_ranks
from target_service.model.runner import ModelRunner
from target_service.preflight import EngineRefused
from target_service.shared_prompts import encoded_beginning, read_shared_prompts
from target_service.speculation.policy.step_cost import measure_step_cost
from target_service.text.chat_template import TemplateFailed
from target_service.text.prompt_encoder import PromptEncoder
from tree_models.in_pass import SequenceKeys

logger = logging.getLogger(__name__)


class LinkedDrafter(Protocol):
    """A drafter that reads the target's keys and values, for an engine whose steps the host verifies."""

    def link(
        self,
        events: DraftEvents,
        vocabulary_size: int,
        fingerprint: str,
        *,
        attention: Attention,
        cache: KVCache,
        keys_of: Callable[[int], SequenceKeys | None],
    ) -> StoppableLink:
        """See `outrider.drafting.link.Connect`; `attention` and `cache` are those of passes, `keys_of` is
        `Engine.keys_of`."""


_LESS_MEMORY = "--kv-tokens and --memory-share bound the cache of keys and values"


def load_model(config: TargetConfig) -> ModelRunner:
    """The model, its KV cache allocated. Raises `EngineRefused` when it cannot be served."""
    try:
        check_device(config.device)
    except SettingsError as error:
        raise EngineRefused(2, f"error: --device: {error}") from None
    try:
        return in_passing_thread(lambda: load_ranks(config)[0] if config.tensor_parallel > 1 else load_runner(config))
    except torch.OutOfMemoryError as error:
        raise EngineRefused(1, f"cannot serve {config.model}: {error} ({_LESS_MEMORY})") from None
    except (OSError, ValueError, NotSupported, MemoryError) as error:
        hint = f" ({_LESS_MEMORY})" if isinstance(error, OSError) and error.errno == errno.ENOMEM else ""
        raise EngineRefused(1, f"cannot serve {config.model}: {first_line(error)}{hint}") from None


def served_model(config: TargetConfig, runner: ModelRunner) -> ServedModel:
    """The model's description and limits, for clients and their requests."""
    cache, device = runner.cache, runner.device
    kv_tokens = cache.num_pages * cache.page_size
    try:
        triton_version = version("triton")
    except PackageNotFoundError:
        triton_version = ""
    captured, capturable = runner.captured_steps
    return ServedModel(
        name=runner.name,
        other_names=config.served_names[1:],
        vocabulary_size=runner.vocabulary_size,
        max_context=min(runner.max_context, kv_tokens),
        max_rows=min(config.max_draft_nodes + 1, config.step_rows),
        dtype=str(runner.dtype).removeprefix("torch."),
        page_size=cache.page_size,
        kv_tokens=kv_tokens,
        end_token_ids=runner.end_token_ids,
        tokenizer_fingerprint=runner.tokenizer_fingerprint,
        tokenizer=runner.tokenizer,
        speculation=config.speculates or runner.node_table is not None,
        predictions=config.speculation,
        lossy=config.allow_lossy,
        kv_token_bytes=cache.token_bytes * runner.ranks,
        torch_version=str(torch.__version__),
        triton_version=triton_version,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        captured_step_sizes=captured,
        capturable_step_sizes=capturable,
        lookup=runner.node_table is not None and config.lookup_rows > 0,
    )


@dataclass(frozen=True)
class Assembled:
    """An engine, what it serves, and its link to a draft if it has one."""

    engine: Engine
    served: ServedModel
    link: StoppableLink | None = None

    def stop(self) -> None:
        """Fail the remaining sequences and free everything. Waits for the step under way."""
        self.engine.stop()
        if self.link is not None:
            self.link.stop()


def connect_between_steps(runner: ModelRunner, keys_of: Callable[[int], SequenceKeys | None]) -> Connect:
    """What connects the drafter in a runner's passes where no pass can launch what follows it: it drafts behind each
    step, in the engine's thread. `keys_of` is that of the engine."""
    drafter = cast(LinkedDrafter, runner.in_pass)
    return partial(drafter.link, attention=runner.attention, cache=runner.cache, keys_of=keys_of)


def _shared_prompts(config: TargetConfig, runner: ModelRunner) -> list[list[int]]:
    """Token ids that prompts of all tenants begin with. Raises `EngineRefused` where the model has no tokenizer or chat
    template for them."""
    prompts = read_shared_prompts(config.shared_prompts)
    if not prompts:
        return []
    if runner.tokenizer is None:
        raise EngineRefused(2, "error: --shared-prompts: the model has no tokenizer")
    encoder = PromptEncoder(runner.tokenizer)
    try:
        return [encoded_beginning(encoder, prompt) for prompt in prompts]
    except TemplateFailed as error:
        raise EngineRefused(2, f"error: --shared-prompts: {error}") from None


def assemble(
    config: TargetConfig, runner: ModelRunner, observer: EngineObserver | None, connect: Connect | None = None
) -> Assembled:
    """Measure step costs if they are used, create the engine, and connect its draft, if there is one. `connect` is the
    result of `prepared_draft`. Raises `EngineRefused` for a draft that does not fit the model."""
    cost = None
    if (config.speculation or runner.node_table is not None) and config.row_budget == "adaptive":
        logger.info("measuring the cost of a step by its rows")
        cost = in_passing_thread(lambda: measure_step_cost(runner, config.step_rows))
    engine = Engine(runner, config, step_cost=cost, observer=observer, shared_prompts=_shared_prompts(config, runner))
    if runner.link is not None:
        runner.link.expect_answers()
    served = served_model(config, runner)
    if config.drafts_in_passes and not config.captures:
        connect = connect_between_steps(runner, engine.keys_of)
    if connect is None:
        return Assembled(engine, served)
    try:
        link = connect(engine.drafting, runner.vocabulary_size, runner.tokenizer_fingerprint)
    except SettingsError as error:
        raise EngineRefused(2, f"error: --draft: {error}") from None
    engine.drafting.attach(link)
    return Assembled(engine, served, link)
