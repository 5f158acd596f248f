"""Fixtures that every area shares: a tiny model of each served family, with random weights."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from pairs import leave_to_full

from outrider.runtime import collect_seldom, settled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytest_plugins = ("left_behind", "rerun", "seeds", "warm_workers")
# As the commands have it (`prepare_grpc`), before anything imports gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Inductor compiles little here, in the process itself: each worker started another that imports PyTorch for it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The same examples on every machine, however fast it is. `make test-full` looks for others.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# What fails is kept for the run of what failed alone; "same" keeps nothing, and so would a child of it.
settings.register_profile(
    "others",
    settings.get_profile("same"),
    derandomize=False,
    database=settings.get_profile("default").database,
    max_examples=100,
)
# Tests import from this file by its name, which runs it once more, behind the choice of `--hypothesis-profile`.
if settings.get_current_profile_name() not in ("same", "others"):
    settings.load_profile("same")
_is_ours = providers.is_local_module_file
# And the same whichever modules are imported: Hypothesis draws from the constants of each of ours, and parses all of
# them for that.
providers.is_local_module_file = lambda path: not settings.default.derandomize and _is_ours(path)
# Small enough for a step of a millisecond, odd enough (grouped heads, vocabulary not a power of two) to catch mistakes.
TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What families need beside these.
TINY_OF: dict[str, dict[str, Any]] = {
    # Its last product is as wide as the hidden size.
    "helium": {"head_dim": 12},
    # Without a default.
    "ministral": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "hunyuan_v1_moe": {"head_dim": 12},
    # By itself a quarter of a head is rotated, which is odd here.
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    # Of attention layers alone.
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "mamba_n_heads": 4},
}

# Files of some seven processor seconds and more or of much waiting, the longest first. They begin before all others,
# which then fill what one worker has left while another is busy: a long file at the end has a core to itself.
LONGEST = (
    "clients/test_page_commands.py",
    "models/test_families.py",
    "e2e/test_train_head.py",
    "e2e/test_recurrent_lossless.py",
    "e2e/test_train_on_devices.py",
    "kernels/test_linear.py",
    "gateway/test_http.py",
    "kernels/test_chained_layers.py",
    "e2e/test_states_behind_answers.py",
    "e2e/test_mtp_lossless.py",
    "kernels/test_node_table.py",
    "kernels/test_triton_attention.py",
    "chaos/test_runs.py",
    "e2e/test_lossless.py",
    "e2e/test_recurrent_mtp.py",
    "clients/test_demo.py",
    "target/test_in_pass.py",
    "e2e/test_shipped_head.py",
    "e2e/test_ready_sequences.py",
    "e2e/test_ranks.py",
    "target/test_model_preparing.py",
    "e2e/test_lookup.py",
    "target/test_controller.py",
    "gateway/test_workers.py",
    "target/test_distillation.py",
    "kernels/test_experts.py",
    "benchmarks/test_loads.py",
    "e2e/test_windows_lossless.py",
    "target/test_loading.py",
    "target/test_captured_ranks.py",
    "kernels/test_device_verification_kernels.py",
    "models/test_surroundings.py",
    "e2e/test_real_model.py",
    "clients/test_cli.py",
    "kernels/test_recurrence.py",
    "draft/test_training_unrolling.py",
    "target/test_main.py",
    "e2e/test_eagle_distribution.py",
    "target/test_model_store.py",
    "target/test_weights.py",
    "clients/test_models_page.py",
    "gateway/test_limits.py",
    "e2e/test_latent_lossless.py",
    "e2e/test_distribution.py",
    "draft/test_training_medusa.py",
    "clients/test_streams.py",
    "benchmarks/test_host_cuts.py",
    "clients/test_chat.py",
    "draft/test_model_drafter.py",
    "target/test_launch_hold.py",
    "gateway/test_tools.py",
    "e2e/test_typical.py",
    "benchmarks/test_acceptance.py",
    "draft/test_training_init.py",
    "draft/test_mtp_module.py",
    "kernels/test_latent_attention.py",
    "draft/test_eagle_distribution.py",
    "draft/test_eagle_captured.py",
    "clients/test_supervisor.py",
    "kernels/test_page_ends.py",
    "draft/test_assistant.py",
)

# Tests make few cycles, and the collector would look at millions of objects of libraries. `left_behind` has it look
# behind each file.
collect_seldom()
_until_the_end = contextlib.ExitStack()
# Libraries count at their end what is left of theirs. Not before, since pytest collects several times when it ends.
atexit.register(_until_the_end.close)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests and libraries stay: the collector need not look at them again, nor where services of tests end."""
    if session.config.option.collectonly:
        return
    # PyTorch has 56 that do not, and pytest would attach two handlers to each of them three times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    _until_the_end.enter_context(settled())
    collect_seldom()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Before those that are not asked for are left out.
    leave_to_full(items)
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def make_tiny(model_type: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A random-weight model of `model_type` in fp32, the same for every call with the same arguments.

    Weights are scaled up so that distributions are peaked enough for drafts to be accepted now and then.
    """
    # Late: the process that hands tests to others loads this file, and no model.
    import torch
    from transformers import AutoConfig

    from tree_models.reference import causal_lm

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(TINY | TINY_OF.get(model_type, {}) | overrides))
    model = causal_lm(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                if not parameter.any():
                    # Routers that begin at zero: equal scores would leave the choice of experts open.
                    parameter.normal_(std=0.02)
                parameter.mul_(6.0 if "embed" in name or "lm_head" in name else 3.0)
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    return make_tiny()
