"""`dspark report`: which build or package is meant, where the report goes, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fake_build
import full_build
import pytest

from dspark.cli.boundary import run_command
from dspark.errors import PreflightError
from dspark.package.assemble import assemble
from dspark.package.verify import read_manifest, verify
from dspark.workspace import report as reporting
from dspark.workspace.layout import Workspace
from dspark.workspace.results import RunRecord, write_record


@pytest.fixture
def made(workspace: Workspace) -> Workspace:
    """A workspace whose build `demo` is finished."""
    folder = workspace.build("demo")
    sources = full_build.make(folder)
    assemble(sources, folder / "package", card=fake_build.card)
    shutil.rmtree(folder / "corpora")
    cost = workspace.root / "profiles" / f"tiny@{_geometry(workspace)}@{fake_build.CPU}"
    cost.mkdir(parents=True)
    (folder / "cost.json").rename(cost / "cost.json")
    return workspace


def _geometry(workspace: Workspace) -> str:
    from dspark.config.stages import geometry
    from dspark.workspace.run import Request, resolve_request

    return geometry(resolve_request(workspace, Request(build="demo")).chosen.build.drafter)


def called(capsys: pytest.CaptureFixture[str], workspace: Workspace, *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run_command(["-C", str(workspace.root), "report", *arguments]) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_build_gets_its_report_beside_its_results(made: Workspace, capsys: pytest.CaptureFixture[str]):
    out, _ = called(capsys, made, "demo")
    lines = out.splitlines()
    assert lines[0].startswith("Worth deploying on cpu-reference at 1 to 3 concurrent requests: 1.30 [1.25, 1.35]")
    assert lines[-1] == "next     dspark promote demo --to production --dry-run"
    text = (made.build("demo") / "report.html").read_text()
    assert text.startswith("<!doctype html>") and "builds/demo/package" in text and str(made.root) not in text
    assert text.count("<svg") > 2 * 10


def test_without_a_name_it_is_about_the_newest_run(made: Workspace, capsys: pytest.CaptureFixture[str]):
    _, error = called(capsys, made, code=2)
    assert "which build or package? there was no run yet" in error and "dspark report NAME" in error
    run = made.runs / "20261201T000000.000000Z-1"
    run.mkdir(parents=True)
    write_record(run, RunRecord(id=run.name, build="demo", pid=1, started=0.0))
    out, _ = called(capsys, made, "--format", "md")
    assert out.startswith("# demo\n")


def ran(workspace: Workspace, moment: str, made: str, *flags: str) -> None:
    """A run about build `demo` that made a build."""
    run = workspace.runs / f"{moment}.000000Z-1"
    run.mkdir(parents=True)
    stages = ["features@demo", f"evaluate@{made}"]
    write_record(run, RunRecord(id=run.name, build="demo", pid=1, started=0.0, flags=list(flags), stages=stages))


def test_a_build_is_looked_at_with_the_settings_of_its_newest_run(
    made: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Blocks of two were asked for by --set, in the file stand three: costs lie where those of gamma 2 do."""
    (cost,) = (made.root / "profiles").iterdir()
    two = cost.rename(cost.with_name(cost.name.replace("-g3-", "-g2-")))
    assert two != cost
    ran(made, "20261201T000000", "demo", "drafter.gamma=3")
    ran(made, "20261202T000000", "demo", "drafter.gamma=2")
    ran(made, "20261203T000000", "demo-variant", "drafter.gamma=1")
    (damaged := made.runs / "20261204T000000.000000Z-1").mkdir()
    (damaged / "run.json").write_text("{")
    out, _ = called(capsys, made, "demo", "--json")
    assert f"figure cost-{fake_build.CPU}" not in json.loads(out)["absent"]
    assert run_command(["-C", str(made.root), "plots", "demo", "--json"]) == 0
    assert f"cost-{fake_build.CPU}" in json.loads(capsys.readouterr().out)["figures"]
    monkeypatch.setenv("DSPARK_DRAFTER__LAYERS", "2")
    out, _ = called(capsys, made, "demo", "--json")
    assert f"figure cost-{fake_build.CPU}" in json.loads(out)["absent"], "a drafter of two layers was not measured"


def test_markdown_is_printed_or_written(made: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    printed, _ = called(capsys, made, "demo", "--format", "md")
    called(capsys, made, "demo", "--out", str(tmp_path / "summary.md"))
    assert (tmp_path / "summary.md").read_text() == printed
    assert not (made.build("demo") / "report.html").exists()
    page, _ = called(capsys, made, "demo", "--out", "-")
    assert page.startswith("<!doctype html>")


def test_the_answer_as_json(made: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = called(capsys, made, "demo", "--json", "--out", str(tmp_path / "r.html"))
    document = json.loads(out)
    assert document["schema"] == "dspark/report/1" and document["file"] == str(tmp_path / "r.html")
    assert document["verdict"]["answer"] == "deploy" and len(document["verdict"]["lines"]) >= 2
    _, error = called(capsys, made, "demo", "--json", "--format", "md", code=2)
    assert "name a file with --out" in error


def test_a_package_needs_no_workspace(whole: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(["report", str(whole)]) == 0
    out = capsys.readouterr().out
    name = f"demo-{read_manifest(whole).digests.package_digest[:12]}.html"
    assert f"report   {name}" in out and "next     dspark package verify" in out
    assert (tmp_path / name).is_file()
    assert run_command(["report"]) == 3
    assert "name a build, a package's folder" in capsys.readouterr().err


def test_a_package_that_was_changed_is_not_believed(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    package = Path(shutil.copytree(whole, tmp_path / "package"))
    path = package / "evidence/evaluate/metrics.json"
    path.write_text(path.read_text().replace("2.0", "3.0"))
    assert run_command(["report", str(package), "--out", str(tmp_path / "r.html")]) == 7
    assert "evidence/evaluate/metrics.json" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_nothing_is_ever_written_into_a_package(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    package = Path(shutil.copytree(whole, tmp_path / "package"))
    for out in (package / "report.html", package / "evidence" / "report.html"):
        assert run_command(["report", str(package), "--out", str(out)]) == 2
        assert "is a package, which nothing may be added to" in capsys.readouterr().err
    verify(package)


def test_two_packages_or_a_build_and_a_package(
    made: Workspace, weaker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, _ = called(capsys, made, "demo", "--against", str(weaker), "--format", "md")
    assert "## Against demo" in out and r"+66.7 % \[+66.7, +66.7\]" in out
    out, _ = called(capsys, made, str(weaker), "--against", "demo", "--format", "md")
    assert r"-40.0 % \[-40.0, -40.0\]" in out, "3 / 5 - 1"


def test_the_champion_is_what_holds_production(
    made: Workspace, weaker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def fetch(workspace, build, source, *, tracking_uri):
        asked.append((build, source))
        digest = read_manifest(weaker).digests.package_digest
        shutil.copytree(weaker, workspace.package(digest), dirs_exist_ok=True)
        return read_manifest(weaker)

    monkeypatch.setattr(reporting, "fetch_champion", fetch)
    out, _ = called(capsys, made, "demo", "--against", "champion", "--format", "md")
    called(capsys, made, "demo", "--against", "models:/dspark-demo@staging", "--format", "md")
    assert asked == [("demo", None), ("demo", "models:/dspark-demo@staging")] and "+66.7 %" in out


def test_without_a_champion_it_says_so(made: Workspace, capsys: pytest.CaptureFixture[str]):
    _, error = called(capsys, made, "demo", "--against", "champion", code=3)
    assert "nothing is in production, so there is no champion" in error and "--against NAME" in error


@pytest.mark.parametrize("against", ["champion", "models:/dspark-demo@staging"])
def test_what_keeps_a_champion_from_being_fetched_is_told_as_it_is(
    made: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, against: str
):
    def fetch(*arguments, **options):
        raise PreflightError("S3 artifacts are read with boto3", "pip install 'dspark[s3]'")

    monkeypatch.setattr(reporting, "fetch_champion", fetch)
    _, error = called(capsys, made, "demo", "--against", against, code=3)
    assert "S3 artifacts are read with boto3" in error and "pip install 'dspark[s3]'" in error
    assert "production" not in error


def test_a_build_that_has_measured_nothing_is_told_what_to_do(workspace: Workspace, capsys: pytest.CaptureFixture[str]):
    _, error = called(capsys, workspace, "demo", code=3)
    assert "build 'demo' has nothing to tell yet" in error and "dspark run --build demo" in error
    assert not workspace.build("demo").exists()
    _, error = called(capsys, workspace, "dem", code=2)
    assert "did you mean 'demo'?" in error
    _, error = called(capsys, workspace, "no/such/package", code=2)
    assert "does not exist" in error
