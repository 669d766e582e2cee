"""Single files of a package for readers that need no more than these: each is the one that the manifest lists."""

from __future__ import annotations

from pathlib import Path

from dspark.decoding.policies import Fixed
from dspark.decoding.records import RecordSet, read_records
from dspark.errors import DataError, IntegrityError
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.results import EvaluationMetrics
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.layout import CERTIFICATE, METRICS
from dspark.package.manifest import Manifest


def listed_file(folder: Path, manifest: Manifest, path: str) -> Path | None:
    """A file of a package, or None if it has no such file.

    Raises:
        IntegrityError: it is not the file of the manifest.
    """
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        return None
    found = folder / path
    if found.is_symlink() or not found.is_file() or digest_file(found) != entry.sha256:
        raise IntegrityError(
            f"{found}: missing, or not the file of the manifest", f"what else is wrong: dspark package verify {folder}"
        )
    return found


def certificate_of(folder: Path, manifest: Manifest) -> Certificate:
    """The certificate of a package.

    Raises:
        IntegrityError: there is none, or it is not the one of the manifest.
    """
    path = listed_file(folder, manifest, CERTIFICATE)
    if path is None:
        raise IntegrityError(f"{folder} has no {CERTIFICATE}", f"what else is wrong: dspark package verify {folder}")
    return read_model(path, Certificate, IntegrityError)


def metrics_of(folder: Path, manifest: Manifest) -> EvaluationMetrics | None:
    """The evaluation of a package; None: it has none.

    Raises:
        IntegrityError: it is not the one of the manifest.
    """
    path = listed_file(folder, manifest, METRICS)
    return read_model(path, EvaluationMetrics, IntegrityError) if path is not None else None


def records_of(folder: Path, manifest: Manifest, entry: CertificateEntry) -> RecordSet | None:
    """Records of single prompts at the entry's temperature, whole blocks verified; None: there are none to be read.

    Raises:
        IntegrityError: they are not those of the manifest.
    """
    temperature = entry.workload.sampling.temperature if entry.workload is not None else 0.0
    path = listed_file(folder, manifest, f"evidence/evaluate/records/temperature-{temperature:g}.safetensors")
    if path is None:
        return None
    try:
        records = read_records(path)
    except DataError:  # of another version of dspark: the certificate's intervals have to do
        return None
    whole = records.decoded and records.decoded[0].policy == Fixed().name and records.temperature == temperature
    return records if whole else None
