"""How figures look: colours that hold in light and dark mode, and shapes and dashes that tell series apart as well."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's colours and a brown, those with a contrast of 3 or more to the light and to the dark background.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#7f7f7f")
DASHES = (None, "7 4", "2 3", "9 3 2 3")
OVER = "5 5"  # of a line on another one
LIGHT = {"back": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#d8dee4"}
DARK = {"back": "#14171c", "text": "#e6edf3", "muted": "#9aa4af", "grid": "#30363d"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Outlines around the centre, which each path moves to first.
SHAPES = (
    "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # circle
    "m-3.1-3.1h6.2v6.2h-6.2z",  # square
    "m0-4.4l4 7h-8z",  # triangle
    "m0-4.6l4 4.6-4 4.6-4-4.6z",  # diamond
    "m0 4.4l-4-7h8z",  # triangle on its tip
    "m-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",  # plus
)


@dataclass(frozen=True)
class Looks:
    """Of one series."""

    colour: str
    shape: str
    dash: str | None


def looks_of(index: int) -> Looks:
    """The looks of the series that is the `index`-th to appear in its figure."""
    return Looks(
        COLOURS[index % len(COLOURS)],
        SHAPES[index % len(SHAPES)],
        DASHES[index // len(COLOURS) % len(DASHES)],
    )


def style() -> str:
    """The rules of both modes, for every figure on a page; all hang on the class `dspark-plot`."""
    lines = (
        ".dspark-plot{max-width:100%;height:auto}",
        ".dspark-plot .line,.dspark-plot .interval,.dspark-plot .axis,.dspark-plot .reference{fill:none}",
        ".dspark-plot .line{stroke-width:1.8;stroke-linejoin:round}",
        ".dspark-plot .interval{stroke-width:1.1}",
        ".dspark-plot .band{fill-opacity:.16}",
        ".dspark-plot .reference{stroke-width:1.2;stroke-dasharray:4 4}",
    )
    return "".join([*lines, _mode(LIGHT), f"@media (prefers-color-scheme: dark){{{_mode(DARK)}}}"])


def _mode(colours: dict[str, str]) -> str:
    rules = {
        "back": f"fill:{colours['back']}",
        "text": f"fill:{colours['text']}",
        "muted": f"fill:{colours['muted']}",
        "grid": f"stroke:{colours['grid']}",
        "axis": f"stroke:{colours['muted']}",
        "reference": f"stroke:{colours['muted']}",
    }
    return "".join(f".dspark-plot .{name}{{{rule}}}" for name, rule in rules.items())
