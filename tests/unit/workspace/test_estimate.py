"""`dspark plan --estimate`: for targets that are here and for targets that are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dspark.cli.boundary import run_command
from dspark.config.resolve import resolve
from dspark.corpus.sequences import TokenSequence
from dspark.errors import SettingsError
from dspark.features.extraction import extract
from dspark.features.store import INDEX
from dspark.profiling.estimate import Rates
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise
from dspark.workspace.estimate import estimate
from dspark.workspace.layout import Workspace

CHECKOUT = Path(__file__).parents[3]
RATES = Rates(1e12, 1e12, 1e11, 1e11)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name in ("pipeline", "serving_profiles"):
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    (tmp_path / "stages").mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(CHECKOUT / name, tmp_path / name)
    return Workspace(tmp_path)


def estimated(workspace: Workspace, target: str, tokens: int | None = None, flags: tuple[str, ...] = ()):
    chosen = resolve(workspace.root, target=target, flags=flags).chosen
    return estimate(workspace, chosen, tokens, measure=lambda job: RATES)


def files(workspace: Workspace) -> set[Path]:
    return set(workspace.root.rglob("*"))


@pytest.mark.parametrize("target", sorted(path.stem for path in (CHECKOUT / "pipeline/targets").glob("*.yaml")))
def test_every_target_of_the_catalogue_is_estimated_and_nothing_is_written(workspace: Workspace, target: str) -> None:
    before = files(workspace)
    found = estimated(workspace, target)
    assert files(workspace) == before
    assert found.config_from == f"pipeline/targets/{target}.yaml"
    assert set(found.splits) == {"train", "dev"} and found.tokens > 10_000
    assert set(found.memory) == {"responses", "features", "train"}
    assert set(found.seconds) == {"responses", "features", "train", "calibrate"}
    assert all(seconds > 0 for seconds in found.seconds.values())
    json.dumps(found.as_json())


def test_the_known_figures(workspace: Workspace) -> None:
    found = estimated(workspace, "qwen3-4b", tokens=1_240_000_000).as_json()
    features = found["features"]
    assert features["deepspec"] == {"bytes_per_token": 30_726, "cached": 30_726 * 1_240_000_000}
    bf16 = features["bytes"][0]
    assert (bf16["dtype"], bf16["bytes_per_token"]) == ("bfloat16", 30_732)
    assert bf16["cached"] == 30_732 * 1_240_000_000 and not bf16["cached_fits"]
    assert found["tokens"] == 1_240_000_000
    assert found["parameters"] == 4_022_468_096


def test_prompts_are_an_upper_bound_of_what_the_stage_keeps(workspace: Workspace) -> None:
    from dspark.corpus.prepare import prepare_prompts
    from dspark.corpus.summary import PromptsSummary
    from dspark.io.jsonfile import read_model

    chosen = resolve(workspace.root, target="tiny").chosen
    record = materialise(chosen.build.target, root=workspace.root)
    target = load_target(record, workspace.root)
    before = estimated(workspace, "tiny")
    assert before.config_from == "the fetched model"
    out = workspace.root / "corpora" / chosen.build.corpus.name / "prompts"
    out.parent.mkdir(parents=True)
    domains = [*chosen.domains, *chosen.evaluation_domains]
    prepare_prompts(chosen.build.corpus, domains, workspace.root / "pipeline/domains", target.template, out)
    made = read_model(out / "summary.json", PromptsSummary)
    after = estimated(workspace, "tiny")
    assert after.tokens_from == "at most, from the corpus's prompts"
    for split in ("train", "dev"):
        assert after.splits[split].sequences == made.splits[split].prompts <= before.splits[split].sequences
        assert after.splits[split].prompt_tokens == made.splits[split].tokens <= before.splits[split].prompt_tokens
    other = estimated(workspace, "tiny", flags=("prompts.max_prompt_tokens=32",))
    assert other.tokens_from.startswith("at most, from the domains")  # the summary is of other settings


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "fp8"])
def test_estimated_features_are_those_that_an_extraction_writes(workspace: Workspace, dtype: str) -> None:
    chosen = resolve(workspace.root, target="tiny", flags=(f"features.dtype={dtype}",)).chosen
    target = load_target(materialise(chosen.build.target, root=workspace.root), workspace.root)
    rows = [TokenSequence(f"a-{n}#0", "a", list(range(10, 10 + 100 + n)), 5, "stop") for n in range(24)]
    manifest = extract(target, {"train": rows}, chosen.build.corpus.features, workspace.root / "features")
    tokens = sum(len(row.token_ids) for row in rows)
    found = estimate(workspace, chosen, tokens, measure=lambda job: RATES)
    (expected,) = (row.cached for row in found.features if row.dtype == dtype)
    stored = [entry for entries in manifest.splits.values() for entry in entries]
    numbers = 0
    for entry in stored:
        data = (next((workspace.root / "features").rglob(f"{entry.key}*.safetensors"))).read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        assert len(data) == entry.bytes
        # Beside the tokens a shard says where its sequences end and where their prompts do.
        places = [json.loads(data[8:header])[name]["data_offsets"] for name in INDEX]
        aside = sum(end - start for start, end in places)
        numbers += len(data) - header - aside
    assert numbers == expected
    assert expected <= manifest.bytes <= 1.05 * expected + 4096 * len(stored)


def test_a_local_folder_tells_its_own_size(workspace: Workspace) -> None:
    folder = workspace.root / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (workspace.root / "pipeline/targets/mine.yaml").write_text("source: {kind: folder, path: model}\n")
    found = estimated(workspace, "mine")
    assert found.config_from == "the model's folder"
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert found.parameters == 1000 * 64 + 6 * layer + 64
    assert found.memory["responses"].parts["keys and values"] % 256 == 0  # no sequence is longer than the target takes
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    with pytest.raises(SettingsError, match="encoder and a decoder"):
        estimated(workspace, "mine")


def test_everything_is_counted_on_the_device_that_stages_use(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = estimated(workspace, "qwen3-8b", tokens=10_000_000)
    assert {stage.device for stage in on_cpu.memory.values()} == {"cpu"}
    monkeypatch.delenv("DSPARK_DEVICE", raising=False)
    monkeypatch.setattr("dspark.device.gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 37, 141 << 30))
    on_gpu = estimated(workspace, "qwen3-8b", tokens=10_000_000)
    assert {stage.device for stage in on_gpu.memory.values()} == {"cuda"} and on_gpu.dtype == "bfloat16"
    assert {stage.available for stage in on_gpu.memory.values()} == {141 << 30}
    features = on_gpu.memory["features"]
    assert features.host_bytes == features.parts["a shard"]
    assert features.parts["taps"] >= on_cpu.memory["features"].parts["taps"]  # sequences share a pass there


def test_an_unknown_size_is_refused_with_the_way_to_get_it(workspace: Workspace) -> None:
    (workspace.root / "pipeline/targets/far.yaml").write_text("source: {kind: hub, repo: some/where}\n")
    with pytest.raises(
        SettingsError, match=r"'far' is not fetched and pipeline/targets/far\.yaml does not tell"
    ) as caught:
        estimated(workspace, "far")
    assert "dspark targets fetch far" in caught.value.hint and "config:" in caught.value.hint


def test_taps_that_do_not_fit_the_declared_size_are_refused(workspace: Workspace) -> None:
    path = workspace.root / "pipeline/targets/qwen3-4b.yaml"
    path.write_text(path.read_text().replace("33]", "40]"))
    with pytest.raises(SettingsError, match="leave the target's 36 layers"):
        estimated(workspace, "qwen3-4b")


def test_a_declared_size_is_held_against_a_random_config(workspace: Workspace) -> None:
    path = workspace.root / "pipeline/targets/tiny.yaml"
    declared = "model_type: qwen3, hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, head_dim: 8"
    rest = "num_key_value_heads: 2, intermediate_size: 128, vocab_size: 304, tie_word_embeddings: false"
    path.write_text(path.read_text() + f"\nconfig: {{{declared}, {rest}}}\n")
    with pytest.raises(SettingsError, match="intermediate_size is declared as 128, the model's is 64"):
        estimated(workspace, "tiny")


def test_an_imported_drafter_is_not_trained(workspace: Workspace) -> None:
    found = estimated(workspace, "qwen3-4b", flags=(f"training.imported={'a' * 64}",))
    assert "train" not in found.memory and "train" not in found.seconds


def test_the_verb(workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.root)
    monkeypatch.setattr("dspark.profiling.rates.measure_rates", lambda job: RATES)
    command = ["plan", "--target", "qwen3-4b", "--estimate"]
    assert run_command([*command, "--tokens", "1240000000"]) == 0
    out = capsys.readouterr().out
    assert "4,022,468,096 parameters" in out and "615,221,249 parameters" in out
    assert "30,732" in out and "30,726" in out and "38.1 TB" in out and "cached does not fit" in out
    assert run_command([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "dspark/estimate/1"
    assert run_command(["plan", "--target", "qwen3-4b", "--tokens", "5"]) == 2
    assert "--tokens goes with --estimate" in capsys.readouterr().err
    assert run_command([*command, "--settings"]) == 2
    assert run_command([*command, "--tokens", "0"]) == 2
