"""The parts of a target's checkpoint that a head needs: sizes, token embedding, lm_head, tokenizer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from draft_service.checkpoints.facts import TargetFacts
from outrider.heads import HeadRefused, tokenizer_fingerprint
from outrider.weights import Weights

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
_LM_HEADS = ("lm_head.weight", "output.weight")


class TargetCheckpoint:
    """A target model's folder or hub id, read lazily, a tensor at a time."""

    def __init__(self, source: str | Path) -> None:
        """Raises `HeadRefused` if there is no model in safetensors."""
        self._source = str(source)
        self._weights = Weights(source)

    def facts(self, *, fingerprint: bool = False) -> TargetFacts:
        """Sizes, and with `fingerprint` that of the tokenizer, if there is one."""
        return TargetFacts.from_config(self._weights.config, self._fingerprint() if fingerprint else "")

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._weights.tensor(self.embedding_name())

    def lm_head(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding if the two are tied."""
        return self._weights.tensor(self.lm_head_name())

    def embedding_name(self) -> str:
        """Name of the weight that `embedding` reads. Raises `HeadRefused` if there is none."""
        for name in _EMBEDDINGS:
            if name in self._weights.names:
                return name
        raise HeadRefused(f"{self._source} has none of {', '.join(_EMBEDDINGS)}")

    def lm_head_name(self) -> str:
        """Name of the weight that `lm_head` reads. Raises `HeadRefused` if there is none."""
        return next((name for name in _LM_HEADS if name in self._weights.names), None) or self.embedding_name()

    def _fingerprint(self) -> str:
        """Empty without a tokenizer."""
        folder = self._weights.folder
        if not (folder / "tokenizer.json").is_file():
            return ""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        # A broken file makes transformers raise anything.
        except Exception as error:
            raise HeadRefused(f"{self._source}: tokenizer.json: {error}") from None
        return tokenizer_fingerprint(tokenizer)
