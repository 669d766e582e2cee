"""The catalogue of domains: `pipeline/domains/<name>.yaml`, one file each; a file of prompts becomes one here."""

from __future__ import annotations

import shutil
from pathlib import Path

from dspark.config.declared import NAME, read_declared
from dspark.config.models import DomainSpec, JsonLinesSource
from dspark.corpus.domains import domain_file, read_domain
from dspark.errors import DataError, SettingsError
from dspark.io.atomic import atomic_path, write_text
from dspark.io.digest import digest_file


def read_domain_spec(folder: Path, name: str, *, root: Path | None = None) -> DomainSpec:
    """Read `<folder>/<name>.yaml`.

    Args:
        root: the workspace; messages name files below it.
    Raises:
        SettingsError: no such domain (the nearest is named), or mistakes in the file (all are named, with lines).
    """
    return read_declared(folder, name, DomainSpec, word="domain", root=root)


def add_domain(folder: Path, name: str, prompts: Path, *, root: Path | None = None) -> bool:
    """Declare a JSON lines file of prompts as the domain `name`, with a copy of it beside the declaration.

    A copy, so that the corpus stays what it was when the file goes or changes, and can be committed with it. What is
    there already is never changed: a domain that has these very prompts is left as it is.

    Args:
        prompts: a .jsonl file, or .jsonl.gz.
        root: the workspace; messages name files below it.
    Returns:
        True if the domain is new, False if it was there.
    Raises:
        SettingsError: a name that cannot be one, no such file, or the domain is there with other prompts.
        DataError: no row of the file is a prompt; the first reasons are named.
    """
    if not NAME.match(name):
        raise SettingsError(f"{name!r} cannot be a name", "use lower-case letters, digits, dots and hyphens")
    source = prompts.expanduser().resolve()
    if not source.is_file():
        raise SettingsError(f"{prompts}: there is no such file", "--prompts FILE: one JSON object with a prompt a line")
    declaration = folder / f"{name}.yaml"
    if declaration.is_file():
        _require_same(domain_file(read_domain_spec(folder, name, root=root), folder), source, name)
        return False
    _require_prompts(DomainSpec(name=name, source=JsonLinesSource(kind="jsonl", path=str(source))), folder)
    copy = folder / f"{name}.jsonl{'.gz' if source.suffix == '.gz' else ''}"
    if copy.exists():
        _require_same(copy, source, name)
    else:
        with atomic_path(copy) as temporary:
            shutil.copyfile(source, temporary)
    # Last: it names the other one, and whoever finds it finds a whole domain.
    write_text(declaration, f"source:\n  kind: jsonl\n  path: {copy.name}\n")
    return True


def _require_same(there: Path, source: Path, name: str) -> None:
    if there != source and digest_file(there) != digest_file(source):
        raise SettingsError(
            f"domain {name!r} is there with other prompts: {there} is not {source}",
            f"choose another name, or change {there} and leave --prompts out",
        )


def _require_prompts(spec: DomainSpec, folder: Path) -> None:
    """Refuse a file of which nothing could be used, before a trace of it is left."""
    reading = read_domain(spec, folder)
    if reading.prompts:
        return
    reasons = "; ".join(f"line {row.line}: {row.reason}" for row in reading.rejections[:3])
    raise DataError(
        f"{spec.source.path if isinstance(spec.source, JsonLinesSource) else spec.name}: none of its "
        f"{len(reading.rejections)} rows is a prompt{f' ({reasons})' if reasons else ''}",
        'one JSON object a line, for instance {"messages": [{"role": "user", "content": "..."}]}',
    )
