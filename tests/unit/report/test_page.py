"""The report: numbers of the records, everything escaped, nothing from elsewhere, what is missing said plainly."""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import fake_build
import full_build
import pytest

from dspark.io.jsonfile import model_json, write_json
from dspark.package.verify import read_manifest
from dspark.report.chart import Figure, rows
from dspark.report.page import Evidence, Page, read_evidence, render_html, render_markdown, tell
from dspark.report.page.compare import SAME_RUN, differences
from dspark.report.page.evidence import package_files
from dspark.report.page.figures import point_rows
from dspark.report.page.model import Chart, Code, Facts, Group, Items, Missing, Paragraph, Section, Step, Table

TODAY = datetime.date(2026, 12, 1)
HOSTILE = "<script>alert(1)</script> \"'>& | `x` [a](http://evil.example) ![i](j) </style></details>\n# top {{7*7}}"


def evidence_of(package: Path) -> Evidence:
    return read_evidence(package_files(package, read_manifest(package), "some/package"))


def page_of(package: Path, other: Path | None = None) -> Page:
    return tell(evidence_of(package), evidence_of(other) if other is not None else None, today=TODAY)


def figures_of(page: Page) -> list[Figure]:
    """Of all sections, in their order."""
    blocks = [block for section in page.sections for block in section.blocks]
    flat = [inner for block in blocks for inner in (block.blocks if isinstance(block, Group) else (block,))]
    return [block.figure for block in flat if isinstance(block, Chart)]


class Document(HTMLParser):
    """Every element with its attributes, and the text of styles, scripts and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.inside.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag, f"</{tag}> ends another element"

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside[-1]][-1] += data

    def of(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name in names]


def test_everything_that_was_measured_is_drawn_and_told(whole: Path):
    page = page_of(whole)
    assert [figure.name for figure in figures_of(page)] == [
        "pareto", "budget", f"cost-{fake_build.CPU}", "tau", "acceptance", "reliability-temperature-0-greedy-match",
        "reliability-temperature-1-sampled", "threshold-acceptance", "threshold-tau", "training-loss", "training-tau",
    ]  # fmt: skip
    assert [section.anchor for section in page.sections] == [
        "serving", "speed", "acceptance", "confidence", "soundness", "training", "origin", "missing",
    ]  # fmt: skip
    assert page.absent.keys() == {
        f"serving profile {fake_build.ELSEWHERE}", f"figure load, {fake_build.ELSEWHERE}",
        f"figure cost-{fake_build.ELSEWHERE}",
    }  # fmt: skip


def test_the_answer_stands_before_everything_else(whole: Path):
    text = render_html(page_of(whole))
    headline = "Worth deploying on cpu-reference at 1 to 3 concurrent requests: 1.30 [1.25, 1.35] times plain decoding"
    assert text.index(headline, text.index("<main")) < text.index('id="serving"')
    markdown = render_markdown(page_of(whole)).splitlines()
    assert markdown[0] == "# demo" and markdown[4].startswith("**Worth deploying on cpu-reference at 1 to 3")


@pytest.mark.parametrize("render, cell", [(render_html, "{}</td>"), (render_markdown, "| {} |")])
def test_numbers_are_those_of_the_records(whole: Path, render, cell: str):
    """As the made-up build has them: tau, throughput, ratios, calibration, losslessness, each with its interval."""
    text = render(page_of(whole)).replace("\\[", "[").replace("\\]", "]")
    for number in (
        "2.000 [1.900, 2.100]",  # tau of math
        "1.400 [1.300, 1.500]",  # of code, which was not trained on
        "1.750 [1.650, 1.850]",  # the mean
        "0.87 [0.86, 0.88]",  # slower than plain decoding in the evaluation
        "0.80 [0.75, 0.85]",  # and at four requests in the engine
        "160.0 [159.9, 160.1]",  # tokens/s there
        "0.0800 [-0.0200, 0.1800]",  # ECE before
        "0.0200 [-0.0800, 0.1200]",  # and after
    ):
        assert cell.format(number) in text, number
    assert "150 tokens of n = 12 prompts (240 drafts verified, 70 accepted)" in text
    assert "0123456789abcdef" in text and read_manifest(whole).digests.package_digest in text


def test_a_chart_has_its_numbers_beside_it(whole: Path):
    """Every point of every figure is a row of a table, with value, interval and n as in the figure."""
    page = page_of(whole)
    document = Document(render_html(page))
    drawn = [attributes for attributes in document.of("path") if attributes.get("class") == "mark"]
    points = sum(len(rows(figure)) for figure in figures_of(page))
    assert len(drawn) == 2 * points, "wide and narrow"
    header, found = point_rows(next(figure for figure in figures_of(page) if figure.name == "tau"))
    assert header == ("panel", "series", "domain", "tokens per cycle", "95 % interval", "n")
    assert ("temperature 0 (greedy match)", "trained on", "math", "2", "[1.9, 2.1]", "12") in found


def test_charts_have_names_and_ids_are_not_used_twice(whole: Path, weaker: Path):
    document = Document(render_html(page_of(whole, weaker)))
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = [one for one in document.of("svg") if one.get("role") == "img"]
    assert len(drawings) == 2 * 12
    for one in document.of("svg", "figure", "div", "section"):
        for name in (one.get("aria-labelledby") or "").split():
            assert name in ids
    assert all(one.get("aria-labelledby") or one.get("aria-hidden") for one in document.of("svg"))
    targets = {one["href"][1:] for one in document.of("a")}
    assert targets <= set(ids)
    assert all(one.get("tabindex") == "0" for one in document.of("div") if one.get("class") == "scroll")


def test_the_policy_allows_exactly_what_is_there(whole: Path):
    text = render_html(page_of(whole))
    document = Document(text)
    policy = next(one for one in document.of("meta") if one.get("http-equiv") == "Content-Security-Policy")["content"]
    directives = {words[0]: words[1:] for words in (part.split() for part in policy.split(";"))}
    assert directives["default-src"] == ["'none'"] and directives["img-src"] == ["data:"]
    for directive, element in (("style-src", "style"), ("script-src", "script")):
        (content,) = document.texts[element]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives[directive] == [f"'sha256-{digest}'"]
    assert "unsafe" not in policy
    for _, attributes in document.elements:
        assert "style" not in attributes and not [name for name in attributes if name.startswith("on")]


def test_nothing_is_loaded_from_elsewhere(whole: Path, weaker: Path):
    text = render_html(page_of(whole, weaker))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    document = Document(text)
    assert [one["href"] for one in document.of("link")] == ["data:,"]
    assert not document.of("img", "iframe", "object", "embed", "form", "base", "use")
    for _, attributes in document.elements:
        assert not {"src", "srcset", "action", "xlink:href"} & attributes.keys()
    assert all(one["href"].startswith("#") for one in document.of("a"))


def test_what_was_not_measured_is_said_with_its_reason(whole: Path):
    page = page_of(whole)
    text = render_html(page)
    assert "Not there: onnxruntime arm.</strong> not asked for" in text
    assert "Not there: temperature 1, confidence.</strong> too few" in text
    assert "no GPU | at hand" in text and "position 3: T stays 1 &lt;b&gt;" in text
    assert r"not there: serving profile gpu-elsewhere (no GPU \| at hand)" in render_markdown(page)


@pytest.mark.parametrize("missing, named", [
    ("evidence/evaluate/metrics.json", "evaluation"), ("evidence/evaluate/lossless.json", "losslessness"),
    ("scheduler/calibration.json", "calibration"), ("evidence/parity.json", "export parity"),
    ("evidence/lineage.json", "lineage"), ("evidence/certify/cpu-reference.json", "certificate of cpu-reference"),
    ("evidence/train/curves.csv", "figure training"), ("evidence/evaluate/threshold_sweep.csv", "figure threshold"),
])  # fmt: skip
def test_a_record_that_is_not_there_is_missing_and_the_rest_is_told(
    whole: Path, tmp_path: Path, missing: str, named: str
):
    package = Path(shutil.copytree(whole, tmp_path / "package"))
    (package / missing).unlink()
    page = page_of(package)
    assert page.absent[named].startswith(f"{missing}: file not found")
    for text in (render_html(page), render_markdown(page)):
        assert "file not found" in text and str(tmp_path) not in text
    assert len(figures_of(page)) >= 8


def test_a_build_with_nothing_but_its_evaluation(tmp_path: Path):
    made = full_build.make(tmp_path)
    files = package_files(tmp_path, read_manifest(_assembled(made, tmp_path)), "x")
    bare = replace(
        files,
        manifest=None,
        package=None,
        plots=replace(files.plots, evaluate=made.evaluate, calibrate=tmp_path / "no", certificates={}, costs={}),
    )
    page = tell(read_evidence(bare), today=TODAY)
    assert page.verdict.answer == "not known" and page.steps == (Step("make the package", "dspark run --build demo"),)
    assert [figure.name for figure in figures_of(page)] == [
        "pareto", "budget", "tau", "acceptance", "threshold-acceptance", "threshold-tau",
    ]  # fmt: skip
    assert {"calibration", "export parity", "lineage", "losslessness"} - page.absent.keys() == {"losslessness"}
    assert "not assembled yet" in render_html(page)


def _assembled(made, tmp_path: Path) -> Path:
    from dspark.package.assemble import assemble

    assemble(made, tmp_path / "package", card=fake_build.card)
    return tmp_path / "package"


def test_hostile_names_and_reasons_stay_text(whole: Path, tmp_path: Path):
    """In every kind of place: title, verdict, commands, tables, lists, facts, reasons, series, panels, axes."""
    page = page_of(whole)
    figure = figures_of(page)[0]
    panel = figure.panels[0]
    series = replace(panel.series[0], name=HOSTILE, points=(replace(panel.series[0].points[0], note=HOSTILE),))
    poisoned = replace(
        figure,
        title=HOSTILE,
        caption=HOSTILE,
        x=replace(figure.x, label=HOSTILE),
        y=replace(figure.y, label=HOSTILE),
        panels=(replace(panel, title=HOSTILE, series=(series, *panel.series)),),
    )
    table = Table(HOSTILE, (HOSTILE, HOSTILE), ((HOSTILE, Code(HOSTILE)),), HOSTILE)
    blocks = (Paragraph(HOSTILE), Items((HOSTILE,)), Facts(((HOSTILE, HOSTILE), ("x", Code(HOSTILE)))), table,
              Missing(HOSTILE, HOSTILE), Chart(poisoned))  # fmt: skip
    made = replace(
        page,
        title=HOSTILE,
        subtitle=HOSTILE,
        verdict=replace(page.verdict, headline=HOSTILE, lines=(HOSTILE,)),
        steps=(Step(HOSTILE, HOSTILE),),
        sections=(Section("hostile", HOSTILE, blocks),),
    )
    html = render_html(made)
    document = Document(html)
    kinds = {name for name, _ in Document(render_html(page)).elements}
    assert {name for name, _ in document.elements} <= kinds, "no element comes from a name"
    assert len(document.texts["script"]) == len(document.texts["style"]) == 1
    clean = " ".join(HOSTILE.split())
    assert document.texts["h1"] == [clean] and document.texts["title"][0].startswith(clean)
    assert clean in document.texts["dt"] and clean in document.texts["code"] and clean in document.texts["li"]
    markdown = render_markdown(made)
    for line in markdown.splitlines():
        if "alert(1)" in line and not line.startswith("    "):  # a command is code
            assert not re.search(r"(?<![\\`])<script", re.sub(r"`[^`]*`", "", line)), line
    # Code is no Markdown, and neither is a summary: that is HTML.
    prose = re.sub(r"`[^`]*`|^    .*$|^<details><summary>.*</summary>$", "", markdown, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)\]\(", prose)
    assert "<summary>&lt;script&gt;" in markdown
    assert markdown.count("<details>") == markdown.count("\n</details>")


def test_equal_pages_give_equal_bytes(whole: Path):
    assert render_html(page_of(whole)) == render_html(page_of(whole))
    assert render_markdown(page_of(whole)) == render_markdown(page_of(whole))


def test_a_second_package_is_compared_prompt_by_prompt(whole: Path, weaker: Path):
    """Cycles that commit 2 and 3 tokens against 1 and 2 on every prompt: 5 / 3 - 1 is 2 / 3, whatever is drawn."""
    found = differences(evidence_of(whole), evidence_of(weaker))
    assert {(item.temperature, item.domain) for item in found} == {
        (temperature, domain) for temperature in ("0", "1") for domain in full_build.DOMAINS
    }
    for item in found:
        assert item.relative is not None and item.relative.n == 2
        assert item.relative.value == pytest.approx(2 / 3) and item.relative.ci95 == pytest.approx((2 / 3, 2 / 3))
        assert item.basis == "6 prompts of the same name, from the records of two runs"
    page = page_of(whole, weaker)
    text = render_html(page)
    assert "+66.7 % [+66.7, +66.7]" in text and figures_of(page)[0].name == "against"
    assert [section.anchor for section in page.sections][:2] == ["serving", "against"]
    assert "in different runs" in text and "to look at, not to decide by" in text
    assert "No setting differs." in text


def test_what_one_run_measured_in_pairs_is_taken_first(whole: Path, weaker: Path):
    """The made-up baseline needed a tenth more cycles for the same tokens: 10 % on every prompt."""
    first, second = evidence_of(whole), evidence_of(weaker)
    report = fake_build.paired()
    rival = report.rivals[1].model_copy(update={"package_digest": second.digest})
    found = differences(replace(first, paired=report.model_copy(update={"rivals": (rival,)})), second)
    assert {item.basis for item in found} == {SAME_RUN}
    assert all(item.relative.value == pytest.approx(0.1) and item.relative.n == 12 for item in found)


@pytest.mark.parametrize("change, said", [
    ({"target": None}, "not known whether both draft for the same target"),
    ({"target": "another"}, "they draft for different targets"),
])  # fmt: skip
def test_other_targets_are_not_paired(whole: Path, weaker: Path, change: dict, said: str):
    second = evidence_of(weaker)
    other = replace(second, files=replace(second.files, **change))
    for item in differences(evidence_of(whole), other):
        assert item.relative is None and said in item.basis and item.first is not None and item.second is not None


def test_records_that_cannot_be_paired_are_a_reason(whole: Path, pristine: Path, weaker: Path, tmp_path: Path):
    """Those of the pristine package are of no known schema; then none are there; then of other prompts."""
    first = evidence_of(whole)
    assert "another version of dspark, or damaged" in differences(first, evidence_of(pristine))[0].basis
    package = Path(shutil.copytree(weaker, tmp_path / "package"))
    path = package / "evidence/evaluate/records/temperature-0.safetensors"
    full_build.write_records(path, full_build.records(0.0, (0, 1), ("elsewhere",)))
    (package / "evidence/evaluate/records/temperature-1.safetensors").unlink()
    by_temperature = {item.temperature: item for item in differences(first, evidence_of(package))}
    assert by_temperature["0"].basis == "not paired: no prompt in common"
    assert "has no records of single prompts at temperature 1" in by_temperature["1"].basis
    page = tell(first, evidence_of(package), today=TODAY)
    assert "against" not in [figure.name for figure in figures_of(page)], "nothing to draw"


def test_prompts_of_one_side_only_are_left_out(whole: Path, weaker: Path, tmp_path: Path):
    package = Path(shutil.copytree(weaker, tmp_path / "package"))
    for temperature in ("0", "1"):
        path = package / f"evidence/evaluate/records/temperature-{temperature}.safetensors"
        full_build.write_records(path, full_build.records(float(temperature), (0, 1), ("code", "math", "elsewhere")))
    found = {
        item.domain: item for item in differences(evidence_of(whole), evidence_of(package)) if item.temperature == "0"
    }
    assert found["math"].relative.value == pytest.approx(2 / 3) and found["math"].relative.n == 2
    assert found["chat"].relative is None and found["chat"].basis == "not paired: no prompt of it in common"


def test_throughput_of_the_same_rounds_is_a_ratio(whole: Path, weaker: Path):
    first, second = evidence_of(whole), evidence_of(weaker)
    champion = fake_build.against_champion().model_copy(update={"package_digest": second.digest})
    entry = first.entries[fake_build.CPU].model_copy(update={"against_champion": champion})
    page = tell(replace(first, entries={fake_build.CPU: entry}), second, today=TODAY)
    text = render_html(page)
    assert "Tokens/s on cpu-reference, in the same rounds" in text and "1.040 [1.020, 1.060]" in text
    assert "in different runs" not in text


def test_settings_that_differ_are_listed(whole: Path, weaker: Path):
    first, second = evidence_of(whole), evidence_of(weaker)
    manifest = second.files.manifest
    recipe = {**manifest.inputs.recipe, "training": {**manifest.inputs.recipe["training"], "steps": 99}}
    inputs = manifest.inputs.model_copy(update={"recipe": recipe})
    changed = replace(second, files=replace(second.files, manifest=manifest.model_copy(update={"inputs": inputs})))
    text = render_markdown(tell(first, changed, today=TODAY))
    assert "| recipe.training.steps | 5 | 99 |" in text
    unknown = replace(second, files=replace(second.files, manifest=None))
    assert "no package that says how it was made" in render_markdown(tell(first, unknown, today=TODAY))


def test_markdown_has_as_many_cells_in_each_row(whole: Path, weaker: Path):
    width = None
    for line in render_markdown(page_of(whole, weaker)).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace(r"\|", "").count("|")
        width = width or cells
        assert cells == width, line


def test_the_next_command_follows_from_the_verdict(whole: Path):
    first = evidence_of(whole)
    in_a_workspace = replace(first, files=replace(first.files, is_build=True, package="builds/demo/package"))
    assert tell(in_a_workspace, today=TODAY).steps[0].command == "dspark promote demo --to production --dry-run"
    late = tell(in_a_workspace, today=datetime.date(2030, 1, 1))
    assert (late.verdict.answer, late.steps[0].command) == ("not known", "dspark profiles list")
    advice = first.entries[fake_build.CPU].recommended
    few = tuple(one.model_copy(update={"policy": "none", "decided": False}) for one in advice)
    entry = first.entries[fake_build.CPU].model_copy(update={"recommended": few})
    unclear = tell(replace(in_a_workspace, entries={fake_build.CPU: entry}), today=TODAY)
    assert unclear.steps[0].command == "dspark run --build demo --set evaluation.throughput_rounds=12"
    entry = first.entries[fake_build.CPU].model_copy(update={"recommended": ()})
    off = tell(replace(in_a_workspace, entries={fake_build.CPU: entry}), today=TODAY)
    assert off.steps[0].command == "dspark plan --build demo --settings"
    assert tell(first, today=TODAY).steps[0].command == "dspark package verify some/package"
    served = first.entries[fake_build.CPU].model_copy(update={"fingerprint": {"engine": "sglang"}})
    assert tell(replace(first, entries={fake_build.CPU: served}), today=TODAY).steps[-1].command == (
        "bash some/package/engines/sglang/launch.sh"
    )


def test_only_a_profile_on_which_it_pays_is_offered_to_be_served(whole: Path):
    """The second certificate recommends the same policy, and ran out the day before."""
    first = evidence_of(whole)
    pays = first.entries[fake_build.CPU].model_copy(update={"fingerprint": {"engine": "sglang"}})
    over = pays.holds_until.model_copy(update={"date": "2026-11-30"})
    late = pays.model_copy(update={"profile": "late", "holds_until": over})
    page = tell(replace(first, entries={"late": late, fake_build.CPU: pays}), today=TODAY)
    assert [step.why for step in page.steps if "serve it as on" in step.why] == [f"serve it as on {fake_build.CPU}"]


def test_a_build_that_was_evaluated_again_says_that_its_package_is_older(whole: Path, tmp_path: Path):
    package = Path(shutil.copytree(whole, tmp_path / "package"))
    first = evidence_of(package)
    build = replace(first, files=replace(first.files, is_build=True))
    assert "package of this evaluation" not in tell(build, today=TODAY).absent
    write_json(package / "evidence/evaluate/metrics.json", model_json(fake_build.calibrated(fake_build.metrics())))
    assert "made from another one" in tell(build, today=TODAY).absent["package of this evaluation"]


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, dspark.report.page, dspark.workspace.report, dspark.cli.report\n"
        "print(sorted({'torch', 'transformers', 'mlflow', 'dvc', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_script_and_style_cannot_end_before_they_end():
    folder = Path(sys.modules["dspark.report.page"].__file__).parent
    for name in ("page.js", "page.css"):
        assert "</" not in (folder / name).read_text() and "\r" not in (folder / name).read_text()
