"""Chat templates: from messages to the exact token ids that the target is prompted with.

Text in a message stays text. A message that spells one of the tokenizer's control tokens is refused, because the
tokenizer would read it as the token itself: `<|im_end|>` in a user's text would end the turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from dspark.errors import DataError

Thinking = Literal["none", "off", "on"]
Messages = Sequence[Mapping[str, Any]]
_TEXTS = ("The user's message.", "Another one,\n\nof three lines.")  # stand for any text


class ChatTemplate:
    """A tokenizer and how it is prompted.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        thinking_mode: "none" for templates that know no thinking, else what `enable_thinking` is set to.
    """

    def __init__(self, tokenizer: Any, thinking_mode: Thinking = "none") -> None:
        self.tokenizer = tokenizer
        self.thinking_mode: Thinking = thinking_mode

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Strings that the tokenizer turns into one token wherever they stand: turn markers and the like."""
        return control_tokens(self.tokenizer)

    def encode_chat(self, messages: Messages) -> list[int]:
        """The prompt's token ids: the messages in the chat template, ready for the assistant's turn.

        Raises:
            DataError: a message spells a control token, or the template refuses the messages.
        """
        for message in messages:
            for token in self.control_tokens:
                if token in str(message["content"]):
                    raise DataError(f"the {message['role']} message contains the control token {token!r}")
        return render_prompt(self.tokenizer, messages, self.thinking_mode)

    def around_message(self) -> tuple[str, str]:
        """What the template puts before and after the text of a single user message, for programs without Jinja.

        The text must have no white space at its ends: some templates trim it. What a template takes from the day, such
        as a date, is that of today.

        Raises:
            DataError: no chat template, or it does more than put two strings around the message.
        """
        found: set[tuple[str, str] | None] = set()
        for text in _TEXTS:
            rendered = render_text(self.tokenizer, [{"role": "user", "content": text}], self.thinking_mode)
            before, _, after = rendered.partition(text)
            found.add((before, after) if rendered == before + text + after else None)
        around = found.pop()
        if found or around is None:
            raise DataError("the chat template does not simply put the user's message between two strings")
        return around

    def round_trips(self, text: str) -> bool:
        """True if tokenising `text` and putting the tokens together again gives exactly `text`."""
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError, ValueError):  # lone surrogates
            return False
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return bool(decoded == text)


def render_prompt(tokenizer: Any, messages: Messages, thinking_mode: Thinking = "none") -> list[int]:
    """Token ids of `messages` in the chat template, with the header of the assistant's turn.

    Raises:
        DataError: no chat template, or the template refuses the messages.
    """
    return list(tokenizer.encode(render_text(tokenizer, messages, thinking_mode), add_special_tokens=False))


def render_text(tokenizer: Any, messages: Messages, thinking_mode: Thinking = "none") -> str:
    """The text whose token ids `render_prompt` gives.

    Raises:
        DataError: no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError("the target's tokenizer has no chat template", "choose an instruction-tuned target")
    options = {} if thinking_mode == "none" else {"enable_thinking": thinking_mode == "on"}
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
            )
        )
    except Exception as reason:  # Jinja raises its own tree, templates raise what they like
        raise DataError(f"the chat template refuses the messages: {reason}") from None


def control_tokens(tokenizer: Any) -> frozenset[str]:
    """Added tokens of a tokenizer, those that are mere white space excepted (some tokenizers add runs of blanks)."""
    return frozenset(
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special or token.content.strip()
    )
