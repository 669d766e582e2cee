"""What stands between a room without tests and a green `make test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "coverage_floors.py"
GUARDED = ("scheduling", "calibration", "decoding", "package")


def summary(covered: int, missing: int, covered_branches: int = 0, missing_branches: int = 0) -> dict[str, object]:
    names = ("covered_lines", "missing_lines", "covered_branches", "missing_branches")
    counts = (covered, missing, covered_branches, missing_branches)
    return {"summary": dict(zip(names, counts, strict=True))}


@pytest.mark.parametrize(
    ("changes", "below"),
    [
        ({}, ""),
        # 95 of 100 lines and 9 of 10 branches: 104 of 110 is 94.5 %.
        ({"dspark/scheduling/a.py": summary(95, 5, 9, 1)}, "scheduling"),
        # 18 of 20 and 58 of 60 are 95 %, though one of the files has less.
        ({"dspark/package/a.py": summary(18, 2), "dspark/package/deep/b.py": summary(58, 2)}, ""),
        ({"dspark/package/a.py": None}, "package"),
        # 400 of 4 * 100 + 134 lines: 74.9 %.
        ({"dspark/api.py": summary(0, 134)}, "dspark"),
    ],
)
def test_a_room_below_its_floor_is_named_and_fails(changes: dict[str, object], below: str, tmp_path: Path) -> None:
    files = {f"dspark/{room}/a.py": summary(100, 0) for room in GUARDED} | changes
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"files": {name: found for name, found in files.items() if found}}))
    done = subprocess.run([sys.executable, str(SCRIPT), str(report)], capture_output=True, text=True, check=False)
    assert done.stderr == (f"below the floor: {below}\n" if below else "")
    assert done.returncode == (1 if below else 0)
