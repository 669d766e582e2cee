"""`monitoring/prometheus-rules.yaml`: alerts with the certificate's bounds, for engines that count speculation.

The bounds are measured, so that the file is evidence: it changes no digest of what is deployed, and verification makes
it again from the certificate. An alert says where to look; `dspark drift` decides, with its rate of false alarms.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from dspark.decoding.policies import Fixed
from dspark.evaluation.certified import certified_acceptance
from dspark.evaluation.drift import WHOLE
from dspark.evaluation.entry import CertificateEntry
from dspark.package.certificate import NONE, Certificate
from dspark.package.manifest import Description

WINDOW = "30m"
FEWEST_STEPS = 2000  # in a window; of fewer, a tau says little
_HOLDS = "15m"
_BY = "sum by (job, instance)"
_CUT = {"llamacpp"}  # engines that cut a reply's last blocks, as in `engines.replay`
_HEAD = (
    "# Made from certificate.json. How to use it: docs/how-to/monitoring.md of dspark. The rules take every server of\n"
    "# the engine that this Prometheus scrapes; where some serve other packages, name this one's job in each `expr`.\n"
)


@dataclass(frozen=True)
class _Names:
    """Counters of an engine (engine-formats.md, 1.9, 2.4 and 3.7).

    Attributes:
        steps, tokens: verified blocks, and generated tokens.
        accepted, drafted: draft tokens; None: not counted.
        requests: that have ended, of an engine whose accepted drafts follow from it; else None.
    """

    steps: str
    tokens: str
    accepted: str | None = None
    drafted: str | None = None
    requests: str | None = None


_NAMES = {
    "llamacpp": _Names(
        steps="llamacpp:spec_decode_num_drafts_total",
        tokens="llamacpp:tokens_predicted_total",
        accepted="llamacpp:spec_decode_num_accepted_tokens_total",
        drafted="llamacpp:spec_decode_num_draft_tokens_total",
    ),
    "sglang": _Names(
        steps="sglang:spec_verify_calls_total",
        tokens="sglang:generation_tokens_total",
        requests="sglang:num_requests_total",
    ),
    "vllm": _Names(
        steps="vllm:spec_decode_num_drafts_total",
        tokens="vllm:generation_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
    ),
}


def prometheus_rules(description: Description, certificate: Certificate) -> dict[str, Any]:
    """Recording and alerting rules, one group for each engine that the package has files for."""
    written = [item.engine for item in certificate.engines if item.status == "written" and item.engine in _NAMES]
    return {"groups": [_group(engine, description, certificate) for engine in written]}


def rules_text(rules: dict[str, Any]) -> str:
    """The rules as YAML; equal rules give equal texts."""
    yaml = YAML()
    yaml.width = 10_000  # an expression stays on its line
    out = StringIO()
    yaml.dump(rules, out)
    return _HEAD + out.getvalue()


def _group(engine: str, description: Description, certificate: Certificate) -> dict[str, Any]:
    measured = [entry for entry in certificate.entries if entry.status == "measured"]
    own = [entry for entry in measured if entry.fingerprint.get("engine") == engine]
    entry = next(iter(own or measured), None)
    labels = {"engine": engine, "build": description.build}
    tau = {"record": "dspark:tau", "expr": _tau(engine, certificate.gamma), "labels": labels}
    alerts = [_off(engine, own), *_moved(engine, entry, certificate.gamma), *_expired(own)]
    # In quotes, whatever its digits: `697043100123` and `12345678e901` are numbers to some reader of YAML.
    package = DoubleQuotedScalarString(description.package_digest[:12])
    for alert in alerts:
        alert["labels"] = {**alert["labels"], **labels, "package": package}
    return {"name": f"dspark-{description.build}-{engine}", "rules": [tau, *alerts]}


def _rate(name: str) -> str:
    return f"{_BY} (rate({name}[{WINDOW}]))"


def _tau(engine: str, gamma: int) -> str:
    """Tokens per step; of SGLang at most, since drafts behind a reply's end are not in its counters."""
    names = _NAMES[engine]
    if names.accepted is not None:
        return f"1 + {_rate(names.accepted)} / {_rate(names.steps)}"
    assert names.requests is not None  # there is no third kind
    return f"({_rate(names.tokens)} + {gamma - 1} * {_rate(names.requests)}) / {_rate(names.steps)}"


def _shortened(engine: str, gamma: int) -> str:
    """True while less than whole blocks are verified, where acceptance is that of a choice."""
    names = _NAMES[engine]
    if names.drafted is None:
        window = "sglang:spec_cap_length"
        return f"{_BY.replace('sum', 'min')} ({window} > 0) < {gamma + 1}"
    return f"{_rate(names.drafted)} / {_rate(names.steps)} < {WHOLE[engine] * gamma:g}"


def _off(engine: str, own: list[CertificateEntry]) -> dict[str, Any]:
    names = _NAMES[engine]
    # Where it was measured not to pay, a server without it is as it should be.
    pays = not own or any(item.policy != NONE for entry in own for item in entry.recommended)
    return _alert(
        "DSparkSpeculationOff",
        f"{_rate(names.tokens)} > 0 unless {_rate(names.steps)} > 0",
        "critical" if pays else "info",
        "tokens are generated and no block is verified" + ("" if pays else ", as the certificate recommends"),
        "The server runs without its drafter: look at its start arguments and at the start of its log.",
    )


def _moved(engine: str, entry: CertificateEntry | None, gamma: int) -> Iterator[dict[str, Any]]:
    """Alerts on tau, of certificates of whole blocks."""
    if entry is None or entry.workload is None or entry.workload.policy != Fixed().name:
        return
    certified = certified_acceptance(entry, gamma, cut=engine in _CUT)
    low, high = certified.tau.ci95[0], certified.tau.ci95[1] + certified.lost_tokens(certified.not_verified)
    worst = min(one.tau.ci95[0] for one in entry.acceptance.values())
    where = entry.profile if entry.fingerprint.get("engine") == engine else f"{entry.profile}, in another engine"
    enough = f"{_BY} (increase({_NAMES[engine].steps}[{WINDOW}])) > {FEWEST_STEPS}"

    def expression(bound: str) -> str:
        # Both sides have the labels job and instance alone, but for those of the recording rule.
        return f"({_tau(engine, gamma)} {bound}) and {enough} unless {_shortened(engine, gamma)}"

    told = f"certified is {certified.tau.value:.3f} [{low:.3f}, {certified.tau.ci95[1]:.3f}] ({where})"
    decide = "`dspark drift --package DIR --metrics URL` says whether that is chance, traffic or engine."
    yield _alert(
        "DSparkAcceptanceLow",
        expression(f"< {low:.4f}"),
        "warning",
        f"tau is {{{{ $value | printf `%.3f` }}}}, {told}",
        decide,
    )
    if worst < low:
        yield _alert(
            "DSparkAcceptanceBelowEveryDomain",
            expression(f"< {worst:.4f}"),
            "critical",
            f"tau is {{{{ $value | printf `%.3f` }}}}, below every certified domain; {told}",
            f"No mixture of the certified domains explains it. {decide}",
        )
    if engine != "sglang":  # whose tau here is an upper bound
        yield _alert(
            "DSparkAcceptanceHigh",
            expression(f"> {high:.4f}"),
            "info",
            f"tau is {{{{ $value | printf `%.3f` }}}}, {told}",
            f"The traffic has moved, to the better for speculation. {decide}",
        )
    yield _alert(
        "DSparkBlocksShortened",
        f"{_shortened(engine, gamma)}",
        "info",
        f"the server verifies less than whole blocks of {gamma}, which is what was certified",
        "Acceptance cannot be compared with the certificate meanwhile; the alerts on it are silent.",
    )


def _expired(own: list[CertificateEntry]) -> Iterator[dict[str, Any]]:
    ends = [entry.holds_until.date for entry in own if entry.holds_until is not None]
    if ends:
        end = datetime.datetime.fromisoformat(max(ends)).replace(tzinfo=datetime.UTC) + datetime.timedelta(days=1)
        yield _alert(
            "DSparkCertificateExpired",
            f"vector(time()) > {end.timestamp():.0f}",
            "info",
            f"the certificate held until {max(ends)}",
            "Certify again: `dspark run` on the machine that serves it.",
            holds=None,
        )


def _alert(
    name: str, expression: str, severity: str, summary: str, what: str, *, holds: str | None = _HOLDS
) -> dict[str, Any]:
    alert: dict[str, Any] = {"alert": name, "expr": expression}
    if holds is not None:
        alert["for"] = holds
    return alert | {"labels": {"severity": severity}, "annotations": {"summary": summary, "description": what}}
