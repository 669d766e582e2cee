"""`manifest.json`: what a package is, the class and sha256 of every file, and the digests over them (package.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dspark.config.models import Digest, DrafterKind, DType, MarkovType, Name, drafter_family
from dspark.io.digest import digest_json, digest_listing
from dspark.io.jsonfile import canonical_json, model_json
from dspark.package.layout import TARGET_ENDS, FileClass, collision, path_mistake, place_of

SCHEMA: Literal["dspark/package/1"] = "dspark/package/1"
Text = Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Part(BaseModel):
    """Base of the manifest's parts: unknown keys are mistakes, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class TargetInput(Part):
    """The target that the drafter belongs to; a local folder is named by its public id and digests, never by path."""

    name: Name
    public_id: Text
    source: dict[str, Any]
    revision: Text
    weights_digest: Digest
    embedding_digest: Digest
    head_digest: Digest
    tokenizer_digest: Digest
    chat_template_digest: Digest
    dtype: DType
    quantisation: Text | None = None
    vocab_logical: int = Field(gt=0)
    vocab_physical: int = Field(gt=0)
    max_position: int = Field(gt=0)


class CorpusInput(Part):
    """The prompts and answers that the drafter was trained on."""

    name: Name
    digest: Digest  # over the prompts and responses of every split
    domains: tuple[Name, ...]
    evaluation_domains: tuple[Name, ...]
    prompts: dict[Name, int]  # per split
    tokens: dict[Name, int]  # of answers, per split that was answered
    thinking_mode: Literal["none", "off", "on"]
    sampling: dict[str, float]


class Inputs(Part):
    """Everything that decides the model."""

    target: TargetInput
    corpus: CorpusInput
    recipe: dict[str, Any]  # name and resolved settings, as they were


class MarkovPart(Part):
    """The sequential head as it was trained; without one (type none) the checkpoint holds a neutral one for engines."""

    type: MarkovType
    rank: int = Field(ge=0)


class ConfidencePart(Part):
    """The confidence head."""

    enabled: bool
    with_markov: bool
    bias: bool


class DrafterPart(Part):
    """The drafter as an engine needs to know it."""

    kind: DrafterKind
    gamma: int = Field(ge=1)
    taps: tuple[int, ...] = Field(min_length=1)
    # Nobody notices taps that are off by one, so the convention is spelled out.
    tap_convention: Literal["output of layer k, counted from 0"]
    # Readers disagree on the default, so it is always written (package.md, rule 2).
    sample_from_anchor: Literal[True]
    mask_token_id: int = Field(ge=0)
    markov: MarkovPart
    confidence: ConfidencePart
    draft_vocab: int = Field(gt=0)  # tokens that it can propose
    parameters: int = Field(gt=0)
    dtype: DType

    @property
    def family(self) -> str:
        """What papers call such a drafter, see `drafter_family`."""
        return drafter_family(self.kind, self.markov.type)


class FileEntry(Part):
    """One file of the package."""

    path: str
    bytes: int = Field(ge=0)
    sha256: Digest
    class_: FileClass = Field(alias="class")
    # The package may be without it: `package materialise` makes it, to the byte, from the target (io.json says how).
    made_from: Literal["target"] | None = None

    @model_validator(mode="after")
    def _stands_in_the_layout(self) -> FileEntry:
        mistake = path_mistake(self.path)
        if mistake:
            raise ValueError(f"{self.path!r} {mistake}")
        place = place_of(self.path)
        if place is None or place.file_class != self.class_:
            raise ValueError(f"{self.path!r} is not of class {self.class_!r}")
        if self.made_from is not None and self.path != TARGET_ENDS:
            raise ValueError(f"{self.path!r} cannot be made from the target")
        return self


class Digests(Part):
    """The digests of package.md; `self_digest` covers everything, the others a class of files each."""

    model_digest: Digest
    package_digest: Digest
    evidence_digest: Digest
    self_digest: Digest


class Description(Part):
    """What a package is, before its evidence exists: enough for the certificate and the model card."""

    name: Name
    build: Name
    inputs: Inputs
    drafter: DrafterPart
    model_digest: Digest
    package_digest: Digest


class Manifest(Part):
    """`manifest.json`."""

    schema_: Literal["dspark/package/1"] = Field(default=SCHEMA, alias="schema")
    name: Name
    build: Name
    inputs: Inputs
    drafter: DrafterPart
    files: tuple[FileEntry, ...]
    digests: Digests

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        target, drafter = self.inputs.target, self.drafter
        paths = [entry.path for entry in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("files are not sorted by path, each once")
        clash = collision(paths)
        if clash:
            raise ValueError(f"{clash[0]!r} and {clash[1]!r} are one name on some file systems")
        if target.vocab_logical > target.vocab_physical:
            raise ValueError("vocab_logical exceeds vocab_physical")
        if drafter.mask_token_id >= target.vocab_physical:
            raise ValueError("mask_token_id lies outside the target's vocabulary")
        if drafter.draft_vocab > target.vocab_physical:
            raise ValueError("draft_vocab exceeds the target's vocabulary")
        if list(drafter.taps) != sorted(set(drafter.taps)) or drafter.taps[0] < 0:
            raise ValueError("taps are not ascending layer numbers")
        if self.digests.model_digest != model_digest(self.files):
            raise ValueError("model_digest is not the digest of the model's files")
        if self.digests.package_digest != package_digest(self.files):
            raise ValueError("package_digest is not the digest of the deployable files")
        if self.digests.evidence_digest != evidence_digest(self.files):
            raise ValueError("evidence_digest is not the digest of the evidence")
        if self.digests.self_digest != self_digest(model_json(self)):
            raise ValueError("self_digest is not the digest of the manifest")
        return self

    def description(self) -> Description:
        """What the certificate and the model card are told about the package."""
        return Description(
            name=self.name,
            build=self.build,
            inputs=self.inputs,
            drafter=self.drafter,
            model_digest=self.digests.model_digest,
            package_digest=self.digests.package_digest,
        )


def model_digest(files: Iterable[FileEntry]) -> str:
    """Digest of the unmeasured files: drafter, GGUF, ONNX, TensorRT recipe."""
    return _digest(files, {"model"})


def package_digest(files: Iterable[FileEntry]) -> str:
    """Digest of every deployable file, cost tables and scheduler included: the registry's key."""
    return _digest(files, {"model", "deploy"})


def evidence_digest(files: Iterable[FileEntry]) -> str:
    """Digest of certificate, model card, speculation profile and evidence."""
    return _digest(files, {"evidence"})


def self_digest(value: dict[str, Any]) -> str:
    """Digest of the canonical bytes of a manifest's JSON object without its field `digests.self_digest`."""
    digests = {key: digest for key, digest in value["digests"].items() if key != "self_digest"}
    return digest_json({**value, "digests": digests})


def compose(description: Description, files: Iterable[FileEntry]) -> Manifest:
    """The manifest of a described package with these files, all digests computed."""
    entries = sorted(files, key=lambda entry: entry.path)
    value: dict[str, Any] = {
        "schema": SCHEMA,
        **model_json(description),
        "files": [model_json(entry) for entry in entries],
        "digests": {
            "model_digest": model_digest(entries),
            "package_digest": package_digest(entries),
            "evidence_digest": evidence_digest(entries),
        },
    }
    del value["model_digest"], value["package_digest"]
    value["digests"]["self_digest"] = self_digest(value)
    return Manifest.model_validate(value)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The one spelling of a manifest: canonical JSON, UTF-8, no final newline."""
    return canonical_json(model_json(manifest)).encode("utf-8")


def _digest(files: Iterable[FileEntry], classes: set[FileClass]) -> str:
    return digest_listing({entry.path: entry.sha256 for entry in files if entry.class_ in classes})
