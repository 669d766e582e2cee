from __future__ import annotations

import pytest

from dspark.errors import DataError
from dspark.targets.synthetic import byte_tokenizer
from dspark.targets.template import ChatTemplate, control_tokens, render_prompt

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def template():
    return ChatTemplate(byte_tokenizer())


def text_of(template, ids):
    return template.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_prompt_is_the_messages_in_the_template_with_the_assistants_header(template):
    ids = template.encode_chat(USER)
    assert text_of(template, ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # One token per byte and per marker: 3 markers, "user\n", "Hi", "\n", "assistant\n".
    assert len(ids) == 3 + 5 + 2 + 1 + 10


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<|mask|>"])
def test_text_that_spells_a_control_token_is_refused(template, marker):
    with pytest.raises(DataError, match="control token"):
        template.encode_chat([{"role": "user", "content": f"end this {marker} turn"}])


def test_text_that_looks_like_jinja_stays_text(template):
    ids = template.encode_chat([{"role": "user", "content": "{{ 6 * 7 }}{% raw %}"}])
    assert "{{ 6 * 7 }}{% raw %}" in text_of(template, ids)


def test_without_the_guard_the_marker_would_end_the_turn(template):
    """Why the guard is there: the bare renderer turns the text into the token."""
    ids = render_prompt(template.tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(template.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


@pytest.mark.parametrize(("mode", "said"), [("none", "unset"), ("off", "False"), ("on", "True")])
def test_the_thinking_mode_reaches_the_template(mode, said):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    template = ChatTemplate(tokenizer, mode)
    assert text_of(template, template.encode_chat(USER)) == said


@pytest.mark.parametrize("text", ["", "plain", "é", "e\u0301", "𝔘nicode 🎉\u200d", "\r\n\t", "a  b"])
def test_text_round_trips(template, text):
    assert template.round_trips(text)


def test_a_lone_surrogate_does_not_round_trip(template):
    assert not template.round_trips("\ud800")


def test_a_template_that_refuses_is_a_data_error(template):
    template.tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(DataError, match="no system turn"):
        template.encode_chat(USER)
    template.tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        template.encode_chat(USER)


def test_runs_of_blanks_are_no_control_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["    ", "<tool>"])
    assert control_tokens(tokenizer) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<tool>"}


def test_what_stands_around_a_message_gives_the_prompt_with_any_text(template):
    before, after = template.around_message()
    assert (before, after) == ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    for text in ("Hi", "{{ 6 * 7 }}", "The user's message."):
        ids = template.encode_chat([{"role": "user", "content": text}])
        assert text_of(template, ids) == before + text + after


def test_a_template_that_trims_is_two_strings_all_the_same(template):
    template.tokenizer.chat_template = "<{{ messages[0]['content'] | trim }}>"
    assert template.around_message() == ("<", ">")


@pytest.mark.parametrize(
    "source",
    [
        "<{{ messages[0]['content'] | upper }}>",
        "<{{ messages[0]['content'] }}{{ messages[0]['content'] }}>",
        "<{{ messages[0]['content'] | length }} {{ messages[0]['content'] }}>",
        "nothing",
    ],
)
def test_a_template_that_does_more_than_two_strings_around_a_message_is_refused(template, source):
    template.tokenizer.chat_template = source
    with pytest.raises(DataError, match="between two strings"):
        template.around_message()
