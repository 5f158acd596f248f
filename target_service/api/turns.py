"""The turns of a conversation, checked, as chat templates take them."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidField
from outrider.v1 import target_pb2
from target_service.text.tool_turns import named_results, template_turn

ROLES = ("system", "user", "assistant", "tool")


def check_turn(message: target_pb2.ChatMessage, path: str) -> None:
    """Raise `InvalidField` for an unknown role, a field that the role does not have, and a call without a name."""
    if message.role not in ROLES:
        raise InvalidField(f"{path}.role", f"is not one of {', '.join(ROLES)}")
    own = {"tool_calls": "assistant", "reasoning": "assistant", "tool_call_id": "tool", "name": "tool"}
    for name, role in own.items():
        if message.role != role and getattr(message, name):
            raise InvalidField(f"{path}.{name}", f"is for the role {role}")
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidField(f"{path}.tool_calls[{i}].name", "is empty")


def turns_of(chat: target_pb2.ChatInput) -> list[dict[str, Any]]:
    """The turns of a conversation."""
    return named_results(
        [
            template_turn(
                message.role,
                message.content,
                [(call.id, call.name, call.arguments) for call in message.tool_calls],
                call_id=message.tool_call_id,
                name=message.name,
                reasoning=message.reasoning,
            )
            for message in chat.messages
        ]
    )
