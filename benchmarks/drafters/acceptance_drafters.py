"""The drafters whose acceptance is compared: a trie; one EAGLE head as chain, tree and merged with the trie; one set of
Medusa heads as chain and tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.drafters.base import Drafter
from draft_service.drafters.merged import MergedConfig, MergedDrafter
from draft_service.eagle.checkpoint import EagleCheckpoint
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from outrider.heads import head_source

EAGLE = ("eagle_chain", "eagle_tree", "merged")
MEDUSA = ("medusa_chain", "medusa_tree")
NAMES = ("trie", *EAGLE, *MEDUSA)
# With the root, they fill one word of a tree's mask.
TREE_NODES = 63
# Enough for all sequences: one that does not fit gets no drafts.
_CACHE_TOKENS = 1 << 18


@dataclass
class DrafterSet:
    """Makes and starts drafters. A trie is new each time; drafters with a head learn nothing and are kept.

    Attributes:
        head: folder or name of the EAGLE head; empty when none is needed.
        embeddings: folder of the target.
        chain_steps: nodes of a chain.
        tree_steps, topk: levels of a tree, and nodes that each expands.
        medusa: folder of the Medusa heads; empty when none are needed.
        gumbel_sharpness: of COUPLED trees; see `EagleConfig`.
    """

    head: str
    embeddings: str
    device: str
    dtype: str
    chain_steps: int = 7
    tree_steps: int = 7
    topk: int = 10
    cuda_graphs: bool = False
    gumbel_sharpness: float = EagleConfig.gumbel_sharpness
    medusa: str = ""
    _loaded: EagleHead | None = None
    _started: dict[str, EagleDrafter | MedusaDrafter] = field(default_factory=dict)

    def make(self, name: str) -> Drafter:
        """Raises `KeyError` for a name that is not in `NAMES`."""
        makers: dict[str, Callable[[], Drafter]] = {
            "trie": self._trie,
            "eagle_chain": lambda: self._eagle(name, self.chain_steps, 1, self.chain_steps),
            "eagle_tree": lambda: self._eagle(name, self.tree_steps, self.topk, TREE_NODES),
            "merged": self._merged,
            "medusa_chain": lambda: self._medusa(name, 1),
            "medusa_tree": lambda: self._medusa(name, self.topk),
        }
        return makers[name]()

    def _trie(self) -> Drafter:
        trie = NgramDrafter(TrieConfig(num_draft_tokens=TREE_NODES))
        trie.start()
        return trie

    def _merged(self) -> Drafter:
        # Its parts are started already.
        parts = [self.make("eagle_tree"), self._trie()]
        return MergedDrafter(MergedConfig(merged_nodes=TREE_NODES), parts)

    def _eagle(self, name: str, steps: int, topk: int, nodes: int) -> Drafter:
        if name not in self._started:
            # Every node that fits, however unlikely: acceptance is measured, not the use of rows.
            config = EagleConfig(
                head=self.head,
                embeddings=self.embeddings,
                num_steps=steps,
                topk=topk,
                num_draft_tokens=nodes,
                min_score=0.0,
                gumbel_sharpness=self.gumbel_sharpness,
                kv_tokens=_CACHE_TOKENS,
                dtype=self.dtype,
                device=self.device,
                cuda_graphs=self.cuda_graphs,
            )
            self._started[name] = EagleDrafter(config, self._head())
            self._started[name].start()
        return self._started[name]

    def _medusa(self, name: str, topk: int) -> Drafter:
        if name not in self._started:
            config = MedusaConfig(
                head=self.medusa,
                base_model=self.embeddings,
                topk=topk,
                num_draft_tokens=TREE_NODES,
                min_score=0.0,
                gumbel_sharpness=self.gumbel_sharpness,
                dtype=self.dtype,
                device=self.device,
            )
            self._started[name] = MedusaDrafter(config)
            self._started[name].start()
        return self._started[name]

    def _head(self) -> EagleHead:
        if self._loaded is None:
            target, dtype = TargetCheckpoint(self.embeddings), getattr(torch, self.dtype)
            head = EagleCheckpoint(head_source(self.head)).load(target=target)
            self._loaded = head.to(dtype=dtype, device=self.device)
        return self._loaded
