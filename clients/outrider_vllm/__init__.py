"""vLLM drafts with Outrider's draft service.

`Proposer` is what vLLM's speculative method `custom_class` loads: vLLM keeps the model, its parallelism, adapters and
quantisation, and asks a draft service for the tokens that it verifies.

    from vllm import LLM

    llm = LLM(
        model="meta-llama/Llama-3.1-70B-Instruct",
        tensor_parallel_size=4,
        speculative_config={
            "method": "custom_class",
            "model": "outrider_vllm.Proposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"outrider": {"draft": "127.0.0.1:50052"}},
    )
"""

from outrider.runtime import prepare_grpc

# Before anything below imports gRPC.
prepare_grpc()

from outrider_vllm.config import ProposerConfig  # noqa: E402
from outrider_vllm.proposer import Proposer  # noqa: E402

__all__ = ["Proposer", "ProposerConfig"]
