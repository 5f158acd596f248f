"""Grammars of forms: what is compiled and kept, which tokens follow rows of a tree, and vocabularies of all kinds."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray
from structured_forms import VOCABULARY, trained_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from waits import HUNG_SECONDS

from outrider.errors import InvalidField, NotSupported
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.grammars import compiling, following, row_masks, vocabulary
from target_service.grammars.compiling import GRAMMARS_PER_TENANT, Grammars
from target_service.grammars.expected_text import ExpectedNodes
from target_service.grammars.following import FollowedGrammar, FollowedTree, TreeMasks, masks_of
from target_service.grammars.row_masks import TreeRows
from target_service.grammars.vocabulary import TokenWords, grammar_tokenizer
from target_service.text.tokenizer import ModelTokenizer

END = 2


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def test_the_first_form_finds_what_a_start_prepared() -> None:
    tokenizer = trained_tokenizer()
    grammar_tokenizer.cache_clear()
    vocabulary.warm_up(tokenizer, VOCABULARY, (END,))
    made = grammar_tokenizer.cache_info().misses
    Grammars(tokenizer, VOCABULARY, (END,)).check(StructuredOutput(regex="a+"), "")
    assert grammar_tokenizer.cache_info().misses == made == 1


def test_a_model_without_forms_starts() -> None:
    # No token ends an output.
    vocabulary.warm_up(trained_tokenizer(), VOCABULARY, ())


def tokens_of(text: str) -> list[int]:
    return list(trained_tokenizer().encode(text))


def allowed(masks: TreeMasks, row: int) -> set[int]:
    bits = np.unpackbits(masks.words[row].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def masked(trees: Sequence[FollowedTree]) -> list[TreeMasks]:
    # Every row of them may need a mask; what lies there before is of an earlier step.
    room = np.full((1 + 9 * len(trees), -(-VOCABULARY // 32)), -1, np.int32)
    masks, count = masks_of(trees, room)
    assert count <= len(room)
    return masks


def chain(root: int, tokens: Sequence[int]) -> TokenTree:
    rows = range(len(tokens) + 1)
    return TokenTree((root, *tokens), tuple(max(row - 1, 0) for row in rows), (1.0,) * len(rows))


def expected_texts(followed: FollowedGrammar, tree: TreeRows, output: Sequence[int], masks: int = 9) -> set[str]:
    masked([followed.follow(tree, output)])
    found, _ = followed.expected(100, masks)
    paths = list[list[int]]()
    for token, parent, score in zip(found.token_ids, found.parents, found.scores, strict=True):
        assert 0 < score <= 1 and parent < len(paths)
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return {str(trained_tokenizer().decode(path)) for path in paths}


class CountedMatcher:
    """Counts calls of a matcher and of its copies: copies, masks, and tokens that are read."""

    def __init__(self, matcher: LLMatcher, calls: Counter[str]) -> None:
        self._matcher, self._calls = matcher, calls
        self.is_error = matcher.is_error

    def deep_copy(self) -> CountedMatcher:
        self._calls["deep_copy"] += 1
        return CountedMatcher(self._matcher.deep_copy(), self._calls)

    def consume_tokens(self, tokens: list[int]) -> bool:
        self._calls["consume"] += len(tokens)
        return self._matcher.consume_tokens(tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._calls["consume"] += len(tokens)
        return self._matcher.try_consume_tokens(tokens)

    def compute_ff_bytes(self) -> bytes:
        return self._matcher.compute_ff_bytes()

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self._calls["mask"] += 1
        self._matcher.unsafe_compute_mask_ptr(address, size)


class TestExpectedText:
    FORM = StructuredOutput(regex="(yes|no)[0-9a-z]{30}#[1-3]!")

    def test_forced_text_and_what_few_tokens_begin(self, grammars: Grammars) -> None:
        followed = grammars.followed(self.FORM, "t")
        texts = expected_texts(followed, TreeRows((9,), (0,)), ())
        assert {"yes", "no"} <= texts
        # What comes behind may be anything of thirty characters.
        assert not any(
            text not in ("yes", "no") and not ("yes".startswith(text) or "no".startswith(text)) for text in texts
        )
        free = [*tokens_of("no"), *tokens_of("abc")]
        assert expected_texts(followed, TreeRows((free[-1],), (0,)), free) == set()
        # Nothing of it has moved the output's own grammar.
        assert followed.masks(chain(free[-1], []), free).error is None

    def test_behind_the_rows_of_a_tree(self, grammars: Grammars) -> None:
        followed = grammars.followed(self.FORM, "t")
        output = [*tokens_of("no"), *tokens_of("x" * 29)]
        x, sign, other = tokens_of("x")[0], tokens_of("#")[0], tokens_of("-")[0]
        # Two equal siblings, as a device may lay out, and a row that is forbidden.
        tree = TreeRows((output[-1], x, x, other, sign), (0, 0, 0, 0, 1))
        texts = expected_texts(followed, tree, output)
        assert {"x#1", "x#2", "x#3"} <= texts
        assert {"x#1!", "x#2!", "x#3!"} <= texts
        (masks,) = masked([followed.follow(tree, output)])
        assert allowed(masks, 1) == allowed(masks, 2) == {sign} and allowed(masks, 3) == {END}

    def test_it_is_found_once_for_all_outputs_of_a_form(self) -> None:
        own, form = Grammars(trained_tokenizer(), VOCABULARY, (END,)), self.FORM
        known: set[str] = set()
        for tenant, letter, masks in (("t", "x", 9), ("t", "y", 0), ("other", "x", 0)):
            followed, output, sign = own.followed(form, tenant), tokens_of("yes"), tokens_of("#")[0]
            # The output's own rows, up to where few tokens may come.
            for token in tokens_of(letter * 30):
                expected_texts(followed, TreeRows((output[-1],), (0,)), output, masks=0)
                output.append(token)
            texts = expected_texts(followed, TreeRows((output[-1], sign), (0, 0)), output, masks)
            known = known or texts
            assert {"#1!", "#2!", "#3!"} <= known
            # Of another tenant's nothing is known.
            assert texts == (known if tenant == "t" else {"#"})

    def test_digits_that_were_chosen_share_what_follows(self) -> None:
        """Each would be looked for anew otherwise, and every output has others."""
        own = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        form = StructuredOutput(regex="number=[0-9]{3}; the end")
        for digits, masks in (("345", 24), ("987", 0)):
            followed, output = own.followed(form, "t"), list[int]()
            for token in tokens_of(f"number={digits}"):
                expected_texts(followed, TreeRows((9,), (0,)), output, masks)
                output.append(token)
            texts = expected_texts(followed, TreeRows((9,), (0,)), output, masks)
            assert "; the end" in texts

    def test_outputs_share_what_is_expected_behind_them(self) -> None:
        """Forced text is made ready once, also where rows of it are drafted already."""
        own, found = Grammars(trained_tokenizer(), VOCABULARY, (END,)), list[ExpectedNodes]()
        whole = tokens_of("yes, no and null")
        for rows in (1, 3):
            followed = own.followed(StructuredOutput(choices=("yes, no and null",)), "t")
            masked([followed.follow(TreeRows((9, *whole[: rows - 1]), (0, *range(rows - 1))), ())])
            found.append(followed.expected(100, 9)[0])
        assert found[0] is found[1] and found[0].token_ids == whole
        assert found[0].packed() is found[1].packed()

    def test_what_was_chosen_before_is_told_apart(self) -> None:
        own = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        form = StructuredOutput(grammar='start: "a" /[0-9a-z]{2}/ "=left" | "b" /[0-9a-z]{2}/ "=right"')
        found = dict[str, set[str]]()
        for letter in "abab":
            followed, output = own.followed(form, "t"), list[int]()
            for token in [*tokens_of(letter), *tokens_of("x"), *tokens_of("x")]:
                expected_texts(followed, TreeRows((9,), (0,)), output, masks=0)
                output.append(token)
            texts = expected_texts(followed, TreeRows((9,), (0,)), output)
            assert texts == found.setdefault(letter, texts)
        assert "=left" in found["a"] and "=right" in found["b"]
        assert "=right" not in found["a"] and "=left" not in found["b"]


class TestMasks:
    def test_every_row_has_the_mask_of_its_own_path(self, grammars: Grammars) -> None:
        form = StructuredOutput(regex="[ab](c|d)e?")
        a, b, c, d, e, x = (tokens_of(letter)[0] for letter in "abcdex")
        # Two branches, a row that is forbidden, one below it, and an end.
        tree = TokenTree((9, a, b, x, c, d, e, c, END), (0, 0, 0, 0, 1, 2, 5, 3, 4), (1.0,) * 9)
        followed = grammars.followed(form, "t")
        for _ in range(2):
            masks = followed.masks(tree, ())
            assert [allowed(masks, row) for row in (0, 1, 2, 4, 5)] == [{a, b}, {c, d}, {c, d}, {e, END}, {e, END}]
            # No walk comes to those: their logits need some distribution all the same.
            assert [allowed(masks, row) for row in (6, 3, 7, 8)] == [{END}] * 4
            assert masks.error is None
        assert allowed(followed.masks(chain(b, [d, e]), (b,)), 1) == {e, END}
        assert allowed(followed.masks(chain(d, []), (b, d)), 0) == {e, END}

    @pytest.mark.parametrize("each", [1, 999])
    def test_masks_of_many_trees_are_those_of_each(
        self, grammars: Grammars, each: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By threads that help, and without."""
        monkeypatch.setattr(row_masks, "_MASKS_EACH", each)
        monkeypatch.setattr(row_masks, "_MOST_HELPERS", 15)
        forms, dice = [StructuredOutput(regex="[ab](c|d)e?"), StructuredOutput(regex="(ab|ac)*d")], random.Random(2)
        tokens = [tokens_of(letter)[0] for letter in "abcde"] + [END]
        trees, alone = list[FollowedTree](), list[NDArray[np.int32]]()
        end_alone = grammars.followed(forms[0], "t").masks(chain(9, [tokens[4]]), ()).words[1]
        for number in range(12):
            parents = [0, *[dice.randrange(row) for row in range(1, 9)]]
            rows = TreeRows([9, *dice.choices(tokens, k=8)], parents)
            trees.append(grammars.followed(forms[number % 2], "t").follow(rows, ()))
            # By a grammar that reads each row's path.
            words = list[NDArray[np.int32]]()
            for row in range(9):
                path, at = list[int](), row
                while at:
                    path, at = [rows.token_ids[at], *path], parents[at]
                follows = grammars.followed(forms[number % 2], "t")
                legal = all(
                    path[place] in allowed(follows.masks(chain(9, []), path[:place]), 0) for place in range(len(path))
                )
                words.append(follows.masks(chain(9, []), path).words[0] if legal and END not in path else end_alone)
            alone.append(np.stack(words))
        for masks, expected in zip(masked(trees), alone, strict=True):
            assert masks.error is None
            assert (masks.words == expected).all()

    def test_no_thread_is_waited_for_that_has_not_begun(
        self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(row_masks, "_MASKS_EACH", 1)
        monkeypatch.setattr(row_masks, "_MOST_HELPERS", 15)
        busy, done = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as helpers:
            monkeypatch.setattr(row_masks, "_helpers", lambda: helpers)
            helpers.submit(lambda: (busy.set(), done.wait(HUNG_SECONDS)))
            assert busy.wait(HUNG_SECONDS)
            follows = [grammars.followed(StructuredOutput(regex="[ab]c" + "d*" * place), "t") for place in range(4)]
            masks = masked([each.follow(chain(9, tokens_of("ac")), ()) for each in follows])
            done.set()
        a, b, c, d = (tokens_of(letter)[0] for letter in "abcd")
        ends = [{END}, *[{END, d}] * 3]
        assert [[allowed(each, row) for row in range(3)] for each in masks] == [[{a, b}, {c}, end] for end in ends]

    def test_each_row_is_masked_once_and_each_chain_copied_once(self, grammars: Grammars) -> None:
        """The work of a pass, counted: what it takes grows with its rows, and not with what they follow."""
        form, calls = StructuredOutput(regex="[ab]{40}"), Counter[str]()
        followed = grammars.followed(form, "t")
        followed._matcher = CountedMatcher(followed._matcher, calls)  # type: ignore[assignment]
        a, b = (tokens_of(letter)[0] for letter in "ab")
        # Three chains: of four rows, of two and of one.
        tree, output = TreeRows((a, a, b, a, b, a, b), (0, 0, 1, 2, 1, 4, 0)), [a] * 20
        masked([followed.follow(tree, output)])
        assert calls == {"deep_copy": 3, "mask": 7, "consume": 20 + 3 + 2 + 1 + 1}
        calls.clear()
        # Two of its rows were accepted, and one token follows.
        masked([followed.follow(TreeRows((a,), (0,)), [*output, a, b, a])])
        assert calls == {"mask": 1, "consume": 3}

    def test_what_takes_long_is_left(self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of one tree, and not of those beside it."""
        form, letters = StructuredOutput(regex="[ab]{9}"), tokens_of("abababab")
        slow, other = (grammars.followed(form, "t") for _ in range(2))
        monkeypatch.setattr(following, "_most_seconds", lambda rows: -1.0 if rows > 5 else inf)
        trees = [slow.follow(chain(9, letters), (), may_be_late=True), other.follow(chain(9, letters[:4]), ())]
        _, masks = masked(trees)
        assert slow.late and slow.slow and not (other.late or other.slow)
        assert [allowed(masks, row) for row in range(5)] == [{*tokens_of("a"), *tokens_of("b")}] * 5
        # The next time there are roots alone, which are waited for.
        assert allowed(masked([slow.follow(chain(9, []), (), may_be_late=True)])[0], 0) == allowed(masks, 0)
        assert not slow.late and slow.slow

    @pytest.mark.parametrize("most", [1, 5, 13, 40])
    def test_tokens_that_are_allowed_at_once_are_those_that_may_come(self, grammars: Grammars, most: int) -> None:
        form = StructuredOutput(json_schema=json.dumps({"type": "string", "minLength": 1, "maxLength": most}))
        tokenizer = grammar_tokenizer(trained_tokenizer(), VOCABULARY, (END,))
        # One by one.
        matcher = LLMatcher(tokenizer.with_slices([]), compiling.grammar_of(form), log_level=0)
        followed, output, dice = grammars.followed(form, "t"), list[int](), random.Random(most)
        while not output or output[-1] != END:
            words = np.frombuffer(matcher.compute_bitmask(), np.int32)
            masks = followed.masks(chain(9, []), output)
            assert (masks.words[0] == words[: followed.words]).all()
            output.append(dice.choice(sorted(allowed(masks, 0))))
            assert output[-1] == END or matcher.consume_token(output[-1])

    def test_characters_may_be_cut_between_tokens(self, grammars: Grammars) -> None:
        # Not forced, or it would come in the tokenizer's own tokens.
        form = StructuredOutput(regex="[^a]{1,3}")
        vocabulary = trained_tokenizer().get_vocab()
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        for text in ("日本語", "🙂"):
            ((shown, _),) = characters.pre_tokenize_str(text)
            single = [vocabulary[byte] for byte in shown]
            masks = grammars.followed(form, "t").masks(chain(9, single), ())
            assert masks.error is None
            for row, token in enumerate([*single, END]):
                assert token in allowed(masks, row), (text, row)

    def test_special_tokens_are_never_text(self, grammars: Grammars) -> None:
        followed = grammars.followed(StructuredOutput(regex="[^x]+"), "t")
        assert allowed(followed.masks(chain(9, []), ()), 0).isdisjoint({0, 1, END})
        after = allowed(followed.masks(chain(9, []), tokens_of("a")), 0)
        assert END in after
        assert after.isdisjoint({0, 1})
        # Nor are ids that the model has and the tokenizer has not.
        assert max(after) < len(trained_tokenizer().get_vocab())

    def test_work_without_end_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        form = StructuredOutput(grammar='start: "a" (hard | "c")\nhard: "b" /[^z]{1,400}/ "z"')
        a, b, c = (tokens_of(letter)[0] for letter in "abc")
        monkeypatch.setattr(compiling, "_STEP_LEXER_FUEL", 200)
        own = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        followed = own.followed(form, "t")
        assert followed.masks(chain(a, [c]), (a,)).error is None
        other = own.followed(form, "t")
        error = followed.masks(chain(b, []), (a, b)).error
        assert error is not None
        assert error.field == "sampling.structured_output.grammar"
        # Nobody else has met it.
        for later in (other, own.followed(form, "t")):
            assert later.masks(chain(a, [c]), (a,)).error is None

    @pytest.mark.parametrize("as_in_a_pass", [True, False])
    def test_a_limit_that_one_output_meets_is_that_outputs_own(
        self, as_in_a_pass: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of states of the lexer, which the outputs of a form share."""
        monkeypatch.setattr(compiling, "_LEXER_STATES", 300)
        form = StructuredOutput(regex="[ab]*a[ab]{14}c")
        own, apart = (Grammars(trained_tokenizer(), VOCABULARY, (END,)) for _ in range(2))
        letters = [tokens_of(letter)[0] for letter in random.Random(1).choices("ab", k=400)]

        def masks_at(followed: FollowedGrammar, length: int) -> TreeMasks:
            tree = TreeRows([letters[length]] * 4, [0, 0, 1, 0])
            if as_in_a_pass:
                return masked([followed.follow(tree, letters[:length])])[0]
            return followed.masks(chain(0, []), letters[:length])

        broken, other = own.followed(form, "t"), own.followed(form, "t")
        assert broken.lexer is other.lexer
        results = [masks_at(broken, length).error for length in range(len(letters) - 1)]
        assert results[0] is None and results[-1] is not None
        assert broken.lexer is not other.lexer
        for fine in (other, own.followed(form, "t")):
            for length in (1, 10, 20):
                masks, expected = masks_at(fine, length), masks_at(apart.followed(form, "t"), length)
                assert masks.error is None
                assert (masks.words == expected.words).all()
        assert other.lexer is not broken.lexer

    def test_what_an_output_began_with_is_read_again(self) -> None:
        """By the matcher of an output that leaves a shared lexer."""
        own, form = Grammars(trained_tokenizer(), VOCABULARY, (END,)), StructuredOutput(regex="xy[ab]c")
        followed, (a,), (c,) = own.followed(form, "t"), tokens_of("a"), tokens_of("c")
        followed.begin_behind([7, 7], b"xy")
        lexer = followed.lexer
        assert allowed(followed.masks(chain(9, []), [7, 7, a]), 0) == {c}
        # As a slow one's are computed.
        tree = chain(9, [])
        followed.compute_ahead(tree, [7, 7, a, c])
        assert followed.lexer is not lexer
        assert allowed(followed.masks(tree, [7, 7, a, c]), 0) == {END}

    def test_without_its_library_a_form_is_refused_with_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        own = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        with pytest.raises(NotSupported, match=r"llguidance on the target: pip install 'outrider\[target\]'"):
            own.check(StructuredOutput(json_object=True), "t")


# Small texts that would take more than a machine has, or than others may wait for.
HOSTILE = {
    "nested-groups": StructuredOutput(regex="(" * 30000 + "a" + ")" * 30000),
    "doubling": StructuredOutput(json_schema=json.dumps({
        "$defs": {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {f"{i}{j}": {}}}]}
                                      for j in range(9)]} for i in range(9)} | {"d9": {"type": "object"}},
        "$ref": "#/$defs/d0"})),
    "all-of-any-of": StructuredOutput(json_schema=json.dumps({"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for j in range(9)]}
        for i in range(9)]})),
    "endless-reference": StructuredOutput(json_schema='{"$ref": "#"}'),
    "endless-rule": StructuredOutput(grammar="start: start"),
}  # fmt: skip
# Grammars that other engines take long for, and this one does not.
HARMLESS = {
    "endless-object": StructuredOutput(
        json_schema=json.dumps(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
        )
    ),
    "backtracking": StructuredOutput(regex="(x+x+)+y"),
    "ambiguous": StructuredOutput(grammar='start: start start | "a"'),
    "long-enum": StructuredOutput(json_schema=json.dumps({"enum": [f"{i:x}" for i in range(2000)]})),
    "deep": StructuredOutput(json_schema='{"type":"array","items":' * 60 + "{}" + "}" * 60),
}


class TestCompiling:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_forms_are_refused(self, grammars: Grammars, name: str) -> None:
        with pytest.raises(InvalidField) as raised:
            grammars.check(HOSTILE[name], "t", "f")
        assert raised.value.field == f"f.{HOSTILE[name].form}"
        assert len(raised.value.problem) < 400

    @pytest.mark.parametrize("name", HARMLESS)
    def test_forms_that_look_worse_than_they_are(self, grammars: Grammars, name: str) -> None:
        HARMLESS[name].check()
        followed = grammars.followed(HARMLESS[name], "t")
        assert followed.masks(chain(9, []), ()).error is None

    def test_what_a_schema_says_to_the_compiler_does_not_loosen_it(self, grammars: Grammars) -> None:
        for options in ({"lenient": True}, {"whitespace_flexible": True}):
            text = json.dumps({"x-guidance": options, "type": "array", "uniqueItems": True})
            with pytest.raises(InvalidField, match="uniqueItems"):
                grammars.check(StructuredOutput(json_schema=text), "t")

    def test_each_tenant_keeps_the_forms_it_used_last(self) -> None:
        grammars = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        forms = [StructuredOutput(choices=(f"c{i}",)) for i in range(GRAMMARS_PER_TENANT + 1)]
        grammars.check(forms[0], "a")
        assert grammars.keeps(forms[0], "a")
        assert not grammars.keeps(forms[0], "b")
        for form in forms[1:-1]:
            grammars.check(form, "a")
        grammars.check(forms[0], "a")
        grammars.check(forms[-1], "a")
        assert [grammars.keeps(form, "a") for form in forms[:3]] == [True, False, True]

    @pytest.mark.parametrize("shared", [True, False])
    def test_what_was_compiled_is_used_again(self, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of forms that take long to compile a matcher that was prepared is used once."""
        monkeypatch.setattr(compiling, "_SHARED_SECONDS", inf if shared else -1.0)
        grammars, form, tree = (
            Grammars(trained_tokenizer(), VOCABULARY, (END,)),
            StructuredOutput(regex="ab"),
            chain(9, []),
        )
        grammars.prepare(form, "t")
        assert not grammars.has_matcher(form, "t"), "it is not known to compile"
        grammars.check(form, "t")
        grammars.prepare(form, "t")
        assert grammars.has_matcher(form, "t") and not grammars.has_matcher(form, "other")
        first = grammars.followed(form, "t")
        assert grammars.has_matcher(form, "t") == shared
        second, (a,), (b,) = grammars.followed(form, "t"), tokens_of("a"), tokens_of("b")
        assert (first.lexer is second.lexer) == shared
        assert first.lexer is not grammars.followed(form, "other").lexer
        assert allowed(first.masks(chain(a, []), (a,)), 0) == {b}
        assert allowed(second.masks(tree, ()), 0) == {a}
        monkeypatch.setattr(compiling, "_MOST_MATCHERS", 2)
        forms = [StructuredOutput(regex="ab" * (1 + number)) for number in range(3)]
        for each in forms:
            grammars.check(each, "t")
            grammars.prepare(each, "t")
        assert [grammars.has_matcher(each, "t") for each in forms] == [False, True, True]

    def test_tenants_are_bounded_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiling, "MOST_TENANTS", 2)
        grammars = Grammars(trained_tokenizer(), VOCABULARY, (END,))
        form = StructuredOutput(choices=("a",))
        for tenant in ("a", "b", "a", "c"):
            grammars.check(form, tenant)
        assert [grammars.keeps(form, tenant) for tenant in "abc"] == [True, False, True]

    def test_a_refused_form_is_not_kept(self, grammars: Grammars) -> None:
        form = StructuredOutput(regex="(")
        with pytest.raises(InvalidField):
            grammars.check(form, "t")
        assert not grammars.keeps(form, "t")


def sentence_piece() -> ModelTokenizer:
    """Words with a mark for the space before them, and bytes for what no token covers, as Llama 2's."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdenosty", "▁no", "yes"]
    merges = [("▁", "n"), ("▁n", "o"), ("y", "e"), ("ye", "s")]
    words += ["▁n", "ye"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return ModelTokenizer(backend)


class TestVocabularies:
    def test_byte_level_behind_other_decoders(self) -> None:
        """A file that was converted lists decoders for other vocabularies first, as SmolLM2's."""
        backend = Tokenizer.from_str(trained_tokenizer().backend.to_str())
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
        backend.decoder = decoders.Sequence(parts)
        fast = ModelTokenizer(backend)
        plain = TokenWords(trained_tokenizer(), VOCABULARY, (END,)).tokens
        assert TokenWords(fast, VOCABULARY, (END,)).tokens == plain
        text = 'a "Zoë" 日本語 🙂\n'
        assert b"".join(plain[token] for token in tokens_of(text)) == text.encode()

    def test_bytes_as_tokens(self) -> None:
        tokenizer = sentence_piece()
        size = len(tokenizer.get_vocab()) + 3
        words = TokenWords(tokenizer, size, (END,))
        vocabulary = tokenizer.get_vocab()
        assert (words.tokens[vocabulary["▁no"]], words.tokens[vocabulary["<0xE6>"]]) == (b" no", b"\xe6")
        assert words.tokens[-3:] == [b""] * 3
        # The tokenizer would put a space in front.
        assert words("yes no é".encode()) == [vocabulary[one] for one in ("yes", "▁no", "▁", "<0xC3>", "<0xA9>")]
        assert words(b"\xa9no") == [vocabulary[one] for one in ("<0xA9>", "n", "o")]
        followed = Grammars(tokenizer, size, (END,)).followed(StructuredOutput(regex="(yes|a) no[é日]"), "t")
        path = [vocabulary[one] for one in ("a", "▁no", "<0xE6>", "<0x97>", "<0xA5>")]
        masks = followed.masks(chain(5, path), ())
        assert allowed(masks, 0) == {vocabulary[one] for one in ("y", "ye", "yes", "a", "<0x61>", "<0x79>")}
        assert {vocabulary["<0xC3>"], vocabulary["<0xE6>"]} == allowed(masks, 2)
        assert allowed(masks, 5) == {END}

    def test_tokens_whose_text_depends_on_neighbours_are_refused(self) -> None:
        backend = Tokenizer(models.BPE({"a": 0, "b</w>": 1, "</s>": 2, "c": 3}, []))
        backend.decoder = decoders.BPEDecoder()
        with pytest.raises(NotSupported, match="fixed bytes"):
            grammar_tokenizer(ModelTokenizer(backend), 4, (END,))

    def test_of_a_long_forced_text_only_the_beginning_is_cut(self) -> None:
        words = TokenWords(trained_tokenizer(), VOCABULARY, (END,))
        text = ("é日" * 20000).encode()
        found = words(text)
        assert 0 < len(found) <= 512
        assert text.startswith(b"".join(words.tokens[token] for token in found))
        short = b"null true"
        assert words(short) == tokens_of("null true")

    def test_a_long_constant_is_followed(self, grammars: Grammars) -> None:
        # As deep as a client's tree may be, beyond what functions may call themselves.
        text = "null日" * 1000
        followed = grammars.followed(StructuredOutput(choices=(text,)), "t")
        masks = followed.masks(chain(9, tokens_of(text)), ())
        assert masks.error is None
        assert allowed(masks, len(masks.words) - 1) == {END}

    def test_an_end_token_that_has_text_is_the_end_alone(self) -> None:
        end = tokens_of("x")[0]
        grammars = Grammars(trained_tokenizer(), VOCABULARY, (END, end))
        followed = grammars.followed(StructuredOutput(regex="[a-z]"), "t")
        assert end not in allowed(followed.masks(chain(9, []), ()), 0)
        assert allowed(followed.masks(chain(9, []), tokens_of("a")), 0) == {END, end}
