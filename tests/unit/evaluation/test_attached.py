"""A certificate of a server that runs elsewhere, against servers that speak SGLang's and vLLM's protocols."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))  # protocol_servers.py

from protocol_servers import Engine, PlainSGLangDouble, PlainVLLMDouble, SGLangDouble, VLLMDouble, serving

from dspark.config.models import EvaluationSettings, ServingProfile
from dspark.corpus.prompts import PreparedPrompt
from dspark.engines.connect import connect
from dspark.errors import DataError
from dspark.evaluation.attached import certify_attached
from dspark.evaluation.entry import CertificateEntry
from dspark.evaluation.tiny import tiny_drafter, tiny_target
from dspark.io.jsonfile import model_json
from dspark.package.certificate import Certificate
from dspark.profiling.fingerprint import fingerprint, profile_mistakes

SETTINGS = EvaluationSettings(
    max_new_tokens=16, throughput_rounds=4, throughput_prompts=4, throughput_new_tokens=12, prompts_per_domain=4
)
PROMPTS = [
    PreparedPrompt(id=f"p{number}", domain=domain, messages=[{"role": "user", "content": "?"}], token_ids=ids)
    for number, (domain, ids) in enumerate(
        [("math", [3, 4, 5]), ("chat", [7, 7, 8, 9, 2, 13]), ("math", [20]), ("chat", [11, 12, 13]), ("math", [9, 9])]
    )
]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target(24, spread=0.4, seed=3)
    return target, tiny_drafter(target, 4, seed=1)


DOUBLES = {"sglang": (SGLangDouble, PlainSGLangDouble), "vllm": (VLLMDouble, PlainVLLMDouble)}


def certify(pair: tuple[Any, Any], engine: str, drafting: Any, plain: Any) -> CertificateEntry:
    with serving(drafting) as url, serving(plain) as plain_url:
        profile = ServingProfile(
            name="far", engine=engine, access="url", url=url, plain_url=plain_url, certify_concurrency=(1, 2),
            hardware={"accelerator": "NVIDIA H100", "count": 1},
        )  # fmt: skip
        found = fingerprint(profile)
        assert profile_mistakes(profile, found) == []
        return certify_attached(
            profile, found, connect(url, engine), connect(plain_url, engine), *pair, PROMPTS, SETTINGS,
            prompts_per_domain=4,
        )  # fmt: skip


@pytest.mark.parametrize("engine", DOUBLES)
def test_everything_is_measured_through_the_servers(pair: tuple[Any, Any], engine: str) -> None:
    drafting, plain = DOUBLES[engine]
    entry = certify(pair, engine, drafting(Engine(*pair)), plain(Engine(*pair)))
    assert (entry.status, entry.reason) == ("measured", None)
    agreement = entry.offline_vs_engine
    assert agreement is not None and agreement.result == "agrees" and agreement.equal_counters == len(PROMPTS)
    assert entry.lossless is not None and (entry.lossless.result, entry.lossless.differences) == ("pass", ())
    assert {(point.concurrency, point.arm) for point in entry.load} == {
        (1, "none"), (1, "fixed"), (2, "none"), (2, "fixed")}  # fmt: skip
    assert {(one.concurrency, one.arm) for one in entry.against_none} == {(1, "fixed"), (2, "fixed")}
    assert entry.cycle is None, "nobody tells drafting from verifying from outside"
    verified = {point.arm: point.verified_tokens_per_request for point in entry.load}
    assert verified["none"] == 0 and verified["fixed"] > 0
    assert set(entry.acceptance) == {"chat", "math"}
    assert entry.fingerprint["hardware"]["accelerator"] == "NVIDIA H100"
    assert entry.fingerprint["engine_version"] == {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.32.0"}[engine]
    assert CertificateEntry.model_validate(model_json(entry)) == entry
    assert list(Certificate.model_fields)  # the entry is a part of one


def test_a_server_that_schedules_gives_no_certificate_of_whole_blocks(pair: tuple[Any, Any]) -> None:
    entry = certify(
        pair, "sglang", SGLangDouble(Engine(*pair, verified=2), windows=True), PlainSGLangDouble(Engine(*pair))
    )
    assert entry.status == "inconclusive" and "late positions are lower" in str(entry.reason)


def test_servers_in_each_others_place_are_noticed(pair: tuple[Any, Any]) -> None:
    target, _ = pair
    with pytest.raises(DataError, match="plain_url of serving profile far is to be the same"):
        certify(pair, "sglang", SGLangDouble(Engine(*pair)), SGLangDouble(Engine(*pair)))
    other = Engine(target, tiny_drafter(target, 3, seed=1))
    with pytest.raises(DataError, match="drafts blocks of 3, the drafter has gamma 4"):
        certify(pair, "sglang", SGLangDouble(other), PlainSGLangDouble(other))


def test_another_version_than_the_profile_is_for_is_a_mistake(pair: tuple[Any, Any]) -> None:
    with serving(VLLMDouble(Engine(*pair))) as url:
        profile = ServingProfile(
            name="far", engine="vllm", access="url", url=url, plain_url=url, engine_versions=">=0.33"
        )
        assert profile_mistakes(profile, fingerprint(profile)) == ["it is for vllm >=0.33, here is vLLM 0.32.0"]
