"""Sign what is registered already: the signature joins the version's tags, where `pull` finds it.

Artifacts of a version are never written again, so a package that was published unsigned, as `dspark run` does, can only
be signed beside them. Copies of a version carry its tags along.
"""

from __future__ import annotations

import base64
from pathlib import Path

from dspark.errors import IntegrityError
from dspark.package.layout import SIGNATURE
from dspark.package.verify import read_manifest
from dspark.registry.lookup import SIGNATURE_TAG, Version, find_version, set_tag


def register_signature(package: Path, address: str, *, tracking_uri: str) -> Version:
    """Put `manifest.sig` of a signed package into the tags of the version that holds this very package.

    Args:
        package: signed and verified (`package.signature.sign`).
        address: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
    Raises:
        IntegrityError: the version holds another package, or the same with other evidence.
        SettingsError, PreflightError, ServiceError: as `find_version`.
    """
    version = find_version(address, tracking_uri)
    digest = read_manifest(package).digests.self_digest
    registered = version.tags.get("dspark.self_digest")
    if registered != digest:
        raise IntegrityError(
            f"version {version.number} of {version.name} has the manifest {registered or 'unknown'}, "
            f"{package} has {digest}",
            f"sign what is registered: dspark package pull {address} DIR, then sign DIR",
        )
    encoded = base64.b64encode((package / SIGNATURE).read_bytes()).decode("ascii")
    set_tag(version, SIGNATURE_TAG, encoded, tracking_uri)
    return version
