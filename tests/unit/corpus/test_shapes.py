from __future__ import annotations

import pytest

from dspark.corpus.shapes import Message, RowError, messages_of


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [user("Hi")]}, [("user", "Hi")]),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, user("Hi")]},
            [("system", "Be brief."), ("user", "Hi")],
        ),
        ({"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}, [("user", "a\nb")]),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]},
            [("system", "s"), ("user", "q")],
        ),
        ({"instruction": "Translate", "input": "Hello", "output": "Bonjour"}, [("user", "Translate\n\nHello")]),
        ({"instruction": "Translate", "input": ""}, [("user", "Translate")]),
        ({"prompt": "Write."}, [("user", "Write.")]),
    ],
)
def test_usable_shapes_become_turns(row, expected):
    assert messages_of(row) == tuple(Message(role, text) for role, text in expected)


def test_text_is_kept_exactly_as_written():
    text = "  {% set x = 1 %}{{ 7*7 }}\n\tcafe\u0301  "
    assert messages_of({"prompt": text})[0].content == text


def test_a_closing_assistant_turn_is_dropped_whatever_it_holds():
    for answer in (assistant("Lima."), assistant(None), {"role": "assistant", "tool_calls": [{}], "content": None}):
        assert messages_of({"messages": [user("Capital of Peru?"), answer]}) == (Message("user", "Capital of Peru?"),)


def test_only_one_closing_assistant_turn_is_dropped():
    with pytest.raises(RowError, match=r"messages\[1\]\.role: the last turn must be the user's"):
        messages_of({"messages": [user("a"), assistant("b"), assistant("c")]})


def test_messages_win_over_the_second_copy_of_the_prompt_beside_them():
    row = {"prompt": "first turn only", "messages": [user("a"), assistant("b"), user("c")]}
    assert [message.content for message in messages_of(row)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "none of the fields messages, conversations, instruction, prompt is there"),
        ({"messages": "Hi"}, "messages: must be a list, is a string"),
        ({"messages": []}, "messages: empty"),
        ({"messages": ["Hi"]}, "messages[0]: must be an object, is a string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: 'tool' is none of system, user, assist"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: null is none of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role: a list is none of"),
        ({"messages": [user(7)]}, "messages[0].content: must be text, is a number"),
        ({"messages": [user(True)]}, "messages[0].content: must be text, is a boolean"),
        ({"messages": [user({"text": "x"})]}, "messages[0].content: must be text, is an object"),
        ({"messages": [user(" \n\t")]}, "messages[0].content: empty"),
        ({"messages": [user([])]}, "messages[0].content: empty"),
        ({"messages": [user(["x"])]}, "messages[0].content[0]: must be an object with type and text, is a string"),
        ({"messages": [user([{"type": "text", "text": None}])]}, "messages[0].content[0].text: must be text, is null"),
        (
            {"messages": [user([{"type": "text", "text": "x"}, {"type": "image_url"}])]},
            "messages[0].content[1].type: 'image_url' parts are not supported, only text is",
        ),
        ({"messages": [user("a"), user("b")]}, "messages[1].role: user where assistant was expected"),
        ({"messages": [assistant("a"), user("b")]}, "messages[0].role: assistant where user was expected"),
        (
            {"messages": [user("a"), {"role": "system", "content": "s"}, user("b")]},
            "messages[1].role: system where assistant was expected",
        ),
        ({"messages": [{"role": "system", "content": "s"}]}, "messages[0].role: the last turn must be the user's"),
        ({"messages": [assistant("Hi")]}, "messages[0].role: assistant where user was expected"),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "b", "tool_calls": [{}]}, user("c")]},
            "messages[1].tool_calls: not supported",
        ),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "conversations[0].from: 'bot' is none of human, gpt"),
        ({"conversations": [{"from": "human", "value": None}]}, "conversations[0].value: must be text, is null"),
        ({"instruction": ""}, "instruction: empty"),
        ({"instruction": "a", "input": 3}, "input: must be text, is a number"),
        ({"prompt": [user("a")]}, "prompt[0].type: null parts are not supported"),
        ({"prompt": "a\0b"}, "prompt: holds a NUL character"),
        ({"prompt": "ab\ud800"}, "prompt: holds a lone surrogate at character 2"),
    ],
)
def test_the_rest_is_refused_with_a_reason_that_names_the_field(row, reason):
    with pytest.raises(RowError) as caught:
        messages_of(row)
    assert caught.value.reason.startswith(reason)


def test_a_reason_is_short_printable_ascii_whatever_the_value():
    with pytest.raises(RowError) as caught:
        messages_of({"messages": [{"role": "\ud800é" + "x" * 5000, "content": "a"}]})
    assert caught.value.reason.isascii() and len(caught.value.reason) < 150
