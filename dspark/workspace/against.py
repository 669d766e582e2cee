"""`dspark package verify --against`: is a package's certificate about what would be served here?"""

from __future__ import annotations

import datetime
from pathlib import Path

from dspark.config.models import ServingProfile
from dspark.errors import GateError, IntegrityError, PreflightError, SettingsError
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.layout import CERTIFICATE
from dspark.package.staleness import AGAIN, differences, measured_entry
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
    """
    if profile.access != "local":
        raise SettingsError(
            f"serving profile {profile.name} has access {profile.access}: its machine is not this one",
            "name a profile with access local, or verify on the machine that serves it",
        )
    here = fingerprint(profile)
    if mistakes := profile_mistakes(profile, here):
        raise PreflightError(
            f"serving profile {profile.name} is not for this machine: {'; '.join(mistakes)}",
            "verify on the machine that serves it, or correct the profile",
        )
    entry = measured_entry(read_model(folder / CERTIFICATE, Certificate, IntegrityError), profile.name)
    today = datetime.datetime.now(datetime.UTC).date()
    found = differences(read_manifest(folder), entry, profile, here, today=today)
    if found:
        lines = "".join(f"\n    {difference}" for difference in found)
        raise GateError(f"the package is sound, but its certificate of {profile.name} is stale here:{lines}", AGAIN)
    return entry.holds_until.date if entry.holds_until is not None else "further notice"
