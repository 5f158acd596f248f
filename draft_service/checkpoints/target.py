"""The parts of a target's checkpoint that a head needs: sizes, token embedding, lm_head, tokenizer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from draft_service.checkpoints.facts import HeadShape, same_tokenizer
from outrider.heads import HeadRefused, tokenizer_fingerprint
from outrider.weights import Weights
from tree_models.weights.checkpoint import text_name

# Weights that a head may leave to its target, by the head's names, and where targets have them.
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
)
_PUBLISHED = {EMBEDDING: _EMBEDDINGS, LM_HEAD: ("lm_head.weight", "output.weight", *_EMBEDDINGS)}

# Files of which a folder with a tokenizer has one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class TargetCheckpoint:
    """A target model's folder or hub id, read lazily, a tensor at a time."""

    def __init__(self, source: str | Path) -> None:
        """Raises `HeadRefused` if there is no model in safetensors."""
        self._source = str(source)
        self._weights = Weights(source)

    @property
    def num_layers(self) -> int:
        """Decoder layers. Raises `HeadRefused` if config.json does not count them."""
        return self._size("num_hidden_layers")

    def check_fits(self, head: HeadShape) -> None:
        """Raise `HeadRefused` unless the head was made for a target like this one."""
        vocabulary, width = self._size("vocab_size"), self._size("hidden_size")
        if head.vocab_size != vocabulary:
            raise HeadRefused(f"the head has a vocabulary of {head.vocab_size}, the target one of {vocabulary}")
        if head.target_hidden_size != width:
            raise HeadRefused(
                f"the head reads hidden states of width {head.target_hidden_size}, the target's have {width}"
            )
        head.layers_of(self.num_layers)
        known = head.tokenizer_fingerprint
        if known and not same_tokenizer(known, self.fingerprint()):
            raise HeadRefused("the head was made for another tokenizer")

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._weights.tensor(self.name_of(EMBEDDING))

    def lm_head(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding if the two are tied."""
        return self._weights.tensor(self.name_of(LM_HEAD))

    def name_of(self, weight: str) -> str:
        """The published name of `EMBEDDING` or `LM_HEAD`. Raises `HeadRefused` if there is none."""
        stored = {text_name(name): name for name in self._weights.names}
        for name in _PUBLISHED[weight]:
            if name in stored:
                return stored[name]
        raise HeadRefused(f"{self._source} has none of {', '.join(_EMBEDDINGS)}")

    def _size(self, name: str) -> int:
        """An entry of config.json, or of its part about text."""
        config = self._weights.config
        text = config.get("text_config") or config
        if name not in text:
            raise HeadRefused(f"the target's config.json has no {name!r}")
        return int(text[name])

    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer; empty without one."""
        return folder_fingerprint(self._weights.folder)


def folder_fingerprint(folder: Path) -> str:
    """The fingerprint of a folder's tokenizer, as its target has it; empty without one. Raises `HeadRefused` where it
    cannot be read."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return ""
    from outrider.checkpoints.tokenizer_files import TokenizerRefused, read_tokenizer

    try:
        return tokenizer_fingerprint(read_tokenizer(folder))
    except TokenizerRefused as error:
        raise HeadRefused(f"{folder}: {error}") from None
