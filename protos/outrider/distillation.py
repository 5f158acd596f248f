"""What a drafter learns from its target, as plain values: text that the target wrote, hidden states and distributions.

The trainer is in the draft service and the model in the target service, and neither imports the other: a trainer finds
its teacher through the entry points of `TEACHER_GROUP`. PyTorch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.extensions import find_extension
from outrider.settings import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

TEACHER_GROUP = "outrider.teachers"


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The target to learn from, by the target service's names, and its device and dtype."""

    model: str
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """The target's shape. `model` is the name it was loaded by, `rope` transformers' `rope_parameters`, and
    `max_context` counts prompt and output together."""

    model: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True)
class WritingOrder:
    """The text that the teacher shall write, by number: each has its own seed, and temperatures are taken in turn."""

    # User turns to answer, before any sampled prompt; each is answered once per temperature.
    conversations: Sequence[tuple[str, ...]]
    sampled_prompts: bool  # whether the target then continues with prompts that it samples itself, without end
    temperatures: tuple[float, ...]  # of answers; prompts are sampled at 1
    max_length: int  # tokens of prompt and answer together
    max_prompt: int  # tokens of a sampled user turn; longer ones are dropped
    max_answer: int  # most tokens of an answer
    turns: int  # most user turns of a sampled conversation; numbers take 1, 2 .. of them in turn
    sequences: int  # texts written at once
    seed: int  # of all sampling
    first: int = 0
    stride: int = 1  # the numbers to write are first, first + stride ..
    seconds: float = math.inf  # after which writing ends; what is not whole by then is dropped


class WrittenText(NamedTuple):
    """One prompt with its answer, which begins at `prompt_length`. `token_ids` are both, with the end token if any."""

    number: int
    token_ids: tuple[int, ...]
    prompt_length: int
    temperature: float


class Lesson(NamedTuple):
    """The target's outputs for texts. `states` [B, L, F * W] are the hidden states of the wanted layers, concatenated.
    `probs` [R, V'] are the probabilities, at temperature 1, of the wanted tokens to follow each wanted row; over part
    of the vocabulary they sum to less than 1."""

    states: Tensor
    probs: Tensor


class TeacherWeights(NamedTuple):
    """The target's token embedding and lm_head, [vocab_size, W] each."""

    embedding: Tensor
    lm_head: Tensor


class Reader(Protocol):
    """Runs the target over texts: batches in, hidden states and distributions out, without gradients."""

    def weights(self) -> TeacherWeights:
        """Weights that a head may start from. Must not be changed."""

    def read(self, token_ids: Tensor, rows: Tensor, wanted: Tensor | None) -> Lesson:
        """Read whole texts.

        Args:
            token_ids: [B, L] int64, padded at the end with any token.
            rows: [R] int64, indices into the flattened [B * L] texts whose distributions are wanted.
            wanted: [V'] int64 token ids of the distributions; None for the whole vocabulary.
        """


class Teacher(Protocol):
    """A target that writes and reads."""

    facts: TeacherFacts

    def write(self, order: WritingOrder) -> Iterator[WrittenText]:
        """Texts in the order in which they are completed, without end if `sampled_prompts`. Closing the iterator frees
        its memory. Raises `SettingsError` for an order that cannot be fulfilled, such as sampled prompts of a model
        without a chat template."""

    def reader(self, layers: tuple[int, ...]) -> Reader:
        """A reader of the outputs of these layers, counted as in `outrider.wire.frames.FeatureRequest`."""


def load_teacher(name: str, settings: TeacherSettings) -> Teacher:
    """The teacher that an entry point of `TEACHER_GROUP`, or a function MODULE:FUNCTION, makes. Raises `SettingsError`
    when there is none of this name, or the model cannot be a teacher."""
    load: Callable[[TeacherSettings], Teacher] | None
    if ":" in name:
        try:
            load = EntryPoint(name, name, TEACHER_GROUP).load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"--teacher {name}: {error}") from None
    else:
        load = find_extension(TEACHER_GROUP, name)
    if load is None:
        raise SettingsError(f"no teacher {name!r} is installed in this environment")
    return load(settings)
