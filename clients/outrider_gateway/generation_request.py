"""A request for answers in the contract's own values, whichever endpoint it came to."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.sampling import SamplingParams
from outrider_client.generation import Speculation
from outrider_client.messages import ChatOptions, ChatTurn

# What each endpoint calls the contract's fields; `input` is what is continued.
CHAT_NAMES = {
    "input": "messages",
    "chat.messages": "messages",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "chat.template_arguments": "chat_template_kwargs",
    "chat.tools": "tools",
    "chat.tools.definitions": "tools",
    "chat.tools.name": "tool_choice",
    "chat.tools.choice": "tool_choice",
    "logprobs": "top_logprobs",
    "speculation": "outrider",
}
COMPLETION_NAMES = {"input": "prompt", "text": "prompt", "tokens.token_ids": "prompt", "speculation": "outrider"}


# Characters or tokens of a message that tell conversations apart. Chosen: some pages of tokens.
_BEGINNING = 1_024


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is continued: exactly one of the three is set."""

    messages: tuple[ChatTurn, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()

    @property
    def beginning(self) -> str:
        """What every later turn of the same conversation begins with: all up to its first question, cut after
        `_BEGINNING` characters or tokens."""
        if not self.messages:
            return self.text[:_BEGINNING] or array("q", self.token_ids[:_BEGINNING]).tobytes().hex()
        asked = next((place for place, one in enumerate(self.messages) if one.role == "user"), 0)
        return "\0".join([one.content[:_BEGINNING] for one in self.messages[: asked + 1]])


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request. It has `choices` answers to each of its prompts. `prediction` is the text that the caller expects,
    `logprobs` whether tokens are listed with their probabilities, `drafts` whether answers show what was drafted,
    `echo` whether they begin with their prompts, `show_special_tokens` whether their texts have them, `special_tokens`
    whether the text of one in a prompt is that token (None: the target's rule), `cache_key` the body's name for
    requests that belong together, and `user` whom the caller names for its records. `continuous_usage` is whether each
    event of a stream has the usage so far. A chat's answer is split into text, reasoning and tool calls;
    `shows_reasoning` is whether the reasoning is sent. With `prompt_only` nothing follows the echoed prompt. Of the
    `choices` answers to a prompt, the best `returned_choices` are returned; 0 is all. `fields` are the body's names of
    the contract's fields."""

    chat: bool
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    speculation: Speculation = field(default_factory=Speculation)
    model: str = ""
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    drafts: bool = False
    prediction: str | None = None
    cache_key: str = ""
    chat_options: ChatOptions = field(default_factory=ChatOptions)
    show_special_tokens: bool = False
    special_tokens: bool | None = None
    continuous_usage: bool = False
    echo: bool = False
    user: str = ""
    shows_reasoning: bool = True
    prompt_only: bool = False
    returned_choices: int = 0
    fields: Mapping[str, str] = field(default_factory=lambda: CHAT_NAMES)

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.choices

    def prompt(self, index: int) -> Prompt:
        """What the answer of this index continues."""
        return self.prompts[index // self.choices]

    def conversation(self, index: int) -> str:
        """What else than the caller keeps the answer of this index on one target: the key that the body names, or what
        the whole conversation begins with, whose keys and values that target may have."""
        return self.cache_key or self.prompt(index).beginning

    def seeded(self, index: int) -> SamplingParams:
        """How the answer of this index is drawn: with a seed, each choice has its own, the first the one given."""
        place = index % self.choices
        seed = self.sampling.seed
        if seed is None or not place:
            return self.sampling
        return replace(self.sampling, seed=(seed + place) % 2**64)
