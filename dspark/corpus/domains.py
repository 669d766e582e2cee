"""Domains: where prompts come from. One reader for each kind of source.

A file of templates is the user's own declaration, so a mistake in it is an error; a row of a JSON lines file or of a
package's data is data, so a row that cannot be used is rejected with its reason and the others are kept.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.config.models import DomainSpec, PackageSource, TemplateSource
from dspark.corpus.prompts import Prompt, Reading, read_prompt_lines
from dspark.corpus.shapes import Message, RowError, check_characters, text_of
from dspark.corpus.templates import read_templates
from dspark.errors import DataError, PreflightError, SettingsError


def domain_file(spec: DomainSpec, folder: Path) -> Path:
    """The file that a domain's prompts come from; nothing is read and no package is imported.

    Args:
        spec: the domain.
        folder: where the domain's YAML file lies.
    Raises:
        SettingsError: the file is not there.
        PreflightError: the package that ships it is not installed, or has no such file; names the requirement.
    """
    source = spec.source
    if isinstance(source, PackageSource):
        return _package_file(spec.name, source)
    path = folder / source.path
    if not path.is_file():
        raise SettingsError(
            f"domain {spec.name!r}: {path} is not a file", f"correct source.path in {folder / spec.name}.yaml"
        )
    return path


def read_domain(spec: DomainSpec, folder: Path) -> Reading:
    """Read all prompts of a domain; duplicates are still in it.

    Args:
        spec: the domain.
        folder: where the domain's YAML file lies.
    Raises:
        SettingsError, PreflightError: as `domain_file`, or a mistake in a file of templates.
        DataError: a file that cannot be unpacked, or one id that stands for two different prompts.
    """
    path = domain_file(spec, folder)
    source = spec.source
    if isinstance(source, TemplateSource):
        return Reading(_templated(spec.name, source.path, path), [], 0)
    data = _read_bytes(path)
    if isinstance(source, PackageSource):
        if "{text}" not in source.wrap:
            raise SettingsError(f"domain {spec.name!r}: source.wrap does not hold {{text}}")
        return read_prompt_lines(
            data,
            source=f"{source.package}:{source.file}",
            domain=spec.name,
            read_messages=lambda row: _wrapped(row, source),
            id_fields=("id", "task_id"),
        )
    return read_prompt_lines(data, source=source.path, domain=spec.name)


def _templated(domain: str, source: str, path: Path) -> list[Prompt]:
    return [
        Prompt(
            id=f"{domain}/{row.template}/{row.variant}",
            domain=domain,
            template=row.template,
            messages=(Message("user", row.text),),
            source=source,
            line=row.line,
        )
        for row in read_templates(path)
    ]


def _wrapped(row: Mapping[str, Any], source: PackageSource) -> tuple[Message, ...]:
    if source.field not in row:
        raise RowError("shape", f"{source.field}: missing")
    text = text_of(source.field, row[source.field]).strip("\n")
    check_characters(source.field, text)
    return (Message("user", source.wrap.replace("{text}", text)),)


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a gzip file: {error}") from None


def _package_file(domain: str, source: PackageSource) -> Path:
    """Look in the package's folder, then among the files of the distribution that brings it."""
    hint = f"pip install '{source.install}'"
    package = importlib.util.find_spec(source.package.partition(".")[0])
    if package is None:
        raise PreflightError(
            f"domain {domain!r}: the Python package {source.package!r} is not installed; "
            f"it comes with {source.install!r}",
            hint,
        )
    for folder in package.submodule_search_locations or ():
        path = Path(folder, *source.package.split(".")[1:], source.file)
        if path.is_file():
            return path
    # Some builds of a package keep their data beside the package's folder: the list of installed files knows.
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", source.install)
    try:
        files = importlib.metadata.files(match[0]) if match else None
    except importlib.metadata.PackageNotFoundError:
        files = None
    for file in files or ():
        if file.as_posix().endswith("/" + source.file) or file.as_posix() == source.file:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise PreflightError(
        f"domain {domain!r}: the installed package {source.package!r} has no file {source.file!r}; "
        f"{source.install!r} should bring it",
        f"pip install --force-reinstall '{source.install}'",
    )
