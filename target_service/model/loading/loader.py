"""From a target's settings to a model that runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
import torch
from torch import Tensor
from transformers import PretrainedConfig

from outrider.checkpoints.causal_lm import load_causal_lm, read_configuration, read_generation_config, said
from outrider.checkpoints.folder import Checkpoint, check_tokenizer
from outrider.checkpoints.formats import DEQUANTISED_FORMATS
from outrider.checkpoints.plain_attention import attention_refusal
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.devices import choose_device
from outrider.drafting.link import prepare_in_pass
from outrider.heads import tokenizer_fingerprint
from outrider.processes.python import module_command
from outrider.runtime import in_daemon_thread
from target_service.compiling import LOOPS
from target_service.config import TargetConfig
from target_service.grammars import vocabulary
from target_service.model.head_projection import read_draft_head
from target_service.model.loading.self_check import check_runner, own_logits, plain_logits
from target_service.model.loading.store import resolve
from target_service.model.network import TargetNetwork
from target_service.model.rank_link import RankLink
from target_service.model.runner import ModelRunner, end_tokens_of, runner_over, takes_latents
from target_service.model.support import (
    ModelRefused,
    check_supported,
    description_of,
    has_latents,
    kv_bytes,
    quantisation_method,
    text_part,
)
from target_service.model.transformers_network import TransformersNetwork, pack_linears
from target_service.text.loading import load_tokenizer
from tree_kernels.ahead import CHILD, AheadCompiler
from tree_kernels.attention import Backend
from tree_kernels.recurrence import MOST_NODES, RecurrentStates
from tree_models.building import build
from tree_models.families import Description
from tree_models.fused.preparing import LayerOptions
from tree_models.in_pass import InPassDrafter, MakeDrafter, pass_target
from tree_models.layer_comparison import layers_that_differ
from tree_models.layers.decoder import Decoder
from tree_models.layers.linear import can_pack
from tree_models.layers.placing import Placement
from tree_models.rank_group import RankGroup
from tree_models.ranks.decoder import build_rank
from tree_models.spec import FamilyRefused
from tree_models.weights.checkpoint import WeightsRefused, text_tensors, whole_names
from tree_models.weights.mxfp4 import DequantisedExperts

log = logging.getLogger(__name__)
# A page of the default size, which the text of `check_runner` fits into.
_LEAST_KV_TOKENS = 16


class RankGroupLink(RankGroup, RankLink, Protocol):
    """What layers and passes need of the other ranks."""


# As `load_runner`, of one rank.
LoadRank = Callable[[TargetConfig, RankGroupLink], ModelRunner]


def load_runner(config: TargetConfig, link: RankGroupLink | None = None) -> ModelRunner:
    """Load the model that `config` names, with a KV cache sized for this machine. With a `link`, the part of this
    rank, while all others load theirs; passes of a rank that follows are captured later, as the leading one's are.

    Raises:
        ModelRefused: it cannot be served, with the reason.
        CheckpointRefused: it is not read whole.
        NotSupported: the draft's head does not fit it.
        OSError: there is no such model, or no such head.
    """
    if 0 < config.kv_tokens < _LEAST_KV_TOKENS:
        raise ModelRefused(f"--kv-tokens must be at least {_LEAST_KV_TOKENS}, or 0")
    choose_device(config.device)
    leads = link is None or link.leads
    if config.captures and leads:
        # Loops that the first requests would wait for where steps are captured.
        LOOPS.compile_beside(
            (
                "target_service.execution.node_tables:warm_up",
                "target_service.grammars.row_masks:warm_up",
                "target_service.speculation.policy.estimates:compile_pooled",
                "target_service.speculation.policy.lookup_baseline:compile_loops",
            )
        )
    # From now on, so that they have imported all when they are needed. Other ranks take what the leading one compiles.
    ahead = AheadCompiler(
        module_command(CHILD), config.compilers if leads else 0, _launched(config) if config.captures else ""
    )
    try:
        return _load(config, link, ahead)
    except BaseException:
        ahead.close()
        raise


def _launched(config: TargetConfig) -> str:
    """What the kernels of a start depend on, but for the GPU's memory: our code, the settings, and the model's own."""
    packages = (find_spec(name) for name in ("tree_kernels", "tree_models", "target_service", "draft_service"))
    folders = [Path(folder) for spec in packages if spec for folder in spec.submodule_search_locations or ()]
    code = hashlib.sha256()
    for source in sorted(path for folder in folders for path in folder.rglob("*.py")):
        code.update(source.read_bytes())
    # Addresses change nothing, and those of a private stack are others at each start.
    draft = config.draft if config.drafts_in_passes else bool(config.draft)
    settings = {name: value for name, value in asdict(config).items() if not name.endswith("listen")} | {"draft": draft}
    described = resolve(config.model) / "config.json"
    model = described.read_text() if described.exists() else ""
    return f"{code.hexdigest()} {settings} {torch.cuda.get_device_name(config.device)} {model}"


def _load(config: TargetConfig, link: RankGroupLink | None, ahead: AheadCompiler) -> ModelRunner:
    """See `load_runner`. `ahead` compiles what steps launch."""
    _set_threads(config, link)
    folder = resolve(config.model)
    on_gpu = torch.device(config.device).type == "cuda"
    checkpoint = replace(Checkpoint.of_folder(folder, DEQUANTISED_FORMATS), for_gpu=on_gpu)
    whole = read_configuration(folder)
    check_supported(whole)
    settings = text_part(whole)
    if settings is not whole:
        log.info("of %s the part for text is served: images and sounds are refused", whole.model_type)
    if config.batch_invariant and has_latents(settings):
        raise ModelRefused(f"--batch-invariant: the layers of {settings.model_type} depend on the rest of the batch")
    check_tokenizer(folder)
    backend = _backend(config, torch.device(config.device))
    if backend == "flashinfer" and (reason := attention_refusal(settings)):
        raise ModelRefused(f"{settings.model_type}: {reason} by --attention flashinfer")
    network, own = _network(checkpoint, settings, config, backend, link, is_part=settings is not whole)
    # Memory that was pinned for reading, where PyTorch has a way to free it.
    if on_gpu and (free_pinned := getattr(torch.accelerator, "empty_host_cache", None)):
        free_pinned()
    if not config.threads and network.device.type == "cuda":
        # PyTorch's threads beside a GPU. A step leaves little work to the CPU, and a team of threads on all cores takes
        # milliseconds to wake, and then spins for milliseconds on cores that the draft needs: with 32 threads, steps at
        # 8B size spent 1.0 (p50) to 6 ms (p90) picking a head's few rows (H200 host, 2026-11-22).
        torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    if network.recurrent_layers and backend == "triton" and config.max_draft_nodes >= MOST_NODES:
        raise ModelRefused(f"--max-draft-nodes must be below {MOST_NODES} where layers keep states on a GPU")
    log.info("serving %s in %s", config.model, config.dtype)
    fingerprint = tokenizer_fingerprint(tokenizer)
    runner = runner_over(
        network,
        tokenizer,
        end_token_ids=end_tokens_of(settings, read_generation_config(folder)),
        attention=backend,
        invariant=config.batch_invariant,
        name=config.served_names[0],
        max_context=_longest_context(config, network),
        tokenizer_fingerprint=fingerprint,
        in_pass=_in_pass(config, network, fingerprint),
        **_cache_sizes(config, network, link),
    )
    runner.ahead = ahead
    if config.captures and tokenizer is not None and (link is None or link.leads):
        # Beside the waiting of captures, which take longer.
        of_forms = tokenizer, runner.vocabulary_size, runner.end_token_ids
        in_daemon_thread(partial(vocabulary.warm_up, *of_forms), "forms")
    if config.draft_head and (link is None or link.leads):
        runner.run_head(read_draft_head(config.draft_head, settings.num_hidden_layers, settings.hidden_size))
    check_runner(runner, own)
    if config.captures:
        return _captured(runner, config, link, own)
    runner.attach(link)
    log.info("KV cache of %s", runner.cache)
    return runner


def _in_pass(config: TargetConfig, network: TargetNetwork, fingerprint: str) -> InPassDrafter | None:
    """What drafts behind passes, if anything does, or this rank's part of it."""
    if not config.drafts_in_passes:
        return None
    make: MakeDrafter = prepare_in_pass(config.draft, config.model)
    return make(pass_target(network, fingerprint))


def _network(
    checkpoint: Checkpoint,
    settings: PretrainedConfig,
    config: TargetConfig,
    backend: Backend,
    ranks: RankGroup | None,
    *,
    is_part: bool,
) -> tuple[TargetNetwork, Tensor]:
    """The model, and its logits of the text of `check_runner`. Our layers, where the family has an entry and they
    compute what transformers' do; else transformers' own."""
    description = description_of(settings)
    if description is not None:
        decoder = _decoder(checkpoint, settings, description, config, backend, ranks, is_part=is_part)
        if decoder is not None:
            return decoder, plain_logits(decoder)
    if ranks is not None:
        raise ModelRefused(
            f"--tensor-parallel: {settings.model_type} runs on transformers' layers, which are not divided"
        )
    if is_part:
        raise ModelRefused(f"{settings.model_type}: the layers of its part for text are not those of transformers")
    if method := quantisation_method(settings):
        raise ModelRefused(
            f"{settings.model_type}: quantised weights ({method}) are not served by transformers' layers"
        )
    if reason := attention_refusal(settings):
        # Transformers' layers get no windows here, and a short text does not show that.
        raise ModelRefused(f"{settings.model_type}: {reason} by transformers' layers")
    model = load_causal_lm(checkpoint, settings, getattr(torch, config.dtype)).to(config.device)
    check_supported(settings, model)
    with _running_transformers():
        own = own_logits(model)
    if can_pack(model.dtype, model.device):
        pack_linears(model)
    log.info("layers of %s are transformers' own", settings.model_type)
    return TransformersNetwork(model), own


@contextmanager
def _running_transformers() -> Iterator[None]:
    """Whatever transformers' model of a foreign configuration raises when it is built or run is a `CheckpointRefused`
    of one line."""
    try:
        yield
    except (CheckpointRefused, WeightsRefused, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointRefused(f"no model can be run by its config.json: {said(error)}") from error


def _decoder(
    checkpoint: Checkpoint,
    settings: PretrainedConfig,
    description: Description,
    config: TargetConfig,
    backend: Backend,
    ranks: RankGroup | None,
    *,
    is_part: bool,
) -> Decoder | None:
    """The decoder of a checkpoint; None where one of its layers computes something else than transformers'. Raises
    `CheckpointRefused` where its tensors are not those of the model."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    latent = config.latent_cache and not config.batch_invariant and takes_latents(backend)
    place = Placement(device, dtype, can_pack(dtype, device), latent, ranks)
    try:
        source = whole_names(text_tensors(checkpoint) if is_part else checkpoint, description.names)
        if method := quantisation_method(settings):
            log.info("experts in %s are dequantised: passes multiply plain matrices", method)
            source = DequantisedExperts(source)
        decoder = (build if ranks is None else build_rank)(description, source, place)
        with _running_transformers():
            differing = layers_that_differ(decoder, settings, source)
    except WeightsRefused as error:
        raise CheckpointRefused(str(error)) from None
    except FamilyRefused as error:
        raise ModelRefused(f"{settings.model_type}: {error}") from None
    if differing:
        log.warning("our layers of %s differ from transformers': %s", settings.model_type, ", ".join(differing))
        return None
    if has_latents(settings):
        mine, other = (kv_bytes(settings, dtype.itemsize, latent=form) for form in (latent, not latent))
        kept = "its latents" if latent else "keys and values of all heads, expanded from its latents"
        log.info("latent attention: the cache keeps %s, %d bytes a token (%d otherwise)", kept, mine, other)
    return decoder


def _captured(runner: ModelRunner, config: TargetConfig, link: RankLink | None, own: Tensor) -> ModelRunner:
    """The runner, its steps captured unless another rank decides when; its logits of a short text are to be `own`. The
    leading rank alone chooses rows."""
    # Only here: Triton may be absent.
    from target_service.model.cuda_graphs.capturing import capture_steps
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions

    leads = link is None or link.leads
    if config.speculation and leads:
        _choose_rows_on_device(runner, config)
    layers = LayerOptions(invariant=config.batch_invariant)
    drafter = runner.in_pass or runner.draft_head
    hooked = drafter.layers if drafter is not None else ()
    bounds = config.step_rows, config.max_running
    captured = CapturedRunner(runner, CaptureOptions(*bounds, layers, hooked, common_pages=config.prefix_cache))
    captured.attach(link)
    if leads:
        # Without keys and values memory bounds nothing.
        share = 0.0 if config.kv_tokens or not runner.cache.shapes else config.memory_share
        capture_steps(captured, seconds=config.capture_seconds, memory_share=share)
        check_runner(captured, own)
    return captured


def _choose_rows_on_device(runner: ModelRunner, config: TargetConfig) -> None:
    # What is looked up is a chain, as batch-invariant drafts have to be; what is recycled is a tree.
    runner.enable_device_row_selection(config.max_running, config.lookup_rows, recycles=not config.batch_invariant)


def _backend(config: TargetConfig, device: torch.device) -> Backend:
    backend = config.attention
    if backend == "auto":
        backend = "torch" if device.type == "cpu" else "triton"
    if config.batch_invariant and (device.type != "cuda" or backend != "triton"):
        raise ModelRefused("--batch-invariant needs a GPU and --attention triton")
    return cast(Backend, backend)


def states_bytes(network: TargetNetwork, largest_tree: int) -> int:
    """Bytes of one sequence's recurrent states and of the nodes of a tree; 0 where no layer keeps states."""
    if network.recurrent_layers is None:
        return 0
    layers, shape = network.recurrent_layers
    return layers * RecurrentStates.layer_bytes(shape, largest_tree, network.dtype)


def _set_threads(config: TargetConfig, ranks: RankGroup | None) -> None:
    """PyTorch's threads while weights are read, and on a CPU afterwards too."""
    if config.threads:
        torch.set_num_threads(config.threads)
    elif ranks is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.size))


def _longest_context(config: TargetConfig, network: TargetNetwork) -> int:
    """Tokens of the longest sequence."""
    longest = network.longest_context
    # Default context, chosen so that a laptop stays usable with models of a million tokens; `--max-context` sets more.
    return min(config.max_context or min(longest, 8192), longest)


def _cache_sizes(config: TargetConfig, network: TargetNetwork, ranks: RankGroup | None) -> dict[str, Any]:
    """The sizes of a runner's cache, see `runner_over`."""
    kv_tokens = _kv_tokens(config, network, ranks)
    if config.captures and not config.kv_tokens and network.cache_shapes:
        # Until captured steps have taken their memory.
        kv_tokens = 2 * config.step_rows
    return {
        "num_pages": max(1, kv_tokens // config.page_size),
        "page_size": config.page_size,
        "state_slots": config.max_running,
        "kept_states": config.kept_states if config.prefix_cache else 0,
        "largest_tree": config.max_draft_nodes + 1,
        # Other ranks know nothing of frames.
        "window_share": config.window_share if ranks is None else None,
        # Those of a pass under way, and of the next one.
        "window_rows": 2 * config.step_rows,
    }


def _kv_tokens(config: TargetConfig, network: TargetNetwork, ranks: RankGroup | None) -> int:
    kept = config.kept_states if config.prefix_cache else 0
    states = (config.max_running + kept) * states_bytes(network, config.max_draft_nodes + 1)
    share = config.window_share if ranks is None else 1.0
    tokens = config.kv_tokens or _tokens_that_fit(config, network, states, share)
    # The leading rank's pages are those of all.
    return tokens if ranks is None else ranks.least(tokens)


def _tokens_that_fit(config: TargetConfig, network: TargetNetwork, states: int, window_share: float) -> int:
    """Tokens whose keys and values fit a share of the memory that is free now, beside `states` bytes, with room for
    `window_share` of them in layers with a window; without keys and values those of all sequences that run. Raises
    `ModelRefused` where the states do not fit."""
    if network.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(network.device)
    else:
        free = psutil.virtual_memory().available
    each = _kept_numbers(network, window_share) * network.dtype.itemsize
    if states > free:
        raise ModelRefused(
            f"recurrent states take {states:,} bytes of {free:,} that are free: set a lower --max-running, or a lower "
            "--kept-states"
        )
    if not network.cache_shapes:
        # A token takes no memory.
        return config.max_running * _longest_context(config, network)
    # Default tokens of the KV cache at most: eight such contexts. Chosen; `--kv-tokens` sets more.
    # Share of the free memory that the default cache may take, since the draft and other programs share a laptop's.
    # Chosen; where steps are captured, the cache gets the memory that is left instead.
    return int(min(65536, (free - states) * 0.3 / each))


def _kept_numbers(network: TargetNetwork, window_share: float) -> float:
    """Numbers of a token in the cache, of layers with a window the share of a text that they have room for."""
    layers = zip(network.cache_shapes, network.windows, strict=True)
    return sum(
        shape.heads * (shape.key_width + shape.value_width) * (1.0 if window is None else window_share)
        for shape, window in layers
    )
