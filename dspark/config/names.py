"""Which names a workspace declares, from its file names alone: quick enough for the tab key."""

from __future__ import annotations

from pathlib import Path

FOLDERS = {
    "target": "pipeline/targets",
    "domain": "pipeline/domains",
    "recipe": "pipeline/recipes",
    "build": "pipeline/builds",
    "study": "pipeline/studies",
    "serving profile": "serving_profiles",
}


def declared_names(folder: Path) -> list[str]:
    """Names of the declarations in a folder, sorted; `*.templates.yaml` holds a domain's texts and declares nothing."""
    stems = (path.stem for path in folder.glob("*.yaml") if path.is_file())
    return sorted(stem for stem in stems if not stem.endswith(".templates"))


def build_names(root: Path) -> list[str]:
    """Declared builds of a workspace and the default builds of targets without one, sorted."""
    return sorted({*declared_names(root / FOLDERS["build"]), *declared_names(root / FOLDERS["target"])})
