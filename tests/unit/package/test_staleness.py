"""A certificate that is about something else than what would be served."""

from __future__ import annotations

import datetime

import pytest
from fake_build import CPU, ELSEWHERE, fingerprint, profiles

from dspark.config.models import Sampling, ServingProfile
from dspark.errors import GateError, IntegrityError, PreflightError, SettingsError
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.staleness import differences, measured_entry
from dspark.package.verify import read_manifest
from dspark.workspace import against
from dspark.workspace.against import require_fresh

DAY = datetime.date(2026, 12, 1)


@pytest.fixture
def ask(pristine):
    """What differs for the measured profile, after changes to it, to the machine's fingerprint or to the day."""
    certificate = read_model(pristine / "certificate.json", Certificate, IntegrityError)

    def found(*, today=DAY, profile=None, **changes):
        entry = measured_entry(certificate, CPU)
        here = profiles()[0].model_copy(update=profile or {})
        asked = differences(read_manifest(pristine), entry, here, fingerprint() | changes, today=today)
        return [str(difference) for difference in asked]

    return found


def test_nothing_differs_where_it_was_measured(ask):
    assert ask() == []
    assert ask(today=datetime.date(2027, 5, 28)) == []


def test_every_field_that_differs_is_named(ask):
    engine = fingerprint()["engine_version"]
    assert ask(engine_version="9.9") == [f"engine_version: certified {engine}, here 9.9"]
    assert ask(hardware={"cpu": "another"})[0].startswith("hardware.")
    assert ask(gpus="two") == ["gpus: certified nothing, here two"]


def test_what_an_entry_knows_beyond_the_machine_is_no_field_of_it(pristine):
    entry = measured_entry(read_model(pristine / "certificate.json", Certificate, IntegrityError), CPU)
    more = entry.model_copy(update={"fingerprint": entry.fingerprint | {"quantisation": "Q4_1"}})
    assert differences(read_manifest(pristine), more, profiles()[0], fingerprint(), today=DAY) == []


def test_a_field_that_is_there_on_one_side_only_differs(ask):
    changed = fingerprint()["hardware"] | {"gpus": "one"}
    assert ask(hardware=changed) == ["hardware.gpus: certified nothing, here one"]


def test_an_entry_ends_after_its_day(ask):
    assert ask(today=datetime.date(2027, 5, 29)) == ["holds until: certified 2027-05-28, here 2027-05-29"]


def test_other_traffic_than_the_corpus_was_answered_with_is_named(ask):
    assert ask(profile={"thinking_mode": "on"}) == ["thinking mode of the corpus: certified none, here on"]
    (said,) = ask(profile={"sampling": Sampling(temperature=0.2)})
    assert said.startswith("sampling of the corpus: certified temperature ") and "here temperature 0.2, top_k 0" in said


def test_a_profile_without_a_measurement_is_refused_with_its_reason(pristine):
    certificate = read_model(pristine / "certificate.json", Certificate, IntegrityError)
    with pytest.raises(GateError, match="no entry for serving profile 'moon'"):
        measured_entry(certificate, "moon")
    with pytest.raises(GateError, match=r"absent in the certificate: no GPU \| at hand"):
        measured_entry(certificate, ELSEWHERE)


def test_what_is_stale_is_refused_on_this_machine(pristine, monkeypatch):
    here = profiles()[0]
    monkeypatch.setattr(against, "fingerprint", lambda profile: fingerprint())
    with pytest.raises(PreflightError, match=r"not for this machine: it is for reference >=9, here is 0\.1\.0"):
        require_fresh(pristine, here.model_copy(update={"engine_versions": ">=9"}))
    assert require_fresh(pristine, here) == "2027-05-28"
    monkeypatch.setattr(against, "fingerprint", lambda profile: fingerprint() | {"threads": 64})
    with pytest.raises(GateError, match=r"is stale here:\n    threads: certified \d+, here 64"):
        require_fresh(pristine, here)
    far = ServingProfile(name=ELSEWHERE, engine="sglang", access="none", reason="far")
    with pytest.raises(SettingsError, match="its machine is not this one"):
        require_fresh(pristine, far)
