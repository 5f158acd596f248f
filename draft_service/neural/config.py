"""Settings that every neural drafter has. Each default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.neural.tree_config import CacheShape, TreeShape
from outrider.settings import setting


@dataclass(frozen=True)
class NeuralConfig:
    """How trees grow, and what the network runs on."""

    num_steps: int = setting(3, "levels of a tree, each of which costs a pass")
    topk: int = setting(4, "children of a node, and nodes that each level expands; 1 drafts a chain")
    num_draft_tokens: int = setting(12, "nodes of a tree, the root not counted")
    min_score: float = setting(0.005, "least probability of the path to a node that is worth drafting")
    race_entrants: int = setting(128, "tokens of a node that run the shared race of COUPLED requests")
    race_sharpness: float = setting(1.0, "how far the race over the draft's law is taken for the target's own")

    dtype: str = setting("bfloat16", "type of weights and cache", choices=("float32", "bfloat16"))
    device: str = setting("cpu", "device to run on")
    threads: int = setting(0, "threads of PyTorch on a CPU; 0 takes OMP_NUM_THREADS, 1 in a draft service")
    cuda_graphs: bool = setting(False, "draft in captured CUDA graphs, on a GPU")
    captured_sequences: int = setting(8, "sequences that graphs are captured for at the start; for more when first met")
    kv_tokens: int = setting(65536, "tokens of all sequences in the cache; what does not fit is not drafted for")
    page_size: int = setting(64, "tokens of a page of the cache")
    max_rows: int = setting(2048, "rows of one pass over what arrived together")
    max_context: int = setting(131_072, "longest sequence followed, in tokens")

    def __post_init__(self) -> None:
        # They check themselves.
        _ = self.tree, self.cache

    @property
    def tree(self) -> TreeShape:
        return TreeShape(
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
            min_score=self.min_score,
            race_entrants=self.race_entrants,
            race_sharpness=self.race_sharpness,
        )

    @property
    def cache(self) -> CacheShape:
        return CacheShape(self.kv_tokens, self.page_size, self.max_rows)
