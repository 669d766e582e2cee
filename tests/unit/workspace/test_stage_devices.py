"""Where each stage puts its target on a machine with a GPU: the scripts themselves, up to the work they hand on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark import device
from dspark.config.models import Hardware, ServingProfile
from dspark.io.progress import Progress

STAGES = Path(__file__).resolve().parents[3] / "stages"
GPU = "cuda:1"
ON_CPU = ServingProfile(name="here", engine="reference", access="local", dtype="float32")
ON_GPU = ON_CPU.model_copy(update={"hardware": Hardware(accelerator="NVIDIA H200"), "draft_backend": "onnxruntime"})
FAR = ServingProfile(name="far", engine="sglang", access="none", reason="far away")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, of which the second is this process's and the profile's."""
    for variable in ("DSPARK_DEVICE", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(device, "gpu_names", lambda: ["NVIDIA H100", "NVIDIA H200"])


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that targets are loaded to; whatever a stage reads is there, and is nothing."""
    devices: list[str] = []
    nothing = SimpleNamespace(
        embedding=None, head=None, dtype=None, results=(), gamma=3, splits={}, scheduling=None, eos_token_ids=()
    )
    nothing.config = nothing.to = lambda *_: nothing

    def load(*_: object, device: str, **__: object) -> Any:
        devices.append(device)
        return nothing

    monkeypatch.setattr("dspark.targets.loading.load_target", load)
    for name in (
        "targets.record.read_record",
        "targets.ends.read_ends",
        "corpus.prompts.read_prompts",
        "corpus.sequences.read_sequences",
        "io.jsonfile.read_model",
        "io.jsonfile.write_model",
        "calibration.results.read_report",
        "decoding.records.read_records",
        "drafters.checkpoint.read_checkpoint",
        "decoding.proposers.torch_proposer",
        "features.extraction.plan",
        "drafters.config.DrafterConfig.of",
    ):
        monkeypatch.setattr(f"dspark.{name}", lambda *_, **__: nothing)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    return devices


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stage's module, with its `main` as it is written."""
    monkeypatch.setattr("dspark.workspace.stage.stage", lambda name: lambda main: main)
    spec = importlib.util.spec_from_file_location(name, STAGES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Inputs(SimpleNamespace):
    """Settings of any stage; what a test does not name is empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inputs()


def handed_on(monkeypatch: pytest.MonkeyPatch, name: str, use: Callable[..., Any]) -> None:
    monkeypatch.setattr(f"dspark.{name}", use)


def paths(folder: Path) -> Any:
    return SimpleNamespace(
        target=folder, root=folder, corpus=folder, build=folder, features=folder, store=folder, out=folder, work=folder,
        cost=folder, workspace=None, read_budget=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("generate_responses", "corpus.responses.answer_prompts"),
        ("extract_features", "features.extraction.extract"),
    ],
)
def test_answers_and_features_are_computed_on_the_gpu(
    name: str, work: str, placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_on(monkeypatch, work, lambda *_: None)
    script(name, monkeypatch).main(Inputs(features=SimpleNamespace(mode="cached")), paths(tmp_path), Progress())
    assert placed == [GPU]


@pytest.mark.parametrize("name", ["train_drafter", "export_drafter"])
def test_features_that_are_not_stored_are_computed_where_the_process_trains(
    name: str, placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_on(monkeypatch, "features.online.open_split", lambda *_, target, **__: target())
    handed_on(monkeypatch, "export.blocks.ProbeBlocks.of_sequences", lambda *_: None)
    handed_on(monkeypatch, "export.build.export_build", lambda *_, **__: None)
    handed_on(monkeypatch, "training.trainer.train", lambda *_, **__: SimpleNamespace(write=lambda *_: None))
    inputs = Inputs(training=SimpleNamespace(max_length=9, imported=None, initial=None))
    script(name, monkeypatch).main(inputs, paths(tmp_path), Progress())
    assert placed == [GPU], "one target for both splits"


def test_calibration_decodes_on_the_gpu_and_replays_a_server_on_the_cpu(
    placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_on(monkeypatch, "calibration.results.write_results", lambda *_: None)
    handed_on(monkeypatch, "evaluation.calibrate.calibrate_drafter", lambda *_: None)
    handed_on(monkeypatch, "evaluation.recorded.records_from_server", lambda *_: None)
    drafter = SimpleNamespace(config=SimpleNamespace(confidence=True), to=lambda dtype: None, float=lambda: None)
    monkeypatch.setattr("dspark.drafters.checkpoint.read_checkpoint", lambda *_, **__: drafter)
    stage = script("calibrate_confidence", monkeypatch)
    inputs = Inputs(calibration=SimpleNamespace(dtype="float32", records=SimpleNamespace(kind="server")))
    inputs.profile = SimpleNamespace(records_url="http://a:1")
    stage.main(inputs, paths(tmp_path), Progress())
    assert placed == [GPU, "cpu"]


@pytest.mark.parametrize(("profile", "where"), [(ON_CPU, "cpu"), (ON_GPU, GPU)], ids=["cpu", "gpu"])
def test_a_profile_is_measured_on_what_it_declares(
    profile: ServingProfile, where: str, placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting: list[Any] = []
    handed_on(monkeypatch, "export.backend.onnx_backends", lambda *_, device: drafting.append(device))
    handed_on(monkeypatch, "profiling.steps.profile_engine", lambda *_, backends, **__: backends(None))
    script("profile_engine", monkeypatch).reference(Inputs(profile=profile), paths(tmp_path), {}, Progress())
    assert placed == [where] == drafting


@pytest.mark.parametrize(("profile", "where"), [(ON_CPU, "cpu"), (ON_GPU, GPU)], ids=["cpu", "gpu"])
def test_the_engine_is_certified_there_with_what_drafts_beside_it(
    profile: ServingProfile, where: str, placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers: list[Any] = []
    handed_on(monkeypatch, "engines.onnxruntime.OnnxProposer", lambda *_, **options: providers.append(options))
    handed_on(monkeypatch, "workspace.rivals.champion", lambda *_, device: device)

    def certify(*arguments: Any, champion: Any, **_: Any) -> None:
        arguments[2]("float32")
        assert champion == where

    handed_on(monkeypatch, "evaluation.certify.certify_reference", certify)
    inputs = Inputs(profile=profile, against="a" * 64)
    script("certify_engine", monkeypatch).reference(inputs, paths(tmp_path), {}, Progress())
    assert placed == [where]
    if profile.draft_backend == "onnxruntime":
        on_it = (("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider")
        assert providers == [{"providers": on_it}]


@pytest.mark.parametrize("engine", ["attached", "llamacpp"])
def test_what_other_engines_said_is_replayed_on_the_cpu(
    engine: str, placed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export/llamacpp").mkdir(parents=True)
    (tmp_path / "export/llamacpp/drafter.gguf").touch()
    for name in ("engines.connect.connect", "targets.served.served_file", "export.gguf.load_drafter_gguf"):
        handed_on(monkeypatch, name, lambda *_, **__: None)
    for name in (
        "evaluation.attached.certify_attached", "evaluation.llamacpp.certify_llamacpp",
        "export.agreement.agree_with_llamacpp", "export.agreement.judge_agreement",
    ):  # fmt: skip
        handed_on(monkeypatch, name, lambda *_, **__: None)
    handed_on(monkeypatch, "evaluation.decoding.spread_prompts", lambda *_: [])
    drafter = SimpleNamespace(float=lambda: None)
    monkeypatch.setattr("dspark.drafters.checkpoint.read_checkpoint", lambda *_, **__: drafter)
    getattr(script("certify_engine", monkeypatch), engine)(
        Inputs(profile=FAR), paths(tmp_path), {"threads": 1}, Progress()
    )
    assert placed == ["cpu"]


@pytest.mark.parametrize(
    ("profile", "measured", "sampled"),
    [(ON_CPU, "cpu", GPU), (ON_GPU, GPU, None), (FAR, GPU, None)],
    ids=["cpu", "gpu", "far"],
)
def test_evaluation_samples_on_the_gpu_and_measures_where_the_profile_says(
    profile: ServingProfile, measured: str, sampled: str | None, placed: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def evaluate(load: Any, *_: Any, **options: Any) -> None:
        load("float32")
        assert (options["sampled"] is None) is (sampled is None)
        if sampled is not None:
            options["sampled"]("bfloat16")

    handed_on(monkeypatch, "evaluation.drafter.evaluate_drafter", evaluate)
    inputs = Inputs(profile=profile, against=())
    script("evaluate_drafter", monkeypatch).main(inputs, paths(tmp_path), Progress())
    assert placed == [measured, *([sampled] if sampled else [])]
