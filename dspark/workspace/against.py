"""`dspark package verify --against`: is a package's certificate about what would be served here?"""

from __future__ import annotations

import datetime
from pathlib import Path

from dspark.config.models import ServingProfile
from dspark.errors import GateError, IntegrityError, PreflightError, SettingsError
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate, CertificateEntry
from dspark.package.layout import CERTIFICATE
from dspark.package.staleness import AGAIN, Difference, differences, measured_entry, served_entry
from dspark.package.verify import read_manifest
from dspark.profiling.fingerprint import fingerprint, profile_mistakes


def require_fresh(folder: Path, profile: ServingProfile) -> str:
    """Refuse a certificate that is about something else; the package has been verified before.

    Args:
        folder: the package.
        profile: what would be served, on this machine.
    Returns:
        the day until which the entry holds.
    Raises:
        GateError: no measurement for the profile, or a stale one; names each field that differs.
        SettingsError: a profile without access from here.
        PreflightError: a profile for another engine version or other hardware.
        ServiceError: the profile's server does not answer.
    """
    if profile.access == "none":
        raise SettingsError(
            f"serving profile {profile.name} has access none: {profile.reason}",
            "name a profile with access local or url, or verify on the machine that serves it",
        )
    here = fingerprint(profile)
    if mistakes := profile_mistakes(profile, here):
        raise PreflightError(
            f"serving profile {profile.name} is not for this machine: {'; '.join(mistakes)}",
            "verify on the machine that serves it, or correct the profile",
        )
    entry = measured_entry(read_model(folder / CERTIFICATE, Certificate, IntegrityError), profile.name)
    today = datetime.datetime.now(datetime.UTC).date()
    _refuse(differences(read_manifest(folder), entry, profile, here, today=today), profile.name)
    return _end(entry)


def require_fresh_server(folder: Path, address: str) -> tuple[str, str]:
    """As `require_fresh`, for a server that runs: is what it tells of itself what was certified?

    Args:
        folder: the package.
        address: of a llama.cpp, SGLang or vLLM server.
    Returns:
        the serving profile whose entry it is, and the day until which that holds.
    Raises:
        GateError: nothing was measured in this engine, a stale measurement, or a drafter of another block size.
        SettingsError: no such address.
        ServiceError: no engine that is known answers there.
    """
    from dspark.engines.connect import connect

    client = connect(address)
    served, gamma = client.served(), read_manifest(folder).drafter.gamma
    certificate = read_model(folder / CERTIFICATE, Certificate, IntegrityError)
    today = datetime.datetime.now(datetime.UTC).date()
    facts = client.facts()
    entry, found = served_entry(certificate, client.name, facts, today=today)
    if not facts:
        raise GateError(
            f"{served.engine} at {client.address} tells nothing of itself that could be compared",
            f"on the machine that serves: dspark package verify {folder} --against {entry.profile}",
        )
    if client.name != "llamacpp" and served.gamma is None and client.totals() is None:
        found.append(Difference("speculation", "on", "off"))
    if served.gamma not in (None, gamma):
        found.append(Difference("gamma", gamma, served.gamma))
    _refuse(found, entry.profile)
    return entry.profile, _end(entry)


def _refuse(found: list[Difference], profile: str) -> None:
    if found:
        lines = "".join(f"\n    {difference}" for difference in found)
        raise GateError(f"the package is sound, but its certificate of {profile} is stale here:{lines}", AGAIN)


def _end(entry: CertificateEntry) -> str:
    return entry.holds_until.date if entry.holds_until is not None else "further notice"
