"""The examples that need a package alone, on one whose figures are made up and known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark

CHECKOUT = Path(__file__).resolve().parents[3]
Example = Callable[..., dict[str, Any]]


def columns(text: str) -> list[list[str]]:
    """The table's rows, words apart."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("requests"))
    return [line.split() for line in lines[start + 1 :]]


def test_what_if_multiplies_survival_and_steps_per_second(
    package: Path, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worked out by hand from the formula at the top of the script, with the certificate's own survival."""
    example("what-if/what_if.py", package, "--domain", "math", "--requests", 1, 2)
    opened = dspark.load_package(package)
    survival = [share.value for share in opened.entry("cpu-reference").acceptance["math"].marginal]
    cost = opened.scheduling.cost("cpu-reference")
    one, two = columns(capsys.readouterr().out)
    for count in range(4):
        speed = (1 + sum(survival[:count])) * float(cost.rate(1, 1 + count))
        assert float(one[2 + count].rstrip("*")) == pytest.approx(speed, abs=0.051)
        speed = 2 * (1 + sum(survival[:count])) * float(cost.rate(2, 2 * (1 + count)))
        assert float(two[2 + count].rstrip("*")) == pytest.approx(speed, abs=0.051)
    assert one[1] == "100.0", "plain decoding: one request, a step of 10 ms"
    assert two[1] == "-", "plain decoding of two requests was not measured"
    assert sum(cell.endswith("*") for cell in one) == 1


def test_what_if_says_nothing_beyond_what_was_measured(
    package: Path, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of at most 8 tokens were measured: 4 requests with 2 drafts each would be 12."""
    example("what-if/what_if.py", package, "--requests", 4)
    [row] = columns(capsys.readouterr().out)
    assert row[2] != "-" and row[3] != "-" and row[4:6] == ["-", "-"]


def test_mistakes_end_in_two_lines(package: Path, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    for script in ("what-if/what_if.py", "own-engine/toy_engine.py"):
        with pytest.raises(SystemExit) as ended:
            example(script, package.parent)
        assert ended.value.code == 7
        assert len(capsys.readouterr().err.strip().splitlines()) == 2
    with pytest.raises(SystemExit) as ended:
        example("what-if/what_if.py", package, "--domain", "poems")
    assert ended.value.code and "it has: " in capsys.readouterr().err


def test_the_toy_engine_gains_and_says_the_targets_text(
    package: Path, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    example("own-engine/toy_engine.py", package, "--steps", 400)
    rows = columns(capsys.readouterr().out)
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8]
    for row in rows:
        none, whole, scheduled = map(float, row[1:4])
        assert scheduled > 0.97 * max(none, whole), "with calibrated confidences the scheduler is not worse than either"
        assert 0.5 < float(row[row.index("(1") - 1]) < 1.6
    assert float(rows[0][3]) > 1.2 * float(rows[0][1])
    assert rows[-1][4] == "0.00", "8 requests fill the largest step: nothing is left to verify"


def test_the_toy_engines_text_would_betray_a_wrong_acceptance_rule(package: Path, example: Example) -> None:
    """The measure of the example notices an engine that accepts every draft."""
    names = example("own-engine/toy_engine.py", name="toy")
    tables = names["Tables"].drawn(0)
    scheduler = dspark.load_package(package).scheduler(temperature=1.0)

    def text(rule: Callable[[Any, Any], Any]) -> float:
        engine = names["ToyEngine"](rule(tables.target, tables.drafter), scheduler, "scheduled", 1, 0)
        for _ in range(800):
            engine.step()
        return float(names["deviation"](engine.followed, tables.target))

    assert text(lambda target, drafter: names["Tables"](target, drafter)) < 1.6
    assert text(lambda target, drafter: names["Tables"](drafter, drafter * 0.999 + 0.001 / len(drafter))) > 5


def test_confidences_of_the_toy_are_the_chances_of_acceptance(example: Example) -> None:
    """sum over v of min(p, q), against counting: a draft v of q is accepted with min(1, p(v) / q(v))."""
    tables = example("own-engine/toy_engine.py", name="toy")["Tables"].drawn(3)
    accepted = (tables.drafter * np.minimum(1, tables.target / tables.drafter)).sum(axis=1)
    assert tables.acceptance == pytest.approx(accepted)


@pytest.mark.parametrize(
    ("script", "few"), [("what-if/what_if.py", []), ("own-engine/toy_engine.py", ["--steps", "10"])]
)
def test_they_need_no_torch(script: str, few: list[str], package: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(CHECKOUT / "examples" / script), str(package), *few],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_chat_names_what_is_missing(tmp_path: Path, example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example("chat/chat.py", "--workspace", tmp_path, "--say", "hello")
    assert ended.value.code == 7
    assert "does not exist" in capsys.readouterr().err
