"""The report in a real browser: on a phone and on a desk, light and dark, with the pointer and with the keyboard."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from browser import executable, found, probed, visit

from dspark.package.verify import read_manifest
from dspark.report.looks import DARK, LIGHT
from dspark.report.page import read_evidence, render_html, tell
from dspark.report.page.evidence import package_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="no browser is installed: apt-get install chromium"),
]

MEASURE = """
const root = document.documentElement;
const seen = (one) => one.getClientRects().length > 0;
const wide = [...document.querySelectorAll("body *")].filter((one) =>
  seen(one) && !one.closest(".scroll, nav, pre, .skip") && one.getBoundingClientRect().right > root.clientWidth + 0.5);
return {
  inner: window.innerWidth, client: root.clientWidth, scroll: root.scrollWidth,
  beyond: wide.map((one) => one.outerHTML.slice(0, 120)),
  drawings: [...document.querySelectorAll("svg[role=img]")].filter(seen).length,
  smallest: Math.min(...[...document.querySelectorAll("svg[role=img]")].filter(seen).map((one) =>
    11 * one.getBoundingClientRect().width / one.viewBox.baseVal.width)),
  back: getComputedStyle(document.querySelector("main > section")).backgroundColor,
  text: getComputedStyle(document.body).color,
  plot: getComputedStyle(document.querySelector("svg[role=img] .back")).fill,
};
"""

USE = """
const chart = [...document.querySelectorAll(".chart")].find((one) => one.querySelector(".legend"));
const tip = document.getElementById("tip");
const shown = () => tip.hidden ? null : tip.textContent;
const drawing = [...chart.querySelectorAll("svg[role=img]")].find((one) => one.getClientRects().length > 0);
const press = (key) => drawing.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const result = { before: shown(), hint: document.querySelector(".hint").hidden, focusable: drawing.tabIndex };
press("ArrowRight"); result.first = shown();
press("ArrowRight"); result.second = shown();
press("ArrowLeft"); press("ArrowLeft"); result.last = shown();
press("Escape"); result.escaped = shown();
const mark = drawing.querySelector(".mark");
mark.dispatchEvent(new PointerEvent("pointerenter")); result.pointed = shown();
const at = tip.getBoundingClientRect();
result.inside = at.left >= 0 && at.right <= document.documentElement.clientWidth && at.top >= 0;
mark.dispatchEvent(new PointerEvent("pointerleave")); result.left = shown();
const count = () => [...drawing.querySelectorAll(".series .mark")].filter((one) => one.getClientRects().length).length;
const button = chart.querySelector(".legend button");
result.all = count();
button.click(); result.without = [count(), button.getAttribute("aria-pressed")];
button.click(); result.again = [count(), button.getAttribute("aria-pressed")];
const details = chart.querySelector("details");
details.open = true; result.rows = details.querySelectorAll("tbody tr").length;
return result;
"""


@pytest.fixture(scope="module")
def page(whole: Path, weaker: Path) -> str:
    first, second = (
        read_evidence(package_files(package, read_manifest(package), "some/package")) for package in (whole, weaker)
    )
    return render_html(tell(first, second, today=datetime.date(2026, 12, 1)))


def colour(text: str) -> tuple[int, ...]:
    """`#1f2328` or `rgb(31, 35, 40)`."""
    if text.startswith("#"):
        return tuple(bytes.fromhex(text[1:]))
    return tuple(int(part) for part in text[4:-1].split(","))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_it_fits_and_can_be_used_and_nothing_is_complained_about(page: str, tmp_path: Path, width: int, dark: bool):
    path = tmp_path / "report.html"
    script = f"return [(() => {{{MEASURE}}})(), (() => {{{USE}}})()];"
    path.write_text(probed(page, script), encoding="utf-8")
    dump, console = visit(path, width=width, dark=dark)
    measured, used = found(dump)
    assert console == [] and measured["inner"] == width
    assert measured["scroll"] <= measured["client"], "the page scrolls sideways"
    assert measured["beyond"] == []
    assert measured["drawings"] == 12 and measured["smallest"] >= 9, "pixels of the smallest labels"
    colours = DARK if dark else LIGHT
    assert colour(measured["back"]) == colour(measured["plot"]) == colour(colours["back"])
    assert colour(measured["text"]) == colour(colours["text"])
    check_use(used)


def check_use(used: dict[str, Any]) -> None:
    """The first chart with two series is that of throughput: `none` and `fixed` at 1 and 4 requests."""
    assert used["before"] is None and used["hint"] is False and used["focusable"] == 0
    assert used["first"].startswith("none: 100 at 100, 95 % [99.9, 100.1], n = 10 (1)")
    assert used["second"] != used["first"]
    assert used["last"] not in (None, used["first"]) and used["escaped"] is None
    assert used["pointed"] == used["first"] and used["inside"] and used["left"] is None
    assert used["all"] > used["without"][0] > 0 and used["without"][1] == "false"
    assert used["again"] == [used["all"], "true"] and used["rows"] == used["all"]


def test_another_script_does_not_run(page: str, tmp_path: Path):
    """The policy is no ornament: a script that is not the page's own is refused, and that is all it complains about."""
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", "<script>document.title = 'taken over'</script></body>"), encoding="utf-8")
    dump, console = visit(path, width=800)
    (complaint,) = console
    assert "taken over</title>" not in dump and "Content Security Policy" in complaint
    assert 'aria-pressed="true" disabled' not in dump, "the page's own script ran"


def test_everything_shows_without_a_script(page: str, tmp_path: Path):
    """With the page's script removed: charts, legends and tables are there, nothing needs it."""
    start, end = page.index("<script>"), page.index("</script>")
    path = tmp_path / "report.html"
    path.write_text(probed(page[:start] + page[end + len("</script>") :], MEASURE), encoding="utf-8")
    dump, _ = visit(path, width=800)
    assert found(dump)["drawings"] == 12 and dump.count("<title>") > 100, "marks keep their titles"
