"""Runs whole passes of tiny decoders whose layers' forms are by the kernels' own classes, in the interpreter, and
writes by how much they differ from plain layers as JSON to standard output.

A process of its own, because Triton's interpreter must be chosen before Triton is imported. Where layers are prepared
each form is tried alone; here one reads what the one before carries to it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from classic_models import CLASSIC
from examples import is_full
from fused_models import EXPERTS, FUSED, PAGE_SIZE, PAGES, after, batch_of, model_of, runner_of
from recurrent_models import RECURRENT
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor
from windowed_models import WINDOWED

from target_service.model.forward import pass_over
from target_service.model.preparing import prepare_network
from target_service.model.runner import ModelRunner, runner_over
from tree_kernels.experts import triton_backend as expert_kernels
from tree_kernels.experts.triton_backend import TritonExperts
from tree_kernels.experts.triton_tiling import ExpertVectorTilings
from tree_kernels.linear import vector_backend as vector_kernels
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.triton_tiling import VectorTiling
from tree_kernels.linear.vector_backend import VectorLinears
from tree_models.families import describe
from tree_models.fused import preparing
from tree_models.fused.preparing import LayerOptions
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.ranks.decoder import build_rank
from tree_models.reference import published_tensors

UNCOMPILED = LayerOptions(compiled=False)
# By `VectorLinears`, by `TritonLinears` with experts through registers and without, and by `CublasLinears`.
ROWS = (1, 3, 5, 70)
# Rows whose experts go through registers, as those of real sizes do.
FEW = 4
VECTORS = VectorTiling(4, 1, 1)
# Held by the rank that computes.
TURN = threading.Lock()
# One model of what differs behind or before a product; the others under `make test-full`.
USUAL = (
    "llama", "qwen3", "olmo2", "starcoder2", "qwen2_moe", "gpt_oss", "gemma4", "qwen3_next", "plain among experts",
    "caches", "int8", "ranks, experts",
)  # fmt: skip
# Of windows, those without a layer that has a form.
NO_FORMS = ("gemma3n", "cohere2_moe, sigmoid", "mimo_v2", "llama4, plain heads")
STATES = (
    "lfm2", "lfm2, biases", "lfm2_moe", "qwen3_next", "qwen3_next, dense", "qwen3_5", "qwen3_5, experts",
    "granitemoehybrid, mamba", "granitemoehybrid, mamba and experts", "bamba", "nemotron_h",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A tiny model, and how its layers are prepared."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: LayerOptions = UNCOMPILED
    # Layers that stay plain among those with a form.
    plain: tuple[int, ...] = ()
    # Passes write what layers cache alone, as those of a head that drafts do.
    caches: bool = False
    # How many share the model.
    ranks: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def widened(self) -> dict[str, Any]:
        """Settings with heads of 16 numbers: kernels of few rows take no heads of 12."""
        found = {"hidden_size": 64} | self.settings
        if found.get("head_dim") == 12:
            found["head_dim"] = 16
        if self.model_type in ("granitemoehybrid", "bamba"):
            found["mamba_n_heads"] = 8
        return found

    def runner(self) -> ModelRunner:
        return runner_of(self.model_type, dtype=self.dtype, **self.widened)


def cases() -> dict[str, Case]:
    found = {name: Case(name, settings) for name, settings in FUSED.items()}
    for name in ("gpt2", "gpt_neo", "gpt_neox", "gptj", "falcon", "falcon, groups", "gpt_bigcode", "bloom", "mpt"):
        found[name] = Case(*CLASSIC[name])
    found |= {name: Case(*WINDOWED[name]) for name in WINDOWED if name not in NO_FORMS}
    found |= {name: Case(*RECURRENT[name]) for name in STATES}
    for name in ("granitemoe", "ernie4_5_moe", "minimax_m2", "olmoe", "flex_olmo"):
        found[name] = Case(name, EXPERTS)
    grouped = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    of_groups = {"moe_intermediate_size": 24, "head_dim": 16, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    found["groups"] = Case("glm4_moe", grouped | of_groups)
    # Its first layer is dense.
    found["qwen2_moe"] = experts = Case("qwen2_moe", FUSED["qwen2_moe"] | {"num_hidden_layers": 3})
    llama = found["llama"]
    deep = {"num_hidden_layers": 5}
    found["plain among"] = replace(llama, settings=llama.settings | deep, plain=(1, 3))
    found["plain among experts"] = replace(experts, settings=experts.settings | deep, plain=(2,))
    found["caches"] = replace(experts, caches=True)
    found["caches of a plain layer"] = replace(llama, caches=True, plain=(1,))
    found["invariant"] = replace(llama, options=LayerOptions(invariant=True))
    found["invariant, experts"] = replace(found["mixtral"], options=LayerOptions(invariant=True))
    for name in ("", "qwen2_moe", "olmo2", "starcoder2", "gemma4", "qwen3_next", "nemotron_h"):
        of = found[name or "llama"]
        found[f"int8, {name}" if name else "int8"] = replace(of, options=replace(UNCOMPILED, int8=True))
    found["caches, int8"] = replace(found["int8"], caches=True)
    for name, of in (("", llama), (", norms of sums", found["glm4"]), (", experts", experts)):
        found[f"ranks{name}"] = replace(of, ranks=2)
    found["ranks, plain among"] = replace(found["plain among"], ranks=2)
    for name in ("llama", "gemma", "olmo2", "qwen2_moe", "gpt_oss", "qwen3_next"):
        found[f"half precision, {name}"] = replace(found[name], dtype=torch.float16)
    return found


def through_registers() -> None:
    """Have products of one row, and experts of few, chosen as for weights as wide as real ones are."""
    linears: Any = vector_kernels
    linears.choose_vector_tiling = lambda *_, **__: VECTORS
    experts: Any = expert_kernels
    experts.reads_few_rows = lambda rows, _hidden: rows <= FEW
    of_experts = ExpertVectorTilings(VECTORS, VECTORS)
    experts.choose_expert_vectors = lambda rows, *_, **__: of_experts if rows <= FEW else None


def prepared(runner: ModelRunner, case: Case, **classes: Any) -> tuple[int, int]:
    """How many layers got a form, by `classes` or by the definitions, and how many there are. None is tried: what a
    trial does not take would stay plain."""

    def fits(_stack: object, index: int, _form: object) -> bool:
        return index not in case.plain

    with patch.multiple(preparing, computes_the_same=fits, **classes):
        return prepare_network(runner.network, case.options), runner.network.layer_count


def by_kernels(runner: ModelRunner, case: Case) -> tuple[int, int]:
    """As `prepared`, by the classes that a GPU has."""
    return prepared(
        runner,
        case,
        row_linears=TritonLinears,
        single_row_linears=VectorLinears,
        many_row_linears=CublasLinears,
        row_experts=TritonExperts,
        reads_in_registers=lambda _weight: True,
    )


def cached(runner: ModelRunner, rows: int) -> list[Tensor]:
    """The caches behind a pass that writes them alone."""
    batch, decoder = batch_of(rows), runner.network
    assert isinstance(decoder, Decoder)
    tokens, positions, slots = (torch.tensor(each) for each in (batch.token_ids, batch.positions, batch.slots))
    step = pass_over(runner.attention, runner.attention.plan(batch.attention), slots, runner.cache, None)
    with torch.inference_mode():
        decoder.cache_rows(decoder.embedded(tokens, positions), decoder.angles(positions), step)
    return [cache.clone() for cache in runner.cache.keys + runner.cache.values]


def errors_of(case: Case) -> dict[str, Any]:
    """How many layers have forms, and by rows of a pass the largest error of its logits, or of what it caches, relative
    to the largest number."""
    if case.ranks > 1:
        return errors_of_ranks(case)
    plain, fused = case.runner(), case.runner()
    layers = by_kernels(fused, case)
    if case.options.int8:
        prepared(plain, case)
    run = cached if case.caches else after
    errors = {rows: errors_between(run(fused, rows), run(plain, rows)) for rows in ROWS}
    return {"layers": layers, "errors": errors}


class TurnRank(ThreadRank):
    """A rank that computes while no other does: the interpreter has one state for the process."""

    def _parts(self, part: Tensor) -> list[Tensor]:
        TURN.release()
        try:
            return super()._parts(part)
        finally:
            TURN.acquire()


def errors_of_ranks(case: Case) -> dict[str, Any]:
    """As `errors_of`, of the logits that the ranks make together."""
    whole = case.runner()
    model = model_of(case.model_type, **case.widened)
    description = describe(model.config)
    assert description is not None

    def run(rank: ThreadRank) -> tuple[tuple[int, int], list[Tensor]]:
        with TURN:
            place = Placement(whole.device, whole.network.dtype, ranks=rank)
            network = build_rank(description, published_tensors(model), place)
            own = runner_over(network, None, num_pages=PAGES, page_size=PAGE_SIZE, end_token_ids=())
            for mine, all_heads in zip(own.cache.keys + own.cache.values, begun, strict=True):
                mine.copy_(all_heads.chunk(case.ranks, dim=2)[rank.rank])
            layers = by_kernels(own, case)
            return layers, [own.forward(batch_of(rows)).clone() for rows in ROWS]

    begun = [cache.clone() for cache in whole.cache.keys + whole.cache.values]
    (layers, first), (_, second) = on_ranks(case.ranks, run, TurnRank)
    expected = [whole.forward(batch_of(rows)) for rows in ROWS]
    errors = {
        rows: errors_between([one, other], [value, value])
        for rows, one, other, value in zip(ROWS, first, second, expected, strict=True)
    }
    return {"layers": layers, "errors": errors}


def errors_between(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of any tensor, relative to its largest number."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, expected, strict=True) if other.numel()]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def main() -> None:
    through_registers()
    chosen = {name: case for name, case in cases().items() if is_full() or name in USUAL}
    json.dump({name: errors_of(case) for name, case in chosen.items()}, sys.stdout)


if __name__ == "__main__":
    main()
