"""A package in a program: what it answers, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import fake_build
import pytest

from dspark.errors import IntegrityError, SettingsError
from dspark.package.opened import load_package
from dspark.package.verify import read_manifest
from dspark.scheduling.prefix import PrefixScheduler


def test_it_is_verified_before_it_is_opened(package: Path) -> None:
    opened = load_package(str(package), digest=read_manifest(package).digests.package_digest)
    assert opened.report.authenticated == "deployable files"
    assert (opened.gamma, opened.manifest.build) == (fake_build.GAMMA, "demo")
    (package / "README.md").write_text("something else")
    with pytest.raises(IntegrityError, match=r"README\.md"):
        load_package(package)


def test_another_package_than_was_meant_is_refused(pristine: Path) -> None:
    with pytest.raises(IntegrityError, match="neither its package_digest"):
        load_package(pristine, digest="0" * 64)


def test_entries_and_advice_are_those_of_the_certificate(pristine: Path) -> None:
    opened = load_package(pristine)
    entry = opened.entry(fake_build.CPU)
    assert entry.profile == fake_build.CPU and entry.status == "measured"
    for one in entry.recommended:
        assert opened.recommended(one.from_concurrency, fake_build.CPU) == one
        assert opened.recommended(one.to_concurrency, fake_build.CPU) == one
    assert opened.recommended(10_000, fake_build.CPU) is None
    assert opened.recommended(1, fake_build.ELSEWHERE) is None, "nothing was measured there"


def test_a_profile_must_be_named_where_there_are_several(pristine: Path) -> None:
    opened = load_package(pristine)
    with pytest.raises(SettingsError, match="2 serving profiles: name one") as caught:
        opened.entry()
    assert caught.value.hint == "there are: cpu-reference, gpu-elsewhere"
    with pytest.raises(SettingsError, match="no serving profile 'tpu'"):
        opened.entry("tpu")


def test_the_scheduler_has_the_profiles_cost_and_the_samplings_temperatures(pristine: Path) -> None:
    opened = load_package(pristine)
    scheduler = opened.scheduler(temperature=1.0)  # the only profile with step times
    assert type(scheduler) is PrefixScheduler and scheduler.gamma == fake_build.GAMMA
    assert scheduler.temperatures.tolist() == [1.5, 1.25, 1.0]
    assert scheduler.cost == opened.scheduling.cost(fake_build.CPU)
    with pytest.raises(SettingsError, match=r"no calibration for temperature 0\.3"):
        opened.scheduler(temperature=0.3)
    with pytest.raises(SettingsError, match="no serving profile 'gpu-elsewhere'"):
        opened.scheduler(fake_build.ELSEWHERE)


def test_another_target_is_refused_before_anything_is_read(pristine: Path) -> None:
    from dspark.evaluation.tiny import tiny_target

    with pytest.raises(
        SettingsError, match=r"drafts for tiny \(org/tiny-llama\); tiny differs in weights_digest"
    ) as caught:
        load_package(pristine).proposer(tiny_target(fake_build.VOCABULARY))
    assert "dspark run" in caught.value.hint
