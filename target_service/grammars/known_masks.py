"""Masks that an output of a form has computed, for all of its outputs: states that allow the same text share one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.grammars.json_states import JsonState, JsonStates, plain_length
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
        by_length: of a state within a string of which characters are counted, those behind so many.
    """

    __slots__ = ("below", "by_length", "few", "place", "state")

    def __init__(self, state: JsonState, place: int, few: tuple[int, ...]) -> None:
        self.state, self.place, self.few = state, place, few
        self.below: dict[int, KnownMask] = {}
        self.by_length: dict[int, KnownMask] | None = {} if state.counts_characters() else None


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
        store: where masks are.
        masks: those that are known.
        states: of the rows; none where every mask is known.
    """

    store: MaskStore
    masks: list[KnownMask | None]
    states: list[JsonState | None]

    def few(self) -> list[tuple[int, ...]]:
        """The tokens that may follow each row; none where they are many, or no walk reaches it. Every mask is known."""
        return [mask.few for mask in self.masks if mask is not None]

    def words(self) -> dict[int, Ints]:
        """By row those of its masks that are known."""
        known = {row: mask.place for row, mask in enumerate(self.masks) if mask is not None and mask is not FORBIDDEN}
        return {row: self.store.masks[place] for row, place in known.items()}


def write_known(trees: Sequence[KnownRows], room: Ints) -> tuple[Ints, int]:
    """Write the masks of trees of which all are known to `room` [1 + rows, words], from its second place on. Returns
    the places of the rows, 0 for those that no walk reaches, and the first place that is free then."""
    if not trees:
        return np.zeros(0, np.int32), 1
    # By place in the store.
    written, places = {FORBIDDEN.place: 0}, list[int]()
    for tree in trees:
        places += [written.setdefault(mask.place, len(written)) for mask in tree.masks if mask is not None]
    # The usual mode would write to memory of its own first.
    np.take(trees[0].store.masks, list(written)[1:], axis=0, out=room[1 : len(written)], mode="clip")
    return np.array(places, np.int32), len(written)


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
        # By token.
        self._lengths: dict[int, int | None] = {}
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
                return KnownRows(self.store, masks, [])
        masks, states = [root], [state]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            above = masks[parent]
            found = None if above is None else self.below(above, token)
            if found is None:
                states.append(self.behind(states[parent], token))
                masks.append(self.find(states[-1], token) if above is None else None)
            else:
                states.append(None if found is FORBIDDEN else found.state)
                masks.append(found)
        return KnownRows(self.store, masks, states)

    def below(self, above: KnownMask, token: int) -> KnownMask | None:
        """The mask behind a token that follows a state; None where it is not known."""
        found = above.below.get(token)
        if found is not None:
            return found
        if above is FORBIDDEN or token in self._ends or not self._allows(above, token):
            found = FORBIDDEN
        else:
            found = self._found_below(above, token)
        if found is not None and above is not FORBIDDEN:
            if self._count_below >= _MOST_BELOW:
                self._count_below = 0
                for known in self._known.values():
                    known.below.clear()
            self._count_below += 1
            above.below[token] = found
        return found

    def _found_below(self, above: KnownMask, token: int) -> KnownMask | None:
        # Each token of a string would be a text of its own.
        length = None if above.by_length is None else self._length_of(token)
        if length is None or above.by_length is None:
            return self.find(self.behind(above.state, token), token)
        found = above.by_length.get(length)
        if found is None:
            found = self.find(self.behind(above.state, token), token)
            if found is not None:
                above.by_length[length] = found
        return found

    def _length_of(self, token: int) -> int | None:
        """The characters of a token whose text a string has as it stands; None for another one."""
        if token not in self._lengths:
            self._lengths[token] = plain_length(self._texts[token])
        return self._lengths[token]

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


class OutputMasks:
    """Where one output stands among the known masks of its form."""

    def __init__(self, form: FormMasks) -> None:
        self._form, self._forgotten = form, form.forgotten
        self._state: JsonState | None = JsonState()
        # The mask of the state, if it is known, and the token before it.
        self._mask: KnownMask | None = None
        self._last = -1

    def read(self, tokens: Sequence[int]) -> None:
        """The output goes on by these tokens."""
        form = self._form
        if self._forgotten != form.forgotten:
            self._forgotten, self._mask = form.forgotten, None
        for token in tokens:
            found = None if self._mask is None else form.below(self._mask, token)
            if found is None or found is FORBIDDEN:
                self._state, self._mask = form.behind(self._state, token), None
            else:
                self._state, self._mask = found.state, found
            self._last = token
        if self._mask is None:
            self._mask = form.find(self._state, self._last)

    def rows(self, tree: TreeRows) -> KnownRows:
        """The masks of a tree's rows, whose root is the last token that was read."""
        return self._form.rows(tree, self._mask, self._state)

    def add(
        self,
        rows: KnownRows,
        tree: TreeRows,
        computed: Mapping[int, bool],
        room: Ints,
        places: Ints,
        few: Sequence[tuple[int, ...]],
    ) -> None:
        """Keep masks of a tree that `rows` returned: those that were `computed`, by row whether it depends on the token
        before too. The mask of each row is at its place in `room`, and allows `few` tokens or many."""
        for row, depends_on_last in computed.items():
            last = tree.token_ids[row] if row else self._last
            self._form.add(rows.states[row], last if depends_on_last else None, room[places[row]], few[row])
