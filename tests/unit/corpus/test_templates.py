from __future__ import annotations

import re

import pytest

from dspark.corpus.templates import read_templates
from dspark.errors import SettingsError


@pytest.fixture
def draw(tmp_path):
    def draw(text):
        path = tmp_path / "t.yaml"
        path.write_text(text, encoding="utf-8")
        return read_templates(path)

    return draw


def test_a_template_without_gaps_gives_each_phrasing_once(draw):
    rows = draw("templates:\n  - {id: a, text: [One way., Another way.]}\n  - {id: b, text: ' Alone. '}\n")
    assert [(row.template, row.variant, row.text) for row in rows] == [
        ("a", 0, "One way."),
        ("a", 1, "Another way."),
        ("b", 0, "Alone."),
    ]


def test_phrasings_take_turns_among_the_variants(draw):
    rows = draw("variants: 4\ntemplates:\n  - {id: a, text: ['first {n}', 'second {n}'], values: {n: 1..1000}}\n")
    assert [row.text.split()[0] for row in rows] == ["first", "second", "first", "second"]


def test_values_lie_in_their_ranges_ends_included(draw):
    rows = draw(
        "variants: 200\ntemplates:\n  - {id: a, text: '{n} {d}', values: {n: -2..2 step 2, d: 0.5..1 step 0.25}}\n"
    )
    assert {row.text for row in rows} == {f"{n} {d}" for n in ("-2", "0", "2") for d in ("0.50", "0.75", "1.00")}


def test_derived_values_are_computed_from_those_above_them(draw):
    rows = draw(
        "variants: 9\ntemplates:\n"
        "  - {id: a, text: '{a} {b} {p} {s} {m} {t}',"
        " values: {a: 2..90, b: [3, 5], p: a * b, s: p + 1, m: a - b, t: 10 * m}}\n"
    )
    for row in rows:
        a, b, p, s, m, t = map(int, row.text.split())
        assert (p, s, m, t) == (a * b, a * b + 1, a - b, 10 * (a - b))


def test_draws_from_one_list_are_different_within_a_prompt(draw):
    rows = draw(
        "variants: 6\nlists: {names: [Ada, Ben, Cy]}\ntemplates:\n"
        "  - {id: a, text: '{x} {y} {z}', values: {x: from names, y: from names, z: from names}}\n"
    )
    assert len(rows) == 6  # all orders of three names
    assert all(sorted(row.text.split()) == ["Ada", "Ben", "Cy"] for row in rows)


def test_a_template_gives_no_text_twice_and_ends_when_it_is_exhausted(draw):
    rows = draw("variants: 50\ntemplates:\n  - {id: a, text: 'n = {n}', values: {n: 1..3}}\n")
    assert sorted(row.text for row in rows) == ["n = 1", "n = 2", "n = 3"]


def test_other_templates_do_not_change_what_a_template_draws(draw):
    one = "  - {id: a, text: 'n = {n}', values: {n: 1..100000}}\n"
    alone = draw("templates:\n" + one)
    among = draw("templates:\n  - {id: b, text: '{n}', values: {n: 1..9}}\n" + one)
    assert [row.text for row in alone] == [row.text for row in among if row.template == "a"]
    assert len(alone) == 8


def test_a_value_that_looks_like_a_gap_stays_text(draw):
    rows = draw("templates:\n  - {id: a, text: '{x} {y}', values: {x: ['{y}'], y: [1]}}\n")
    assert [row.text for row in rows] == ["{y} 1"]


def test_braces_that_are_no_gap_stay_text(draw):
    text = "f = {1, 2} {} {N} {{ x }} {% if %} 10^{n}"
    rows = draw(f"templates:\n  - {{id: a, text: '{text}', values: {{n: [3]}}}}\n")
    assert rows[0].text == "f = {1, 2} {} {N} {{ x }} {% if %} 10^3"


def test_a_row_knows_the_line_of_its_template(draw):
    rows = draw(
        "# comment\nvariants: 2\ntemplates:\n  - id: a\n    text: x\n  - text: y\n    id: b-2\n  - {id: c, text: z}\n"
    )
    assert [(row.template, row.line) for row in rows] == [("a", 4), ("b-2", 7), ("c", 8)]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{id: a, text: '{n} {m}', values: {n: 1..2}}", "no value for m"),
        ("{id: a, text: '{n}', values: {n: 1..2, m: 1..2}}", "m is never used"),
        ("{id: a, text: '{n}', values: {n: 5..2}}", "n: nothing to choose from"),
        ("{id: a, text: '{n}', values: {n: []}}", "n: nothing to choose from"),
        ("{id: a, text: '{n}', values: {n: 1..5 step 0}}", "n: the step is 0"),
        ("{id: a, text: '{n}', values: {n: from nowhere}}", "n: there is no list 'nowhere'"),
        ("{id: a, text: '{n}', values: {n: __import__}}", "n: '__import__' is no range"),
        ("{id: a, text: '{n}', values: {n: m * 2, m: 1..2}}", "n: m must stand above it"),
        ("{id: a, text: '{n}', values: {m: [x], n: m * 2}}", "m is 'x', which is not a number"),
        ("{id: a, text: ['x', '  ']}", "text: empty"),
        ('{id: a, text: "x\\0y"}', "text: holds a NUL character"),
    ],
)
def test_a_mistake_in_a_template_is_an_error_with_its_line(draw, entry, reason):
    with pytest.raises(SettingsError, match=rf"t\.yaml:3: template 'a': {re.escape(reason)}"):
        draw(f"variants: 3\ntemplates:\n  - {entry}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "templates:\n  - {id: a, text: x}\n  - {id: a, text: y}\n",
            r"t\.yaml:3: template 'a' already stands on line 2",
        ),
        ("templates:\n  - {id: a, text: x, answer: 3}\n", r"t\.yaml: templates\.0\.answer: Extra inputs"),
        ("templates: []\n", r"t\.yaml: templates: "),
        ("just text\n", r"t\.yaml: value: "),
        ("templates:\n  - {id: A B, text: x}\n", r"t\.yaml: templates\.0\.id: "),
        ("templates: [\n", r"t\.yaml:2: not valid YAML"),
        ("variants: 2\nvariants: 3\n", r"t\.yaml:2: not valid YAML"),
    ],
)
def test_a_file_that_is_no_file_of_templates_is_an_error(draw, text, reason):
    with pytest.raises(SettingsError, match=reason):
        draw(text)
