"""Which prompts the target can be asked at all: what its tokenizer and chat template say to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dspark.corpus.prompts import Prompt, Rejection, rejection
from dspark.errors import DataError


class PromptEncoder(Protocol):
    """What screening needs of the target's tokenizer and chat template."""

    @property
    def control_tokens(self) -> frozenset[str]:
        """Strings that the tokenizer turns into a token of its own wherever they stand."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the rendered prompt; DataError if the template refuses the messages."""

    def round_trips(self, text: str) -> bool:
        """True if tokenising and detokenising gives exactly `text`."""


# More characters no token of any vocabulary stands for: a text beyond them is too long without being tokenised, which
# takes seconds and a gigabyte for each ten megabytes.
CHARACTERS_PER_TOKEN = 1024


def screen(prompt: Prompt, encoder: PromptEncoder, max_prompt_tokens: int) -> list[int] | Rejection:
    """The prompt's token ids, or why the target cannot be asked it.

    Text that spells a control token is refused rather than escaped: as tokens it would be a turn, and spelled
    otherwise it would be another prompt.
    """
    characters = sum(len(message.content) for message in prompt.messages)
    if characters > max_prompt_tokens * CHARACTERS_PER_TOKEN:
        reason = f"{characters} characters, prompts.max_prompt_tokens is {max_prompt_tokens}"
        return rejection(prompt, "too-long", reason)
    for index, message in enumerate(prompt.messages):
        field = f"messages[{index}].content"
        spelled = sorted(token for token in encoder.control_tokens if token.strip() and token in message.content)
        if spelled:
            return rejection(prompt, "control-token", f"{field}: spells the control token {', '.join(spelled)}")
        if not encoder.round_trips(message.content):
            return rejection(prompt, "round-trip", f"{field}: tokenising and detokenising does not give it back")
    try:
        token_ids = encoder.encode_chat([message.as_dict() for message in prompt.messages])
    except DataError as error:
        return rejection(prompt, "chat-template", error.message)
    if not token_ids:
        return rejection(prompt, "chat-template", "the chat template renders it to no token")
    if len(token_ids) > max_prompt_tokens:
        return rejection(
            prompt, "too-long", f"{len(token_ids)} tokens, prompts.max_prompt_tokens is {max_prompt_tokens}"
        )
    return token_ids
