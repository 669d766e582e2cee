"""Builds from declarations: precedence, origins, and every mistake at once with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config.declared import Mistakes, read_declared
from dspark.config.layers import Origin, Overlay
from dspark.config.models import RecipeSpec
from dspark.config.resolve import build_names, resolve
from dspark.errors import SettingsError

CHECKOUT = Path(__file__).resolve().parents[3]


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "params.yaml",
        "defaults:\n  domains: [math, code]\n  recipe: dspark\n  serving_profiles: [cpu]\n"
        "training:\n  steps: 111\n  seed: 4\nprompts:\n  per_domain: 7\n",
    )
    for domain in ("math", "code", "chat"):
        write(tmp_path, f"pipeline/domains/{domain}.yaml", "source: {kind: jsonl, path: rows.jsonl}\n")
    write(tmp_path, "pipeline/domains/math.templates.yaml", "- anything\n")
    for target in ("small", "large"):
        write(tmp_path, f"pipeline/targets/{target}.yaml", f"name: {target}\nsource: {{kind: folder, path: /x}}\n")
    write(
        tmp_path,
        "pipeline/recipes/dspark.yaml",
        "name: dspark\ndrafter:\n  layers: 3\n  markov: {rank: 8}\ntraining:\n  steps: 222\n  learning_rate: 1e-5\n",
    )
    write(tmp_path, "serving_profiles/cpu.yaml", "engine: reference\naccess: local\n")
    return tmp_path


def build_file(root: Path, text: str, name: str = "mine") -> None:
    write(root, f"pipeline/builds/{name}.yaml", text)


def test_a_target_without_a_build_file_gets_a_build_of_its_name_from_the_defaults(root: Path) -> None:
    chosen = resolve(root, target="small").chosen
    assert (chosen.name, chosen.build.target.name, chosen.build.corpus.name) == ("small", "small", "small")
    assert chosen.build.corpus.domains == ("math", "code")
    assert not chosen.declared


def test_each_layer_wins_over_the_ones_below_it(root: Path) -> None:
    """params 111 < recipe 222 < build 333 < environment 444 < flag 555, peeled off one by one."""
    build_file(root, "target: small\ntraining:\n  steps: 333\n")
    variables = {"DSPARK_TRAINING__STEPS": "444"}

    def steps(flags: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> int:
        return resolve(root, build="mine", flags=flags, environment=environment).chosen.build.training.steps

    assert steps(("training.steps=555",), variables) == 555
    assert steps((), variables) == 444
    assert steps() == 333
    build_file(root, "target: small\n")
    assert steps() == 222
    write(root, "pipeline/recipes/dspark.yaml", "name: dspark\n")
    assert steps() == 111
    write(root, "params.yaml", "defaults: {domains: [math], recipe: dspark, serving_profiles: [cpu]}\n")
    assert steps() == 3000  # the built-in default of TrainingSettings


def test_nested_mappings_are_merged_key_by_key_and_lists_are_replaced(root: Path) -> None:
    build_file(root, "target: small\ndrafter: {gamma: 5}\ndomains: [chat]\n")
    build = resolve(root, build="mine", flags=("drafter.markov.rank=16",)).chosen.build
    assert (build.drafter.gamma, build.drafter.layers, build.drafter.markov.rank) == (5, 3, 16)
    assert build.corpus.domains == ("chat",)


def test_every_value_remembers_where_it_came_from(root: Path) -> None:
    build_file(root, "target: small\ntraining:\n  seed: 9\n")
    settings = resolve(root, build="mine", flags=("export.onnx=false",), environment={"DSPARK_DRAFTER__GAMMA": "3"})
    where = settings.chosen.settings.where
    assert where(["training", "seed"]) == "pipeline/builds/mine.yaml:3"
    assert where(["training", "steps"]) == "pipeline/recipes/dspark.yaml:6"
    assert where(["prompts", "per_domain"]) == "params.yaml:9"
    assert where(["drafter", "gamma"]) == "DSPARK_DRAFTER__GAMMA"
    assert where(["export", "onnx"]) == "--set export.onnx=false"
    assert where(["evaluation", "seed"]) == "built-in"
    assert where(["recipe"]) == "params.yaml:3"
    rows = {name: (value, origin) for name, value, origin in settings.chosen.rows()}
    assert rows["training.seed"] == (9, "pipeline/builds/mine.yaml:3")
    assert rows["drafter.markov.rank"] == (8, "pipeline/recipes/dspark.yaml:4")
    assert rows["prompts.per_domain"] == (7, "params.yaml:9")
    assert rows["training.loss.decay"] == (4.0, "built-in")


def test_numbers_are_read_as_yaml_1_2_everywhere(root: Path) -> None:
    """YAML 1.1 readers take `1e-5` for text."""
    assert resolve(root, target="small").chosen.build.training.learning_rate == 1e-5
    flagged = resolve(root, target="small", flags=("training.learning_rate=2e-4",)).chosen.build
    assert flagged.training.learning_rate == 2e-4


def test_all_mistakes_are_raised_at_once_with_file_and_line(root: Path) -> None:
    build_file(
        root,
        "target: smal\nrecipe: dspark-rn\ndomains: [math, cod]\ntrainning: {}\ntraining:\n  stepz: 3\n  seed: x\n",
    )
    with pytest.raises(Mistakes) as caught:
        resolve(root, build="mine", flags=("nope=1", "export.onnx_opset=99"), environment={"DSPARK_TRAIN__STEPS": "1"})
    found = {mistake.where: mistake for mistake in caught.value.mistakes}
    assert found.keys() >= {
        "pipeline/builds/mine.yaml:1",
        "pipeline/builds/mine.yaml:2",
        "pipeline/builds/mine.yaml:3",
        "pipeline/builds/mine.yaml:4",
        "pipeline/builds/mine.yaml:6",
        "pipeline/builds/mine.yaml:7",
        "--set nope=1",
        "DSPARK_TRAIN__STEPS",
    }
    assert "did you mean 'small'?" in found["pipeline/builds/mine.yaml:1"].hint
    assert "did you mean 'dspark'?" in found["pipeline/builds/mine.yaml:2"].hint
    assert "did you mean 'code'?" in found["pipeline/builds/mine.yaml:3"].hint
    assert "did you mean 'training'?" in found["pipeline/builds/mine.yaml:4"].hint
    assert "did you mean 'steps'?" in found["pipeline/builds/mine.yaml:6"].hint
    assert "did you mean 'training'?" in found["DSPARK_TRAIN__STEPS"].hint


def test_a_benchmark_is_never_trained_on(root: Path) -> None:
    text = "evaluation_only: true\nsource: {kind: jsonl, path: rows.jsonl}\n"
    write(root, "pipeline/domains/bench.yaml", text)
    build_file(root, "target: small\ndomains: [math]\nevaluation_domains: [bench]\n")
    assert resolve(root, build="mine").chosen.build.corpus.evaluation_domains == ("bench",)
    build_file(root, "target: small\ndomains:\n  - math\n  - bench\n")
    with pytest.raises(Mistakes, match=r"mine\.yaml.*'bench' is only ever evaluated"):
        resolve(root, build="mine")


def test_a_mistake_in_a_flag_or_variable_names_it(root: Path) -> None:
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small", flags=("training.stepz=3",), environment={"DSPARK_EXPORT__ONNX_OPSET": "99"})
    assert {mistake.where for mistake in caught.value.mistakes} == {
        "--set training.stepz=3",
        "DSPARK_EXPORT__ONNX_OPSET",
    }


def test_one_mistake_reads_as_one_line_and_its_hint(root: Path) -> None:
    build_file(root, "target: small\nrecipe: dspark-rn\n")
    with pytest.raises(SettingsError) as caught:
        resolve(root, build="mine")
    assert caught.value.message == "pipeline/builds/mine.yaml:2: recipe 'dspark-rn' does not exist"
    assert caught.value.hint == "did you mean 'dspark'?  all recipes: dspark"


def test_mistakes_inside_a_recipe_and_a_target_are_found_with_their_lines(root: Path) -> None:
    write(root, "pipeline/recipes/dspark.yaml", "name: dspark\ndrafter:\n  markov:\n    rnk: 3\n")
    write(root, "pipeline/targets/small.yaml", "name: small\nsource:\n  kind: folder\n  pth: /x\n")
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small")
    text = str(caught.value)
    assert "pipeline/recipes/dspark.yaml:4: unknown key 'drafter.markov.rnk'" in text
    assert "did you mean 'rank'?" in text
    assert "pipeline/targets/small.yaml:4: unknown key 'source.pth'" in text
    assert "did you mean 'path'?  known: kind, path" in text


def test_two_builds_that_give_one_corpus_different_settings_are_both_named(root: Path) -> None:
    build_file(root, "target: small\ncorpus: shared\n", "one")
    build_file(root, "target: small\ncorpus: shared\nresponses: {max_new_tokens: 5}\n", "two")
    with pytest.raises(SettingsError, match=r"'one' and 'two' name one corpus, 'shared'.*responses"):
        resolve(root, build="one")


def test_two_builds_may_share_a_corpus_of_equal_settings(root: Path) -> None:
    build_file(root, "target: small\ncorpus: shared\n", "one")
    build_file(root, "target: small\ncorpus: shared\ntraining: {steps: 5}\n", "two")
    assert resolve(root, build="one").chosen.build.corpus == resolve(root, build="two").chosen.build.corpus


def test_flags_concern_the_chosen_build_only(root: Path) -> None:
    pipeline = resolve(root, target="small", flags=("drafter.gamma=2",))
    assert pipeline.chosen.build.drafter.gamma == 2
    assert pipeline.builds["small"].build.drafter.gamma == 2
    assert pipeline.builds["large"].build.drafter.gamma == 7


def test_a_broken_build_does_not_stand_in_the_way_of_another(root: Path) -> None:
    build_file(root, "target: nowhere\n", "broken")
    pipeline = resolve(root, target="small")
    assert "broken" not in pipeline.builds
    assert "nowhere" in str(pipeline.broken["broken"])


def test_a_build_of_another_target_is_not_run_under_the_wrong_name(root: Path) -> None:
    build_file(root, "target: large\n")
    with pytest.raises(SettingsError, match="is for target 'large', not 'small'"):
        resolve(root, target="small", build="mine")
    assert resolve(root, target="large", build="mine").chosen.name == "mine"


@pytest.mark.parametrize(("options", "near"), [({"target": "smal"}, "small"), ({"build": "larg"}, "large")])
def test_an_unknown_name_suggests_the_one_that_was_meant(root: Path, options: dict[str, str], near: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(root, **options)
    assert f"did you mean {near!r}?" in caught.value.hint


def test_naming_nothing_asks_for_a_target(root: Path) -> None:
    with pytest.raises(SettingsError, match="which build"):
        resolve(root)


def test_a_name_that_contradicts_its_file_is_refused(root: Path) -> None:
    build_file(root, "name: other\ntarget: small\n")
    with pytest.raises(SettingsError, match="named as its file"):
        resolve(root, build="mine")
    write(root, "pipeline/recipes/dspark.yaml", "name: other\n")
    with pytest.raises(SettingsError, match=r"recipes/dspark.yaml:1: name is 'other'"):
        resolve(root, target="small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: small\ndomains: math\n", "expected a list of names"),
        ("target: small\ndomains: [math, math]\n", "names something twice"),
        ("target: small\ndomains: []\n", "at least one is needed"),
        ("target: 3\n", "expected the name of a target"),
        ("target: small\ntraining: 3\n", "training: expected `key: value` lines"),
        ("- target\n", "expected `key: value` lines, found a list"),
        ("target: [\n", "not valid YAML"),
        (
            "target: small\ntraining:\n  steps: 1\n  steps: 2\n",
            "mine.yaml:4: not valid YAML: key 'steps' stands there twice",
        ),
        ("target: small\ncorpus: No Name\n", "corpus.name: must be a name of a-z, 0-9"),
    ],
)
def test_malformed_builds_are_refused_with_the_file(root: Path, text: str, said: str) -> None:
    build_file(root, text)
    with pytest.raises(SettingsError) as caught:
        resolve(root, build="mine")
    assert said in caught.value.message
    assert "pipeline/builds/mine.yaml" in caught.value.message


def test_mistakes_in_params_are_found(root: Path) -> None:
    write(root, "params.yaml", "defaults: {domain: [math], recipe: dspark, serving_profiles: [cpu]}\ntrainin: {}\n")
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small")
    text = str(caught.value)
    assert "params.yaml:1: unknown key 'defaults.domain'" in text
    assert "params.yaml:2: unknown key 'trainin'" in text
    assert "params.yaml: `defaults` names no domains; nor does pipeline/builds/small.yaml name any" in text


@pytest.mark.parametrize("text", ["", "training: {}\n", "defaults:\n"])
def test_parameters_without_defaults_are_said_to_have_none(root: Path, text: str) -> None:
    write(root, "params.yaml", text)
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small")
    (mistake,) = caught.value.mistakes
    assert str(mistake).startswith("params.yaml: `defaults` is missing, and with it recipe, domains, serving_profiles")
    assert "git checkout params.yaml" in mistake.hint


def test_files_of_templates_are_no_declarations(root: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(root, target="small", flags=())  # resolves
        build_file(root, "target: small\ndomains: [maths]\n")
        resolve(root, build="mine")
    assert "math.templates" not in caught.value.hint


def test_every_target_and_every_build_file_is_a_build(root: Path) -> None:
    build_file(root, "target: small\n")
    assert build_names(root) == ["large", "mine", "small"]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("training", "expected section.key=value"),
        ("training.=3", "expected section.key=value"),
        ("training=3", "a key of 'training' is missing"),
        ("training.steps=", "--set training.steps=: it has no value"),
        ("training.steps=[", "not valid YAML"),
    ],
)
def test_malformed_flags_are_refused(root: Path, flag: str, said: str) -> None:
    with pytest.raises(Mistakes, match=said.replace("[", r"\[")):
        resolve(root, target="small", flags=(flag,))


def test_a_profile_that_serves_other_traffic_than_the_corpus_was_answered_with_is_refused(root: Path) -> None:
    """Sampled answers teach a drafter little about a thinking model, and its acceptance would collapse unseen."""
    build_file(root, "target: small\nresponses:\n  sampling: {temperature: 0.7}\n")
    write(root, "serving_profiles/cpu.yaml", "engine: reference\naccess: local\nsampling: {temperature: 0.7}\n")
    assert resolve(root, build="mine").chosen.profiles[0].thinking_mode is None
    other = "engine: reference\naccess: local\nsampling: {temperature: 0.2}\nthinking_mode: 'on'\n"
    write(root, "serving_profiles/cpu.yaml", other)
    with pytest.raises(Mistakes) as caught:
        resolve(root, build="mine")
    said = str(caught.value)
    assert "profile cpu serves thinking mode on, the target answers with none" in said
    assert "profile cpu serves temperature 0.2, top_k 0, top_p 1, the corpus is answered with temperature 0.7" in said


def test_a_policy_for_longer_blocks_than_the_drafters_is_refused(root: Path) -> None:
    build_file(root, "target: small\ndrafter:\n  gamma: 4\n")
    profile = "engine: llamacpp\naccess: local\ndtype: float16\npolicies: ['fixed({})', 'threshold(0.5)']\n"
    write(root, "serving_profiles/cpu.yaml", profile.format(4))
    assert resolve(root, build="mine").chosen.profiles[0].policies == ("fixed(4)", "threshold(0.5)")
    write(root, "serving_profiles/cpu.yaml", profile.format(9))
    with pytest.raises(Mistakes, match=r"profile cpu names fixed\(9\), a block has 4 drafts"):
        resolve(root, build="mine")


def test_what_a_verb_lays_over_a_build_wins_over_its_file_and_loses_to_flags(root: Path) -> None:
    """The declared builds stay as they are: only the chosen one has the layer, and no file is touched."""
    build_file(root, "target: small\ncorpus: c\ndomains: [math]\ntraining: {steps: 333, seed: 1}\n")
    build_file(root, "target: small\ncorpus: c\ndomains: [math]\n", "other")
    values = {"domains": ["math", "chat"], "training": {"steps": 50, "mixture": {"new": ["chat"], "replay": 0.25}}}
    overlay = Overlay(values, Origin("verb", "dspark retrain"))
    found = resolve(root, build="mine", flags=["training.mixture.replay=0.75"], overlay=overlay)
    build = found.chosen.build
    assert (build.corpus.domains, build.training.steps, build.training.seed) == (("math", "chat"), 50, 1)
    assert build.training.mixture is not None and build.training.mixture.replay == 0.75
    assert found.builds["other"].build.corpus.domains == ("math",)
    origins = {name: origin for name, _, origin in found.chosen.rows()}
    assert origins["training.steps"] == "dspark retrain"
    assert origins["training.mixture.replay"] == "--set training.mixture.replay=0.75"
    assert resolve(root, build="mine").chosen.build.training.steps == 333


def test_a_mixture_must_name_domains_of_the_build_and_leave_some_to_replay(root: Path) -> None:
    build_file(root, "target: small\ntraining:\n  mixture: {new: [mat, code]}\n")
    with pytest.raises(Mistakes) as refused:
        resolve(root, build="mine")
    assert str(refused.value).startswith("pipeline/builds/mine.yaml:3: training.mixture.new: 'mat' is none of")
    assert "did you mean 'math'?" in refused.value.hint
    with pytest.raises(Mistakes, match="all domains are new, there is nothing to replay"):
        resolve(root, build="mine", flags=["training.mixture.new=[math, code]"])
    allowed = ("training.mixture.new=[math, code]", "training.mixture.replay=0")
    assert resolve(root, build="mine", flags=allowed).chosen.build.training.mixture is not None
    with pytest.raises(Mistakes, match=r"training\.initial\.package: must be a SHA-256 digest"):
        resolve(root, build="mine", flags=["training.mixture=null", "training.initial.package=abc"])


def test_a_profile_with_a_mistake_is_one_mistake(root: Path) -> None:
    build_file(root, "target: small\nserving_profiles: [cpu]\n")
    write(root, "serving_profiles/cpu.yaml", "engine: llamacpp\naccess: local\n")
    with pytest.raises(Mistakes) as caught:
        resolve(root, build="mine")
    assert len(caught.value.mistakes) == 1 and "float16 or float32" in str(caught.value)


def test_what_to_measure_against_is_set_by_file_variable_or_flag_and_pinned_by_the_gates(root: Path) -> None:
    champion, other, pinned = "a" * 64, "b" * 64, "c" * 64
    build_file(root, f"target: small\nagainst: {champion}\n")
    assert resolve(root, build="mine").chosen.build.rivals == (champion,)
    by_variable = resolve(root, build="mine", environment={"DSPARK_AGAINST": other}).chosen
    assert by_variable.build.against == other
    assert by_variable.settings.where(["against"]) == "DSPARK_AGAINST"
    assert resolve(root, build="mine", flags=("against=null",)).chosen.build.rivals == ()
    assert resolve(root, target="small").chosen.build.rivals == ()
    gates = (Path(__file__).resolve().parents[3] / "pipeline/gates.yaml").read_text()
    write(root, "pipeline/gates.yaml", gates.replace("baselines: {}", f"baselines:\n  mine: {pinned}\n"))
    assert resolve(root, build="mine").chosen.build.rivals == (champion, pinned)
    assert resolve(root, build="mine", flags=(f"against={pinned}",)).chosen.build.rivals == (pinned,)
    assert resolve(root, target="small").chosen.build.rivals == ()


def test_a_rival_is_named_by_its_digest_and_a_pin_by_a_build_that_exists(root: Path) -> None:
    build_file(root, "target: small\nagainst: latest\n")
    gates = (Path(__file__).resolve().parents[3] / "pipeline/gates.yaml").read_text()
    write(root, "pipeline/gates.yaml", gates.replace("baselines: {}", f"baselines:\n  mime: {'c' * 64}\n"))
    with pytest.raises(Mistakes) as caught:
        resolve(root, build="mine", flags=("agains=null",))
    found = {mistake.where: mistake for mistake in caught.value.mistakes}
    assert "expected a package_digest" in found["pipeline/builds/mine.yaml:2"].what
    assert "did you mean 'against'?" in found["--set agains=null"].hint
    line = len(gates.splitlines()) + 1
    assert "did you mean 'mine'?" in found[f"pipeline/gates.yaml:{line}"].hint


RECORDS = ("calibration.records.kind=server", "calibration.records.profile=far")
FAR = "engine: sglang\naccess: url\nurl: http://a:1\nplain_url: http://a:2\n"


def test_a_profile_whose_server_records_confidences_is_found_beside_those_that_are_certified(root: Path) -> None:
    write(root, "serving_profiles/far.yaml", FAR + "records_url: http://a:3\n")
    chosen = resolve(root, target="small", flags=RECORDS).chosen
    assert [profile.name for profile in chosen.profiles] == ["cpu"]
    assert chosen.records_profile is not None and chosen.records_profile.records_url == "http://a:3"
    assert resolve(root, target="small").chosen.records_profile is None


def test_records_of_a_profile_that_records_none_are_a_mistake(root: Path) -> None:
    write(root, "serving_profiles/far.yaml", FAR)
    with pytest.raises(Mistakes, match="serving profile far names no records_url"):
        resolve(root, target="small", flags=RECORDS)
    with pytest.raises(Mistakes, match="serving profile 'fat' does not exist"):
        resolve(root, target="small", flags=("calibration.records.kind=server", "calibration.records.profile=fat"))
    write(root, "serving_profiles/far.yaml", FAR.replace("sglang", "vllm") + "records_url: http://a:3\n")
    with pytest.raises(Mistakes, match="records_url is for sglang; vllm records no confidences"):
        resolve(root, target="small", flags=RECORDS)


def test_shards_need_the_digests_of_what_was_served(root: Path) -> None:
    flags = ("calibration.records.kind=shards", "calibration.records.folder=shards")
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small", flags=flags)
    assert "'calibration.records.drafter_weights_sha256' is missing" in str(caught.value)
    digests = (
        f"calibration.records.drafter_weights_sha256={'a' * 64}",
        f"calibration.records.target_digest={'b' * 64}",
    )
    records = resolve(root, target="small", flags=flags + digests).chosen.build.calibration.records
    assert records.kind == "shards" and records.temperature == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "engine: referense",
            "engine: must be reference, llamacpp, sglang, vllm, tensorrt_llm or tensorrt, not 'refer",
        ),
        (
            "engine_versions: newest",
            "engine_versions: must be a range of versions, such as >=0.5.23,<0.6, not 'newest'",
        ),
        ("url: a:1", "url: must be an address, such as http://127.0.0.1:30000, not 'a:1'"),
        ("requests: 3", "requests: expected a list, not 3"),
        ("requests: []", "requests: must hold at least 1, it holds 0"),
        ("requests: [0]", "requests: must be > 0, not 0"),
        ("requests: [1.5]", "requests: must be a whole number, not 1.5"),
        ("threads: many", "threads: must be a whole number, not 'many'"),
        ("repeats: 3", "repeats: must be at least 5, not 3"),
        ("limits: 5", "limits: expected `key: value` lines, not 5"),
        ("hardware: {accelerator: 5}", "hardware.accelerator: must be text, not 5"),
        ("sampling: {top_p: 1.5}", "sampling.top_p: must be at most 1, not 1.5"),
        ("sampling: {temperature: hot}", "sampling.temperature: must be a number, not 'hot'"),
        ("policies: [all]", "policies: a policy is fixed, fixed(k) or threshold(0.x), not 'all'"),
        ("hardwere: {}", "unknown key 'hardwere'"),
    ],
)
def test_mistakes_in_serving_profiles_are_told_in_our_own_words(root: Path, line: str, said: str) -> None:
    rest = "" if line.startswith("engine:") else "engine: reference\n"
    write(root, "serving_profiles/cpu.yaml", f"{rest}access: local\n{line}\n")
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small")
    assert f"serving_profiles/cpu.yaml:{3 if rest else 2}: {said}" in str(caught.value)
    assert "nput should" not in str(caught.value) and "tring should" not in str(caught.value)


def test_a_misspelt_value_is_answered_with_the_one_that_was_meant(root: Path) -> None:
    write(root, "serving_profiles/cpu.yaml", "engine: referense\naccess: local\n")
    with pytest.raises(Mistakes) as caught:
        resolve(root, target="small")
    assert caught.value.hint == "did you mean 'reference'?"
    with pytest.raises(Mistakes, match=r"calibration\.records: kind must be decoding, server, shards, not 'shard'"):
        resolve(root, target="small", flags=("calibration.records.kind=shard",))


HEADLESS = "  markov: {type: none}\n  confidence: false\n"


def test_a_drafter_without_heads_is_declared_by_its_recipe_whatever_rank_other_layers_name(root: Path) -> None:
    write(root, "pipeline/recipes/flat.yaml", f"drafter:\n{HEADLESS}training: {{loss: {{confidence: 0}}}}\n")
    build_file(root, "target: small\nrecipe: flat\ndrafter: {markov: {rank: 64}}\n")
    drafter = resolve(root, build="mine").chosen.build.drafter
    assert (drafter.markov.type, drafter.markov.rank, drafter.confidence) == ("none", 0, False)
    assert drafter.family == "dflash"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("drafter: {confidence: false}\n", "training.loss.confidence: 1 weighs a confidence head that the drafter"),
        ("training: {loss: {confidence: 0}}\n", "training.loss.confidence: 0 leaves the head untrained"),
        ("drafter: {markov: {type: none}}\n", "a confidence head reads the sequential head"),
        ("drafter: {markov: {rank: 0}}\n", "a vanilla head has a rank of at least 1"),
        (
            f"drafter:\n{HEADLESS}training: {{loss: {{confidence: 0}}}}\n"
            "calibration: {records: {kind: shards, folder: x, drafter_weights_sha256: '" + "0" * 64 + "', "
            "target_digest: '" + "0" * 64 + "'}}\n",
            "calibration.records: shards records are of confidences, the drafter states none",
        ),
    ],
)
def test_settings_of_heads_that_do_not_go_together_are_mistakes(root: Path, text: str, what: str) -> None:
    build_file(root, f"target: small\n{text}")
    with pytest.raises(SettingsError) as refusal:
        resolve(root, build="mine")
    assert what in str(refusal.value)


def test_a_threshold_is_no_policy_for_a_drafter_without_confidences(root: Path) -> None:
    write(
        root,
        "serving_profiles/cpu.yaml",
        "engine: llamacpp\naccess: local\ndtype: float16\npolicies: [fixed(2), threshold(0.5)]\n",
    )
    build_file(root, f"target: small\ndrafter:\n{HEADLESS}training: {{loss: {{confidence: 0}}}}\n")
    with pytest.raises(SettingsError, match=r"names threshold\(0\.5\), the drafter has no confidence head"):
        resolve(root, build="mine")


def test_the_recipes_of_the_comparison_differ_in_what_they_are_there_for() -> None:
    """deepspec.md, section 6: the paper's dflash changes heads and loss; dflash-tv changes the heads alone."""
    found = {}
    for name in ("dspark", "dflash", "dflash-tv", "mtp1"):
        recipe = read_declared(CHECKOUT / "pipeline/recipes", name, RecipeSpec, word="recipe", root=CHECKOUT)
        loss = recipe.training.loss
        weights = (loss.cross_entropy, loss.l1, loss.confidence)
        found[name] = (recipe.drafter.family, recipe.drafter.gamma, recipe.drafter.layers, weights)
    assert found == {
        "dspark": ("dspark", 7, 5, (0.1, 0.9, 1.0)),
        "dflash": ("dflash", 7, 5, (1.0, 0.0, 0.0)),
        "dflash-tv": ("dflash", 7, 5, (0.1, 0.9, 0.0)),
        "mtp1": ("dflash", 1, 1, (1.0, 0.0, 0.0)),
    }
