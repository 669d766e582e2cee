"""Prometheus rules: bounds from the certificate, valid syntax, and alerts that go off when they should.

With Prometheus' own promtool where it is installed (Debian: `prometheus`); without it the structure is checked alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_build import CPU, card

sys.path.insert(0, str(Path(__file__).parent))  # watched.py

from watched import entry

from dspark.errors import IntegrityError
from dspark.io.jsonfile import write_model
from dspark.io.yamlfile import parse_yaml, read_yaml
from dspark.package.assemble import assemble
from dspark.package.certificate import Certificate
from dspark.package.monitoring import prometheus_rules, rules_text
from dspark.package.verify import read_manifest, verify

RULES = "monitoring/prometheus-rules.yaml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def rules(folder: Path, *entries) -> dict:
    """Of a package's certificate with these entries."""
    certificate = Certificate.model_validate_json((folder / "certificate.json").read_text())
    if entries:
        certificate = certificate.model_copy(update={"entries": entries})
    return prometheus_rules(read_manifest(folder).description(), certificate)


def alerts(found: dict, engine: str) -> dict[str, dict]:
    (group,) = [one for one in found["groups"] if one["name"].endswith(f"-{engine}")]
    return {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}


def test_every_package_has_rules_for_the_engines_that_count(pristine):
    found = read_yaml(pristine / RULES)
    assert [group["name"] for group in found["groups"]] == ["dspark-demo-sglang", "dspark-demo-vllm"]
    digest = read_manifest(pristine).digests.package_digest
    for group in found["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"record", "alert", "expr", "for", "labels", "annotations"}
            assert isinstance(rule["expr"], str) and rule["expr"].count("(") == rule["expr"].count(")")
            if "alert" in rule:
                assert rule["labels"]["package"] == digest[:12] and rule["annotations"]["summary"]
                assert "`" not in re.sub(r"`%\.3f`|`dspark[^`]*`", "", str(rule["annotations"]))


def test_the_rules_are_evidence_and_change_no_digest_of_what_is_deployed(sources, tmp_path):
    """Only the certificate differs: package and model digests stay, the rules change."""
    before = assemble(sources, tmp_path / "a", card=card)
    write_model(sources.certificates[CPU], entry())
    after = assemble(sources, tmp_path / "b", card=card)
    assert after.digests.package_digest == before.digests.package_digest
    assert after.digests.model_digest == before.digests.model_digest
    assert (tmp_path / "a" / RULES).read_bytes() != (tmp_path / "b" / RULES).read_bytes()
    assert {file.path: file.class_ for file in after.files}[RULES] == "evidence"


def test_rules_that_do_not_follow_from_the_certificate_are_refused(package, reseal):
    path = package / RULES
    path.write_text(path.read_text().replace("< 1.6600", "< 1.0000"))
    reseal(package)
    with pytest.raises(IntegrityError, match=r"prometheus-rules\.yaml is not what follows from certificate\.json"):
        verify(package)


def test_bounds_are_the_engines_own_where_it_was_measured(pristine):
    """tau 2.03 with an interval of 0.1 about it; chat, the worst domain, has 1.5, so that no mixture is below 1.4."""
    found = alerts(rules(pristine, entry()), "vllm")
    assert "< 1.9300) and" in found["DSparkAcceptanceLow"]["expr"]
    assert "< 1.4000) and" in found["DSparkAcceptanceBelowEveryDomain"]["expr"]
    assert "> 2.1300) and" in found["DSparkAcceptanceHigh"]["expr"]
    assert "in another engine" not in str(found)
    elsewhere = alerts(rules(pristine, entry()), "sglang")
    assert f"({CPU}, in another engine)" in elsewhere["DSparkAcceptanceLow"]["annotations"]["summary"]
    assert "DSparkCertificateExpired" in found and "DSparkCertificateExpired" not in elsewhere
    assert "DSparkAcceptanceHigh" not in elsewhere  # its tau is an upper bound


def test_without_a_measurement_only_a_server_that_does_not_speculate_is_noticed(pristine):
    absent = entry(status="inconclusive", reason="too few prompts")
    assert set(alerts(rules(pristine, absent), "vllm")) == {"DSparkSpeculationOff"}


def test_a_server_without_its_drafter_is_no_alarm_where_that_was_recommended(pristine):
    one = entry()
    off = entry(recommended=(one.recommended[-1].model_copy(update={"from_concurrency": 1}),))
    assert alerts(rules(pristine, one), "vllm")["DSparkSpeculationOff"]["labels"]["severity"] == "critical"
    found = alerts(rules(pristine, off), "vllm")["DSparkSpeculationOff"]
    assert found["labels"]["severity"] == "info" and "as the certificate recommends" in found["annotations"]["summary"]


def test_the_text_is_what_is_verified(pristine):
    found = rules(pristine)
    assert parse_yaml(rules_text(found)) == found == read_yaml(pristine / RULES)


@pytest.mark.parametrize("digest", ["0123456789ab", "697043100123", "12345678e901", "000000000000"])
def test_a_digest_that_looks_like_a_number_is_written_like_any_other(pristine, digest):
    """One in about 140 does; an unquoted one would be a number to some reader, and its text another than the rest's."""
    certificate = Certificate.model_validate_json((pristine / "certificate.json").read_text())
    description = read_manifest(pristine).description().model_copy(update={"package_digest": digest + 52 * "a"})
    text = rules_text(prometheus_rules(description, certificate))
    written = [line.strip() for line in text.splitlines() if "package:" in line]
    assert written and set(written) == {f'package: "{digest}"'}


@needs_promtool
def test_promtool_takes_the_rules(pristine):
    done = subprocess.run([PROMTOOL, "check", "rules", str(pristine / RULES)], capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


def series(name: str, each_minute: float, labels: str = "") -> dict[str, str]:
    """A counter of one server that grows by so much a minute."""
    return {"series": f'{name}{{job="j",instance="i"{labels}}}', "values": f"0+{each_minute:g}x120"}


def vllm(steps, accepted, drafted, tokens):
    name = "vllm:spec_decode_num_"
    counts = {"drafts": steps, "accepted_tokens": accepted, "draft_tokens": drafted}
    found = [series(f"{name}{key}_total", count) for key, count in counts.items() if count is not None]
    return [*found, series("vllm:generation_tokens_total", tokens)]


def sglang(steps, tokens, requests, window=0.0):
    gauge = {"series": 'sglang:spec_cap_length{job="j",instance="i"}', "values": f"{window:g}+0x120"}
    return [
        series("sglang:spec_verify_calls_total", steps),
        series("sglang:generation_tokens_total", tokens, ',is_streaming="true"'),
        series("sglang:num_requests_total", requests, ',is_streaming="true"'),
        gauge,
    ]


LOW, WORST = "DSparkAcceptanceLow", "DSparkAcceptanceBelowEveryDomain"
HIGH, OFF, SHORT = "DSparkAcceptanceHigh", "DSparkSpeculationOff", "DSparkBlocksShortened"

# What a server counts in a minute, and what goes off after an hour and a half. Certified: 2.03 [1.93, 2.13], gamma 3.
CASES = {
    "as certified": (vllm(100, 103, 300, 203), ()),
    "a little low": (vllm(100, 80, 300, 180), (LOW,)),
    "below every domain": (vllm(100, 30, 300, 130), (LOW, WORST)),
    "high": (vllm(100, 140, 300, 240), (HIGH,)),
    "too few steps": (vllm(20, 6, 60, 26), ()),
    "scheduled": (vllm(100, 30, 150, 130), (SHORT,)),
    "drafter gone": (vllm(0, 0, 0, 100), (OFF,)),
    "never had one": (vllm(None, None, None, 100), (OFF,)),
    "idle": (vllm(0, 0, 0, 0), ()),
    # 100 steps and one request a minute: 1 + 2 * 1 more than the tokens may have been committed.
    "sglang as certified": (sglang(100, 195, 1), ()),
    "sglang low": (sglang(100, 185, 1), (LOW,)),
    "sglang scheduled": (sglang(100, 130, 1, window=2.5), (SHORT,)),
    "sglang without": (sglang(0, 100, 1), (OFF,)),
}


@needs_promtool
def test_alerts_go_off_when_they_should(pristine, tmp_path):
    """All cases in one run of promtool: it evaluates the rules on these series as a server would."""
    found = rules(pristine, entry())
    (tmp_path / "rules.yaml").write_text(rules_text(found))
    names = {rule["alert"] for group in found["groups"] for rule in group["rules"] if "alert" in rule}
    tests = []
    for case, (inputs, expected) in CASES.items():
        engine = "sglang" if case.startswith("sglang") else "vllm"
        known = alerts(found, engine)
        checks = []
        for name in sorted(names):
            firing = []
            if name in expected:
                rule = known[name]
                firing.append({"exp_labels": {**rule["labels"], "job": "j", "instance": "i"}})
            checks.append({"eval_time": "90m", "alertname": name, "exp_alerts": firing})
        tests.append({"name": case, "interval": "1m", "input_series": inputs, "alert_rule_test": checks})
    # Annotations quote the value: promtool compares them too, so that they are left out of the rules under test.
    stripped = {
        "groups": [
            {
                **group,
                "rules": [
                    {key: value for key, value in rule.items() if key != "annotations"} for rule in group["rules"]
                ],
            }
            for group in found["groups"]
        ]
    }
    (tmp_path / "rules.yaml").write_text(rules_text(stripped))
    (tmp_path / "tests.yaml").write_text(rules_text({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prompts_to_ask_take_turns_among_the_domains(pristine):
    from dspark.corpus.prompts import read_prompts

    asked = read_prompts(pristine / "evidence/smoke.jsonl")
    assert [one.id for one in asked[:4]] == ["math/0", "chat/0", "code/0", "math/1"] and len(asked) == 20
    assert asked[0].messages[0]["content"] == "say 0\u2028again"


def test_a_prompt_that_is_none_is_refused(package, reseal):
    path = package / "evidence/smoke.jsonl"
    path.write_text(path.read_text().replace('"token_ids":[1,2]', '"token_ids":[]', 1))
    reseal(package)
    with pytest.raises(IntegrityError, match=r"smoke\.jsonl: .*token_ids"):
        verify(package)


def test_a_prompt_with_a_character_that_no_text_of_a_package_may_hold_is_left_out(sources, tmp_path):
    path = sources.corpus / "prompts" / "eval.jsonl"
    path.write_text(path.read_text().replace("say 3", "say \x7f3"))
    assemble(sources, tmp_path / "a", card=card)
    text = (tmp_path / "a" / "evidence/smoke.jsonl").read_text()
    assert "say 2" in text and "\x7f" not in text and text.count("\n") == 20
