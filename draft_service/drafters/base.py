"""The interface of every drafter: what it is given of sequences, what it returns, and where drafters are listed.

A new drafter is a class, which its users name as `MODULE:CLASS`; one that comes with Outrider is a module with a
settings class and a factory, and has a line in `DRAFTERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from outrider import __version__
from outrider.errors import NotSupported
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import DEFAULT_TENANT, CorpusInfo, DraftInfo, FeatureRequest, TreeLimits

if TYPE_CHECKING:
    # Drafters without features run without PyTorch.
    from draft_service.drafters.hidden_states import FeatureWindow


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
    # What the target asked for; zero leaves it to the drafter.
    limits: TreeLimits = field(default_factory=TreeLimits)
    # Of the target's weights that say what comes next; 0 from a target that does not say.
    model_version: int = 0
    state: Any = None
    features: FeatureWindow | None = None

    @property
    def root(self) -> int:
        return self.token_ids[-1]


class Drafter(Protocol):
    """Guesses continuations. Calls for sequences come from one thread at a time; each is fast, and none blocks.

    What inherits this need not say what it has nothing to do for.

    `limits` are the most a tree of this drafter has, the root not counted; `max_context` is the longest sequence
    it follows, in tokens; a `vocabulary_size` of 0 means any.
    """

    name: str
    limits: TreeLimits
    max_context: int
    vocabulary_size: int

    def start(self) -> None:
        """Load, compile and warm up, so that no request pays for it. May take seconds. Called once, first."""
        return

    def stop(self) -> None:
        """Write what must survive and end threads. Called once, last."""
        return

    def open(self, sequence: DraftSequence) -> None:  # noqa: ARG002
        """Start following a sequence. Raises `UnknownCorpus`, or `NotSupported`, and then holds nothing of it."""
        return

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:  # noqa: ARG002
        """Take note of `committed`, the tokens that were just appended to `sequence.token_ids`."""
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
    """What `CorpusDrafter.add_corpus` did: tokens learnt by the call, nodes in that trie after it."""

    tokens: int
    nodes: int


@runtime_checkable
class CorpusDrafter(Protocol):
    """A drafter that can be taught documents."""

    def add_corpus(self, tenant: str, corpus: str, token_ids: Sequence[int]) -> CorpusGrowth:
        """Learn one document, or one piece of it, into shared `corpus`, or into the tenant's own trie when empty.

        Blocks until it is learnt (microseconds per token); any thread. Raises `QuotaExceeded` when not all of it
        fits, with what fitted kept, and `PermissionDenied` for a corpus that another tenant made.
        """

    def corpora(self, tenant: str) -> list[CorpusInfo]:
        """What a tenant may draft from: its own trie, if anything was learnt for it, and the shared corpora by name.
        Any thread."""

    def delete_corpus(self, tenant: str | None, corpus: str) -> CorpusInfo:
        """Forget a shared corpus of this owner, or of whichever owner when None; returns what it was.

        Open sequences that named it go on without it. Any thread; waits for what is being learnt. Raises
        `UnknownCorpus`, also for one that another tenant owns.
        """


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that reads hidden states of the target, as EAGLE heads do. Others have no `features`, or None.

    `open` gives such a sequence a `FeatureWindow`, empty. Whoever holds the session then appends vectors and says at
    which position: vector i belongs to `token_ids[i]`. The target knows the vector of a token once a pass has read that
    token, which the root's has not: a sequence of L tokens has L - 1 vectors. So

    - after `open` with L tokens come the vectors of tokens 0 .. L - 2, in as many pieces as the target likes, while it
      reads the prompt or from what it kept; they may begin late, and those that are missing cost acceptance only;
    - with an `advance` that takes a sequence from L tokens to L + n come n vectors, of the old root and of the
      committed tokens but the last: positions L - 1 .. L + n - 2; where it ends a prompt, also those of the prompt that
      had not come yet. They are appended before `Drafter.advance` is called.

    A tree is drafted when the vector of the token before the root is there, the last that can be; until then the tree
    is the root alone. Vectors of another width, or for tokens that cannot have one yet, are refused with
    `InvalidField`, which closes that sequence and nothing else.
    """

    features: FeatureRequest | None

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """Read the vectors that wait, ahead of the next tree: for a prompt's, which arrive while the target still reads
        the rest of it. Never needed: `propose` reads what waits."""


def features_of(drafter: object) -> FeatureRequest | None:
    """Which of the target's hidden states the drafter reads; None for none."""
    return drafter.features if isinstance(drafter, FeatureDrafter) else None


def info_of(drafter: Drafter, vocabulary_size: int, tokenizer_fingerprint: str = "") -> DraftInfo:
    """What a target learns of a drafter: its limits and features, and the vocabulary and tokenizer that it serves."""
    return DraftInfo(
        drafter=drafter.name,
        vocabulary_size=vocabulary_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        limits=drafter.limits,
        max_context=drafter.max_context,
        version=__version__,
        features=features_of(drafter),
    )


# Makes another listed drafter, with its own settings, for one that is made of others.
MakePart = Callable[[str], Drafter]


def device_of(drafter: object) -> str:
    """Where a drafter computes, as PyTorch names it: its attribute `device`, and the CPU for one that has none."""
    return str(getattr(drafter, "device", "cpu"))


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """How a drafter is configured and made.

    `name` is also that of its table in the configuration file; `parts` tells from its settings which listed drafters it
    is made of.
    """

    name: str
    config: type[Any]
    create: Callable[[Any, MakePart], Drafter]
    parts: Callable[[Any], Sequence[str]] = lambda _: ()


# Name -> module that holds SPEC. Imported on use, so that one drafter's dependencies never burden another.
DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "trie": "draft_service.ngram.drafter",
        "prompt_lookup": "draft_service.drafters.prompt_lookup",
        "random": "draft_service.drafters.random_trees",
        "eagle": "draft_service.eagle.drafter",
        "medusa": "draft_service.medusa.drafter",
        "mtp": "draft_service.mtp.drafter",
        "model": "draft_service.causal_lm.drafter",
        "merged": "draft_service.drafters.merged",
    }
)

# For all other names, `MODULE:CLASS`; imported on use as well.
_NAMED_CLASSES = "draft_service.drafters.named_class"


def drafter_spec(name: str) -> DrafterSpec:
    """The spec of a listed drafter, or of a class that is named `MODULE:CLASS`. Raises `NotSupported` for others."""
    if ":" in name:
        named: DrafterSpec = importlib.import_module(_NAMED_CLASSES).spec_of(name)
        return named
    module = DRAFTERS.get(name)
    if module is None:
        listed = ", ".join(DRAFTERS)
        raise NotSupported(f"no drafter is called {name!r}; there are {listed}, and MODULE:CLASS of your own")
    spec: DrafterSpec = importlib.import_module(module).SPEC
    return spec


def create(name: str, config: Any = None, settings_of: Callable[[str], Any] | None = None) -> Drafter:
    """Make a drafter, not yet started. `config` of None takes its defaults.

    `settings_of` gives the settings of the drafters that this one is made of, by name; their defaults without it.
    """
    spec = drafter_spec(name)
    own = spec.config() if config is None else config
    return spec.create(own, lambda part: create(part, settings_of(part) if settings_of else None, settings_of))


def tree_limits(own: TreeLimits, asked: TreeLimits) -> TreeLimits:
    """The limits in force for one sequence: the smaller of both, where zero asks for the drafter's own."""
    return TreeLimits(
        max_nodes=min(own.max_nodes, asked.max_nodes or own.max_nodes),
        max_depth=min(own.max_depth, asked.max_depth or own.max_depth),
    )
