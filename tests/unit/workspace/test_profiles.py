"""Serving profiles as they are declared, listed and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config.models import ServingProfile
from dspark.errors import SettingsError
from dspark.workspace.layout import Workspace
from dspark.workspace.profiles import describe_profiles, read_profile, show_profile

CHECKOUT = Workspace(Path(__file__).resolve().parents[3])
ABSENT = {"name": "far", "engine": "sglang", "access": "none", "reason": "not here"}


def test_every_profile_of_the_checkout_is_whole_and_says_why_it_cannot_be_measured() -> None:
    rows = {row.name: row for row in describe_profiles(CHECKOUT)}
    assert set(rows) >= {"reference-cpu", "llamacpp-cpu", "sglang-h100", "sglang-b300", "vllm-h100", "trtllm-b200"}
    for name, row in rows.items():
        assert row.access in ("local", "none"), row
        assert (read_profile(CHECKOUT, name).reason is not None) == (row.access == "none")


def test_a_profile_is_shown_with_the_builds_that_name_it() -> None:
    profile, builds = show_profile(CHECKOUT, "reference-smoke")
    assert profile.threads == 1 and builds == ["tiny"]
    assert show_profile(CHECKOUT, "sglang-h100")[1] == []
    with pytest.raises(SettingsError, match="sglang-h10"):
        show_profile(CHECKOUT, "sglang-h10")


def test_a_file_with_mistakes_is_listed_as_broken(tmp_path: Path) -> None:
    (tmp_path / "serving_profiles").mkdir()
    (tmp_path / "serving_profiles/bad.yaml").write_text("engine: sglang\naccess: local\n")
    (row,) = describe_profiles(Workspace(tmp_path))
    assert (row.name, row.access) == ("bad", "broken")
    assert "this version starts reference and llamacpp" in row.description


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reason": None}, "access: none needs a reason"),
        ({"access": "local"}, "starts reference and llamacpp; sglang needs access: none or url"),
        ({"access": "url"}, r"needs url \(with the drafter\) and plain_url"),
        ({"url": "http://a:1"}, "url is for access: url"),
        (
            {"engine": "tensorrt_llm", "access": "url", "url": "http://a:1"},
            "servers of sglang and vllm, not of tensorrt_llm",
        ),
        (
            {
                "engine": "vllm",
                "access": "url",
                "url": "http://a:1",
                "plain_url": "http://a:2",
                "profile_url": "http://a:3",
            },
            "vllm takes no cost table",
        ),
        ({"access": "url", "url": "a:1", "plain_url": "http://a:2"}, "url"),
        ({"engine": "llamacpp", "access": "url"}, "dspark certify --url"),
        ({"engine": "llamacpp", "access": "local"}, "float16 or float32"),
        ({"engine": "llamacpp", "policies": ["scheduled"]}, r"fixed, fixed\(k\) or threshold"),
        ({"engine": "llamacpp", "policies": ["threshold(0.00)"]}, r"fixed, fixed\(k\) or threshold"),
        ({"engine": "llamacpp", "policies": ["fixed", "fixed"]}, "names one twice"),
        ({"engine": "llamacpp", "draft_backend": "onnxruntime"}, "drafts by itself"),
        (
            {"engine": "reference", "access": "local", "requests": [1, 64], "limits": {"requests": 8}},
            "go up to 64, the engine's limit is 8",
        ),
        (
            {"engine": "reference", "access": "local", "contexts": [64, 9999], "limits": {"context": 4096}},
            "contexts go up to 9999",
        ),
        ({"policies": ["fixed"]}, "policies are for llamacpp"),
        ({"engine": "reference", "access": "url"}, "runs inside dspark"),
        ({"parallelism": {"tensor": 2, "data": 2}, "hardware": {"count": 3}}, "needs 4 accelerators"),
        ({"engine_versions": "newest"}, "pattern"),
        ({"engine": "vlm"}, "Input should be"),
        ({"service_levels": [{"requests": 0, "tokens_per_second_per_user": 1}]}, "greater than 0"),
    ],
)
def test_profiles_that_cannot_be_meant_are_refused(change: dict[str, object], said: str) -> None:
    assert ServingProfile.model_validate(ABSENT).engine == "sglang"
    with pytest.raises(ValueError, match=said):
        ServingProfile.model_validate(ABSENT | change)
