"""What is asked of a text process, and what it answers: frames of JSON on a socket."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.processes.messages import MessageCodec
from target_service.text.chat_template import Ending


class Tokenizing(msgspec.Struct, tag=True):
    """The first message: a model's tokenizer, as `ModelTokenizer` has it."""

    backend: str
    chat_template: str
    special_tokens: dict[str, str]
    split_special: bool


class EncodeText(msgspec.Struct, tag=True):
    """A prompt as it stands; see `PromptEncoder.text`."""

    text: str
    special: bool | None = None
    begin: bool = True


class EncodeChat(msgspec.Struct, tag=True):
    """A conversation; see `PromptEncoder.chat`."""

    turns: list[dict[str, Any]]
    special: bool | None = None
    most: int = 1 << 30
    ending: Ending = Ending.ANSWER
    arguments: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    owner: str = ""


class Encoded(msgspec.Struct, tag=True):
    """The token ids of a job."""

    token_ids: list[int]


class Failed(msgspec.Struct, tag=True):
    """A job that failed. `reason` is for its caller, and has nothing of the text; of one whose text is too long once
    its template has been filled in, it is empty. `continuing`: the last message cannot be continued."""

    reason: str
    continuing: bool = False


Job = EncodeText | EncodeChat
Message = Tokenizing | Job | Encoded | Failed

# Of callers' tools and arguments, which have numbers of any size.
_codec: MessageCodec[Message] = MessageCodec(Message, form=msgspec.json)
pack, unpack, receive = _codec.pack, _codec.unpack, _codec.receive
