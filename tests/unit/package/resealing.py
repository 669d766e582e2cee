"""Changed packages whose digests are right again, so that what a reader then refuses is the content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def reseal(folder: Path) -> Path:
    """Make all digests of a changed package right again, as an attacker would, without dspark's own code.

    Digests and canonical form are those of package.md; the files that name the package's digest are adapted too, so
    that what verification then refuses is the content.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes())
    old = manifest["digests"]["package_digest"]
    listed = {entry["path"]: entry for entry in manifest["files"]}

    def refresh() -> str:
        for name, entry in listed.items():
            data = (folder / name).read_bytes()
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return digest({"model", "deploy"})

    def digest(classes: set[str]) -> str:
        lines = "".join(
            f"{name} {entry['sha256']}\n" for name, entry in sorted(listed.items()) if entry["class"] in classes
        )
        return hashlib.sha256(lines.encode()).hexdigest()

    new = refresh()
    for name in ("certificate.json", "speculation_profile.json", "README.md"):
        if name in listed:
            path = folder / name
            path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    rules = folder / "monitoring/prometheus-rules.yaml"
    if rules.is_file():
        rules.write_bytes(rules.read_bytes().replace(old[:12].encode(), new[:12].encode()))
    refresh()
    manifest["digests"] = {
        "model_digest": digest({"model"}),
        "package_digest": new,
        "evidence_digest": digest({"evidence"}),
    }
    manifest["digests"]["self_digest"] = hashlib.sha256(canonical(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(canonical(manifest))
    return folder


def canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
