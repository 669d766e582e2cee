"""The shapes in which a conversation can stand in a row of JSON, and the one shape they are read into.

Read, first match wins (datasets often carry a second copy of the prompt beside the conversation):
`messages` (role, content), `conversations` (ShareGPT: from, value), `instruction` with optional `input` (Alpaca),
`prompt` (text). A content may be a list of text parts. Text is data: nothing in it is ever executed or taken for a
turn. Whatever cannot be read without guessing is refused with the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# ShareGPT's names of the roles; `messages` uses the right-hand side.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
ROLES = ("system", "user", "assistant")
# Fields of a message that change what the model is asked, and that a prompt of text cannot carry.
UNSUPPORTED = ("tool_calls", "function_call", "audio", "images")


class RowError(Exception):
    """A row that cannot be a prompt.

    Args:
        category: short name under which such rows are counted.
        reason: one line for the user, the field's name first.
    """

    def __init__(self, category: str, reason: str) -> None:
        super().__init__(reason)
        self.category = category
        self.reason = reason


@dataclass(frozen=True)
class Message:
    """One turn: role system, user or assistant, and its text exactly as given."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


def messages_of(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation of a row, ending in the user turn that the target is to answer.

    A closing assistant turn (or Alpaca's `output`) is dropped: the target answers itself.

    Raises:
        RowError: no known shape, a turn that cannot be read, or turns out of order.
    """
    if "messages" in row:
        turns = _turns("messages", row["messages"], "role", "content", {role: role for role in ROLES})
    elif "conversations" in row:
        turns = _turns("conversations", row["conversations"], "from", "value", SHAREGPT_ROLES)
    elif "instruction" in row:
        turns = [("instruction", Message("user", _alpaca(row)))]
    elif "prompt" in row:
        turns = [("prompt", Message("user", text_of("prompt", row["prompt"])))]
    else:
        raise RowError("shape", "none of the fields messages, conversations, instruction, prompt is there")
    _check_order(turns)
    return tuple(message for _, message in turns)


def text_of(field: str, value: Any) -> str:
    """The text of a content: a string, or a list of text parts joined by newlines.

    Raises:
        RowError: another type, a part that is not text, nothing but white space, a NUL or a lone surrogate.
    """
    if isinstance(value, list):
        text = "\n".join(_part(f"{field}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, str):
        text = value
    else:
        raise RowError("content", f"{field}: must be text, is {json_type(value)}")
    if not text.strip():
        raise RowError("content", f"{field}: empty")
    check_characters(field, text)
    return text


def check_characters(field: str, text: str) -> None:
    """Refuse characters that no tokenizer can give back.

    Raises:
        RowError: a NUL or a lone surrogate.
    """
    if "\0" in text:
        raise RowError("characters", f"{field}: holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("characters", f"{field}: holds a lone surrogate at character {error.start}") from None


def json_type(value: Any) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _turns(field: str, value: Any, role_key: str, text_key: str, roles: dict[str, str]) -> list[tuple[str, Message]]:
    """The turns of a list with, for each, the place that error messages name."""
    if not isinstance(value, list):
        raise RowError("shape", f"{field}: must be a list, is {json_type(value)}")
    if not value:
        raise RowError("shape", f"{field}: empty")
    turns = []
    for index, turn in enumerate(value):
        place = f"{field}[{index}]"
        if not isinstance(turn, dict):
            raise RowError("shape", f"{place}: must be an object, is {json_type(turn)}")
        name = turn.get(role_key)
        role = roles.get(name) if isinstance(name, str) else None
        if role is None:
            raise RowError("role", f"{place}.{role_key}: {_quote(name)} is none of {', '.join(roles)}")
        if index > 0 and index == len(value) - 1 and role == "assistant":
            break  # dropped, so its content does not matter
        for key in UNSUPPORTED:
            if turn.get(key):
                raise RowError("unsupported", f"{place}.{key}: not supported, only text is")
        turns.append((f"{place}.{role_key}", Message(role, text_of(f"{place}.{text_key}", turn.get(text_key)))))
    return turns


def _alpaca(row: Mapping[str, Any]) -> str:
    instruction = text_of("instruction", row["instruction"])
    extra = row.get("input")
    if extra is None or extra == "":
        return instruction
    return f"{instruction}\n\n{text_of('input', extra)}"


def _check_order(turns: list[tuple[str, Message]]) -> None:
    """Optional system turn, then user and assistant by turns, user last."""
    expected = "user"
    for index, (place, message) in enumerate(turns):
        if index == 0 and message.role == "system":
            continue
        if message.role != expected:
            raise RowError("role", f"{place}: {message.role} where {expected} was expected")
        expected = "assistant" if expected == "user" else "user"
    if turns[-1][1].role != "user":
        raise RowError("role", f"{turns[-1][0]}: the last turn must be the user's, is {turns[-1][1].role}")


def _part(field: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise RowError("content", f"{field}: must be an object with type and text, is {json_type(part)}")
    kind = part.get("type")
    if kind != "text":
        raise RowError("unsupported", f"{field}.type: {_quote(kind)} parts are not supported, only text is")
    text = part.get("text")
    if not isinstance(text, str):
        raise RowError("content", f"{field}.text: must be text, is {json_type(text)}")
    return text


def _quote(value: Any) -> str:
    """A value in ASCII and cut to 40 characters, safe to print and to store."""
    if not isinstance(value, str):
        return json_type(value)
    return ascii(value if len(value) <= 40 else value[:40] + "...")
