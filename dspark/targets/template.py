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
    if not tokenizer.chat_template:
        raise DataError("the target's tokenizer has no chat template", "choose an instruction-tuned target")
    options = {} if thinking_mode == "none" else {"enable_thinking": thinking_mode == "on"}
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **options
        )
    except Exception as reason:  # Jinja raises its own tree, templates raise what they like
        raise DataError(f"the chat template refuses the messages: {reason}") from None
    return list(tokenizer.encode(text, add_special_tokens=False))


def control_tokens(tokenizer: Any) -> frozenset[str]:
    """Added tokens of a tokenizer, those that are mere white space excepted (some tokenizers add runs of blanks)."""
    return frozenset(
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special or token.content.strip()
    )
