from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.corpus.prompts import merge_duplicates, normalise, read_prompt_lines, read_prompts
from dspark.errors import DataError


def read(data: bytes):
    return read_prompt_lines(data, source="file.jsonl", domain="d")


def read_rows(*rows):
    return read("\n".join(json.dumps(row) for row in rows).encode())


def reasons(reading):
    return {row.line: row.reason for row in reading.rejections}


def test_every_line_of_the_case_file_is_kept_rejected_or_blank(cases):
    """lines.jsonl has 13 lines, of which 2 and 12 are blank, and 1, 3 and 11 are sound."""
    reading = read((cases / "lines.jsonl").read_bytes())
    assert [(prompt.id, prompt.line) for prompt in reading.prompts] == [("d/bom", 1), ("d/good-1", 3), ("d/good-2", 11)]
    assert reading.blank_lines == 2
    assert reasons(reading) == {
        4: "not valid JSON at column 56: Unterminated string starting at",
        5: "must be an object, is a list",
        6: "must be an object, is a string",
        7: "must be an object, is a number",
        8: "must be an object, is null",
        9: "messages[0].content: holds a NUL character",
        10: "not UTF-8 at byte 56 of the line",
        13: "not valid JSON: duplicate key 'id'",
    }


def test_roles_case_file_keeps_the_usable_shapes(cases):
    reading = read((cases / "roles.jsonl").read_bytes())
    assert [prompt.id for prompt in reading.prompts] == [
        "d/parts",
        "d/good-multi",
        "d/sharegpt",
        "d/alpaca",
        "d/prompt-only",
    ]
    assert {row.id: row.reason.split(":")[0] for row in reading.rejections} == {
        "no-messages": "none of the fields messages, conversations, instruction, prompt is there",
        "empty-messages": "messages",
        "assistant-first": "messages[0].role",
        "system-only": "messages[0].role",
        "null-content": "messages[0].content",
        "empty-content": "messages[0].content",
        "unknown-role": "messages[0].role",
        "image-part": "messages[0].content[0].type",
        "two-users": "messages[1].role",
    }
    by_id = {prompt.id: [message.content for message in prompt.messages] for prompt in reading.prompts}
    assert by_id["d/good-multi"] == ["Pick a number.", "7", "Double it."]
    assert by_id["d/sharegpt"] == ["Old format question?"]
    assert by_id["d/alpaca"] == ["Translate to French\n\nGood morning"]


def test_unicode_case_file_refuses_the_lone_surrogate_and_merges_nfc_with_nfd(cases):
    reading = read((cases / "unicode.jsonl").read_bytes())
    assert reasons(reading) == {3: "messages[0].content: holds a lone surrogate at character 4"}
    kept, duplicates = merge_duplicates(reading.prompts)
    assert [prompt.id for prompt in kept] == ["d/zwj", "d/rtl", "d/nfc"]
    assert [(row.id, row.reason) for row in duplicates] == [("nfd", "duplicate of d/nfc (file.jsonl:4)")]


def test_one_id_for_two_different_rows_is_an_error_that_names_both_lines(cases):
    with pytest.raises(DataError, match=r"file\.jsonl:4: id 'a' already stands for another prompt on line 1"):
        read((cases / "duplicates.jsonl").read_bytes())


def test_exact_and_white_space_duplicates_are_merged_and_counted_as_rejected(cases):
    lines = (cases / "duplicates.jsonl").read_bytes().splitlines()
    reading = read(b"\n".join(lines[:3] + lines[4:]))
    kept, duplicates = merge_duplicates(reading.prompts)
    assert [prompt.id for prompt in kept] == ["d/a", "d/d"]
    assert [(row.line, row.category) for row in duplicates] == [(2, "duplicate"), (3, "duplicate")]
    assert kept[0].root == kept[1].root  # a conversation and its own beginning


def test_the_same_row_twice_under_one_id_is_a_duplicate_and_no_error():
    reading = read_rows({"id": "x", "prompt": "A b"}, {"id": "x", "prompt": "A  b "})
    kept, duplicates = merge_duplicates(reading.prompts)
    assert len(kept) == len(duplicates) == 1


def test_duplicates_are_judged_by_all_turns():
    turns = [{"role": "user", "content": "Hi"}]
    longer = [*turns, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    system = [{"role": "system", "content": "Be brief."}, *turns]
    kept, duplicates = merge_duplicates(read_rows(*({"messages": m} for m in (turns, longer, system))).prompts)
    assert (len(kept), duplicates) == (3, [])


def test_rows_without_id_are_named_by_their_content_and_not_by_their_line():
    first = read_rows({"prompt": "one"}, {"prompt": "two"}).prompts
    second = read_rows({"prompt": "two"}, {"prompt": "zero"}, {"prompt": "one"}).prompts
    assert {prompt.id for prompt in first} < {prompt.id for prompt in second}


@pytest.mark.parametrize("value", [True, 1.5, "", "  ", ["a"], {"a": 1}])
def test_an_id_that_is_no_string_or_whole_number_is_refused(value):
    reading = read_rows({"id": value, "prompt": "x"})
    assert reading.rejections[0].category == "id"
    assert reading.rejections[0].id is None


def test_a_whole_number_is_an_id():
    assert read_rows({"id": 7, "prompt": "x"}).prompts[0].id == "d/7"


def test_an_id_or_template_with_a_lone_surrogate_is_refused_before_it_is_written_anywhere():
    reading = read(b'{"id":"\\ud800","prompt":"x"}\n{"template":"\\ud800","prompt":"x"}\n{"template":3,"prompt":"x"}')
    assert [row.category for row in reading.rejections] == ["characters", "characters", "template"]


@pytest.mark.parametrize(
    ("line", "category"),
    [
        (b'{"prompt": "caf\xe9"}', "encoding"),
        (b"\xff\xfe{\x00}\x00", "encoding"),
        (b'{"prompt": NaN}', "json"),
        (b'{"prompt": "a", "prompt": "a"}', "json"),
        (b'{"prompt": "a", "x": {"k": 1, "k": 1}}', "json"),
        (b'{"prompt": "a\x00"}', "json"),
        (b'{"prompt": "a"', "json"),
        (b'{"prompt": "a"} {}', "json"),
        (b"[" * 200_000, "json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "json"),
    ],
)
def test_what_is_not_one_sound_json_object_is_rejected(line, category):
    reading = read(b'{"prompt": "before"}\n' + line + b'\n{"prompt": "after"}')
    assert [(row.line, row.category) for row in reading.rejections] == [(2, category)]
    assert [prompt.line for prompt in reading.prompts] == [1, 3]


def test_carriage_returns_and_byte_order_marks_cost_no_row():
    reading = read(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n\xef\xbb\xbf{"prompt": "b"}\r\n\xef\xbb\xbf\r\n')
    assert [prompt.messages[0].content for prompt in reading.prompts] == ["a", "b"]
    assert (reading.rejections, reading.blank_lines) == ([], 2)


def test_an_empty_file_has_no_rows():
    assert read(b"") == ([], [], 0)


def test_normalisation_joins_white_space_and_composes_accents_and_keeps_case():
    assert normalise(" A\u00a0b\t\r\nc\u2003") == "A b c"
    assert normalise("cafe\u0301") == "caf\u00e9"
    assert normalise("Peru") != normalise("peru")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["user", "assistant", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["id", "messages", "role", "content", "prompt", "conversations", "from", "value", "type", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
lines = st.one_of(
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.text(max_size=8).map(lambda text: json.dumps({"prompt": text}).encode()),
    st.sampled_from(
        [b"", b"  ", b"\xef\xbb\xbf", b'{"messages":[{"role":"user","content":"hi"}]}', b'{"prompt":"\\ud800"}']
    ),
)


@given(st.lists(lines, max_size=8), st.booleans())
def test_kept_and_rejected_rows_and_blank_lines_are_all_lines_of_any_file(content, final_newline):
    data = b"\n".join(content) + (b"\n" if content and final_newline else b"")
    expected = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    try:
        reading = read(data)
    except DataError as error:
        assert "already stands for another prompt on line" in error.message
        return
    kept, duplicates = merge_duplicates(reading.prompts)
    assert len(kept) + len(duplicates) + len(reading.rejections) + reading.blank_lines == expected
    numbers = [row.line for row in [*reading.prompts, *reading.rejections]]
    assert len(set(numbers)) == len(numbers) and all(1 <= number <= expected for number in numbers)
    assert all(row.reason and row.category for row in [*duplicates, *reading.rejections])
    for prompt in reading.prompts:
        json.dumps([prompt.id, prompt.root], ensure_ascii=False).encode("utf-8")


def test_a_damaged_row_of_a_prepared_file_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "train.jsonl"
    row = {"id": "d/1", "domain": "d", "messages": [{"role": "user", "content": "x"}], "token_ids": [1]}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"token_ids": ["1"]}) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl:2: token_ids\.0: Input should be a valid integer"):
        read_prompts(path)
    path.write_text(json.dumps(row) + "\n")
    assert read_prompts(path)[0].token_ids == [1]
