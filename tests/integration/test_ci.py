"""The scripts of the CI templates, taken out of the YAML and run in their order on the tiny target."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark.io.yamlfile import read_yaml

if TYPE_CHECKING:
    from sandbox import Sandbox

pytestmark = pytest.mark.long
CHECKOUT = Path(__file__).resolve().parents[2]
RETRAIN = read_yaml(CHECKOUT / "pipeline/ci/github/retrain.yml")


class Runner:
    """Runs jobs of a workflow as a runner does: `bash -e`, variables from the workflow's `env`, one summary each."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.folder = sandbox, folder
        tool = folder / "bin/dspark"
        tool.parent.mkdir(parents=True)
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m dspark "$@"\n')
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def job(self, name: str, inputs: dict[str, str]) -> tuple[int, str, str]:
        """Exit code of the first step that fails, else 0; what it printed; the job's summary."""
        summary = self.folder / "summary.md"
        summary.write_text("")
        environment = self.sandbox.environment(
            PATH=f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin", GITHUB_STEP_SUMMARY=str(summary), **inputs
        )
        code, printed = 0, ""
        for step in self.steps(RETRAIN["jobs"][name]):
            if code and step.get("if") != "always()":
                continue
            done = subprocess.run(
                ["bash", "-e", "-c", step["run"]],
                cwd=self.sandbox.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
            code, printed = code or done.returncode, printed + done.stdout + done.stderr
        return code, printed, summary.read_text()

    @staticmethod
    def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
        """All with a script but the installation: what is tested is installed."""
        return [step for step in job["steps"] if "run" in step and step.get("name") != "Install"]


def test_the_workflow_makes_judges_promotes_and_retrains(new_sandbox: Sandbox, tmp_path: Path) -> None:
    runner = Runner(new_sandbox, tmp_path)
    # The exports cost most and are no matter here.
    new_sandbox.edit(
        "pipeline/builds/tiny.yaml", lambda text: text + "export: {onnx: false, gguf: false, tensorrt: false}\n"
    )
    inputs = {
        "TARGET": "tiny",
        "DOMAIN": "",
        "PROMPTS": "",
        "REASON": 'a first one; "quoted" $(touch /tmp/not-run) `x`',
    }
    assert set(inputs) < set(RETRAIN["env"])

    for job in ("preflight", "make"):
        code, printed, _ = runner.job(job, inputs)
        assert code == 0, printed
    code, printed, summary = runner.job("judge", inputs)
    assert code == 6 and "gates are shut" in printed and "lossless" in summary, printed
    code, printed, _ = runner.job("promote", inputs)
    assert code == 6, printed

    # So little is measured of the tiny build that its gates stay undecided.
    forced = new_sandbox.dspark("promote", "tiny", "--to", "production", "--force", "--reason", inputs["REASON"])
    assert forced.code == 0, forced.err
    for job in ("judge", "promote"):
        code, printed, _ = runner.job(job, inputs)
        assert code == 0 and "holds production already" in printed, printed
    history = new_sandbox.dspark("registry", "history", "tiny", "--json").json
    assert inputs["REASON"] in str(history), history
    assert not Path("/tmp/not-run").exists()

    few = new_sandbox.root / "few prompts.jsonl"
    few.write_text("".join((CHECKOUT / "examples/retrain/sql.jsonl").read_text().splitlines(keepends=True)[:48]))
    inputs |= {"DOMAIN": "sql", "PROMPTS": few.name, "REASON": "queries"}
    code, printed, _ = runner.job("preflight", inputs | {"PROMPTS": "nowhere.jsonl"})
    assert code != 0
    for job in ("preflight", "make"):
        code, printed, _ = runner.job(job, inputs)
        assert code == 0, printed
    code, printed, summary = runner.job("judge", inputs)
    assert code in (0, 6) and "sql" in summary, printed
    shown = new_sandbox.dspark("registry", "show", "tiny", "--json").json
    assert len(shown["versions"]) == 2
