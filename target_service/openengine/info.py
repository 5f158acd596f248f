"""What a target is, what it can do, and how busy it is."""

from __future__ import annotations

import time

import outrider
from outrider.openengine import openengine_pb2 as pb
from outrider.sampling import MAX_LOGPROBS
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot

# Of the contract that openengine.proto is a part of.
SCHEMA_REVISION = 1
# Nothing is passed on between targets that read prompts and others that decode.
CONNECTOR = pb.KvConnectorInfo(
    enabled=False, supports_remote_prefill=False, supports_decode_pull=False, supports_abort_cleanup=False
)


def server_info(config: TargetConfig, served: ServedModel, now: EngineSnapshot, instance: str) -> pb.ServerInfo:
    """The server, with its capacity."""
    return pb.ServerInfo(
        engine_name="outrider",
        engine_version=outrider.__version__,
        engine_role=pb.ENGINE_ROLE_AGGREGATED,
        instance_id=instance,
        supported_models=served.names,
        parallelism=pb.ParallelismInfo(
            tensor_parallel_size=config.tensor_parallel,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_start_rank=0,
            decode_context_parallel_size=1,
        ),
        kv_connector=CONNECTOR,
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
        # The commit that has it.
        schema_release="01e549d0a893b6e1578ce1f90e19b0a97c9ba219",
        capacity=pb.DeploymentCapacity(
            kv_block_size=served.page_size,
            total_kv_blocks=now.pages_total,
            max_running_requests=config.max_running,
            max_batched_tokens=config.step_rows,
            max_loras=0,
        ),
    )


def model_info(config: TargetConfig, served: ServedModel) -> pb.ModelInfo:
    """The model, by what it was loaded from, and what requests may ask for."""
    logprobs = pb.LogprobCapabilities(
        supported=True, candidate_selection_modes=[pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N], max_top_n=MAX_LOGPROBS
    )
    has_text = served.tokenizer is not None
    forms = pb.GuidedDecodingCapabilities(supported=has_text and bool(served.end_token_ids))
    if forms.supported:
        forms.modes.extend(
            (
                pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
                pb.GUIDED_DECODING_MODE_REGEX,
                pb.GUIDED_DECODING_MODE_CHOICE,
                pb.GUIDED_DECODING_MODE_JSON_OBJECT,
            )
        )
    return pb.ModelInfo(
        model_id=config.model,
        served_model_name=served.name,
        served_model_aliases=served.other_names,
        max_context_length=served.max_context,
        max_output_tokens=served.max_context - 1,
        supports_text_input=has_text,
        supports_token_ids_input=True,
        generation=pb.GenerationCapabilities(
            prompt_logprobs=logprobs,
            output_logprobs=logprobs,
            guided_decoding=forms,
            max_num_sequences=config.max_running,
            supports_priority=False,
            supports_stop_in_output=has_text,
            supports_cache_salt=False,
            supports_prefix_cache_bypass=True,
        ),
        supports_lora=False,
        supports_multimodal=False,
    )


def load_info(now: EngineSnapshot, instance: str, *, by_rank: bool) -> pb.LoadInfo:
    """The present load. What the engine does not count is absent."""
    load = pb.LoadInfo(
        instance_id=instance,
        timestamp_unix_nanos=time.time_ns(),
        running_requests=now.running,
        queued_requests=now.waiting,
        active_kv_sessions=0,
        used_kv_blocks=now.pages_used,
        total_kv_blocks=now.pages_total,
    )
    if by_rank:
        load.ranks.add(
            data_parallel_rank=0,
            running_requests=now.running,
            queued_requests=now.waiting,
            used_kv_blocks=now.pages_used,
            total_kv_blocks=now.pages_total,
        )
    return load
