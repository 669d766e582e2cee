"""What it was made from: target, corpus, settings, code, digests."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.io.digest import digest_file
from dspark.package.layout import METRICS
from dspark.package.lineage import Lineage
from dspark.package.manifest import Manifest
from dspark.report.page.evidence import Evidence
from dspark.report.page.model import Block, Cell, Code, Facts, Group, Missing, Section, Table
from dspark.report.words import leaves


def origin(evidence: Evidence) -> Section:
    """Everything that decides the package."""
    manifest = evidence.files.manifest
    blocks: list[Block] = []
    if manifest is None:
        blocks.append(Missing("package", "it is not assembled yet, so nothing names target, corpus and settings"))
    else:
        blocks += _inputs(manifest)
    if evidence.lineage is not None:
        blocks += _lineage(evidence.lineage)
    else:
        blocks.append(Missing("lineage", evidence.absent["lineage"]))
    return Section("origin", "Made from", tuple(blocks))


def outdated(evidence: Evidence) -> Missing | None:
    """What to say if a build was evaluated again after its package was made."""
    manifest, metrics = evidence.files.manifest, evidence.files.plots.evaluate / "metrics.json"
    if manifest is None or not evidence.files.is_build or not metrics.is_file():
        return None
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    packed = listed.get(METRICS)
    if packed is None or packed == digest_file(metrics):
        return None
    return Missing("package of this evaluation", "the package was made from another one: run the build again")


def settings_of(manifest: Manifest) -> dict[str, str]:
    """Every setting of a package by its name, and the facts that decide its numbers."""
    target, corpus, drafter = manifest.inputs.target, manifest.inputs.corpus, manifest.drafter
    return {
        **dict(leaves(manifest.inputs.recipe, "recipe.")),
        **dict(leaves(drafter.model_dump(mode="json"), "drafter.")),
        **dict(leaves(corpus.model_dump(mode="json"), "corpus.")),
        **dict(leaves(target.model_dump(mode="json"), "target.")),
    }


def _inputs(manifest: Manifest) -> Iterator[Block]:
    target, corpus, drafter = manifest.inputs.target, manifest.inputs.corpus, manifest.drafter
    digests = manifest.digests
    pairs: tuple[tuple[str, Cell], ...] = (
        ("target", f"{target.public_id}, {target.dtype}, published as {target.quantisation or target.dtype}"),
        ("target revision", Code(target.revision)),
        ("target weights", Code(target.weights_digest)),
        (
            "drafter",
            f"{drafter.kind}, gamma {drafter.gamma}, {drafter.parameters:,} parameters in {drafter.dtype}, taps "
            f"{', '.join(map(str, drafter.taps))}, Markov head {drafter.markov.type} of rank {drafter.markov.rank}, "
            f"confidence head {'yes' if drafter.confidence.enabled else 'no'}",
        ),
        ("corpus", ", ".join(corpus.domains)),
        ("prompts", _counts(corpus.prompts)),
        ("tokens answered by the target", _counts(corpus.tokens)),
        ("corpus digest", Code(corpus.digest)),
        ("model digest", Code(digests.model_digest)),
        ("package digest", Code(digests.package_digest)),
        ("evidence digest", Code(digests.evidence_digest)),
        ("self digest", Code(digests.self_digest)),
    )
    yield Facts(pairs)
    rows = tuple((name, value) for name, value in leaves(manifest.inputs.recipe))
    yield Group("All settings", (Table("Settings of the build", ("setting", "value"), rows),), folded=True)


def _lineage(lineage: Lineage) -> Iterator[Block]:
    pairs: list[tuple[str, Cell]] = []
    if lineage.git_commit is not None:
        pairs.append(("git commit", Code(lineage.git_commit)))
        pairs.append(("uncommitted changes", "yes" if lineage.git_dirty else "no"))
    else:
        pairs.append(("git commit", f"not known: {lineage.git_absent}"))
    lock = lineage.dvc_lock_sha256
    pairs.append(("dvc.lock", Code(lock) if lock is not None else f"not known: {lineage.dvc_lock_absent}"))
    pairs.append(("dspark", lineage.dspark_version))
    versions = ", ".join(f"{name} {version}" for name, version in lineage.versions.items())
    pairs.append(("made with", f"Python {lineage.python_version} on {lineage.platform}; {versions}"))
    yield Facts(tuple(pairs))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{split} {number:,}" for split, number in counts.items()) or "none"
