"""Tokenizers of the kinds that models have, trained on a few lines: each with special tokens for a chat."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The capital of France is Paris, and a banana is yellow.",
    "def add(first, second): return first + second",
    "naïve Zoë 日本語 🙂 end. 99 €",
    "user assistant system hello world again",
] * 3
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
# Added, and not marked as special: some models have control tokens of this form.
CONTROL = ("<|tool|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIZE = 420
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the tokens of a chat."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    return tokenizer


def byte_level() -> Tokenizer:
    """Byte-level BPE with merges across spaces and inside characters, as GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_control_tokens(tokenizer)


def sentence_piece() -> Tokenizer:
    """BPE over words with a mark for the space before them, and bytes for what no token covers, as Llama 2's."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainers.BpeTrainer(
        vocab_size=200, show_progress=False
    ))  # fmt: skip
    merges = models_merges(trained)
    words = [*SPECIAL[:2], *_BYTES, *trained.get_vocab()]
    vocabulary = {word: token_id for token_id, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    with_control_tokens(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=None, special_tokens=[("<s>", 0)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with a mark for the space before words, as T5's and Gemma's elders. Its vocabulary has special tokens."""
    pieces = [(text, 0.0) for text in SPECIAL] + [("<unk>", 0.0)]
    characters = sorted(set("".join(CORPUS)) - {" "} | set("<|>/_"))
    words = sorted({"▁" + word for text in CORPUS for word in text.split()})
    pieces += [("▁", -3.0)] + [(each, -6.0) for each in characters] + [(word, -4.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=len(SPECIAL), byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return with_control_tokens(tokenizer)


def word_piece() -> Tokenizer:
    """WordPiece, as BERT's."""
    words = sorted({word.lower() for text in CORPUS for word in text.split() if word.isascii() and word.isalpha()})
    letters = sorted({letter for word in words for letter in word} | set("imstartenduserthink"))
    vocabulary = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), *words, *"<>|/._,+:()[]9!?'-\n"]
    tokens = {word: token_id for token_id, word in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return with_control_tokens(tokenizer)


def models_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a BPE model, which the library shows in its file alone."""
    import json

    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in found]  # type: ignore[misc]


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentence_piece,
    "unigram": unigram,
    "wordpiece": word_piece,
}
