"""The target as a teacher of drafters: an `outrider.distillation.Teacher` over the model's engine and forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.checkpoints.causal_lm import read_configuration
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.checkpoints.tokenizer_files import TokenizerRefused
from outrider.distillation import Reader, TeacherFacts, TeacherSettings, WritingOrder, WrittenText
from outrider.heads import tokenizer_fingerprint
from outrider.settings import SettingsError
from target_service.distillation.reading import TextReader
from target_service.distillation.writing import ChatTexts, TextWriter, writing_runner
from target_service.model.loading.store import resolve
from target_service.model.support import ModelRefused, check_supported, longest_context
from target_service.text.loading import load_tokenizer


def load(settings: TeacherSettings) -> LocalTeacher:
    """A teacher for the entry point `outrider.teachers`. Fetches a known model; loads no weights yet. Raises
    `SettingsError` when there is no such model, or it cannot be served."""
    try:
        return LocalTeacher(settings)
    except (OSError, CheckpointRefused, ModelRefused, TokenizerRefused) as error:
        raise SettingsError(f"cannot learn from {settings.model}: {error}") from None


class LocalTeacher:
    """A model on this machine. The engine that writes and the model that reads are loaded when they are needed."""

    def __init__(self, settings: TeacherSettings) -> None:
        self._settings = settings
        self._folder = resolve(settings.model)
        config = read_configuration(self._folder)
        check_supported(config)
        if not getattr(config, "rope_parameters", None) or not getattr(config, "intermediate_size", None):
            raise ModelRefused(f"{config.model_type}: a head has its target's rotary positions and width of MLP")
        self._tokenizer = load_tokenizer(self._folder)
        heads = int(config.num_attention_heads)
        self.facts = TeacherFacts(
            model=settings.model,
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            max_context=longest_context(config),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
            rope=dict(config.rope_parameters),
            tokenizer_fingerprint=tokenizer_fingerprint(self._tokenizer),
        )

    def write(self, order: WritingOrder) -> Iterator[WrittenText]:
        chat = ChatTexts(self._tokenizer, sampled=order.sampled_prompts)
        runner = writing_runner(self._settings, order.sequences, order.max_length)
        return TextWriter(runner, order, chat).texts()

    def reader(self, layers: tuple[int, ...]) -> Reader:
        return TextReader(self._folder, layers, device=self._settings.device, dtype=self._settings.dtype)
