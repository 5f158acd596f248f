"""The interface of every drafter: its view of sequences, its results, and the list of drafters.

A new drafter is a class, which users name as `MODULE:CLASS`; one that comes with Outrider is a module with a settings
class and a factory, and has a line in `DRAFTERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from outrider import __version__
from outrider.errors import NotSupported
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import (
    DEFAULT_TENANT,
    MAX_SEQUENCES_PER_FRAME,
    CorpusInfo,
    DraftInfo,
    FeatureRequest,
    TreeLimits,
)

if TYPE_CHECKING:
    # Drafters without features run without PyTorch.
    from draft_service.drafters.hidden_states import FeatureWindow

# Upper bound of a draw's acceptance probability: a drafter's distribution is never exactly the target's.
MOST_CONFIDENT = 0.95


@dataclass(slots=True, eq=False)
class DraftSequence:
    """A sequence on the draft's side. The session owns it and appends to `token_ids`; drafters only read.

    `token_ids` is prompt plus committed tokens, never empty; its last entry is the root.
    `state` belongs to the drafter, from `Drafter.open` to `Drafter.close`. `features` is made by a `FeatureDrafter` in
    its `open` and filled by the session; see there.
    """

    sequence_id: int
    token_ids: list[int]
    prompt_length: int
    vocabulary_size: int
    tenant: str = DEFAULT_TENANT
    corpus: str = ""
    seed: int = 0
    mode: VerificationMode = VerificationMode.GREEDY
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # The target's limits; 0 means the drafter's own.
    limits: TreeLimits = field(default_factory=TreeLimits)
    # Version of the target's weights; 0 where the target reports none.
    model_version: int = 0
    # The target's stream. Weights of two targets may differ, whatever their versions.
    stream: int = 0
    state: Any = None
    features: FeatureWindow | None = None

    @property
    def root(self) -> int:
        return self.token_ids[-1]


class Drafter(Protocol):
    """Guesses continuations. Calls for sequences come from one thread at a time; each is fast, and none blocks.

    A subclass overrides `propose` and the methods that it needs; the others do nothing.

    `limits` bound a tree of this drafter, the root not counted; `max_context` is the longest sequence it follows, in
    tokens; a `vocabulary_size` of 0 means any. One call of `propose` is for at most `most_sequences`: others that await
    a tree are in the next call. `loops` name what compiles its loops, see `LoopCache.compile_beside`.
    """

    name: str
    limits: TreeLimits
    max_context: int
    vocabulary_size: int
    most_sequences: int = MAX_SEQUENCES_PER_FRAME
    loops: Sequence[str] = ()

    def start(self) -> None:
        """Load, compile and warm up, so that no request pays for it. May take seconds. Called once, first."""
        return

    def stop(self) -> None:
        """Write persistent state and end threads. Called once, last."""
        return

    def open(self, sequence: DraftSequence) -> None:  # noqa: ARG002
        """Start following a sequence. Raises `UnknownCorpus` or `NotSupported`, and then keeps nothing of it."""
        return

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:  # noqa: ARG002
        """Handle `committed`, the tokens that were just appended to `sequence.token_ids`."""
        return

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """One tree per sequence, in order. Row 0 is the root; rows stand likeliest first, parents first,
        so that a prefix of the rows is the best smaller tree; scores are conditional on the parent."""

    def close(self, sequence: DraftSequence) -> None:  # noqa: ARG002
        """Forget a sequence. Idempotent."""
        return

    def stats(self) -> Mapping[str, float]:
        """Figures for metrics, by snake_case name with unit, such as `trie_nodes`. Any thread."""
        return {}


@dataclass(frozen=True, slots=True)
class CorpusGrowth:
    """Result of `CorpusDrafter.add_corpus`: tokens inserted by the call, nodes in that trie after it."""

    tokens: int
    nodes: int


@runtime_checkable
class CorpusDrafter(Protocol):
    """A drafter that can learn documents."""

    def add_corpus(self, tenant: str, corpus: str, token_ids: Sequence[int]) -> CorpusGrowth:
        """Learn one document, or one piece of it, into shared `corpus`, or into the tenant's own trie when empty.

        Blocks until it is inserted (microseconds per token); any thread. Raises `QuotaExceeded` when not all of it
        fits, with what fitted kept, and `PermissionDenied` for a corpus that another tenant made.
        """

    def corpora(self, tenant: str) -> list[CorpusInfo]:
        """The tries that a tenant may draft from: its own, if it holds anything, and the shared corpora by name. Any
        thread."""

    def delete_corpus(self, tenant: str | None, corpus: str) -> CorpusInfo:
        """Delete a shared corpus of this owner, or of any owner if None; returns its description.

        Open sequences that named it continue without it. Any thread; waits for earlier documents to be inserted. Raises
        `UnknownCorpus`, also for a corpus of another tenant.
        """


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that reads hidden states of the target, as EAGLE heads do. Others have no `features`, or None.

    `open` gives such a sequence an empty `FeatureWindow`, to which the session appends vectors with their positions:
    vector i is that of `token_ids[i]`. The target has a token's vector once a pass has read the token, which is not the
    case for the root: a sequence of L tokens has L - 1 vectors. So

    - after `open` with L tokens the vectors of tokens 0 .. L - 2 arrive, in any number of pieces, while the target
      reads the prompt, or from its memory; the first may be missing, which costs only acceptance;
    - with an `advance` from L tokens to L + n arrive n vectors, of the old root and of the committed tokens but the
      last: positions L - 1 .. L + n - 2; where it ends a prompt, also those of the prompt that are still missing. They
      are appended before `Drafter.advance` is called.

    A tree is drafted once the vector of the token before the root has arrived; until then the tree is the root alone.
    Vectors of another width, or for tokens that cannot have one yet, are refused with `InvalidField`, which closes only
    that sequence.
    """

    features: FeatureRequest | None

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """Read the waiting vectors before the next tree, while the target still reads the prompt. Optional: `propose`
        reads them too."""


def features_of(drafter: object) -> FeatureRequest | None:
    """The hidden states of the target that the drafter reads; None for none."""
    return drafter.features if isinstance(drafter, FeatureDrafter) else None


def fingerprint_of(drafter: object) -> str:
    """The fingerprint of the tokenizer that a drafter was made for: its attribute `tokenizer_fingerprint`, or empty."""
    return str(getattr(drafter, "tokenizer_fingerprint", ""))


def info_of(drafter: Drafter, vocabulary_size: int, tokenizer_fingerprint: str = "") -> DraftInfo:
    """A drafter's description for targets: limits, features, vocabulary and tokenizer, by default the drafter's own."""
    return DraftInfo(
        drafter=drafter.name,
        vocabulary_size=vocabulary_size,
        tokenizer_fingerprint=tokenizer_fingerprint or fingerprint_of(drafter),
        limits=drafter.limits,
        max_context=drafter.max_context,
        version=__version__,
        features=features_of(drafter),
    )


def most_sequences_of(drafter: object) -> int:
    """Sequences that one call drafts for at most: a drafter's attribute `most_sequences`, or as many as a frame has."""
    return max(1, min(int(getattr(drafter, "most_sequences", MAX_SEQUENCES_PER_FRAME)), MAX_SEQUENCES_PER_FRAME))


def loops_of(drafter: object) -> tuple[str, ...]:
    """What compiles a drafter's loops: its attribute `loops`, or nothing."""
    return tuple(getattr(drafter, "loops", ()))


def device_of(drafter: object) -> str:
    """The device of a drafter, by PyTorch's name: its attribute `device`, or the CPU without one."""
    return str(getattr(drafter, "device", "cpu"))


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """How a drafter is configured and made."""

    name: str  # also of its table in the configuration file
    config: type[Any]
    create: Callable[..., Drafter]  # of its settings, and a list of its parts if it has any
    parts: Callable[[Any], Sequence[str]] = lambda _: ()  # by its settings, the listed drafters that it is made of


# Name -> module that holds SPEC. Imported on use, so that one drafter's dependencies never burden another.
DRAFTERS: Mapping[str, str] = {
    "trie": "draft_service.ngram.drafter",
    "prompt_lookup": "draft_service.drafters.prompt_lookup",
    "eagle": "draft_service.eagle.drafter",
    "medusa": "draft_service.medusa.drafter",
    "mtp": "draft_service.mtp.drafter",
    "model": "draft_service.causal_lm.drafter",
    "merged": "draft_service.drafters.merged",
    "assistant": "draft_service.assistant.drafter",
}


def drafter_spec(name: str) -> DrafterSpec:
    """The spec of a listed drafter, or of a class `MODULE:CLASS`. Raises `NotSupported` for others."""
    if ":" in name:
        named: DrafterSpec = importlib.import_module("draft_service.drafters.named_class").spec_of(name)
        return named
    if name not in DRAFTERS:
        listed = ", ".join(DRAFTERS)
        raise NotSupported(f"no drafter is called {name!r}; there are {listed}, and MODULE:CLASS of your own")
    spec: DrafterSpec = importlib.import_module(DRAFTERS[name]).SPEC
    return spec


def create(name: str, settings_of: Callable[[str], Any] | None = None) -> Drafter:
    """Make a drafter, not yet started. It and its parts have the settings that `settings_of` returns by name, or
    defaults."""
    spec = drafter_spec(name)
    settings = settings_of(name) if settings_of else spec.config()
    parts = [create(part, settings_of) for part in spec.parts(settings)]
    return spec.create(settings, parts) if parts else spec.create(settings)


def tree_limits(own: TreeLimits, asked: TreeLimits) -> TreeLimits:
    """The limits for one sequence: the smaller of both, where 0 means the drafter's own."""
    return TreeLimits(
        max_nodes=min(own.max_nodes, asked.max_nodes or own.max_nodes),
        max_depth=min(own.max_depth, asked.max_depth or own.max_depth),
    )
