"""From a target's settings to a model that runs."""

from __future__ import annotations

import logging
from typing import Any, cast

import psutil
import torch
from transformers import AutoTokenizer, PreTrainedModel

from outrider.checkpoints.causal_lm import load_causal_lm, read_configuration
from outrider.checkpoints.folder import Checkpoint, check_tokenizer
from outrider.devices import choose_device
from outrider.heads import tokenizer_fingerprint
from target_service.config import TargetConfig
from target_service.model.cache_shape import cache_shape
from target_service.model.fused.packed_linears import can_pack, pack_linears
from target_service.model.head_projection import read_draft_head
from target_service.model.latent_attention import EXPANDING, keeps_latents
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.loading.store import resolve
from target_service.model.runner import ModelRunner, runner_for, takes_latents
from target_service.model.support import ModelRefused, check_supported, has_latents, kv_bytes, kv_shape, longest_context
from tree_kernels.attention import Backend

log = logging.getLogger(__name__)
# Default context, chosen so that a laptop stays usable with models of a million tokens; `--max-context` sets more.
_CONTEXT_LIMIT = 8192
# Default tokens of the KV cache at most: eight such contexts. Chosen; `--kv-tokens` sets more.
_KV_TOKENS_LIMIT = 65536
# A page of the default size, which the text of `check_runner` fits into.
_LEAST_KV_TOKENS = 16
# Share of the free memory that the default cache may take, since the draft and other programs share a laptop's. Chosen;
# where steps are captured, the cache gets the memory that is left instead.
_KV_MEMORY_SHARE = 0.3
# PyTorch's threads beside a GPU. A step leaves little work to the CPU, and a team of threads on all cores takes
# milliseconds to wake, and then spins for milliseconds on cores that the draft needs: with 32 threads, steps at 8B size
# spent 1.0 (p50) to 6 ms (p90) picking a head's few rows (H200 host, 2026-11-22).
_BESIDE_GPU = 1


def load_runner(config: TargetConfig) -> ModelRunner:
    """Load the model that `config` names, with a KV cache sized for this machine. Raises `ModelRefused` with the reason
    where it cannot be served, `CheckpointRefused` where it is not read whole, `NotSupported` where the draft's head
    does not fit it, and `OSError` where there is no such model, or no such head."""
    if 0 < config.kv_tokens < _LEAST_KV_TOKENS:
        raise ModelRefused(f"--kv-tokens must be at least {_LEAST_KV_TOKENS}, or 0")
    choose_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = resolve(config.model)
    checkpoint = Checkpoint.of_folder(folder)
    settings = read_configuration(folder)
    check_supported(settings)
    if config.batch_invariant and has_latents(settings):
        raise ModelRefused(f"--batch-invariant: the layers of {settings.model_type} depend on the rest of the batch")
    check_tokenizer(folder)
    backend = _backend(config, torch.device(config.device))
    model = load_causal_lm(checkpoint, settings, getattr(torch, config.dtype)).to(config.device)
    check_supported(settings, model)
    latent = _settle_form(model, config, backend)
    if not config.threads and model.device.type == "cuda":
        torch.set_num_threads(_BESIDE_GPU)
    own = own_logits(model)
    tokenizer = _tokenizer(str(folder))
    longest = longest_context(settings)
    max_context = min(config.max_context or min(longest, _CONTEXT_LIMIT), longest)
    kv_tokens = config.kv_tokens or _tokens_that_fit(model, latent=latent)
    if config.captures and not config.kv_tokens:
        # Until captured steps have taken their memory.
        kv_tokens = 2 * config.step_rows
    log.info("serving %s in %s", config.model, config.dtype)
    runner = runner_for(
        model,
        tokenizer,
        num_pages=max(1, kv_tokens // config.page_size),
        page_size=config.page_size,
        attention=backend,
        invariant=config.batch_invariant,
        latent=latent,
        name=config.served_names[0],
        max_context=max_context,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )
    if config.draft_head:
        runner.run_head(read_draft_head(config.draft_head, settings.num_hidden_layers, settings.hidden_size))
    check_runner(runner, own)
    if not config.captures:
        log.info("KV cache of %s", runner.cache)
        return runner
    runner = _captured(runner, config)
    check_runner(runner, own)
    return runner


def _tokenizer(source: str) -> Any:
    """Load the tokenizer. Raises `ModelRefused` where transformers cannot."""
    try:
        return AutoTokenizer.from_pretrained(source)
    # A broken file makes transformers raise anything.
    except Exception as error:
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelRefused(f"its tokenizer cannot be read: {reason}") from None


def _settle_form(model: PreTrainedModel, config: TargetConfig, backend: Backend) -> bool:
    """Pack weights where that pays, but for those that absorb latents. Returns whether latents are cached."""
    latent = config.latent_cache and takes_latents(backend) and keeps_latents(model)
    if has_latents(model.config):
        mine, other = (kv_bytes(model.config, model.dtype.itemsize, latent=form) for form in (latent, not latent))
        kept = "its latents" if latent else "keys and values of all heads, expanded from its latents"
        log.info("latent attention: the cache keeps %s, %d bytes a token (%d otherwise)", kept, mine, other)
    if can_pack(model.dtype, model.device):
        pack_linears(model, apart=(EXPANDING,) if latent else ())
    return latent


def _captured(runner: ModelRunner, config: TargetConfig) -> ModelRunner:
    # Only here: Triton may be absent.
    from target_service.model.cuda_graphs.capturing import capture_steps
    from target_service.model.cuda_graphs.runner import CaptureOptions
    from target_service.model.fused.preparing import LayerOptions

    if config.speculation:
        # What is looked up is a chain, as batch-invariant drafts have to be; what is recycled is a tree.
        runner.enable_device_row_selection(config.max_running, config.lookup_rows, recycles=not config.batch_invariant)
    layers = LayerOptions(invariant=config.batch_invariant)
    hooked = runner.draft_head.layers if runner.draft_head else ()
    options = CaptureOptions(config.step_rows, config.max_running, layers, hooked)
    share = 0.0 if config.kv_tokens else config.memory_share
    return capture_steps(runner, options, seconds=config.capture_seconds, memory_share=share)


def _backend(config: TargetConfig, device: torch.device) -> Backend:
    backend = config.attention
    if backend == "auto":
        backend = "torch" if device.type == "cpu" else "triton"
    if config.batch_invariant and (device.type != "cuda" or backend != "triton"):
        raise ModelRefused("--batch-invariant needs a GPU and --attention triton")
    return cast(Backend, backend)


def _tokens_that_fit(model: PreTrainedModel, *, latent: bool) -> int:
    """Tokens whose keys and values fit a share of the memory that is free now."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = psutil.virtual_memory().available
    heads, key_width, value_width = kv_shape(model.config, latent=True) if latent else cache_shape(model)
    token_bytes = model.config.num_hidden_layers * heads * (key_width + value_width) * model.dtype.itemsize
    return int(min(_KV_TOKENS_LIMIT, free * _KV_MEMORY_SHARE / token_bytes))
