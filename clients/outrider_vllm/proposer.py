"""What vLLM loads as its proposer of tokens to verify."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.link import connect_draft
from outrider_vllm.config import ProposerConfig
from outrider_vllm.drafting import RequestDrafts, log
from outrider_vllm.tracking import RequestTracker, Seen, Tokens
from outrider_vllm.vocabulary import model_fingerprint

# Between two log lines about errors of ours, of which every step may have one.
_ERROR_SECONDS = 60.0


class Proposer:
    """vLLM's `custom_class` proposer over Outrider's draft service. vLLM reads the drafts of one worker, the first of
    the tensor-parallel group, and sends them to all of them with the next step. So that worker talks to the draft; the
    others have no connection and propose nothing."""

    def __init__(self, vllm_config: Any) -> None:
        """Begin to connect, in the background, to the draft of `additional_config["outrider"]` or the environment
        (`ProposerConfig`). Raises `SettingsError` for settings that cannot be meant: vLLM then does not start."""
        self._config = ProposerConfig.of(getattr(vllm_config, "additional_config", None), os.environ)
        self._max_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        vocabulary_size: int = vllm_config.model_config.get_vocab_size()
        self._tracker = RequestTracker(vllm_config.scheduler_config.max_num_seqs)
        self._drafting = RequestDrafts(self._config, vocabulary_size)
        # Of all steps so far: those with requests, tokens proposed, and those of them that vLLM kept.
        self._steps = self._tokens_proposed = self._tokens_accepted = 0
        # Tokens proposed for each request in the step before, by the request's number.
        self._proposed: dict[int, int] = {}
        self._logged_at, self._logged_error_at = time.monotonic(), -_ERROR_SECONDS
        self._drafts = _is_draft_rank(vllm_config.parallel_config)
        self._leave: Callable[[], object] = lambda: None
        if self._drafts:
            link = connect_draft(
                self._config.draft,
                self._drafting,
                vocabulary_size,
                model_fingerprint(vllm_config.model_config),
                self._config.link_options(),
            )
            self._drafting.attach(link)
            # vLLM ends its workers without closing the proposer.
            self._leave = weakref.finalize(self, link.stop)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        *_unused: Any,
        **_unused_by_name: Any,
    ) -> list[list[int]]:
        """A chain for each row of vLLM's batch. Never raises; waits for the draft, and no longer than is configured.

        Args:
            sampled_token_ids: for each row, the tokens that the step has just generated; none where a prompt is not
                read to its end.
            num_tokens_no_spec: [max rows] the length of each row's text, these tokens included.
            token_ids_cpu: [max rows, max length] the texts.
            slot_mappings, and what later versions may add: not used.

        Returns:
            As many lists as rows, each of at most `num_speculative_tokens` ids of the vocabulary; empty where a row has
            generated nothing or nothing is drafted for it.
        """
        if not self._drafts:
            return [[] for _ in sampled_token_ids]
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # vLLM ends its engine where a proposer raises.
            # The link itself may be what failed.
            with contextlib.suppress(Exception):
                self._start_over()
            return [[] for _ in sampled_token_ids]

    def close(self) -> None:
        """Leave the draft. Also done when the proposer is collected, or its process ends. Idempotent."""
        self._leave()

    def _propose(
        self, sampled_token_ids: list[list[int]], lengths: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> list[list[int]]:
        deadline = time.monotonic() + self._config.wait_seconds
        texts: list[Tokens] = [
            np.ascontiguousarray(token_ids[row, : int(lengths[row])], dtype=np.int32)
            for row in range(len(sampled_token_ids))
        ]
        seen = self._tracker.see(texts)
        self._count(seen, sampled_token_ids)
        self._drafting.close(self._tracker.evict_absent())
        rows = list(zip(seen, texts, sampled_token_ids, strict=True))
        self._drafting.follow((one, text, len(sampled)) for one, text, sampled in rows if one is not None)
        self._drafting.wait_for([one.request for one, _, sampled in rows if one is not None and sampled], deadline)
        chains: list[list[int]] = []
        for one, text, sampled in rows:
            # vLLM has no room for tokens past its longest sequence.
            room = min(self._max_tokens, self._max_length - len(text)) if sampled else 0
            chains.append([] if one is None else self._drafting.chain(one.request, room))
            if one is not None and chains[-1]:
                self._proposed[one.request.number] = len(chains[-1])
                self._tokens_proposed += len(chains[-1])
        self._log()
        return chains

    def _count(self, seen: Sequence[Seen | None], sampled_token_ids: list[list[int]]) -> None:
        """Note what became of the chains of the step before."""
        self._steps += 1
        for one, sampled in zip(seen, sampled_token_ids, strict=True):
            if one is not None and sampled:
                # The last token of a step is the target's own.
                self._tokens_accepted += min(len(sampled) - 1, self._proposed.get(one.request.number, 0))
        self._proposed.clear()

    def _log(self) -> None:
        now = time.monotonic()
        if not self._config.log_seconds or now - self._logged_at < self._config.log_seconds:
            return
        self._logged_at = now
        log.info(
            "draft %s: %d steps, %d tokens proposed, %d accepted, %d answers late, %d requests known",
            "connected" if self._drafting.connected else "away",
            *(self._steps, self._tokens_proposed, self._tokens_accepted, self._drafting.late, len(self._tracker)),
        )

    def _start_over(self) -> None:
        """Log what went wrong, and forget every request: what is known of them may be half of a step."""
        now = time.monotonic()
        if now - self._logged_error_at >= _ERROR_SECONDS:
            self._logged_error_at = now
            log.exception("no drafts in this step")
        self._proposed.clear()
        self._drafting.close(self._tracker.clear())


def _is_draft_rank(parallel_config: Any) -> bool:
    """Whether this worker's drafts are the ones that vLLM reads. Of the workers of a stage those are the first one's
    (`MultiprocExecutor._get_output_rank`). Engines that are launched side by side have to schedule alike without
    exchanging anything, and drafts do not reach all of them in the same step."""
    # vLLM's name for engines that are started side by side, each of which takes the drafts of its own worker.
    if parallel_config.distributed_executor_backend == "external_launcher":
        log.warning("no drafts: engines of an external launcher cannot be given the same ones")
        return False
    ranks = parallel_config.tensor_parallel_size * getattr(parallel_config, "prefill_context_parallel_size", 1)
    return bool(parallel_config.rank % ranks == 0)
