"""What a drafter learns from its target, as plain values: text in the target's own words, states and distributions.

The trainer belongs to the draft service and the model to the target's, and neither imports the other: a trainer finds
its teacher among the entry points of `TEACHER_GROUP`, as a target finds an in-process draft. The protocol stands here,
and not beside the kernels, because it is about prompts, token ids and end tokens, of which kernels have none.
PyTorch is named for types only: nothing here imports it.
"""

from __future__ import annotations

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
    """The target to learn from, named as for the target service, and where it runs."""

    model: str
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """The target's shape.

    Attributes:
        model: as it was named.
        rope: transformers' `rope_parameters`.
        max_context: tokens of prompt and output that it is served for.
    """

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
    """What text the teacher is to write.

    Texts are numbered; number n has a seed of its own and the n-th temperature in turn.

    Attributes:
        conversations: user turns to answer, before any sampled prompt; each is answered once per temperature.
        sampled_prompts: whether the target goes on with prompts of its own, without end.
        temperatures: of answers; prompts are sampled at 1.
        max_length: tokens of prompt and answer together.
        max_prompt: tokens of a sampled user turn; longer ones are dropped.
        max_answer: tokens of an answer, which ends there.
        turns: user turns of a sampled conversation at most; they have 1, 2 .. of them by their numbers.
        sequences: how many are written at once.
        seed: of everything that is sampled.
        first, stride: the numbers to write are first, first + stride ..
    """

    conversations: Sequence[tuple[str, ...]]
    sampled_prompts: bool
    temperatures: tuple[float, ...]
    max_length: int
    max_prompt: int
    max_answer: int
    turns: int
    sequences: int
    seed: int
    first: int = 0
    stride: int = 1


class WrittenText(NamedTuple):
    """One prompt with its answer.

    `token_ids` are both, the end token included where there was one; the answer begins at `prompt_length`.
    """

    number: int
    token_ids: tuple[int, ...]
    prompt_length: int
    temperature: float


class Lesson(NamedTuple):
    """What the target makes of texts.

    `states` [B, L, F * W] are the hidden states of the wanted layers, side by side. `probs` [R, V'] are the
    probabilities, at temperature 1, of the wanted tokens to follow each wanted row; they sum to less than one where
    the target says other tokens too.
    """

    states: Tensor
    probs: Tensor


class TeacherWeights(NamedTuple):
    """The target's token embedding and lm_head, [vocab_size, W] each."""

    embedding: Tensor
    lm_head: Tensor


class Reader(Protocol):
    """The target reading texts: batches in, hidden states and distributions out, without gradients."""

    def weights(self) -> TeacherWeights:
        """What a head may begin with. Not to be changed."""

    def read(self, token_ids: Tensor, rows: Tensor, wanted: Tensor | None) -> Lesson:
        """Read whole texts.

        Args:
            token_ids: [B, L] int64, padded at the end with any token.
            rows: [R] int64, places in the flattened [B * L] texts whose distributions are wanted.
            wanted: [V'] int64 token ids of the distributions; None for the whole vocabulary.
        """


class Teacher(Protocol):
    """A target that writes and reads."""

    facts: TeacherFacts

    def write(self, order: WritingOrder) -> Iterator[WrittenText]:
        """Texts in the order in which they end, without end if `sampled_prompts`. Closing the iterator frees all.

        Raises:
            SettingsError: nothing can be written so, such as a model without a chat template asked for its prompts.
        """

    def reader(self, layers: tuple[int, ...]) -> Reader:
        """For the outputs of these layers, counted as in `outrider.wire.frames.FeatureRequest`."""


def load_teacher(name: str, settings: TeacherSettings) -> Teacher:
    """The teacher that an entry point of `TEACHER_GROUP` makes, or a function named as MODULE:FUNCTION.

    Raises:
        SettingsError: there is none of this name, or the model cannot be one.
    """
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
