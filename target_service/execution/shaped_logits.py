"""What the device needs to shape a step's logits: a place of its table for each sequence, and masks of grammars."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.tree import TokenTree
from target_service.execution.batch import StepBatch
from target_service.execution.device_rows import ChosenRows
from target_service.grammars.following import FollowedTree, TreeMasks, masks_of
from target_service.grammars.row_masks import TreeRows
from target_service.sampling.distribution import LogitShaper
from target_service.sampling.verifier import SequenceVerifier
from tree_kernels.logit_shaping import DeviceShaper


class ShapedLogits:
    """Writes to the table of a `DeviceShaper`, as steps are launched.

    A place is overwritten when another sequence needs it, the one that was used longest ago first. All writes are in
    stream order, so steps under way read what they were launched with.
    """

    def __init__(self, shaper: DeviceShaper) -> None:
        self._shaper = shaper
        self._free = list(range(len(shaper.table)))
        # By sequence id, the one used last at the end.
        self._places: OrderedDict[int, int] = OrderedDict()

    def write(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier]) -> list[int]:
        """The place of each sequence of a step that is launched next, counted from 1; 0 where nothing shapes logits."""
        shaped = {
            item.sequence.sequence_id: verifier
            for item, verifier in zip(batch.items, verifiers, strict=True)
            if verifier.shapes_logits and item.tree is not None
        }
        if not shaped:
            return [0] * len(batch.items)
        for sequence_id in shaped:
            if sequence_id in self._places:
                self._places.move_to_end(sequence_id)
        for sequence_id, verifier in shaped.items():
            if sequence_id not in self._places:
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
                self._places[sequence_id] = place
                self._shaper.place(place, verifier.shaper.packed())
        ids = [item.sequence.sequence_id for item in batch.items]
        return [1 + self._places[sequence_id] if sequence_id in shaped else 0 for sequence_id in ids]

    def mask(
        self,
        batch: StepBatch,
        verifiers: SequenceOf[SequenceVerifier],
        under_way: SequenceOf[bool],
        chosen: ChosenRows | None,
    ) -> dict[int, OutriderError]:
        """Compute the masks of the step that was launched last, for the sequences that are still `under_way`, the
        tokens of the step before it being committed. `chosen` are the rows that the device chose, if it did. Returns by
        place in the batch why sequences cannot go on; those whose grammar is `late` have no masks."""
        errors: dict[int, OutriderError] = {}
        most = len(batch.input.token_ids) if chosen is None else chosen.most
        mask_rows = np.zeros(most, np.int32)
        trees, places = list[FollowedTree](), list[tuple[int, int, SequenceOf[int], int]]()
        for place, (item, verifier) in enumerate(zip(batch.items, verifiers, strict=True)):
            if verifier.grammar is None or item.tree is None or not under_way[place]:
                continue
            first_row = item.first_row
            tree: TokenTree | TreeRows = item.tree
            if chosen is not None and place >= batch.input.laid_out:
                first_row, tree = chosen.of(place)
            output = item.sequence.output
            trees.append(verifier.grammar.follow(tree, output, may_be_late=True))
            places.append((place, first_row, tree.parents, len(output)))
        computed, count = masks_of(trees, self._shaper.mask_room)
        rows = list[int]()
        for _, first_row, parents, _ in places:
            rows += range(first_row, first_row + len(parents))
        # Of all at once: a call of numpy takes longer than what it does with the rows of one.
        if computed:
            mask_rows[rows] = 1 + np.concatenate([masks.places for masks in computed])
        for (place, first_row, parents, generated), masks in zip(places, computed, strict=True):
            if masks.error is not None:
                errors[place] = masks.error
            shaper = verifiers[place].shaper
            if shaper.holds_back(generated):
                mask_rows[first_row : first_row + len(parents)] *= _signs(generated, parents, shaper, masks)
        self._shaper.mask(count, mask_rows)
        return errors

    def clear_masks(self) -> None:
        """The step that is launched next has no masks."""
        self._shaper.mask(0, np.zeros(0, np.int32))


def _signs(generated: int, parents: SequenceOf[int], shaper: LogitShaper, masks: TreeMasks) -> NDArray[np.int32]:
    """-1 for each row of a tree whose mask allows only tokens that are held back, else 1; see
    `DeviceShaper.mask_rows`. The output has `generated` tokens, up to the tree's root, and some are held back."""
    depths = [0] * len(parents)
    for row in range(1, len(parents)):
        depths[row] = depths[parents[row]] + 1
    words = masks.words
    alone = [shaper.allows_held_alone(words[row], generated + depth) for row, depth in enumerate(depths)]
    return np.where(alone, -1, 1).astype(np.int32)
