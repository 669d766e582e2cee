"""What SGLang's released parsers make of our files. `make test-compat` fetches the wheel; nothing of it is installed.

The parsers stand in modules that import much of the engine. Only those modules are loaded from the wheel; whatever else
they import is a placeholder that fails when it is used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.drafters.config import DrafterConfig
from dspark.drafters.description import describe, read_description
from dspark.engines import EngineInputs
from dspark.engines.sglang import VERSION, SGLangEngine, sts_table
from dspark.errors import CalibrationError, CostCurveError, IntegrityError
from dspark.scheduling import AdditiveCost, CostCurve, SchedulerConfig, Temperatures
from dspark.targets.record import TargetRecord

CHECKOUT = Path(__file__).resolve().parents[2]
COST = CHECKOUT / "tests" / "data" / "cost"
WHEELS = sorted((CHECKOUT / ".compat").glob(f"sglang-{VERSION}-*.whl"))
PARSERS = "sglang.srt.speculative.dspark_components"
LOADED = {
    "sglang.srt.speculative.dflash_utils",
    *(f"{PARSERS}.{name}" for name in ("dspark_config", "dspark_sps", "dspark_sts")),
}
pytestmark = pytest.mark.skipif(not WHEELS, reason=f"the wheel of SGLang {VERSION} is not here: make test-compat")


class Placeholder:
    """Whatever a parser imports and does not need."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"the parser used {self.name}")

    def __or__(self, other: Any) -> Any:
        return self


def _placeholder(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("is_"):
        return lambda: False  # asked on import: is this an NPU, a GPU of that maker, ...
    return Placeholder(f"{module}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the parsers out of the wheel and placeholders for the rest of the engine."""

    def __init__(self, wheel: Path) -> None:
        import zipfile

        self.archive = zipfile.ZipFile(wheel)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in LOADED)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        if spec.name not in LOADED:
            module.__getattr__ = lambda name: _placeholder(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in LOADED:
            source = self.archive.read(module.__name__.replace(".", "/") + ".py")
            exec(compile(source, module.__name__, "exec"), module.__dict__)


@pytest.fixture(scope="module")
def parsers() -> Iterator[SimpleNamespace]:
    pytest.importorskip("msgspec", reason="msgspec is not here: make test-compat")
    finder = Finder(WHEELS[-1])
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    sys.meta_path.insert(0, finder)
    try:
        names = ("dspark_config", "dspark_sps", "dspark_sts")
        yield SimpleNamespace(**{name: importlib.import_module(f"{PARSERS}.{name}") for name in names})
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang" and name not in before]:
            del sys.modules[name]


CONFIG = DrafterConfig(
    gamma=3,
    layers=2,
    taps=(1, 3, 5),
    mask_token_id=5,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_position=128,
    vocab_size=50,
    markov_rank=4,
    target_model_type="qwen3",
    num_target_layers=8,
)
DIGESTS = ("digest", "weights_digest", "embedding_digest", "head_digest", "tokenizer_digest", "chat_template_digest")
TARGET = TargetRecord(
    name="tiny",
    source={"kind": "hub", "repo": "org/tiny"},
    revision="0123abc",
    public_id="org/tiny",
    **dict.fromkeys(DIGESTS, "0" * 64),
    dtype="bfloat16",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    text_config={
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    hidden_size=16,
    num_layers=8,
    vocab_logical=50,
    vocab_physical=50,
    max_position=128,
    taps=(1, 3, 5),
    mask_token_id=5,
    eos_token_ids=(1,),
)
CURVE = CostCurve(
    sample_batch_tokens=(2, 4, 6, 8), sample_steps_per_second=(100.0, 95.0, 80.0, 60.0), max_batch_tokens=8
)
ADDITIVE = AdditiveCost(
    bias_seconds=0.01,
    requests=(1, 4, 8),
    alpha_seconds=(0.0, 0.003, 0.004),
    tokens=(2, 8, 9, 64),
    theta_seconds=(0.0, 0.006, 0.006, 0.05),
)


def curve_of(path: Path) -> CostCurve:
    """The curve in one of SGLang's tables, as our profiler would have to make it."""
    raw = json.loads(path.read_text())
    return CostCurve(
        sample_batch_tokens=raw["sample_batch_tokens"],
        sample_steps_per_second=raw["sample_steps_per_sec"],
        max_batch_tokens=raw["max_batch_tokens"],
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """`engines/sglang` of a package."""
    calibration = Temperatures(
        temperature=1.0, top_k=0, top_p=1.0, rule="standard", label="sampled", temperatures=(1.5, 0.8, 2.0)
    )
    scheduler = SchedulerConfig(
        gamma=3, calibrations=(calibration,), curves={"here": CURVE}, additive={"here": ADDITIVE}
    )
    inputs = EngineInputs(CONFIG, TARGET, scheduler, "here", {"engine": "sglang"}, temperature=1.0)
    for name, data in SGLangEngine().files(inputs).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_cost_table_is_read_and_looked_up_as_the_scheduler_does(parsers: SimpleNamespace, files: Path):
    table = parsers.dspark_sps.load_sps_table_from_path(str(files / "sps.json"))
    assert isinstance(table, parsers.dspark_sps.SpsCostTable)
    assert not parsers.dspark_sps.is_uninitialized_sps_table(table)
    for tokens in range(1, 12):
        assert table.lookup(tokens) == pytest.approx(float(CURVE.steps_per_second([tokens])[0]))


def test_the_table_of_requests_and_tokens_is_read_and_interpolated_as_the_scheduler_does(
    parsers: SimpleNamespace, files: Path
):
    """At probes, between and beyond them, on both axes; SGLang asks for requests and budget."""
    table = parsers.dspark_sps.load_sps_table_from_path(str(files / "sps-2d.json"))
    assert isinstance(table, parsers.dspark_sps.SpsAdditiveCostTable)
    assert not parsers.dspark_sps.is_uninitialized_sps_table(table)
    for requests in range(1, 12):
        for budget in range(0, 70, 3):
            found = table.step_time(num_reqs=requests, budget=budget)
            assert found == pytest.approx(float(ADDITIVE.seconds(requests, requests + budget)), rel=1e-12)


def test_the_temperatures_are_read(parsers: SimpleNamespace, files: Path):
    calibration = parsers.dspark_sts.load_sts_calibration_from_path(str(files / "sts.json"))
    assert calibration.temperatures == [1.5, 0.8, 2.0]


def test_the_union_config_gives_gamma_taps_mask_and_head(parsers: SimpleNamespace):
    value = describe(CONFIG, TARGET, dialect="union", dtype="bfloat16", weights_sha256="0" * 64)
    found = parsers.dspark_config.parse_dspark_draft_config(
        draft_hf_config=SimpleNamespace(**json.loads(json.dumps(value)))
    )
    assert (found.gamma, found.mask_token_id, found.markov_rank) == (3, 5, 4)
    assert (list(found.target_layer_ids), found.markov_head_type) == ([1, 3, 5], "vanilla")
    assert parsers.dspark_config.get_dspark_sample_from_anchor(SimpleNamespace(**value)) is True


@pytest.mark.parametrize("table", ["flat", "one-point", "zero", "negative", "rising", "non-monotone"])
def test_tables_that_sglang_takes_without_a_word_are_refused_by_us(parsers: SimpleNamespace, table: str):
    path = COST / f"{table}.json"
    read = parsers.dspark_sps.load_sps_table_from_path(str(path))
    # One probe switches the scheduler off; the others mislead it.
    assert parsers.dspark_sps.is_uninitialized_sps_table(read) is (table == "one-point")
    with pytest.raises(CostCurveError):
        curve_of(path)


@pytest.mark.parametrize("table", ["fractional", "not-increasing"])
def test_tables_that_sglang_refuses_are_refused_by_us_first(parsers: SimpleNamespace, table: str):
    path = COST / f"{table}.json"
    with pytest.raises(CostCurveError):
        curve_of(path)
    with pytest.raises(Exception, match=r"integer|int|increasing"):
        parsers.dspark_sps.load_sps_table_from_path(str(path))


@pytest.mark.parametrize(("wrong", "taken"), [((1.5, 0.0, 2.0), False), ((1.5, -1.0, 2.0), False), ((1.5, 0.8), True)])
def test_temperatures_that_are_wrong_are_refused_by_us_first(
    parsers: SimpleNamespace, tmp_path: Path, wrong: tuple[float, ...], taken: bool
):
    """SGLang compares their number with gamma only when the server starts."""
    calibration = Temperatures(temperature=1.0, label="sampled", temperatures=(1.0, 1.0, 1.0))
    with pytest.raises(CalibrationError):
        sts_table(calibration.model_copy(update={"temperatures": wrong}), CONFIG.gamma, {})
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"temperatures": wrong}))
    if taken:
        assert parsers.dspark_sts.load_sts_calibration_from_path(str(path)).temperatures == list(wrong)
    else:
        with pytest.raises(Exception, match=r"temperature|> 0|positive"):
            parsers.dspark_sts.load_sts_calibration_from_path(str(path))


def test_a_mask_token_that_sglang_takes_is_refused_by_us(parsers: SimpleNamespace):
    value = describe(CONFIG, TARGET, dialect="union", dtype="bfloat16", weights_sha256="0" * 64) | {"mask_token_id": 50}
    with pytest.raises(IntegrityError, match="mask_token_id 50 is outside the vocabulary of 50"):
        read_description(value, "config.json")
    found = parsers.dspark_config.parse_dspark_draft_config(draft_hf_config=SimpleNamespace(**value))
    assert found.mask_token_id == 50


def test_a_block_of_no_tokens_is_refused_by_both(parsers: SimpleNamespace):
    value = describe(CONFIG, TARGET, dialect="union", dtype="bfloat16", weights_sha256="0" * 64) | {"block_size": 0}
    with pytest.raises(IntegrityError, match="gamma"):
        read_description(value, "config.json")
    with pytest.raises(ValueError, match="block_size must be positive"):
        parsers.dspark_config.parse_dspark_draft_config(draft_hf_config=SimpleNamespace(**value))
