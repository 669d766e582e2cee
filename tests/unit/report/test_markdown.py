"""Markdown from data."""

from __future__ import annotations

import pytest

from dspark.measured import Measured
from dspark.report.markdown import code, measured, table, text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain words", "plain words"),
        ("a*b_c", r"a\*b\_c"),
        ("- item", r"\- item"),
        ("# title", r"\# title"),
        ("1. item", r"1\. item"),
        ("1.5 times", "1.5 times"),
        ("2) x", r"2\) x"),
        ("a-b", "a-b"),
        ("line\nbreak\ttab", "line break tab"),
        ("x\u202ey\x1b", "x y"),
        ("&lt;", r"\&lt;"),
        ("a\\b", r"a\\b"),
        (None, "None"),
        (3, "3"),
    ],
)
def test_text_shows_as_it_is(value, expected):
    assert text(value) == expected


def test_code_cannot_be_left():
    assert code("a`b|c\nd") == "`a b c d`"
    assert code("") == "` `"


def test_numbers_carry_their_interval():
    assert measured(Measured(value=1.25, n=3, ci95=(1.0, 1.5)), 2) == r"1.25 \[1.00, 1.50\]"
    assert measured(None) == "–"


def test_a_table():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
