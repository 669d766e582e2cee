"""The model card of a package (`README.md`), from the package's own JSON and nothing else.

It prints what was measured whatever it says: ratios below 1, checks that failed, what is missing and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark.calibration.results import read_report
from dspark.engines.agreement import AgreementReport
from dspark.errors import IntegrityError
from dspark.evaluation.entry import ENGINE_TEXTS, Agreement, CertificateEntry
from dspark.evaluation.results import EvaluationMetrics, LosslessReport
from dspark.export.report import ParityReport
from dspark.io.jsonfile import read_model
from dspark.package.certificate import NONE, Certificate, EngineFiles
from dspark.package.layout import CALIBRATION, CERTIFICATE, LINEAGE, LOSSLESS, METRICS
from dspark.package.lineage import Lineage
from dspark.package.manifest import Description, DrafterPart
from dspark.profiling.cost import CostReport
from dspark.report import figures
from dspark.report.markdown import code, measured, text

_NAMES = {
    "dspark": "A DSpark",
    "dspark-gated": "A DSpark",
    "dspark-rnn": "A DSpark",
    "dflash": "A DFlash",
    "eagle3": "An EAGLE-3",
}
_PARITY = "evidence/parity.json"
COSTS = "scheduler/cost"
_WATCH = (
    "When a server has started, and while it serves (both need dspark's light base install alone):\n\n"
    "```\ndspark package smoke URL --package .\ndspark drift --package . --metrics URL\n```\n\n"
    "The first asks the twenty prompts of `evidence/smoke.jsonl` and ends with 0 if the server drafts as certified and "
    "as fast; the second holds its live counters against the certificate. `monitoring/prometheus-rules.yaml` has "
    "alerts with the certificate's bounds."
)
_STATUS = {
    "measured": "measured in the engine itself",
    "absent": "not measured",
    "disagrees": "**evaluation and engine disagree: do not rely on it**",
    "inconclusive": "**inconclusive**",
}


def render_card(package: Path, description: Description) -> str:
    """The card of a package whose other files are there; equal packages give equal cards.

    Args:
        package: the folder.
        description: what the manifest says, or will say.
    Raises:
        IntegrityError: a file that the card speaks of is missing or does not validate.
    """
    certificate = read_model(package / CERTIFICATE, Certificate, IntegrityError)
    metrics = read_model(package / METRICS, EvaluationMetrics, IntegrityError)
    sections = [
        _head(description),
        "## For whom it pays, and for whom not",
        *(_verdict(entry) for entry in certificate.entries),
        "## How far drafts get",
        *figures.acceptance(metrics),
        "## Is the text still the target's?",
        *figures.lossless(read_model(package / LOSSLESS, LosslessReport, IntegrityError)),
        "## Speed",
        *figures.speed(metrics, certificate),
        "## Confidence",
        *figures.confidence(read_report(package / CALIBRATION), metrics),
        "## Export",
        *figures.parity(read_model(package / _PARITY, ParityReport, IntegrityError)),
        "## Launch",
        *(
            _launch(engine, description, certificate) + _without_costs(package, engine, description)
            for engine in certificate.engines
        ),
        "## Watch",
        _WATCH,
        "## Verify",
        _verify(description),
        "## Made from",
        *_origin(description, read_model(package / LINEAGE, Lineage, IntegrityError)),
    ]
    return "\n\n".join(sections) + "\n"


def _head(description: Description) -> str:
    target, drafter = description.inputs.target, description.drafter
    vocabulary = ""
    if drafter.draft_vocab < target.vocab_physical:
        vocabulary = f", which proposes {drafter.draft_vocab} of the target's {target.vocab_physical} tokens"
    return "\n\n".join(
        [
            f"# {text(description.name)}",
            f"{_NAMES.get(drafter.family, f'A {drafter.family}')} drafter for speculative "
            f"decoding with {text(target.public_id)}: "
            f"{drafter.parameters:,} parameters in {drafter.dtype}, blocks of gamma = {drafter.gamma} "
            f"tokens{vocabulary}. It belongs to exactly this target and is of no use with another.",
            f"Package {code(description.package_digest)}",
        ]
    )


def _verdict(entry: CertificateEntry) -> str:
    lines = [f"### {text(entry.profile)}: {_STATUS[entry.status]}"]
    if entry.reason:
        lines.append(f"Reason: {text(entry.reason)}.")
    if entry.status == "absent":
        return "\n\n".join(lines)
    lines += _advice(entry)
    lines += _champion(entry)
    if not entry.recommended:
        lines.append("No recommendation: nothing was shown to pay. Leave speculation off until it was measured.")
    lines.append(f"Measured {text(entry.measured_at)} on: {text(', '.join(_facts(entry.fingerprint)))}.")
    if entry.workload is not None:
        load, sampling = entry.workload, entry.workload.sampling
        lines.append(
            f"Workload: {text(', '.join(load.domains))}; temperature {sampling.temperature:g}, top_k {sampling.top_k}, "
            f"top_p {sampling.top_p:g}, thinking mode {load.thinking_mode}, verification rule {load.verification_rule}."
        )
    if entry.offline_vs_engine is not None:
        lines.append(_agreement(entry.offline_vs_engine))
    lines += _texts(entry)
    if entry.export is not None:
        lines.append(_export(entry.export))
    if entry.holds_until is not None:
        lines.append(
            f"Holds until {text(entry.holds_until.date)}, and only for engine version "
            f"{code(entry.holds_until.engine_version)}, this hardware, target and workload."
        )
    return "\n\n".join(lines)


def _advice(entry: CertificateEntry) -> list[str]:
    """One list, a line per range of concurrent requests."""
    measured = {item.concurrency for item in entry.against_none}
    lines = []
    for item in entry.recommended:
        one = item.from_concurrency == item.to_concurrency
        span = str(item.from_concurrency) if one else f"{item.from_concurrency} to {item.to_concurrency}"
        off = "**switch speculation off**" if item.decided else "leave speculation off until more is known"
        advice = off if item.policy == NONE else f"use policy {code(item.policy)}"
        noun = "request at a time" if span == "1" else "concurrent requests"
        between = [n for n in range(item.from_concurrency, item.to_concurrency + 1) if n not in measured]
        assumed = f"; {', '.join(map(str, between))} not measured" if between else ""
        lines.append(f"- {span} {noun}: {advice} ({text(item.reason)}{assumed})")
    if not lines:
        return []
    return [
        "\n".join(lines),
        "A policy is chosen on one half of the rounds and judged on the other, whose ratio this is.",
    ]


def _champion(entry: CertificateEntry) -> list[str]:
    """Candidate and champion in the same rounds, as far as the build named one."""
    found = entry.against_champion
    if found is None:
        return []
    ratios = [
        f"{measured(item.ratio)} times at {item.concurrency} "
        f"({text(item.policy)} against its {text(item.champion_policy)})"
        for item in found.ratios
    ]
    return [
        f"Tokens per second against package {code(found.package_digest)}, in the same rounds, by concurrent requests: "
        f"{'; '.join(ratios)}."
    ]


def _texts(entry: CertificateEntry) -> list[str]:
    """Texts with drafts against texts without, where the engine was asked for both."""
    lossless = entry.lossless
    if lossless is None or lossless.method != ENGINE_TEXTS:
        return []
    gaps = ", ".join(f"{item.gap:.2g}" for item in lossless.differences)
    apart = f"; the others part where the target's two best logits lie {gaps} apart" if gaps else ""
    return [
        f"Greedy texts with drafts equal those without on {lossless.n - len(lossless.differences)} of {lossless.n} "
        f"prompts{apart}: **{lossless.result}**."
    ]


def _export(report: AgreementReport) -> str:
    """The engine's drafts at full precision."""
    found = report.agreement
    refused = sum(control.verdict == "different" for control in report.negative_controls.values())
    return (
        f"At full precision {found.blocks - found.differing_blocks} of {found.blocks} blocks of "
        f"{text(report.engine)} were torch's, token by token; the same comparison refused {refused} of "
        f"{len(report.negative_controls)} files with a known fault."
    )


def _agreement(agreement: Agreement) -> str:
    """What the project is there for: do the offline figures hold in the engine?"""
    counters = ""
    if agreement.equal_counters is not None:
        counters = f" Its counters were the loop's own on {agreement.equal_counters} of {agreement.prompts} prompts."
    return (
        f"Evaluation and engine on the same prompts: tau {measured(agreement.offline_tau)} offline, "
        f"{measured(agreement.engine_tau)} in the engine, {measured(agreement.relative_difference)} "
        f"apart; up to {agreement.tolerance:g} counts as agreement: **{agreement.result}**.{counters}"
    )


def _facts(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The leaves of a fingerprint, digests left out: they say nothing to a reader."""
    for key, inner in sorted(value.items()):
        if isinstance(inner, dict):
            yield from _facts(inner, f"{prefix}{key} ")
        elif not key.endswith("digest"):
            yield f"{prefix}{key} {inner}"


def _launch(engine: EngineFiles, description: Description, certificate: Certificate) -> str:
    title = f"### {text(engine.engine)}"
    if engine.status == "absent":
        return f"{title}\n\nNo files: {text(engine.reason)}."
    if engine.engine == "onnxruntime":
        return (
            f"{title}\n\nThe drafter's block as ONNX graphs in {code('engines/onnxruntime')}; {code('io.json')} there "
            "describes every input and output. The runtime brings the target and the verification."
        )
    if engine.engine == "tensorrt":
        return (
            f"{title}\n\n```\ndspark package build-engine . --compute-capability 8.9\n```\n\nBuilds a plan of the ONNX "
            f"block for one kind of GPU into a cache, by the recipe in {code('engines/tensorrt')}. No plan was run for "
            "this package."
        )
    tried = any(
        entry.status == "measured" and entry.fingerprint.get("engine") == engine.engine for entry in certificate.entries
    )
    note = "" if tried else " Written by the engine's released formats; the certificate has no measurement in it."
    target = description.inputs.target
    if engine.engine == "llamacpp":
        published = f", as published in {text(target.quantisation)}" if target.quantisation else ""
        which = f"{code('DSPARK_TARGET')} must name the GGUF file of {text(target.public_id)}{published}"
    elif target.quantisation is None:
        which = f"Serves {text(target.public_id)} with this drafter. {code('DSPARK_TARGET')} names another copy of it"
    else:
        which = (
            f"{code('DSPARK_TARGET')} must name the folder of the target's weights as they were converted from "
            f"{text(target.quantisation)}: {text(target.public_id)} has other weights, on which nothing was measured"
        )
    return (
        f"{title}\n\n```\nbash engines/{engine.engine}/launch.sh\n```\n\n"
        f"{which}; further arguments go to the engine.{note}"
    )


def _without_costs(package: Path, engine: EngineFiles, description: Description) -> str:
    """Why SGLang verifies whole blocks although the drafter has confidences."""
    scheduled = (package / "engines/sglang/sps.json").is_file()
    if (
        engine.engine != "sglang"
        or engine.status == "absent"
        or scheduled
        or not description.drafter.confidence.enabled
    ):
        return ""
    costs = [read_model(path, CostReport, IntegrityError) for path in sorted((package / COSTS).glob("*.json"))]
    reasons = "; ".join(filter(None, (cost.why_no_curve for cost in costs))) or "no serving profile was profiled"
    return (
        f"\n\nThere is no cost table, so whole blocks are verified: {text(reasons)}. "
        f"{code('sts.json')} holds the temperatures for when there is one; {code('launch.sh')} says how."
    )


def _verify(description: Description) -> str:
    return (
        "With dspark (its light base install), which checks every file, every format and every digest:\n\n"
        f"```\ndspark package verify . --digest {description.package_digest}\n```\n\n"
        "Take the digest from where the package was published, not from this file: whoever can change the package can "
        "change this line too. With Python alone, the files only:\n\n"
        "```\npython3 -c \"import hashlib, json, pathlib; [print('CHANGED', f['path']) for f in "
        "json.load(open('manifest.json'))['files'] if hashlib.sha256(pathlib.Path(f['path']).read_bytes()).hexdigest() "
        "!= f['sha256']]\"\n```"
    )


def _origin(description: Description, lineage: Lineage) -> Iterator[str]:
    target, corpus, drafter = description.inputs.target, description.inputs.corpus, description.drafter
    taps = ", ".join(str(tap) for tap in drafter.taps)
    published = target.quantisation or target.dtype
    if lineage.git_commit:
        state = f"commit {code(lineage.git_commit)}{' with uncommitted changes' if lineage.git_dirty else ''}"
    else:
        state = f"commit unknown ({text(lineage.git_absent)})"
    facts = {
        "target": f"{text(target.public_id)}, revision {code(target.revision)}",
        "target weights": f"{code(target.weights_digest)}, {target.dtype}, published as {text(published)}",
        "taps": f"outputs of layers {taps}, counted from 0; mask token {drafter.mask_token_id}",
        "drafter": f"{_heads(drafter)}{_by_recipe(description.inputs.recipe)}",
        "corpus": f"{text(', '.join(corpus.domains))}; prompts: {_counts(corpus.prompts)}; "
        f"tokens answered by the target itself: {_counts(corpus.tokens)}; {code(corpus.digest)}",
        **_beginning(description.inputs.recipe.get("training", {})),
        "model digest": code(description.model_digest),
        "code": f"dspark {text(lineage.dspark_version)}, {state}",
    }
    yield "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    yield "The whole evidence lies in `evidence/`, the certificate in `certificate.json`."


def _heads(drafter: DrafterPart) -> str:
    """The heads that were trained."""
    if drafter.markov.type == "none":
        return "no sequential head (the checkpoint holds one whose bias is 0, for engines) and no confidence head"
    confidence = "" if drafter.confidence.enabled else ", no confidence head"
    return f"{drafter.markov.type} Markov head of rank {drafter.markov.rank}{confidence}"


def _by_recipe(recipe: dict[str, Any]) -> str:
    """By which recipe it was trained, if it was."""
    return "" if "imported" in recipe.get("training", {}) else f", recipe {code(recipe.get('name', 'unknown'))}"


def _beginning(training: dict[str, Any]) -> dict[str, str]:
    """Where training began, if it went on from another package; that there was none, if the drafter was imported."""
    if "imported" in training:
        source, digest = training["source"], code(training["imported"])
        name = "a local folder"
        if source["kind"] == "hub":
            name = f"{text(source['repo'])} at {code(source['revision'])}"
        return {"not trained here": f"imported from {name}, files {digest}"}
    initial, mixture = training.get("initial"), training.get("mixture")
    if initial is None:
        return {}
    mixed = ""
    if mixture is not None:
        share = f"{mixture['replay']:.0%}"
        mixed = f"; {share} of the training replayed the other domains beside {', '.join(mixture['new'])}"
    return {"trained on from": f"package {code(initial['package'])}{text(mixed)}"}


def _counts(counts: dict[str, int]) -> str:
    return text(", ".join(f"{split} {count}" for split, count in counts.items()))
