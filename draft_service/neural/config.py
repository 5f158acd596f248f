"""Settings of every neural drafter: the only place of their defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draft_service.neural.tree_config import TreeShape
from outrider.busy_polling import usable_cores
from outrider.settings import Settings, SettingsError, setting
from outrider.wire.frames import MAX_NODES


@dataclass(frozen=True)
class NetworkConfig(Settings):
    """Where a drafting network runs, and how its predictions are scored."""

    min_score: float = setting(0.001, "least probability of the path to a node that is worth drafting", ge=0, le=1)
    gumbel_candidates: int = setting(
        128, "tokens of a node that take part in the shared Gumbel-max draw of COUPLED requests", ge=1
    )
    gumbel_sharpness: float = setting(
        1.0, "how far the Gumbel-max draw over the draft's distribution is taken for the target's own", gt=0
    )

    dtype: str = setting("bfloat16", "type of weights and cache", choices=("float32", "bfloat16"))
    device: str = setting("cpu", "device to run on")
    threads: int = setting(0, "threads of PyTorch on a CPU; 0 takes OMP_NUM_THREADS, 1 in a draft service", ge=0)
    max_context: int = setting(131_072, "longest sequence followed, in tokens", ge=1)


@dataclass(frozen=True)
class HeadSettings(Settings):
    """The draft vocabulary of a head, and the format in which it receives the target's hidden states."""

    token_map: str = setting("", "JSON or safetensors file of the only token ids to draft (FR-Spec); all when empty")
    feature_dtype: str = setting(
        "bfloat16", "type of features on the wire", choices=("float32", "bfloat16", "float8_e4m3")
    )


# Tokens of a cache by default, and bytes of a larger one on a GPU. 128 sequences of 300 tokens hold 73,000 with the
# rows of their trees; what is beyond that is kept for texts that come again. Chosen.
_LEAST_TOKENS, _MOST_TOKENS, _GPU_BYTES = 65_536, 262_144, 2 << 30
# Processes that compile kernels at the start, at most. Chosen, since a target on the same host compiles too.
_MOST_COMPILERS = 4
# Values for settings that are 0, or -1. Trees that a target waits for, and captured ones, which are drafted while the
# target verifies their predecessors and so must also cover what will follow these. The latter by
# `benchmarks/running_ahead/simulate.py`: where a tree is waited for, four levels are nearly as good as more; one pass
# ahead, eight levels of 16 nodes make 2 to 3 % more tokens than six, and of 32 nodes 1 to 2 % more again. On H200s 32
# nodes made 3 to 6 % more tokens a second than 16 at an 8B shape, their trees in time for 97 passes in 100; nine
# levels came too late for one pass in ten (`benchmarks/results/2026-11-23-h200-widened-sixth.md`,
# `2026-11-23-h200-launched-at-once.md`). How many of a tree's nodes are sent costs a drafter nothing; the node
# table's size and the floor are those of `2026-11-25-cpu-table-sizes.md`. The former are what pays beside a small
# target on a CPU: six levels and 32 nodes made 0.84 × plain decoding there (docs/drafter_figures.md). Gumbel-max draws
# are always as set.
_PLAIN = TreeShape(
    num_steps=3, topk=4, num_draft_tokens=12, min_score=1e-3, gumbel_candidates=128, gumbel_sharpness=1.0
)
# Eight levels of 32 nodes, and as many nodes as a table holds: of the simulation and the H200 runs named above.
_CAPTURED = replace(
    _PLAIN, num_steps=8, topk=8, num_draft_tokens=1007, min_score=3e-5, frontier=32, rows_per_level=64, early_levels=4
)


@dataclass(frozen=True)
class NeuralConfig(NetworkConfig):
    """How trees grow level by level, over a cache of keys and values."""

    min_score: float = setting(
        -1.0,
        "least probability of the path to a node that is worth drafting; -1 takes 0.001, or 0.00003 where captured",
        ge=-1,
        le=1,
    )
    num_steps: int = setting(0, "levels of a tree, each of which costs a pass; 0 takes 3, or 8 where captured", ge=0)
    topk: int = setting(0, "children of a node; 1 drafts a chain; 0 takes 4, or 8 where trees are captured", ge=0)
    frontier: int = setting(
        0,
        "nodes that each level expands; 0 takes as many as topk, or 32 where trees are captured and topk is not set",
        ge=0,
    )
    rows_per_level: int = setting(
        0,
        "most nodes that a level expands over all sequences of a frame, 4 of each at least: with many of them trees "
        "become narrower and shallower, so that a frame takes no longer; 0 takes 64 where trees are captured, and no "
        "bound elsewhere",
        ge=0,
    )
    early_levels: int = setting(
        0,
        "levels that are sent while the others are grown, for one sequence; 0 takes 4 where trees are captured, and "
        "none elsewhere",
        ge=0,
    )
    num_draft_tokens: int = setting(
        0, "nodes of a tree, the root not counted; 0 takes 12, or 1007 where captured", ge=0, le=MAX_NODES
    )
    cuda_graphs: bool = setting(False, "draft in captured CUDA graphs, on a GPU")
    captured_sequences: int = setting(
        128, "sequences drafted for together where trees are captured, for which graphs are made at the start", ge=1
    )
    compile_processes: int = setting(
        -1,
        "processes that compile the kernels of captured passes at the start; 0: none, -1: a quarter of the cores, at "
        f"most {_MOST_COMPILERS}, since a target compiles too",
        ge=-1,
        le=64,
        rare=True,
    )
    kv_tokens: int = setting(
        0,
        "tokens of all sequences in the cache; what does not fit is not drafted for. 0 takes 65,536, and on a GPU what "
        "2 GiB hold, at most 262,144",
        ge=0,
    )
    page_size: int = setting(64, "tokens of a page of the cache", ge=1)
    prefix_cache: bool = setting(True, "keep what was read, for sequences of the same tenant that begin with it")
    max_rows: int = setting(2048, "rows of one pass over what arrived together", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Constructed for its checks of several settings together.
        _ = self.tree
        if 0 < self.kv_tokens < self.page_size:
            raise SettingsError("kv_tokens must be a page at least")

    @property
    def compilers(self) -> int:
        """Processes that compile kernels at the start, -1 resolved."""
        if not self.cuda_graphs or self.compile_processes >= 0:
            return self.compile_processes if self.cuda_graphs else 0
        return min(_MOST_COMPILERS, int(usable_cores()) // 4)

    def cached_tokens(self, token_bytes: int) -> int:
        """`kv_tokens`, 0 resolved, where keys and values of a token take so many bytes."""
        if self.kv_tokens or not self.device.startswith("cuda"):
            return self.kv_tokens or _LEAST_TOKENS
        return max(_LEAST_TOKENS, min(_MOST_TOKENS, _GPU_BYTES // token_bytes))

    @property
    def tree(self) -> TreeShape:
        own = _CAPTURED if self.cuda_graphs else _PLAIN
        steps = self.num_steps or own.num_steps
        return TreeShape(
            num_steps=steps,
            topk=self.topk or own.topk,
            num_draft_tokens=self.num_draft_tokens or own.num_draft_tokens,
            min_score=own.min_score if self.min_score < 0 else self.min_score,
            gumbel_candidates=self.gumbel_candidates,
            gumbel_sharpness=self.gumbel_sharpness,
            frontier=self.frontier or (0 if self.topk else own.frontier),
            rows_per_level=self.rows_per_level or own.rows_per_level,
            early_levels=min(self.early_levels or own.early_levels, steps),
        )
