"""Engine files and launch commands for a target that brings its drafter along, and what is left to the engine.

No package: what a package certifies was measured, and such a target runs in its serving engine only. The folder says
which steps those are.
"""

from __future__ import annotations

from pathlib import Path

from dspark.drafters.inspection import BundledInspection
from dspark.engines.bundled import ABSENT, BundledInputs, BundledTarget, bundled_files
from dspark.errors import SettingsError
from dspark.io.atomic import replaced_tree
from dspark.io.jsonfile import write_model
from dspark.workspace.release import Release

DESCRIPTION, README = "bundled.json", "README.md"

# (step, where it can be done)
STEPS = (
    (
        "recognise, inspect, engine files, launch commands",
        "here, from `config.json` and the headers or the index of the weights",
    ),
    (
        "answer prompts; accepted length and losslessness",
        "the serving engine: start it by `launch.sh`, read its own counters (SGLang `sglang:spec_accept_length` with "
        "`--enable-metrics`, vLLM `vllm:spec_decode_num_accepted_tokens_per_pos`) and compare its greedy replies with "
        "those of a server without speculation",
    ),
    (
        "temperatures of the confidences (`sts.json`)",
        "SGLang, in mode cap-accept and with no `sts.json` there yet: `SGLANG_RAGGED_VERIFY_MODE=cap-accept "
        "SGLANG_DSPARK_STS_COLLECT_PATH=STEM bash launch.sh`, traffic of 256 steps or more, then `python -m "
        "sglang.benchmark.dspark_sts_fit --data-glob 'STEM.*.pt' --out sts.json`; vLLM takes none",
    ),
    (
        "step times (`sps.json`)",
        "SGLang, in mode static: `SGLANG_RAGGED_VERIFY_MODE=static SGLANG_DSPARK_ENABLE_SPS_RECORD=1 "
        "SGLANG_SIMULATE_ACC_LEN=1.0 bash launch.sh`, then `python -m sglang.benchmark.dspark_sps_profiler run "
        "--base-url URL --out sps.json`; vLLM measures its own when it starts",
    ),
    (
        "training on, features, `dspark run` and `dspark certify`, export to ONNX, TensorRT or GGUF",
        "not in this version: they run target and drafter in torch, and it has no DeepSeek-V4",
    ),
)


def write_bundled(out: Path, inspection: BundledInspection, release: Release) -> list[str]:
    """Write `bundled.json`, `engines/` and `README.md` into a new folder, or in place of what an earlier call wrote.

    Returns:
        the launch scripts' paths in it.
    Raises:
        SettingsError: there is something else already.
    """
    if out.exists() and not (out / DESCRIPTION).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"--out {out}: something else is there", "name a new folder")
    repo = release.source.get("repo")
    target = BundledTarget(
        name=repo or "this target",
        public_id=repo,
        revision=release.source.get("revision", ""),
        source=release.source,
    )
    files = bundled_files(BundledInputs(inspection.drafter, target))
    scripts = sorted(f"engines/{path}" for path in files if path.endswith(".sh"))
    with replaced_tree(out.absolute()) as folder:
        write_model(folder / DESCRIPTION, inspection)
        for path, content in files.items():
            (folder / "engines" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "engines" / path).write_bytes(content)
        (folder / README).write_text(_readme(inspection, target, scripts), encoding="utf-8")
    return scripts


def _readme(inspection: BundledInspection, target: BundledTarget, scripts: list[str]) -> str:
    drafter = inspection.drafter
    which = target.public_id or "the target's folder, which `DSPARK_TARGET` must name"
    lines = [
        f"# {target.public_id or 'A target'} with its DSpark drafter inside",
        "",
        f"Serves {which}. Blocks of gamma = {drafter.gamma} drafts, Markov head of rank {drafter.markov_rank}, "
        f"mask token {drafter.mask_token_id}, target layers {', '.join(map(str, drafter.target_layer_ids))} as its "
        "config names them. Nothing here was measured.",
        "",
        "## Launch",
        "",
        *(f"    bash {path}" for path in scripts),
        "",
        "Further arguments go to the engine. No files for: "
        + "; ".join(f"{name} ({why})" for name, why in ABSENT.items())
        + ".",
        "",
        "## What is done where",
        "",
        "| step | where |",
        "|---|---|",
        *(f"| {step} | {where} |" for step, where in STEPS),
        "",
        "`sps.json` and `sts.json` belong into `engines/sglang`; with both there SGLang starts with its scheduler on.",
    ]
    return "\n".join(lines) + "\n"
