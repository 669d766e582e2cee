"""The manifest has one spelling, its digests are those of package.md, and nothing in it contradicts anything else."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest
from pydantic import ValidationError

from dspark.package.layout import place_of
from dspark.package.manifest import Description, FileEntry, Manifest, compose, manifest_bytes

HEX = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abcdefgh"}
PATHS = ("certificate.json", "drafter/config.json", "drafter/model.safetensors", "scheduler/scheduler.json")
DESCRIPTION = {
    "name": "demo",
    "build": "demo",
    "inputs": {
        "target": {
            "name": "tiny",
            "public_id": "org/tiny",
            "source": {"kind": "hub", "repo": "org/tiny"},
            "revision": "0123abcd",
            "weights_digest": HEX["a"],
            "embedding_digest": HEX["b"],
            "head_digest": HEX["c"],
            "tokenizer_digest": HEX["d"],
            "chat_template_digest": HEX["e"],
            "dtype": "bfloat16",
            "vocab_logical": 90,
            "vocab_physical": 96,
            "max_position": 512,
        },
        "corpus": {
            "name": "demo",
            "digest": HEX["f"],
            "domains": ["math"],
            "evaluation_domains": [],
            "prompts": {"train": 3},
            "tokens": {"train": 40},
            "thinking_mode": "none",
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        },
        "recipe": {"name": "dspark", "training": {"steps": 5, "note": None}},
    },
    "drafter": {
        "kind": "dspark",
        "gamma": 3,
        "taps": [0, 2],
        "tap_convention": "output of layer k, counted from 0",
        "sample_from_anchor": True,
        "mask_token_id": 95,
        "markov": {"type": "vanilla", "rank": 4},
        "confidence": {"enabled": True, "with_markov": True, "bias": True},
        "draft_vocab": 96,
        "parameters": 1234,
        "dtype": "bfloat16",
    },
    "model_digest": HEX["g"],
    "package_digest": HEX["h"],
}


def entries(paths=PATHS):
    return [
        FileEntry(path=path, bytes=1, sha256=HEX["abcdefgh"[number % 8]], class_=place_of(path).file_class)
        for number, path in enumerate(paths)
    ]


@pytest.fixture
def value() -> dict:
    return json.loads(manifest_bytes(compose(Description.model_validate(DESCRIPTION), entries())))


def seal(value: dict) -> dict:
    """Make the self digest right again, as package.md defines it, without dspark's own function."""
    inner = copy.deepcopy(value)
    inner["digests"].pop("self_digest", None)
    text = json.dumps(inner, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    value["digests"]["self_digest"] = hashlib.sha256(text.encode()).hexdigest()
    return value


def test_digests_are_sha256_over_sorted_path_and_sha256_lines(value):
    """Worked out from the text of package.md with hashlib alone."""

    def digest(paths):
        lines = "".join(f"{path} {HEX['abcdefgh'[PATHS.index(path)]]}\n" for path in sorted(paths))
        return hashlib.sha256(lines.encode()).hexdigest()

    assert value["digests"]["model_digest"] == digest(["drafter/config.json", "drafter/model.safetensors"])
    assert value["digests"]["package_digest"] == digest(PATHS[1:])
    assert value["digests"]["evidence_digest"] == digest(["certificate.json"])
    assert value["digests"] == seal(copy.deepcopy(value))["digests"]


def test_the_order_in_which_files_are_given_does_not_matter():
    description = Description.model_validate(DESCRIPTION)
    assert manifest_bytes(compose(description, entries())) == manifest_bytes(compose(description, entries()[::-1]))


def test_a_manifest_reads_back_as_itself(value):
    manifest = Manifest.model_validate(value)
    assert json.loads(manifest_bytes(manifest)) == value
    assert manifest.description().drafter.gamma == 3
    assert manifest.description().package_digest == value["digests"]["package_digest"]


def mutations():
    def put(*keys, to):
        def change(value):
            for key in keys[:-1]:
                value = value[key]
            value[keys[-1]] = to

        return change

    return {
        "extra key": put("comment", to="x"),
        "extra key deep": put("inputs", "target", "comment", to="x"),
        "other schema": put("schema", to="dspark/package/2"),
        "name with a slash": put("name", to="../demo"),
        "upper-case digest": put("files", 0, "sha256", to=HEX["a"].upper()),
        "short digest": put("files", 0, "sha256", to="abc"),
        "wrong class": put("files", 3, "class", to="model"),
        "negative size": put("files", 0, "bytes", to=-1),
        "absolute path": put("files", 0, "path", to="/certificate.json"),
        "path that leaves": put("files", 0, "path", to="../certificate.json"),
        "unsorted files": lambda value: value["files"].reverse(),
        "file twice": lambda value: value["files"].insert(0, value["files"][0]),
        "model digest": put("digests", "model_digest", to=HEX["a"]),
        "package digest": put("digests", "package_digest", to=HEX["a"]),
        "evidence digest": put("digests", "evidence_digest", to=HEX["a"]),
        "mask outside the vocabulary": put("drafter", "mask_token_id", to=96),
        "draft vocabulary too large": put("drafter", "draft_vocab", to=97),
        "logical above physical": put("inputs", "target", "vocab_logical", to=97),
        "taps unsorted": put("drafter", "taps", to=[2, 0]),
        "taps repeated": put("drafter", "taps", to=[2, 2]),
        "negative tap": put("drafter", "taps", to=[-1, 2]),
        "no taps": put("drafter", "taps", to=[]),
        "anchor not sampled from": put("drafter", "sample_from_anchor", to=False),
        "other tap convention": put("drafter", "tap_convention", to="input of layer k"),
        "control character": put("inputs", "target", "revision", to="a\nb"),
    }


@pytest.mark.parametrize("name", mutations())
def test_a_contradiction_is_refused_although_the_self_digest_is_right(value, name):
    mutations()[name](value)
    with pytest.raises(ValidationError):
        Manifest.model_validate(seal(value))


def test_files_that_one_file_system_takes_for_one_are_refused(value):
    twin = {**value["files"][0], "path": "evidence/A.json"}
    value["files"] = sorted([*value["files"], twin, {**twin, "path": "evidence/a.json"}], key=lambda item: item["path"])
    with pytest.raises(ValidationError, match="one name"):
        Manifest.model_validate(seal(value))


def test_a_wrong_self_digest_is_refused(value):
    value["inputs"]["recipe"]["training"]["steps"] = 6
    with pytest.raises(ValidationError, match="self_digest"):
        Manifest.model_validate(value)
