"""Where each file of a package stands, and which class it belongs to (package.md, "The package" and "Digests").

The layout is closed: a path that no rule names is no part of a package. Class `model` is what training alone decides,
`deploy` is what was measured for serving, `evidence` is what was observed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FileClass = Literal["model", "deploy", "evidence"]
Kind = Literal["json", "jsonlines", "csv", "safetensors", "gguf", "onnx", "opaque", "shell", "env", "yaml", "markdown"]

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
CERTIFICATE = "certificate.json"
CARD = "README.md"
PROFILE = "speculation_profile.json"
SCHEDULER = "scheduler/scheduler.json"
CALIBRATION = "scheduler/calibration.json"
DRAFTER_CONFIG = "drafter/config.json"
DRAFTER_WEIGHTS = "drafter/model.safetensors"
LINEAGE = "evidence/lineage.json"
METRICS = "evidence/evaluate/metrics.json"
LOSSLESS = "evidence/evaluate/lossless.json"
PAIRED = "evidence/evaluate/paired.json"
ONNX_IO = "engines/onnxruntime/io.json"
TARGET_ENDS = "engines/onnxruntime/target_ends.onnx.data"
SMOKE = "evidence/smoke.jsonl"  # prompts for a server that has just been started
RULES = "monitoring/prometheus-rules.yaml"

# Portable on every file system that serves models: ASCII, no leading dot or dash, no trailing dot.
_SEGMENT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._@+=,-]{0,126}[A-Za-z0-9_@+=-])?")
_NAME = r"[a-z0-9][a-z0-9._-]*"


@dataclass(frozen=True)
class Place:
    """A rule of the layout: the paths it covers, their class, and how their content is checked."""

    pattern: re.Pattern[str]
    file_class: FileClass
    kind: Kind


def _place(pattern: str, file_class: FileClass, kind: Kind) -> Place:
    return Place(re.compile(pattern), file_class, kind)


_PLACES = (
    _place(r"drafter/config\.json", "model", "json"),
    _place(r"drafter/model\.safetensors", "model", "safetensors"),
    _place(r"engines/llamacpp/drafter\.gguf", "model", "gguf"),
    _place(r"engines/onnxruntime/draft_block(?:_cached)?\.onnx", "model", "onnx"),
    _place(r"engines/onnxruntime/(?:draft_block|target_ends)\.onnx\.data", "model", "opaque"),
    _place(r"engines/onnxruntime/io\.json", "model", "json"),
    _place(r"engines/tensorrt/build\.json", "model", "json"),
    _place(rf"scheduler/(?:scheduler|calibration|cost/{_NAME})\.json", "deploy", "json"),
    _place(r"engines/(?:sglang|vllm|tensorrt_llm|llamacpp|onnxruntime)/[a-z0-9_.-]+\.json", "deploy", "json"),
    _place(r"engines/(?:sglang|vllm|tensorrt_llm|llamacpp|onnxruntime)/[a-z0-9_.-]+\.sh", "deploy", "shell"),
    _place(r"engines/tensorrt_llm/[a-z0-9_.-]+\.yaml", "deploy", "yaml"),
    _place(r"engines/(?:sglang|vllm|tensorrt_llm|llamacpp|onnxruntime)/env", "deploy", "env"),
    _place(r"(?:certificate|speculation_profile)\.json", "evidence", "json"),
    _place(r"README\.md", "evidence", "markdown"),
    _place(r"monitoring/prometheus-rules\.yaml", "evidence", "yaml"),
    _place(r"evidence/(?:[^/]+/)*[^/]+\.json", "evidence", "json"),
    _place(r"evidence/(?:[^/]+/)*[^/]+\.jsonl", "evidence", "jsonlines"),
    _place(r"evidence/(?:[^/]+/)*[^/]+\.csv", "evidence", "csv"),
    _place(r"evidence/(?:[^/]+/)*[^/]+\.safetensors", "evidence", "safetensors"),
)


def place_of(path: str) -> Place | None:
    """The rule that covers a path relative to the package, or None if the layout has no such file."""
    return next((place for place in _PLACES if place.pattern.fullmatch(path)), None)


def path_mistake(path: str) -> str | None:
    """Why a path may not stand in a manifest, or None if it may: relative, portable, inside the layout."""
    segments = path.split("/")
    if path.startswith("/") or ".." in segments:
        return "leaves the package"
    if len(path) > 240 or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        return "is not a portable relative path"
    if path in (MANIFEST, SIGNATURE):
        return "cannot list itself"
    if place_of(path) is None:
        return "has no place in the layout of a package"
    return None


def folded(path: str) -> str:
    """The form in which a file system that ignores case or Unicode composition sees a path."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """Two different paths, or folders on the way to them, that some file system takes for one; None if there are none.

    A path that is also a folder on the way to another path collides with it.
    """
    seen: dict[str, tuple[str, bool]] = {}
    for path in paths:
        segments = path.split("/")
        for depth in range(1, len(segments) + 1):
            spelled, is_file = "/".join(segments[:depth]), depth == len(segments)
            other, other_is_file = seen.setdefault(folded(spelled), (spelled, is_file))
            if other != spelled or other_is_file != is_file:
                return other, spelled
    return None
