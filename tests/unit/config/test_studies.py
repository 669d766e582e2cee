"""Studies: what they may vary, what their builds are called and made of, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config.declared import Mistakes, declared_names
from dspark.config.resolve import resolve
from dspark.config.studies import StudySpec, read_study, resolve_study, variants_of
from dspark.errors import SettingsError

CHECKOUT = Path(__file__).resolve().parents[3]


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "params.yaml", "defaults: {domains: [math], recipe: dspark, serving_profiles: [cpu, other]}\n")
    write(tmp_path, "pipeline/domains/math.yaml", "source: {kind: jsonl, path: rows.jsonl}\n")
    write(tmp_path, "pipeline/targets/small.yaml", "source: {kind: folder, path: /x}\n")
    write(tmp_path, "pipeline/recipes/dspark.yaml", "drafter: {layers: 3, markov: {rank: 8}}\n")
    write(
        tmp_path,
        "pipeline/recipes/plain.yaml",
        "drafter: {layers: 4, confidence: false, markov: {type: none}}\ntraining: {loss: {confidence: 0}}\n",
    )
    write(tmp_path, "pipeline/builds/mine.yaml", "target: small\ncorpus: shared\ntraining: {steps: 50}\n")
    write(tmp_path, "serving_profiles/cpu.yaml", "engine: reference\naccess: local\n")
    write(tmp_path, "serving_profiles/other.yaml", "engine: vllm\naccess: none\nreason: not here\n")
    return tmp_path


def study(root: Path, text: str, name: str = "s") -> None:
    write(root, f"pipeline/studies/{name}.yaml", text)


def refusal(root: Path, text: str, **request: object) -> str:
    study(root, text)
    with pytest.raises(SettingsError) as refused:
        resolve_study(root, "s", build="mine", **request)  # type: ignore[arg-type]
    return str(refused.value)


def test_every_combination_is_a_build_and_the_first_axis_runs_fastest(root: Path) -> None:
    study(root, "vary:\n  drafter.layers: [1, 2]\n  recipe: [dspark, plain]\n")
    found = resolve_study(root, "s", build="mine")
    assert [(variant.name, variant.choices) for variant in found.variants] == [
        ("mine.s.layers-1.dspark", {"drafter.layers": "1", "recipe": "dspark"}),
        ("mine.s.layers-2.dspark", {"drafter.layers": "2", "recipe": "dspark"}),
        ("mine.s.layers-1.plain", {"drafter.layers": "1", "recipe": "plain"}),
        ("mine.s.layers-2.plain", {"drafter.layers": "2", "recipe": "plain"}),
    ]
    builds = found.pipeline.wanted
    assert [one.name for one in builds] == [variant.name for variant in found.variants]
    assert [(one.build.drafter.layers, one.build.drafter.markov.type) for one in builds] == [
        (1, "vanilla"), (2, "vanilla"), (1, "none"), (2, "none")]  # fmt: skip
    assert {one.build.recipe for one in builds[2:]} == {"plain"}


def test_variants_are_the_build_but_for_what_varies(root: Path) -> None:
    """One corpus, the profile that evaluation measures on, nothing of production beside them."""
    study(root, "vary: {drafter.gamma: [2]}\nset: {training.learning_rate: 1e-2}\n")
    (variant,) = resolve_study(root, "s", build="mine", flags=["training.seed=7"]).pipeline.wanted
    base = resolve(root, build="mine", flags=["training.seed=7"]).chosen.build
    changed = {
        "name": "mine.s.gamma-2",
        "serving_profiles": ("cpu",),
        "drafter": base.drafter.model_copy(update={"gamma": 2}),
        "training": base.training.model_copy(update={"learning_rate": 1e-2}),
    }
    assert variant.build == base.model_copy(update=changed)
    assert variant.build.corpus.name == "shared"
    origins = {key: origin for key, _, origin in variant.rows()}
    assert origins["drafter.gamma"] == "pipeline/studies/s.yaml"
    assert origins["training.steps"] == "pipeline/builds/mine.yaml:3"


def test_flags_for_the_corpus_hold_for_the_build_and_its_variants_alike(root: Path) -> None:
    study(root, "vary: {drafter.gamma: [2, 3]}\n")
    found = resolve_study(root, "s", build="mine", flags=["responses.max_new_tokens=9"]).pipeline
    assert {one.build.corpus for one in (found.chosen, *found.wanted)} == {found.chosen.build.corpus}
    assert found.chosen.build.corpus.responses.max_new_tokens == 9


def test_settings_that_go_together_have_a_name(root: Path) -> None:
    study(
        root,
        "vary:\n  head:\n    eight: {drafter.markov.rank: 8}\n"
        "    none: {drafter.markov.type: none, drafter.confidence: false, training.loss.confidence: 0}\n    as-is:\n",
    )
    found = resolve_study(root, "s", build="mine")
    assert [variant.name for variant in found.variants] == ["mine.s.eight", "mine.s.none", "mine.s.as-is"]
    assert [one.build.drafter.markov.rank for one in found.pipeline.wanted] == [8, 0, 8]


def test_a_sweep_alone_looks_at_the_build_itself(root: Path) -> None:
    study(root, "sweep: threshold\n")
    found = resolve_study(root, "s", build="mine")
    assert [variant.name for variant in found.variants] == ["mine"]
    assert found.pipeline.wanted == (found.pipeline.chosen,) and found.pipeline.variants == ()


def test_names_are_safe_whatever_varies() -> None:
    spec = StudySpec(
        name="s", vary={"training.learning_rate": [1e-3, 0.5], "training.initial": [None], "recipe": ["a b/c"]}
    )
    assert [variant.name for variant in variants_of(spec, "b")] == [
        "b.s.learning_rate-0.001.initial-none.a-b-c",
        "b.s.learning_rate-0.5.initial-none.a-b-c",
    ]


def test_everything_that_is_wrong_with_a_file_is_said_at_once(root: Path) -> None:
    text = refusal(
        root,
        "vary:\n  responses.max_new_tokens: [1]\n  drafer.layers: [1]\n  drafter.gamma: 3\n"
        "set:\n  training.imported: x\nswep: threshold\n",
    )
    assert "responses.max_new_tokens is the corpus's, which all variants share" in text
    assert "did you mean 'drafter'?" in text
    assert "drafter.gamma: expected a list of values, or names with their settings, not 3" in text
    assert "s.yaml:6: set: training.imported names a finished drafter" in text or "s.yaml:5: set:" in text
    assert "unknown key 'swep'" in text and "did you mean 'sweep'?" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("description: nothing\n", "a study names what varies"),
        ("sweep: threshold\nset: {drafter.gamma: 2}\n", "set is for variants"),
        ("vary: {drafter.gamma: []}\n", "drafter.gamma: names nothing"),
        ("vary: {drafter.gamma: [2, 2]}\n", "drafter.gamma: names a choice twice"),
        ("vary: {drafter.gamma: [[2]]}\n", "a value is a number, a word, true, false or null, not [2]"),
        ("vary: {heads: {A: {drafter.gamma: 2}}}\n", "heads.A: expected a name"),
        ("vary: {target: [small]}\n", "'target' is no setting of a variant"),
        ("vary: {drafter: [2]}\n", "'drafter' is no setting of a variant"),
        ("vary: {drafter.gamma: [2], recipe: [dsparc]}\n", "recipe 'dsparc' does not exist"),
        ("vary: {drafter.gamma: [2, 100, 200]}\n", "drafter.gamma: must be at most 64, not 200"),
    ],
)
def test_what_makes_no_study_is_refused(root: Path, text: str, said: str) -> None:
    assert said in refusal(root, text)


def test_mistakes_of_all_variants_are_said_together_and_each_once(root: Path) -> None:
    study(root, "vary: {drafter.gamma: [100, 2, 200], recipe: [dspark, plain]}\n")
    with pytest.raises(Mistakes) as refused:
        resolve_study(root, "s", build="mine")
    assert [str(mistake) for mistake in refused.value.mistakes] == [
        f"pipeline/studies/s.yaml: drafter.gamma: must be at most 64, not {gamma}" for gamma in (100, 200)
    ]


def test_a_flag_must_not_make_all_variants_the_same(root: Path) -> None:
    text = refusal(root, "vary: {drafter.markov.rank: [4, 8]}\n", flags=["drafter.markov.rank=16"])
    assert text == "--set drafter.markov.rank=16: study s varies drafter.markov.rank"
    text = refusal(root, "vary: {drafter.markov.rank: [4, 8]}\n", environment={"DSPARK_DRAFTER__MARKOV": "{rank: 2}"})
    assert text == "DSPARK_DRAFTER__MARKOV: study s varies drafter.markov.rank"


def test_a_variant_takes_no_name_of_a_build_and_fits_into_a_name(root: Path) -> None:
    write(root, "pipeline/builds/mine.s.gamma-2.yaml", "target: small\ncorpus: shared\ntraining: {steps: 50}\n")
    assert "'mine.s.gamma-2', which is a build" in refusal(root, "vary: {drafter.gamma: [2]}\n")
    assert "63 at most" in refusal(root, f"vary: {{heads: {{{'x' * 60}: {{drafter.gamma: 2}}}}}}\n")


def test_a_build_that_trains_nothing_has_nothing_to_vary(root: Path) -> None:
    text = refusal(root, "vary: {drafter.gamma: [2]}\n", flags=[f"training.imported={'a' * 64}"])
    assert "trains nothing" in text
    study(root, "sweep: threshold\n")
    resolve_study(root, "s", build="mine", flags=[f"training.imported={'a' * 64}"])


def test_an_unknown_study_names_the_one_that_was_meant(root: Path) -> None:
    study(root, "sweep: threshold\n", "depth")
    with pytest.raises(SettingsError) as refused:
        read_study(root, "dept")
    assert "did you mean 'depth'?" in refused.value.hint and "all studies: depth" in refused.value.hint


@pytest.mark.parametrize("name", declared_names(CHECKOUT / "pipeline/studies"))
@pytest.mark.parametrize("build", declared_names(CHECKOUT / "pipeline/builds"))
def test_the_studies_of_the_workspace_fit_its_builds(name: str, build: str) -> None:
    found = resolve_study(CHECKOUT, name, build=build)
    assert len({one.name for one in found.pipeline.wanted}) == len(found.variants) == len(found.pipeline.wanted)


def test_a_load_is_swept_on_the_build_itself(root: Path) -> None:
    study(root, "sweep: load\nload: {concurrency: [1, 8], policies: [scheduled]}\n")
    found = resolve_study(root, "s", build="mine")
    assert [variant.name for variant in found.variants] == ["mine"]
    assert found.spec.load is not None and found.spec.load.concurrency == (1, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep: threshold\nload: {rounds: 8}\n", "load is for sweep: load"),
        ("sweep: load\nvary: {drafter.gamma: [2]}\n", "a load is timed on one build at a time"),
        ("sweep: load\nload: {concurrency: [4, 2]}\n", "numbers of requests must rise, each once"),
        ("sweep: load\nload: {concurrency: []}\n", "load.concurrency"),
        ("sweep: load\nload: {rounds: 3}\n", "load.rounds"),
        ("sweep: load\nload: {rounds: 10}\n", "multiple of 4"),
        ("sweep: load\nload: {round: 8}\n", "unknown key 'load.round'"),
    ],
)
def test_what_is_no_load_is_refused(root: Path, text: str, said: str) -> None:
    assert said in refusal(root, text)
