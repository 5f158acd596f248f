"""The target's own token after each row, and which drafted rows agree with it."""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.sampling import TokenLogprobs
from outrider.tree import TokenTree
from target_service.core.sequence import DevicePass, SequenceRequest
from target_service.grammars.following import FollowedGrammar
from target_service.sampling.distribution import LogitShaper, logprobs_of
from tree_kernels.verification import NOT_FINITE, Mode, RowsToVerify, Walk
from tree_kernels.verification.torch_backend import walk_of
from tree_kernels.verification.typical import path_to

# A draft gets the request's seed, and must not be able to derive rejection's coins from it: a secret per process.
_COIN_SECRET = secrets.token_bytes(16)


class Verified(NamedTuple):
    """The outcome for one tree: the walk, and the log-probabilities of its tokens if the request has them returned. A
    named tuple, since a step makes one for every sequence.

    `following` are the tokens of further passes of the same launch, for sequences without drafts. Where the device
    chose the rows, they are all tokens after the first, and there is a `DevicePass` for each pass.
    """

    walk: Walk
    logprobs: tuple[TokenLogprobs, ...]
    following: tuple[int, ...] = ()
    device_passes: tuple[DevicePass, ...] = ()
    # For each accepted row, of all passes, whether the model would have drawn another token. Empty in lossless modes.
    lossy: tuple[bool, ...] = ()
    # Why the sequence cannot go on: nothing of this outcome is committed then.
    error: OutriderError | None = None

    @property
    def accepted(self) -> int:
        """Drafted tokens among those that were generated."""
        return len(self.walk.accepted_rows) + sum([one.accepted for one in self.device_passes])

    def tokens(self, tree: TokenTree) -> list[int]:
        """All tokens that it brought: accepted rows of the tree, and what the target generated itself."""
        return [*[tree.token_ids[row] for row in self.walk.accepted_rows], self.walk.next_token, *self.following]

    @property
    def finite(self) -> bool:
        """Whether every token may be generated; else the logits before one of them are no finite numbers."""
        return self.walk.finite and all(token < NOT_FINITE for token in self.following)

    @property
    def passes(self) -> int:
        """Forward passes that generated the tokens."""
        return len(self.device_passes) or 1 + len(self.following)


class SequenceVerifier:
    """Verifies one sequence's trees by its mode and sampling parameters.

    The plain form: rows are sampled one by one, as the walk comes to them, so that only accepted rows and the last one
    are. Batched device kernels must choose the same tokens.
    """

    def __init__(self, request: SequenceRequest, end_token_ids: tuple[int, ...]) -> None:
        self._seed = request.seed
        sampling = request.sampling
        self._mode = Mode[request.mode.name]
        self.lossy = request.lossy
        self._typical = request.typical
        self._distribution = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.logprobs = sampling.logprobs
        self.shapes_logits = sampling.shapes_logits
        self.shaper = LogitShaper(sampling, request.token_ids, end_token_ids)
        self.prompt_length = len(request.token_ids)
        # Of requests with structured output: compiled before the first step.
        self._has_form = sampling.structured_output is not None
        self.grammar: FollowedGrammar | None = None
        digest = hashlib.blake2b(request.seed.to_bytes(8, "little"), key=_COIN_SECRET, digest_size=8).digest()
        self._coin_seed = int.from_bytes(digest, "little")

    def rows_to_verify(self, tree: TokenTree, first_row: int, length: int, step: int) -> RowsToVerify:
        """What `DeviceVerifier` needs for the same outcome as `verify`, given logits that are shaped: of the
        tree with its root at `first_row` of the step, and `length` tokens of the sequence, the root included."""
        rejects = self._mode is Mode.REJECTION
        seed, position = (self._coin_seed, step) if rejects else (self._seed, length)
        count, sampled = len(tree.token_ids), self._distribution
        rows = RowsToVerify(first_row, count, self._mode, seed, position, *sampled, tree.is_chain)
        if self._mode is not Mode.TYPICAL:
            return rows
        rule = self._typical
        return rows._replace(begins=self.prompt_length, epsilon=rule.epsilon, delta=rule.delta)

    @property
    def masked(self) -> bool:
        """Whether a grammar masks the rows of its trees."""
        assert self.grammar is not None or not self._has_form, "a form has to be compiled before a step"
        return self.grammar is not None

    def verify(self, tree: TokenTree, logits: Tensor, output: list[int], step: int) -> Verified:
        """Walk the tree, by logits [rows, vocabulary] of its rows. `output` are the tokens committed so far, without
        the prompt; each `step` of the sequence has a new stream of coins."""
        asked = self.rows_to_verify(tree, 0, self.prompt_length + len(output), step)
        drafts = {row: (drawn.token_ids, drawn.weights) for row, drawn in tree.distributions.items()}
        masks = self.grammar.masks(tree, output) if self.masked and self.grammar is not None else None

        def logits_of(row: int) -> Tensor:
            path = [tree.token_ids[node] for node in path_to(tree.parents, row)]
            return self.shaper.shaped(logits[row], output + path, None if masks is None else masks.words[row])

        walk, lossy = walk_of(asked, tree.parents, tree.token_ids, drafts, logits_of)
        error = None if masks is None else masks.error
        if self.logprobs is None or not walk.finite or error is not None:
            return Verified(walk, (), lossy=lossy, error=error)
        rows, tokens = emitted_tokens(tree, walk)
        found = logprobs_of(logits[rows], torch.tensor(tokens, device=logits.device), [self.logprobs] * len(rows))
        return Verified(walk, tuple(found), lossy=lossy)


def emitted_tokens(tree: TokenTree, walk: Walk) -> tuple[list[int], list[int]]:
    """The rows of a walk, root first, and the token after each."""
    return [0, *walk.accepted_rows], [*(tree.token_ids[row] for row in walk.accepted_rows), walk.next_token]
