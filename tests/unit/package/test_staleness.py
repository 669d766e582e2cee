"""A certificate that is about something else than what would be served."""

from __future__ import annotations

import datetime

import pytest
from fake_build import CPU, ELSEWHERE, fingerprint, profiles

from dspark.config.models import Sampling, ServingProfile
from dspark.engines import connect
from dspark.engines.client import Served
from dspark.errors import GateError, IntegrityError, PreflightError, SettingsError
from dspark.io.jsonfile import read_model
from dspark.package.certificate import Certificate
from dspark.package.staleness import differences, measured_entry, served_entry
from dspark.package.verify import read_manifest
from dspark.workspace import against
from dspark.workspace.against import require_fresh, require_fresh_server

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
    with pytest.raises(SettingsError, match="has access none: far"):
        require_fresh(pristine, far)


# ---------------------------------------------------------------- a running server


def measured_in(pristine, engine, **changes):
    """The package's certificate as if its measured entry were of another engine."""
    certificate = read_model(pristine / "certificate.json", Certificate, IntegrityError)
    entry = measured_entry(certificate, CPU)
    other = entry.model_copy(update={"fingerprint": entry.fingerprint | {"engine": engine} | changes})
    return certificate.model_copy(update={"entries": (other, *certificate.entries[1:])})


def test_a_server_is_what_was_certified_or_differs_by_name(pristine):
    facts = {"engine_version": "SGLang 0.5.23", "parallel": {"tp": 1, "dp": 1}, "context": None}
    certificate = measured_in(pristine, "sglang", engine_version="SGLang 0.5.23", parallel={"tp": 2, "dp": 1})
    entry, found = served_entry(certificate, "sglang", facts, today=DAY)
    assert entry.profile == CPU
    assert [str(one) for one in found] == ["parallel.tp: certified 2, here 1"]
    _, found = served_entry(certificate, "sglang", {}, today=datetime.date(2027, 5, 29))
    assert [one.field for one in found] == ["holds until"]
    with pytest.raises(GateError, match=r"no measurement in vllm \(it has: .*\(measured\)"):
        served_entry(certificate, "vllm", facts, today=DAY)


@pytest.mark.parametrize(
    ("certified", "here", "same"),
    [
        ("xllamacpp 2026.10.11549", "llama.cpp b11549-0a1b2c3", True),
        ("xllamacpp 2026.10.11549", "llama.cpp b11549", True),
        ("xllamacpp 2026.10.11549", "llama.cpp b1549", False),
        ("xllamacpp 2026.10.11549", "llama.cpp b11550", False),
        ("SGLang 0.5.23", "SGLang 0.5.23", True),
        ("SGLang 0.5.23", "SGLang 0.5.24", False),
        ("vLLM 0.32.0", "vLLM 0.33.0", False),
    ],
)
def test_builds_of_llamacpp_are_known_by_their_number(pristine, certified, here, same):
    certificate = measured_in(pristine, "llamacpp", engine_version=certified)
    _, found = served_entry(certificate, "llamacpp", {"engine_version": here}, today=DAY)
    assert (found == []) is same


def test_a_packages_server_is_asked_what_it_is(pristine, monkeypatch):
    class Client:
        name = "reference"

        def served(self):
            return Served("e", "t", self.gamma)

        def facts(self):
            return {"engine_version": fingerprint()["engine_version"]}

        def totals(self):
            return None

    monkeypatch.setattr(connect, "connect", lambda address: Client())
    Client.gamma = read_manifest(pristine).drafter.gamma
    assert require_fresh_server(pristine, "http://a:1") == (CPU, "2027-05-28")
    facts = Client.facts
    Client.facts = lambda self: {}
    Client.address = "http://a:1"
    with pytest.raises(GateError, match="tells nothing of itself that could be compared"):
        require_fresh_server(pristine, "http://a:1")
    Client.facts = facts
    Client.gamma += 1
    with pytest.raises(GateError, match=r"gamma: certified \d+, here \d+"):
        require_fresh_server(pristine, "http://a:1")
    Client.gamma = None
    with pytest.raises(GateError, match="speculation: certified on, here off"):
        require_fresh_server(pristine, "http://a:1")


def test_a_clock_that_was_set_back_lets_no_certificate_hold_for_ever(ask):
    """It was measured on 2026-11-29, at noon UTC; a clock a day behind may be that of another machine."""
    assert ask(today=datetime.date(2026, 11, 29)) == ask(today=datetime.date(2026, 11, 28)) == []
    assert ask(today=datetime.date(2026, 11, 27)) == ["measured on: certified 2026-11-29, here 2026-11-27"]
    assert ask(today=datetime.date(1970, 1, 1)) == ["measured on: certified 2026-11-29, here 1970-01-01"]
