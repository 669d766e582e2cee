"""Suites: benchmark sets that a finished build is evaluated on, declared in `pipeline/suites/<name>.yaml`.

A set is data: which files it stands in, which fields of a row make its prompt, where it comes from and under which
licence. Its files are the user's; nothing is ever fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from dspark.config.declared import read_declared
from dspark.config.models import Count, Name, Settings

FOLDER = "pipeline/suites"
# A field of a row, or something inside it: `question`, `turns.0`, `turns.0.content`. `\boxed{}` is none.
FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)\}")
KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


class RowRange(Settings):
    """Rows whose whole number in a field lies in a range, both ends included; others are no part of the set."""

    field: str
    first: int
    last: int


class BenchmarkSet(Settings):
    """One set of a suite: from files (`files` and `prompts`), or a declared domain (`domain`)."""

    name: Name
    group: Name  # sets of one group have a mean of their own
    title: str
    licence: str  # as its authors state it
    origin: str  # where to get it
    rows: Count  # that were released; another number of rows is said
    limit: Count  # prompts that are asked at most, in an order that depends on nothing but their ids
    files: tuple[str, ...] = ()  # patterns below the folder of data; all files of the first that fits any
    id: tuple[str, ...] = ()  # fields that may name a row, first match; rows without one are named by their content
    only: RowRange | None = None
    prompts: tuple[str, ...] = ()  # texts with `{field}`; the first whose fields are all there and not empty
    domain: Name | None = None  # of pipeline/domains, instead of files

    @field_validator("files")
    @classmethod
    def _known_files(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if pattern.startswith("/") or ".." in pattern.split("/"):
                raise ValueError(f"{pattern!r} leaves the folder of data")
            if not pattern.endswith(KINDS):
                raise ValueError(f"{pattern!r} is none of {', '.join(KINDS)}")
        return value

    @model_validator(mode="after")
    def _from_files_or_a_domain(self) -> BenchmarkSet:
        if (self.domain is None) == (not self.files):
            raise ValueError("a set names either files or a domain")
        if bool(self.files) != bool(self.prompts):
            raise ValueError("files need prompts, and a domain has its own")
        if any(not FIELD.search(text) for text in self.prompts):
            raise ValueError("a prompt holds no {field}")
        if self.domain is not None and (self.id or self.only):
            raise ValueError("id and only are for files")
        return self

    @property
    def fields(self) -> frozenset[str]:
        """Fields of a row that are read at all."""
        used = {path.partition(".")[0] for text in self.prompts for path in FIELD.findall(text)}
        return frozenset({*used, *self.id, *([self.only.field] if self.only else [])})


class SuiteSpec(Settings):
    """`pipeline/suites/<name>.yaml`."""

    name: Name
    description: str = ""
    temperatures: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    max_prompt_tokens: Count = 4096
    max_new_tokens: Count = 2048
    sets: tuple[BenchmarkSet, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _different_names(self) -> SuiteSpec:
        names = [one.name for one in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sets of one name: {', '.join(twice)}")
        if any(temperature < 0 for temperature in self.temperatures):
            raise ValueError("temperatures must not be negative")
        return self


def read_suite(root: Path, name: str) -> SuiteSpec:
    """Read `pipeline/suites/<name>.yaml` of a workspace.

    Raises:
        SettingsError: no such suite (the nearest is named), or mistakes in the file (all are named, with lines).
    """
    return read_declared(root / FOLDER, name, SuiteSpec, word="suite", root=root)
