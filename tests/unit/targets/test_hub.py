from __future__ import annotations

import time

import pytest

from dspark.config.models import HubSource, TargetSpec
from dspark.errors import PreflightError, ServiceError
from dspark.io.progress import Progress
from dspark.targets import hub
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise, missing_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def spec(revision="main"):
    source = {"kind": "hub", "repo": "Qwen/Qwen3-Tiny", "revision": revision}
    return TargetSpec.model_validate({"name": "qwen3-tiny", "source": source, "dtype": "float32"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and no hub."""
    folder = tmp_path / "hub-cache"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture
def fill(cache, make_folder):
    """Put a model into the hub's cache, laid out as the hub's client does: a snapshot of links to blobs."""

    def put(commit=COMMIT, drop=(), seed_family="qwen3"):
        model = make_folder(f"model-{commit[:4]}", seed_family)
        repo = cache / "models--Qwen--Qwen3-Tiny"
        (repo / "blobs").mkdir(parents=True, exist_ok=True)
        (repo / "snapshots" / commit).mkdir(parents=True)
        for path in model.iterdir():
            blob = repo / "blobs" / f"{commit[:4]}-{path.name}"
            path.rename(blob)
            if path.name not in drop:
                (repo / "snapshots" / commit / path.name).symlink_to(blob)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(commit)

    return put


def test_without_hub_and_cache_preflight_names_files_and_the_way_out(cache, tmp_path):
    root = tmp_path / "workspace"
    root.mkdir()
    started = time.monotonic()
    absent = missing_files(spec(), root)
    assert time.monotonic() - started < 5
    assert absent[:2] == ["config.json", "tokenizer.json"]
    with pytest.raises(PreflightError) as caught:
        materialise(spec(), root=root)
    assert "Qwen/Qwen3-Tiny at main" in caught.value.message
    assert "model.safetensors" in caught.value.message
    assert "dspark targets add qwen3-tiny-local /path/to/folder" in caught.value.hint
    assert list(root.iterdir()) == []


def test_an_incomplete_cache_names_just_what_is_missing(fill, tmp_path):
    fill(drop=["model.safetensors"])
    assert missing_files(spec(), tmp_path) == ["model.safetensors (or model.safetensors.index.json and its shards)"]


def test_a_complete_cache_is_enough_and_the_commit_is_recorded(fill, tmp_path):
    fill()
    assert missing_files(spec(), tmp_path) == []
    record = materialise(spec(), root=tmp_path)
    assert record.revision == COMMIT
    assert record.public_id == "Qwen/Qwen3-Tiny"
    assert record.source == {"kind": "hub", "repo": "Qwen/Qwen3-Tiny", "revision": "main"}
    load_target(record, tmp_path)


def test_a_branch_that_moved_on_is_not_followed_silently(fill, tmp_path):
    fill()
    first = materialise(spec(), root=tmp_path)
    fill("f" * 40, seed_family="llama")
    assert materialise(spec(), root=tmp_path) == first
    assert materialise(spec("f" * 40), root=tmp_path).model_type == "llama"


def test_a_pinned_commit_is_found_in_the_cache(fill, tmp_path):
    fill()
    fill("f" * 40, seed_family="llama")
    assert materialise(spec(COMMIT), root=tmp_path).revision == COMMIT


class Info:
    sha = COMMIT

    def __init__(self, *names):
        self.siblings = [type("Sibling", (), {"rfilename": name}) for name in names]


def answer(monkeypatch, result):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def model_info(self, repo, *, revision, timeout):
        if callable(result):
            return result()
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)


def test_a_hub_that_never_answers_costs_seconds_not_minutes(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_PATIENCE_SECONDS", 0.2)
    answer(monkeypatch, lambda: time.sleep(30))
    started = time.monotonic()
    assert missing_files(spec(), tmp_path)
    assert time.monotonic() - started < 5


def test_a_hub_that_answers_makes_the_target_fetchable(cache, tmp_path, monkeypatch):
    answer(monkeypatch, Info("config.json"))
    assert missing_files(spec(), tmp_path) == []


def test_only_files_that_a_target_needs_are_fetched(cache, monkeypatch):
    names = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    answer(monkeypatch, Info(*names, "README.md", "pytorch_model.bin", "original/model.safetensors", "modeling_x.py"))
    assert hub.lookup(HubSource(kind="hub", repo="a/b")) == (COMMIT, sorted(names))


def test_fetching_goes_file_by_file_at_the_resolved_commit(fill, tmp_path, monkeypatch):
    fill()
    snapshot = hub.cached_snapshot(spec().source)
    names = sorted(path.name for path in snapshot.iterdir())
    asked = []

    def download(repo, name, *, revision):
        asked.append((repo, name, revision))
        return str(snapshot / name)

    answer(monkeypatch, Info(*names, "README.md"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert materialise(spec(), root=tmp_path).revision == COMMIT
    assert asked == [("Qwen/Qwen3-Tiny", name, COMMIT) for name in names]


def test_a_fetch_that_breaks_off_can_be_continued(cache, monkeypatch):
    def download(repo, name, *, revision):
        raise OSError("connection reset")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ServiceError, match=r"cannot fetch config\.json: connection reset") as caught:
        hub.fetch(spec().source, COMMIT, ["config.json"], Progress())
    assert caught.value.hint == "run again to continue"


def test_a_repository_that_does_not_exist_is_said_at_once(cache, tmp_path, monkeypatch):
    from huggingface_hub.errors import HFValidationError

    answer(monkeypatch, HFValidationError("no"))
    with pytest.raises(PreflightError, match="not on the hub"):
        missing_files(spec(), tmp_path)
