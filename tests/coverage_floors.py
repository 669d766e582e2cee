"""Lines and branches that the tests reached, room by room, against each room's floor: `make coverage`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

WHOLE = "dspark"
FLOORS = {WHOLE: 75.0, **dict.fromkeys(("scheduling", "calibration", "decoding", "package"), 95.0)}  # percent
KINDS = ("covered_lines", "missing_lines", "covered_branches", "missing_branches")


def reached(file: Path) -> dict[str, float]:
    """Percent of lines and branches, of the whole package and of each of its rooms, from slipcover's report."""
    counts: dict[str, Counter[str]] = {}
    for name, found in json.loads(file.read_text())["files"].items():
        _, room, *_ = Path(name).parts
        for place in (WHOLE, room):
            counts.setdefault(place, Counter()).update({kind: found["summary"][kind] for kind in KINDS})
    return {
        place: 100.0 * (count["covered_lines"] + count["covered_branches"]) / max(1, count.total())
        for place, count in counts.items()
    }


def main(file: Path) -> int:
    """Print the table; 1 if a floor was missed or nothing of its room was measured."""
    found = reached(file)
    for place, percent in sorted(found.items()):
        print(f"{place:14} {percent:6.2f} %" + (f"  floor {FLOORS[place]:.0f} %" if place in FLOORS else ""))
    below = [place for place, floor in FLOORS.items() if found.get(place, 0.0) < floor]
    if below:
        print(f"below the floor: {', '.join(below)}", file=sys.stderr)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
