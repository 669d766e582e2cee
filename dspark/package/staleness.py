"""Does a certificate speak about this machine, this engine and this traffic, today? (package.md, "certificate.json")

What was measured elsewhere, or under another version, is not wrong: it is about something else. So each field that
differs is named, and nobody has to guess which of them matters.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dspark.config.models import ServingProfile
from dspark.errors import GateError
from dspark.package.certificate import Certificate, CertificateEntry
from dspark.package.manifest import Manifest

AGAIN = "measure it here: `dspark run` of a build whose serving_profiles name this very profile"


@dataclass(frozen=True)
class Difference:
    """A field in which what was certified and what is asked about differ; None: it is not there."""

    field: str
    certified: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.field}: certified {_said(self.certified)}, here {_said(self.here)}"


def measured_entry(certificate: Certificate, profile: str) -> CertificateEntry:
    """The entry of a serving profile.

    Raises:
        GateError: there is none, or it holds no measurement that counts.
    """
    entries = {entry.profile: entry for entry in certificate.entries}
    if profile not in entries:
        raise GateError(
            f"the certificate has no entry for serving profile {profile!r} (it has: {', '.join(sorted(entries))})",
            AGAIN,
        )
    entry = entries[profile]
    if entry.status != "measured":
        raise GateError(
            f"serving profile {profile}: {entry.status} in the certificate: {entry.reason}",
            "mend what the reason says, then `dspark run` on the machine that serves it",
        )
    return entry


def served_entry(
    certificate: Certificate, engine: str, facts: Mapping[str, Any], *, today: datetime.date
) -> tuple[CertificateEntry, list[Difference]]:
    """The measured entry that is most about a running server, and everything in which the two differ.

    Args:
        engine: that the server is.
        facts: what the server tells of itself, fields of a fingerprint.
        today: when it is asked.
    Raises:
        GateError: nothing was measured in this engine.
    """
    measured = [
        entry
        for entry in certificate.entries
        if entry.status == "measured" and entry.fingerprint.get("engine") == engine
    ]
    if not measured:
        have = ", ".join(f"{one.profile} ({one.status})" for one in certificate.entries)
        raise GateError(f"the certificate has no measurement in {engine} (it has: {have})", AGAIN)
    told = dict(_leaves({name: value for name, value in facts.items() if value is not None}))
    found = []
    for entry in measured:
        certified = dict(_leaves(entry.fingerprint))
        different = [
            Difference(field, certified.get(field), here)
            for field, here in sorted(told.items())
            if not (_same_version if field == "engine_version" else _equal)(certified.get(field), here)
        ]
        found.append((entry, [*_expired(entry, today), *different]))
    return min(found, key=lambda pair: len(pair[1]))


def _equal(certified: Any, here: Any) -> bool:
    return bool(certified == here)


def _same_version(certified: Any, here: Any) -> bool:
    """Equal, or one build of llama.cpp: `xllamacpp 2026.10.11549` holds what a server calls `b11549`."""
    build = re.search(r"\bb(\d+)\b", str(here))
    return _equal(certified, here) or (build is not None and str(certified).endswith(f".{build[1]}"))


def _expired(entry: CertificateEntry, today: datetime.date) -> list[Difference]:
    until = entry.holds_until
    if until is not None and today.isoformat() > until.date:
        return [Difference("holds until", until.date, today.isoformat())]
    if entry.measured_at is not None:
        measured = datetime.datetime.fromisoformat(entry.measured_at).date()
        # A clock that was set back would let a certificate hold for ever; clocks that are a little apart are no fault.
        if today < measured - datetime.timedelta(days=1):
            return [Difference("measured on", measured.isoformat(), today.isoformat())]
    return []


def differences(
    manifest: Manifest,
    entry: CertificateEntry,
    profile: ServingProfile,
    fingerprint: Mapping[str, Any],
    *,
    today: datetime.date,
) -> list[Difference]:
    """Everything that makes an entry stale for a profile on this machine.

    Args:
        profile: as it would be served here; its sampling and thinking mode count if it names them.
        fingerprint: of this machine and engine under the profile (`profiling.fingerprint`).
        today: when it is asked.
    """
    found = _expired(entry, today)
    # What an entry knows beyond a fingerprint of today (its weights' quantisation) is no field of the machine.
    certified = dict(_leaves({key: value for key, value in entry.fingerprint.items() if key in fingerprint}))
    here = dict(_leaves(fingerprint))
    for field in sorted(certified.keys() | here.keys()):
        if certified.get(field) != here.get(field):
            found.append(Difference(field, certified.get(field), here.get(field)))
    corpus = manifest.inputs.corpus
    if profile.thinking_mode not in (None, corpus.thinking_mode):
        found.append(Difference("thinking mode of the corpus", corpus.thinking_mode, profile.thinking_mode))
    if profile.sampling is not None and profile.sampling.model_dump(mode="json") != corpus.sampling:
        found.append(Difference("sampling of the corpus", corpus.sampling, profile.sampling.model_dump(mode="json")))
    return found


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{key}.")
        elif key != "launch_args_digest":  # of arguments that stand beside it by name
            yield f"{prefix}{key}", inner


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner:g}" for key, inner in value.items())
    return "nothing" if value is None else str(value)
