"""Compiles forms of output to grammars, and keeps those that each tenant used last."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import InvalidField, NotSupported
from outrider.structured_output import StructuredOutput
from target_service.grammars.vocabulary import grammar_tokenizer, token_words
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from target_service.core.sequence import TriggeredForm
    from target_service.grammars.expected_text import ExpectedText
    from target_service.grammars.following import FollowedGrammar
    from target_service.grammars.known_masks import FormMasks, MaskStore
    from target_service.grammars.triggers import FormTrigger
    from target_service.grammars.vocabulary import TokenWords

# Grammars kept for each tenant, and tenants that have some. Chosen: an application has a few forms.
GRAMMARS_PER_TENANT = 32
MOST_TENANTS = 256
# Matchers that are kept at their beginning, of all tenants. Chosen: as many sequences as run by default.
_MOST_MATCHERS = 64
# Of a processor, to compile a form whose outputs share a lexer: an output that has to leave it compiles the form again
# while others wait. Chosen: usual forms take 1 to 5 ms.
_SHARED_SECONDS = 0.02
# llguidance's own limits, by work and not by time: they refuse the same grammars on every machine. A tenth to a half of
# its defaults. The schemas and expressions of the tests, and ones for addresses, dates and words, need less; of hostile
# ones that are taken, none took more than 2 ms of a processor for a mask of 49,152 tokens, or 1.3 s to compile.
_STEP_LEXER_FUEL = 20_000
_LEXER_STATES = 10_000
_FIELD = "sampling.structured_output"


@dataclass(eq=False, slots=True)
class _Kept:
    """A grammar, the text that its outputs were found to let expect, and the masks that they have computed."""

    grammar: str
    expected: ExpectedText | None = None
    masks: FormMasks | None = None


class _Beginning(NamedTuple):
    """A matcher at its beginning: of those that are `shared` outputs use copies, another is of one output."""

    matcher: LLMatcher
    shared: bool


@dataclass(eq=False)
class Grammars:
    """The grammars of one model, for use from any thread.

    Compiling takes milliseconds for usual forms, and up to about a second for the largest: never do it where others
    wait. Copies of a matcher share its lexer, which finds its states as texts come to them: the first mask at a state
    takes ten times as long as others. So all outputs of a tenant's form use copies of one matcher. The lexer's states
    count against one limit; an output for which it is met goes on by a matcher of its own, and fails by what its own
    text needs alone, and later outputs use another lexer. A form that takes long to compile is shared by no outputs;
    of those that are asked for again and again a matcher may be made before the next request (`prepare`).
    """

    # None where only token ids are taken.
    tokenizer: ModelTokenizer | None
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    _kept: OrderedDict[str, OrderedDict[StructuredOutput, _Kept]] = field(default_factory=OrderedDict, init=False)
    # By tenant and form, the one that was used last at the end.
    _beginnings: OrderedDict[tuple[str, StructuredOutput], _Beginning] = field(default_factory=OrderedDict, init=False)
    _store: MaskStore | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def keeps(self, form: StructuredOutput, tenant: str) -> bool:
        """Whether a tenant's form is known to compile."""
        with self._lock:
            return form in self._kept.get(tenant, ())

    def check(self, form: StructuredOutput, tenant: str, field_path: str = _FIELD) -> None:
        """Compile a form, unless it is known to compile. Raises `InvalidField` for one that cannot be compiled, and
        `NotSupported` where the model has no suitable tokenizer or no end token, or llguidance is not installed."""
        if self._kept_grammar(form, tenant) is None:
            self._compiled(form, tenant, field_path)

    def followed(self, form: StructuredOutput, tenant: str) -> FollowedGrammar:
        """A form to follow along one output. Raises what `check` does."""
        beginning = self._taken(form, tenant)
        # Late: the serving process compiles grammars, and imports no PyTorch.
        from target_service.grammars import row_masks
        from target_service.grammars.following import FollowedGrammar

        assert self.tokenizer is not None, "a form is compiled"
        row_masks.warm_up()
        words = token_words(self.tokenizer, self.vocabulary_size, self.end_token_ids)
        followed = FollowedGrammar(
            beginning.matcher.deep_copy() if beginning.shared else beginning.matcher,
            form,
            self.vocabulary_size,
            self.end_token_ids,
            words,
            self._expected_text(form, tenant, words),
        )
        if beginning.shared:
            make_own = partial(self._compiled_anew, form, tenant, beginning)
            followed.share(beginning.matcher, make_own, self._form_masks(form, tenant, words))
        return followed

    def has_matcher(self, form: StructuredOutput, tenant: str) -> bool:
        """Whether `followed` compiles nothing."""
        with self._lock:
            return (tenant, form) in self._beginnings

    def prepare(self, form: StructuredOutput, tenant: str) -> None:
        """Compile a kept form for the next request that asks for it, unless that was done."""
        if self.keeps(form, tenant) and not self.has_matcher(form, tenant):
            self._keep(form, tenant, self._begun(form, tenant))

    def _taken(self, form: StructuredOutput, tenant: str) -> _Beginning:
        """What the next output of a form begins with."""
        with self._lock:
            beginning = self._beginnings.get((tenant, form))
            if beginning is not None and beginning.shared:
                self._beginnings.move_to_end((tenant, form))
            elif beginning is not None:
                del self._beginnings[tenant, form]
        if beginning is None:
            beginning = self._begun(form, tenant)
            if beginning.shared:
                self._keep(form, tenant, beginning)
        return beginning

    def _begun(self, form: StructuredOutput, tenant: str) -> _Beginning:
        begin = time.thread_time()
        matcher = self._compiled(form, tenant, _FIELD)
        return _Beginning(matcher, time.thread_time() - begin <= _SHARED_SECONDS)

    def _keep(self, form: StructuredOutput, tenant: str, beginning: _Beginning) -> None:
        with self._lock:
            self._beginnings[tenant, form] = beginning
            self._beginnings.move_to_end((tenant, form))
            if len(self._beginnings) > _MOST_MATCHERS:
                self._beginnings.popitem(last=False)

    def _compiled_anew(self, form: StructuredOutput, tenant: str, shared: _Beginning) -> LLMatcher:
        """A matcher for an output that leaves a `shared` lexer, which no further outputs use."""
        with self._lock:
            if self._beginnings.get((tenant, form)) is shared:
                del self._beginnings[tenant, form]
        return self._compiled(form, tenant, _FIELD)

    def trigger(self, triggered: TriggeredForm, tenant: str) -> FormTrigger:
        """What looks for the beginning of a form in one output. Raises what `check` does."""
        from target_service.grammars.triggers import FormTrigger

        grammar = self.followed(triggered.form, tenant)
        assert self.tokenizer is not None, "a form is compiled"
        return FormTrigger(triggered, grammar, self.tokenizer.name)

    def _kept_grammar(self, form: StructuredOutput, tenant: str) -> str | None:
        with self._lock:
            own = self._kept.get(tenant)
            if own is None or form not in own:
                return None
            self._kept.move_to_end(tenant)
            own.move_to_end(form)
            return own[form].grammar

    def _expected_text(self, form: StructuredOutput, tenant: str, words: TokenWords) -> ExpectedText:
        """What all outputs of a tenant's form share: it depends on the form alone, and on no free text."""
        from target_service.grammars.expected_text import ExpectedText

        found = ExpectedText(words.tokens, frozenset(self.end_token_ids))
        with self._lock:
            own = self._kept.get(tenant)
            kept = None if own is None else own.get(form)
            if kept is None:
                return found
            kept.expected = kept.expected or found
            return kept.expected

    def _form_masks(self, form: StructuredOutput, tenant: str, words: TokenWords) -> FormMasks | None:
        """The known masks of a tenant's form; None where states of the form have no names."""
        if form.json_schema is None and not form.json_object:
            return None
        from target_service.grammars.json_states import JsonStates
        from target_service.grammars.known_masks import FormMasks, MaskStore

        schema = {"type": "object"} if form.json_schema is None else json.loads(form.json_schema)
        with self._lock:
            self._store = self._store or MaskStore(-(-self.vocabulary_size // 32))
            own = self._kept.get(tenant)
            kept = None if own is None else own.get(form)
            if kept is None:
                return None
            if kept.masks is None:
                kept.masks = FormMasks(JsonStates(schema), self._store, words.tokens, frozenset(self.end_token_ids))
            return kept.masks

    def _compiled(self, form: StructuredOutput, tenant: str, field_path: str) -> LLMatcher:
        """A matcher at the beginning of a form, which nothing else uses. Keeps the grammar."""
        matcher, grammar = self._compile(form, self._kept_grammar(form, tenant), f"{field_path}.{form.form}")
        with self._lock:
            own = self._kept.setdefault(tenant, OrderedDict())
            if form not in own:
                own[form] = _Kept(grammar)
            self._kept.move_to_end(tenant)
            if len(own) > GRAMMARS_PER_TENANT:
                own.popitem(last=False)
            if len(self._kept) > MOST_TENANTS:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, form: StructuredOutput, grammar: str | None, field_path: str) -> tuple[LLMatcher, str]:
        if self.tokenizer is None:
            raise NotSupported("the model has no tokenizer, which structured_output needs")
        try:
            from llguidance import LLMatcher
        except ImportError:
            # Of an environment that is older than forms of output.
            raise NotSupported(
                "structured_output needs llguidance on the target: pip install 'outrider[target]'"
            ) from None
        tokenizer = grammar_tokenizer(self.tokenizer, self.vocabulary_size, self.end_token_ids)
        try:
            grammar = grammar_of(form) if grammar is None else grammar
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        except ValueError as error:
            raise _refused(field_path, str(error)) from None
        # The first mask too, which some grammars fail to give.
        if not matcher.is_error():
            allowed = any(matcher.compute_bitmask())
            if not matcher.is_error() and not allowed:
                raise InvalidField(field_path, "no text of this model's tokens has this form")
        if matcher.is_error():
            raise _refused(field_path, matcher.get_error())
        return matcher, grammar


def grammar_of(form: StructuredOutput) -> str:
    """A form in llguidance's own terms. Raises `ValueError` for JSON that is no schema."""
    from llguidance import LLMatcher

    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.grammar is not None:
        return str(LLMatcher.grammar_from_lark(form.grammar))
    if form.choices:
        # Strings of Lark are written as those of JSON.
        texts = [json.dumps(each, ensure_ascii=False) for each in form.choices]
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(texts)))
    schema = '{"type": "object"}' if form.json_schema is None else form.json_schema
    # Over what a schema itself may ask for; a lenient compiler would pass over keywords that it does not enforce.
    overrides = {"whitespace_flexible": form.free_whitespace, "lenient": False}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=overrides))


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=20_000,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _refused(field_path: str, message: str) -> InvalidField:
    """The compiler's reason on one line."""
    lines = [line.strip() for line in message.splitlines() if not line.startswith("<")]
    # No more of it: messages quote the grammar.
    reason = " ".join(filter(None, lines))[:300]
    return InvalidField(field_path, f"cannot be compiled: {reason}")
