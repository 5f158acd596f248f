"""Masks that an output of a form has computed, for all of its outputs: states that allow the same text share one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.grammars.json_states import JsonState, JsonStates
from target_service.grammars.row_masks import TreeRows

Ints = NDArray[np.int32]
# Of all forms of a model, and masks of one form. Chosen: a form of seven fields has some 300 states that come again and
# again, with 16 kB each of 128,000 tokens; a form whose states do not come again takes no more from others.
_MOST_BYTES = 128 << 20
_MOST_OF_FORM = 1024
# Tokens behind states of one form whose masks are known. Chosen: some 6 MB.
_MOST_BELOW = 32768


class KnownMask:
    """The mask of a state.

    Attributes:
        state: that state.
        place: where in the store it is; -1 for rows that no walk reaches.
        few: the tokens that it allows, none where they are many.
        below: the masks behind tokens, as far as they were asked for.
    """

    __slots__ = ("below", "few", "place", "state")

    def __init__(self, state: JsonState, place: int, few: tuple[int, ...]) -> None:
        self.state, self.place, self.few = state, place, few
        self.below: dict[int, KnownMask] = {}


# Of rows that a grammar forbids, and of those behind a text's end.
FORBIDDEN = KnownMask(JsonState(), -1, ())


class MaskStore:
    """The known masks of one model's forms. What forms used longest ago is forgotten for others. Used by one thread."""

    def __init__(self, words: int) -> None:
        """`words` are those of a mask."""
        # Memory that was not written to takes none.
        self.masks = np.empty((max(_MOST_OF_FORM, _MOST_BYTES // (4 * words)), words), np.int32)
        self._free = list(range(len(self.masks)))
        # The one that was used last at the end.
        self._forms: OrderedDict[int, FormMasks] = OrderedDict()

    def place(self, form: FormMasks) -> int:
        """A free place, for a form that gives back its own by `free` when it is told to forget them."""
        while not self._free:
            _, longest_ago = self._forms.popitem(last=False)
            longest_ago.forget()
        self.use(form)
        return self._free.pop()

    def free(self, places: Sequence[int]) -> None:
        """Give places back."""
        self._free += places

    def use(self, form: FormMasks) -> None:
        """A form is used now."""
        self._forms[id(form)] = form
        self._forms.move_to_end(id(form))


class KnownRows(NamedTuple):
    """The rows of a tree.

    Attributes:
        masks: those that are known.
        states: of the rows; none where every mask is known.
    """

    masks: list[KnownMask | None]
    states: list[JsonState | None]


class FormMasks:
    """The known masks of one form.

    A mask depends on the state alone, but where text is forced: that is cut into tokens with the last one in front. So
    there the mask is known by both. What an output finds here is thus what its own matcher would compute.
    """

    def __init__(self, states: JsonStates, store: MaskStore, texts: Sequence[bytes], ends: frozenset[int]) -> None:
        """`texts` are the bytes of every token; behind the tokens `ends` nothing follows."""
        self.states, self.store = states, store
        self._texts, self._ends = texts, ends
        # By state, and where text is forced with the last token.
        self._known: dict[JsonState | tuple[JsonState, int], KnownMask] = {}
        self._count_below = 0
        # How often all were forgotten: a mask of before must not be used.
        self.forgotten = 0

    def forget(self) -> None:
        """Forget all masks."""
        self.store.free([known.place for known in self._known.values()])
        self._known.clear()
        self._count_below = 0
        self.forgotten += 1

    def find(self, state: JsonState | None, last: int) -> KnownMask | None:
        """The mask of a state behind a token, -1 for none; None where it is not known."""
        if state is None:
            return None
        return self._known.get(state) or self._known.get((state, last))

    def behind(self, state: JsonState | None, token: int) -> JsonState | None:
        """The state behind a token."""
        return None if token in self._ends else self.states.behind(state, self._texts[token])

    def rows(self, tree: TreeRows, root: KnownMask | None, state: JsonState | None) -> KnownRows:
        """The masks of a tree's rows, given those of its root."""
        self.store.use(self)
        masks: list[KnownMask | None] = [root]
        if root is not None:
            for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
                above = masks[parent]
                if above is None:
                    break
                masks.append(above.below.get(token) or self.below(above, token))
            if len(masks) == len(tree.token_ids) and None not in masks:
                return KnownRows(masks, [])
        masks, states = [root], [state]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            above = masks[parent]
            states.append(self.behind(states[parent], token))
            masks.append(self.find(states[-1], token) if above is None else self.below(above, token))
        return KnownRows(masks, states)

    def words(self, masks: Sequence[KnownMask | None]) -> dict[int, Ints]:
        """By row those of its masks that are known."""
        known = {row: mask.place for row, mask in enumerate(masks) if mask is not None and mask is not FORBIDDEN}
        return {row: self.store.masks[place] for row, place in known.items()}

    def below(self, above: KnownMask, token: int) -> KnownMask | None:
        """The mask behind a token that follows a state; None where it is not known."""
        found = above.below.get(token)
        if found is not None:
            return found
        if above is FORBIDDEN or token in self._ends or not self._allows(above, token):
            found = FORBIDDEN
        else:
            found = self.find(self.behind(above.state, token), token)
        if found is not None and above is not FORBIDDEN:
            if self._count_below >= _MOST_BELOW:
                self._count_below = 0
                for known in self._known.values():
                    known.below.clear()
            self._count_below += 1
            above.below[token] = found
        return found

    def _allows(self, above: KnownMask, token: int) -> bool:
        return bool(self.store.masks[above.place, token >> 5] >> (token & 31) & 1)

    def add(self, state: JsonState | None, last: int | None, words: Ints, few: tuple[int, ...]) -> None:
        """Keep the mask of a state, behind the `last` token if it depends on it. `words` are copied."""
        if state is None or not state.is_short():
            return
        key = state if last is None else (state, last)
        if key in self._known:
            return
        if len(self._known) >= _MOST_OF_FORM:
            self.forget()
        place = self.store.place(self)
        self.store.masks[place] = words
        self._known[key] = KnownMask(state, place, few)
