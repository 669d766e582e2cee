"""SVG figures, read back by a parser that knows nothing of how they were drawn."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))  # drawn.py

from drawn import NAMESPACE, axis, intervals, marks, numbers, of_class, parsed

from dspark.report import drawing
from dspark.report.chart import Axis, Figure, Panel, Point, Series, table
from dspark.report.drawing import render, sample
from dspark.report.looks import COLOURS, DARK, LIGHT, OVER

X, Y = Axis("x", "across"), Axis("y", "upwards")


def figure(*panels: Panel, name: str = "demo", x: Axis = X, y: Axis = Y, columns: int = 1, **words: str) -> Figure:
    return Figure(name, words.get("title", "A title"), words.get("caption", "A caption."), x, y, panels, columns)


def line(name: str, *points: tuple[float, float], **other) -> Series:
    return Series(name, tuple(Point(*point) for point in points), **other)


def rows_of(drawn: Figure) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table(drawn))))


def check_against_table(drawn: Figure, *, logarithmic: tuple[bool, bool] = (False, False)) -> None:
    """Every mark and every bar of every panel stands where the ticks say that the table's numbers are."""
    rows = iter(rows_of(drawn))
    for panel in of_class(parsed(render(drawn)), "panel"):
        x, y = axis(panel, "x", logarithmic=logarithmic[0]), axis(panel, "y", logarithmic=logarithmic[1])
        spans = []
        for name in ("x", "y"):
            values = [float(tick.text.replace(",", "")) for tick in of_class(panel, f"{name}-tick")]
            spans.append(max(values) - min(values))
        bars = iter(intervals(panel))
        for across, up in marks(panel):
            row = next(rows)
            assert x(across) == pytest.approx(float(row["x"]), abs=2e-4 * spans[0])
            assert y(up) == pytest.approx(float(row["y"]), abs=2e-4 * spans[1])
            if row["low"]:
                low, high = next(bars)
                assert y(low) == pytest.approx(float(row["low"]), abs=2e-4 * spans[1])
                assert y(high) == pytest.approx(float(row["high"]), abs=2e-4 * spans[1])
        assert next(bars, None) is None
    assert next(rows, None) is None


def test_marks_and_intervals_stand_where_the_ticks_say():
    measured = Series("math", (Point(1, 0.7, (0.65, 0.76), 12), Point(2, 0.6, (0.5, 0.7), 12), Point(3, 0.55)))
    other = line("chat", (1, 0.4), (3, 0.2))
    check_against_table(figure(Panel("one", (measured, other)), Panel("two", (other,)), columns=2))
    check_against_table(figure(Panel("", (measured,)), y=Axis("y", "y", low=0, high=1), x=Axis("x", "x", whole=True)))


coordinate = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
points = st.lists(st.tuples(coordinate, coordinate, st.floats(0, 50)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(st.lists(st.lists(points, min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_any_data_can_be_read_back(panels, columns, with_intervals):
    made = [
        Panel(
            f"panel {number}",
            tuple(
                Series(
                    f"series {index}",
                    tuple(Point(x, y, (y - room, y + room) if with_intervals else None) for x, y, room in found),
                )
                for index, found in enumerate(series)
            ),
        )
        for number, series in enumerate(panels)
    ]
    check_against_table(figure(*made, columns=columns))


def test_logarithmic_axes_can_be_read_back():
    series = line("arm", (1, 5), (4, 40), (32, 900))
    check_against_table(figure(Panel("", (series,)), x=Axis("x", "x", kind="values")), logarithmic=(True, False))
    both = figure(Panel("", (series,)), x=Axis("x", "x", kind="logarithmic"), y=Axis("y", "y", kind="logarithmic"))
    check_against_table(both, logarithmic=(True, True))


HOSTILE = ["<script>alert(1)</script>", '"><b>', "a & b", "]]>", "\x00\x08\ud800\ufffe", "tab\tline\nend", "数学 🙂"]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_stay_text_whatever_they_hold(text):
    drawn = figure(
        Panel(text, (line(text, (0, 1), (1, 2)), line("other", (0, 2)))), title=text, caption=text,
        x=Axis("x", text), y=Axis("y", text),
    )  # fmt: skip
    root = parsed(render(drawn))
    allowed = {"svg", "title", "desc", "style", "rect", "g", "text", "line", "path"}
    assert {one.tag.removeprefix(NAMESPACE) for one in root.iter()} <= allowed
    expected = re.sub("[\x00-\x08\ud800-\udfff\ufffe\uffff]", "\ufffd", re.sub(r"[\t\n]", " ", text))
    assert root.find(f"{NAMESPACE}title").text == expected
    assert render(drawn).encode("utf-8")


def test_it_can_be_read_aloud():
    """An image with a name and a description with the numbers of every series; marks say theirs when pointed at."""
    drawn = figure(Panel("greedy", (Series("math", (Point(1, 0.71, (0.7, 0.72), 12), Point(4, 0.62))),)))
    root = parsed(render(drawn))
    assert root.get("role") == "img"
    named = {one.get("id"): one.text for one in root.iter() if one.get("id")}
    title, description = (named[name] for name in root.get("aria-labelledby").split())
    assert title == "A title"
    assert "upwards against across" in description and "greedy: math: 0.71 at 1 to 0.62 at 4." in description
    first, second = (mark.find(f"{NAMESPACE}title").text for mark in of_class(root, "mark"))
    assert first == "math: 0.71 at 1, 95 % [0.7, 0.72], n = 12" and second == "math: 0.62 at 4"


def test_figures_of_one_page_have_ids_of_their_own():
    one, two = (parsed(render(figure(Panel("", (line("a", (0, 1)),)), name=name))) for name in ("first", "second"))
    ids = [{element.get("id") for element in root.iter() if element.get("id")} for root in (one, two)]
    assert len(ids[0]) == 2 and not ids[0] & ids[1]
    same = figure(Panel("", (line("a", (0, 1)),)), name="first")
    other = {element.get("id") for element in parsed(render(same, ids="other")).iter() if element.get("id")}
    assert len(other) == 2 and not other & ids[0]


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2, definition)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [LIGHT, DARK])
def test_colours_can_be_seen_in_both_modes(mode):
    """WCAG 2: 3 for what is drawn (1.4.11), 4.5 for text (1.4.3)."""
    assert all(contrast(colour, mode["back"]) >= 3 for colour in COLOURS)
    assert contrast(mode["text"], mode["back"]) >= 4.5 and contrast(mode["muted"], mode["back"]) >= 4.5


def test_colour_is_never_all_that_tells_series_apart():
    series = tuple(line(f"series {number}", (0, number), (1, number)) for number in range(24))
    root = parsed(render(figure(Panel("", series))))
    looks = []
    for group in of_class(root, "series"):
        path = of_class(group, "line")[0]
        shape = of_class(group, "mark")[0].get("d")
        looks.append((re.sub(r"^M\S+ [^a-zA-Z]+", "", shape), path.get("stroke-dasharray")))
    assert len(set(looks)) == len(looks) == 24


def test_series_look_alike_in_all_panels_and_in_the_legend():
    a, b = line("a", (0, 1), (1, 2)), line("b", (0, 3), (1, 1))
    root = parsed(render(figure(Panel("one", (a, b)), Panel("two", (b,)), columns=2)))
    strokes = [[path.get("stroke") for path in of_class(panel, "line")] for panel in of_class(root, "panel")]
    keys = [of_class(key, "line")[0].get("stroke") for key in of_class(root, "key")]
    assert strokes == [keys, keys[1:]] and keys[0] != keys[1]
    assert [of_class(key, "text")[0].text for key in of_class(root, "key")] == ["a", "b"]
    assert not of_class(parsed(render(figure(Panel("", (a,))))), "key"), "one series needs no legend"


@pytest.mark.parametrize("panels", range(1, 6))
@pytest.mark.parametrize("columns", range(1, 5))
def test_nothing_leaves_the_figure(panels, columns):
    series = tuple(line(f"a rather long name of a series, {number}", (0, 1), (9, 1e6)) for number in range(7))
    drawn = figure(*(Panel(f"panel {number}", series) for number in range(panels)), columns=columns)
    root = parsed(render(drawn))
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (width, height) == (float(root.get("width")), float(root.get("height")))
    for text in root.iter(f"{NAMESPACE}text"):
        assert 0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height
    for tick in of_class(root, "x-tick"):
        half = 11 * 0.56 * len(tick.text) / 2
        assert half <= float(tick.get("x")) <= width - half
    for tick in of_class(root, "y-tick"):
        assert float(tick.get("x")) >= 11 * 0.56 * len(tick.text)
    for across, up in itertools.chain.from_iterable(map(marks, of_class(root, "panel"))):
        assert 0 <= across <= width and 0 <= up <= height


def test_labels_of_ticks_do_not_run_into_each_other():
    """Their places are at least as far apart as their widths, at the width that text is taken to have."""
    root = parsed(
        render(figure(Panel("", (line("a", (1, 1), (7, 2), (8, 2), (9, 3)),)), x=Axis("x", "x", kind="values")))
    )
    ticks = [(float(tick.get("x")), tick.text) for tick in of_class(root, "x-tick")]
    for (before, one), (after, other) in itertools.pairwise(ticks):
        assert after - before >= 11 * 0.56 * (len(one) + len(other)) / 2


def test_of_two_series_that_coincide_both_are_seen():
    """The later line has gaps and the later mark is hollow; what stands alone is drawn in full."""
    both = [line(name, (1, 1), (2, 3)) for name in ("before", "after")]
    root = parsed(render(figure(Panel("a", (*both, line("apart", (1, 2), (2, 2)))), Panel("b", (both[1],)))))
    first, second = of_class(root, "panel")
    assert [one.get("stroke-dasharray") for one in of_class(first, "line")] == [None, OVER, None]
    assert [one.get("fill") == "none" for one in of_class(first, "mark")] == [False] * 2 + [True] * 2 + [False] * 2
    assert {one.get("stroke") for one in of_class(first, "mark")[2:4]} == {COLOURS[1]}
    assert of_class(second, "line")[0].get("stroke-dasharray") is None
    assert [one.get("fill") for one in of_class(second, "mark")] == [COLOURS[1]] * 2


def test_notes_run_neither_into_each_other_nor_into_marks():
    places = [(50, 50), (50.4, 50.2), (50.8, 50.4), (51.5, 49), (0, 0), (100, 100)]
    noted = tuple(Point(x, y, note=str(number)) for number, (x, y) in enumerate(places, 8))
    root = parsed(render(figure(Panel("", tuple(Series(point.note, (point,)) for point in noted)))))
    notes = [(float(one.get("x")), float(one.get("y")), one.text) for one in of_class(root, "note")]
    assert [text for _, _, text in notes] == [point.note for point in noted]
    rooms = [(x, y - 9, x + 9 * 0.56 * len(text), y) for x, y, text in notes]
    everything = [*rooms, *((x - 4, y - 4, x + 4, y + 4) for x, y in marks(root))]
    for one, other in itertools.product(rooms, everything):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert one is other or apart


def test_steps_hold_each_value_until_the_next():
    root = parsed(render(figure(Panel("", (line("a", (0, 1), (1, 2), (2, 4), form="steps"),)))))
    path = of_class(root, "line")[0].get("d")
    assert re.sub(r"[^A-Z]", "", path) == "MHVHV"
    assert not of_class(root, "mark")


def test_a_band_runs_along_both_ends_of_the_intervals():
    series = Series("a", (Point(0, 1, (0.5, 1.5)), Point(1, 2, (1, 3))), band=True)
    root = parsed(render(figure(Panel("", (series,)))))
    outline = numbers(of_class(root, "band")[0].get("d"))
    y = axis(of_class(root, "panel")[0], "y")
    assert [y(value) for value in outline[1::2]] == pytest.approx([0.5, 1, 3, 1.5], abs=1e-2)
    assert not of_class(root, "interval")


def test_references_are_drawn_and_are_no_data():
    diagonal = line("right", (0, 0), (1, 1), reference=True)
    drawn = figure(Panel("", (line("a", (0.5, 0.4)), diagonal)))
    root = parsed(render(drawn))
    assert len(of_class(root, "reference")) == 1 and drawn.names == ["a"]
    assert [row["series"] for row in rows_of(drawn)] == ["a"]


def test_equal_figures_give_equal_bytes_and_nothing_is_loaded_from_elsewhere():
    made = [render(figure(Panel("p", (line("a", (0.1, 1 / 3), (2 / 7, 2)),)))) for _ in range(2)]
    assert made[0] == made[1] and made[0].isascii()
    outside = made[0].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"http|url\(|href|@import|<script", outside)


@pytest.mark.parametrize("point", [Point(float("nan"), 1), Point(1, float("inf")), Point(1, 1, (0, float("nan"))),
                                   Point(1, 1, (2, 1))])  # fmt: skip
def test_numbers_that_cannot_be_drawn_are_refused(point):
    with pytest.raises(ValueError, match="figure demo: "):
        figure(Panel("", (Series("a", (point,)),)))


def test_a_figure_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no point to draw"):
        figure(Panel("", (Series("a", ()),)))


def test_the_table_has_every_number_in_full():
    value = 1 / 3
    series = Series("a, b", (Point(value, value, (value / 2, value * 2), 7, "note"), Point(1, 2)))
    assert rows_of(figure(Panel("p", (series,)))) == [
        {"panel": "p", "series": "a, b", "x": repr(value), "y": repr(value), "low": repr(value / 2),
         "high": repr(value * 2), "n": "7", "note": "note"},
        {"panel": "p", "series": "a, b", "x": "1", "y": "2", "low": "", "high": "", "n": "", "note": ""},
    ]  # fmt: skip


def test_a_bare_figure_leaves_to_its_page_what_that_says_itself():
    """Same marks at the same values; no title, caption, legend or rules, but a name and a description all the same."""
    drawn = figure(Panel("p", (line("a", (1, 1), (2, 3)), line("b", (1, 2)))), title="Words", caption="More words.")
    full, bare = parsed(render(drawn)), parsed(render(drawn, bare=True))
    assert len(marks(bare)) == len(marks(full)) == 3
    assert not of_class(bare, "key") and "style" not in {one.tag for one in bare}
    texts = [one.text for one in bare.iter("text")]
    assert "p" in texts and "Words" not in texts and "More words." not in texts
    assert bare.find("title").text == "Words" and "More words." in bare.find("desc").text
    assert float(bare.get("height")) < float(full.get("height"))


def test_a_narrow_figure_has_its_panels_below_each_other():
    series = line("a", (1, 1), (2, 3e4))
    drawn = figure(*(Panel(f"panel {number}", (series,)) for number in range(3)), columns=3)
    narrow = parsed(render(drawn, narrow=True))
    frames = [numbers(one.get("d")) for one in of_class(narrow, "axis")]
    assert len({frame[0] for frame in frames}) == 1 and frames[0][1] < frames[1][1] < frames[2][1]
    assert float(narrow.get("width")) <= 360
    check_against_table(drawn)


def test_a_sample_looks_like_its_series():
    drawn = figure(Panel("", (line("a", (1, 1), (2, 2)), line("b", (1, 2), form="points"))))
    first, second = (parsed(sample(drawn, name)) for name in ("a", "b"))
    assert [one.get("stroke") for one in of_class(first, "line")] == [COLOURS[0]] and not of_class(second, "line")
    assert first.get("aria-hidden") == "true" and [one.get("fill") for one in second] == [COLOURS[1]]


def test_series_can_be_told_apart_by_whoever_restyles_them():
    root = parsed(render(figure(Panel("p", (line("a", (1, 1)), line("b", (1, 2)))), Panel("q", (line("b", (1, 2)),)))))
    assert [one.get("data-series") for one in of_class(root, "series")] == ["0", "1", "1"]


MUTANTS = {
    "upside down": ("_y", lambda self, box, value: box.top + self.y.place(value) * box.height),
    "shifted": ("_x", lambda self, box, value: box.left + 1 + self.x.place(value) * box.width),
}


@pytest.mark.parametrize("mutant", ["upside down", "shifted"])
def test_a_fault_in_the_drawing_is_found(monkeypatch, mutant):
    """Marks drawn by another rule than ticks: the comparison of both must fail."""
    name, fault = MUTANTS[mutant]
    real, original = getattr(drawing._Drawing, name), drawing._Drawing._mark

    def faulty(self, *arguments):
        monkeypatch.setattr(drawing._Drawing, name, fault)
        found = list(original(self, *arguments))
        monkeypatch.setattr(drawing._Drawing, name, real)
        return iter(found)

    monkeypatch.setattr(drawing._Drawing, "_mark", faulty)
    with pytest.raises(AssertionError):
        check_against_table(
            figure(
                Panel(
                    "",
                    (
                        Series(
                            "a",
                            (Point(1, 1, (0, 2)), Point(2, 3)),
                        ),
                    ),
                )
            )
        )
