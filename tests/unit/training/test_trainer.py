import csv
import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dspark.drafters.checkpoint import read_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.errors import DataError, Interrupted, SettingsError, StageError
from dspark.io.progress import Progress
from dspark.training.optimisation import KeepFloat32, fast_products, learning_rate, make_optimizers
from dspark.training.resume import read_latest
from dspark.training.trainer import Trainer, train


@pytest.fixture
def run(config, target, make_sequences, make_settings):
    """Train on the counting target; keyword arguments change settings."""
    train_rows, dev_rows = make_sequences(9), make_sequences(4, seed=1)

    def go(work, progress=None, drafter=config, rows=train_rows, **changes):
        return train(drafter, *target, rows, dev_rows, make_settings(**changes), work, progress, eos_token_ids=[2])

    return go


class StopAfter(Progress):
    def __init__(self, steps):
        self.left, self.fields, self.notes = steps, [], []

    def note(self, message):
        self.notes.append(message)

    def advance(self, count=1, **fields):
        self.left -= count
        self.fields.append(fields)
        if self.left == 0:
            raise Interrupted("stopped")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["vanilla", "rnn", pytest.param("gated", marks=pytest.mark.long)])
def test_training_learns_a_target_that_counts(run, tmp_path, config, kind):
    """Every next token is the last one plus one: 1.0 is no draft accepted, 4.0 all three of a whole block."""
    config = config.model_copy(update={"layers": 2, "markov_type": kind})
    result = run(tmp_path, drafter=config, steps=120, sequences_per_step=8, learning_rate=1e-2, dev_every_steps=40)
    first, last = result.curves[0], result.curves[-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert result.metrics.best.dev_anchor_tau > 2.0
    assert result.metrics.best.dev_anchor_tau == max(row.get("dev_anchor_tau") or 0 for row in result.curves)


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", "vanilla"), ("muon", "vanilla"), ("muon", "rnn")])
def test_a_killed_run_continues_to_the_same_bits(run, tmp_path, config, optimizer, kind):
    """Six steps at once, against three, a stop, and three more. Seconds apart, everything is equal."""
    drafter = config.model_copy(update={"markov_type": kind})
    whole = run(tmp_path / "whole", drafter=drafter, optimizer=optimizer)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", StopAfter(3), drafter=drafter, optimizer=optimizer)
    again = StopAfter(99)
    continued = run(tmp_path / "cut", again, drafter=drafter, optimizer=optimizer)
    assert len(again.fields) == 3
    assert again.notes == ["training goes on from its checkpoint of step 3 of 6"]
    assert same(whole.drafter.state_dict(), continued.drafter.state_dict())
    assert whole.metrics == continued.metrics
    for one, two in zip(whole.curves, continued.curves, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in two.items() if k != "seconds"}
    ends = [read_latest(tmp_path / name) for name in ("whole", "cut")]
    assert ends[0][0].step == ends[1][0].step == 6
    assert same(ends[0][1], ends[1][1])
    assert same(ends[0][2], ends[1][2])


def test_tokens_seen_are_those_of_all_steps(run, make_sequences, tmp_path):
    """Eight sequences, four a step: six steps see each three times, cut at eleven tokens where it is longer."""
    rows = make_sequences(8)
    once = sum(min(len(row.token_ids), 11) for row in rows)
    metrics = run(tmp_path, rows=rows, max_length=11).metrics
    assert (metrics.train_tokens, metrics.seen_tokens) == (once, 3 * once)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_moves_once_and_only_backbone_matrices_decay(config, target, make_settings, optimizer):
    drafter = DSparkDrafter(config, *target)
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    optimizers = make_optimizers(drafter, make_settings(optimizer=optimizer, weight_decay=0.1, learning_rate=0.01))
    groups = [group for one in optimizers for group in one.param_groups]
    held = [names[parameter] for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(names.values())
    decayed = {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}
    matrices = {name for parameter, name in names.items() if parameter.dim() == 2 and "head." not in name}
    assert decayed == matrices >= {"fc.weight", "layers.0.mlp.up_proj.weight"}
    assert {group["lr"] for group in groups} == {0.01}


def test_muon_moves_alike_where_bfloat16_is_only_emulated(config, target, make_settings, processor_flags):
    """In float32 instead: the same steps, but for the rounding of five iterations."""
    moved = []
    for flags in ("avx512_bf16", "avx2"):
        processor_flags(flags)
        drafter = DSparkDrafter(config, *target, seed=4)
        before = {name: value.clone() for name, value in drafter.named_parameters()}
        optimizers = make_optimizers(drafter, make_settings(optimizer="muon", learning_rate=1.0))
        generator = torch.Generator().manual_seed(0)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with fast_products(torch.device("cpu")) as mode:
            assert (mode is None) == (flags == "avx512_bf16")
            for optimizer in optimizers:
                optimizer.step()
        moved.append({name: value.detach() - before[name] for name, value in drafter.named_parameters()})
    for name, step in moved[0].items():
        assert (moved[1][name] - step).norm() < 0.03 * step.norm(), name


def test_nothing_but_the_rounding_is_left_out():
    values = torch.tensor([1.0001, 2.0])
    with KeepFloat32():
        kept = values.bfloat16()
        assert torch.equal(kept, values) and kept.data_ptr() != values.data_ptr()
        assert values.to(torch.bfloat16).dtype == torch.bfloat16


def test_muon_steps_are_orthogonal_and_as_large_as_adamw_s(config, target, make_settings):
    """A step of fc [16, 32] at rate 1 has all singular values near 0.2 sqrt(32), whatever the gradient's were."""
    drafter = DSparkDrafter(config, *target)
    muon, _ = make_optimizers(drafter, make_settings(optimizer="muon", learning_rate=1.0))
    before = drafter.fc.weight.detach().clone()
    drafter.fc.weight.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    muon.step()
    values = torch.linalg.svdvals(drafter.fc.weight.detach() - before) / (0.2 * max(before.shape) ** 0.5)
    assert 0.4 < values.min() <= values.max() < 1.6


def test_a_run_that_lost_steps_since_its_checkpoint_does_them_again(run, tmp_path):
    """Killed without warning after step 5: the checkpoint of step 4 is there, a torn one is ignored."""
    whole = run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", KillAfter(5))
    assert read_latest(tmp_path / "cut")[0].step == 4
    torn = tmp_path / "cut" / ".step-000005.part"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert same(whole.drafter.state_dict(), run(tmp_path / "cut").drafter.state_dict())


class KillAfter(StopAfter):
    def advance(self, count=1, **fields):
        self.left -= count
        if self.left == 0:
            raise ZeroDivisionError  # as sudden as a kill: nothing is saved


def test_a_finished_run_is_read_back_without_training(run, tmp_path):
    whole = run(tmp_path)
    again = StopAfter(1)
    assert same(run(tmp_path, again).drafter.state_dict(), whole.drafter.state_dict())
    assert again.fields == []


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, tmp_path):
    whole = run(tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        path = tmp_path / "step-000006" / name
        flip(path, len(path.read_bytes()) // 2, 4)
        assert read_latest(tmp_path)[0].step == 4
        again = StopAfter(99)
        assert same(run(tmp_path, again).drafter.state_dict(), whole.drafter.state_dict())
        assert len(again.fields) == 2


def flip(path, position, mask):
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(bytes(data))


def test_no_flipped_bit_and_no_cut_of_a_checkpoint_is_ever_trained_on(run, tmp_path):
    """At 40 places of every file, the best weights included, and cut at three: the one before is found, or none."""
    run(tmp_path)
    newest, before = (read_latest_of(tmp_path, step) for step in (6, 4))
    draw = random.Random(0)
    files = [*sorted((tmp_path / "step-000006").iterdir()), tmp_path / newest[0].best.file]
    assert len(files) == 4
    tries = 0
    for path in files:
        good = path.read_bytes()
        cuts = [good[:length] for length in (0, len(good) // 2, len(good) - 1)]
        for damaged in [*cuts, *(flipped(good, draw.randrange(len(good)), draw.randrange(8)) for _ in range(40))]:
            path.write_bytes(damaged)
            found = read_latest(tmp_path)
            if path.name == "state.json" and damaged.strip() == good.strip():
                continue  # white space at its end
            if found is not None and found[0].step == 6:
                assert path.name == "state.json" and json.loads(damaged) == json.loads(good)  # blank for blank
                continue
            assert found is None or (found[0] == before[0] and same(found[1], before[1]) and same(found[2], before[2]))
            tries += 1
        path.write_bytes(good)
    assert tries > 150 and read_latest(tmp_path)[0] == newest[0]


def read_latest_of(work, step):
    """The checkpoint of a step, as if no later one had been written."""
    copy = work.with_name(f"{work.name} as of {step}")
    shutil.copytree(work, copy)
    for path in copy.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return read_latest(copy)


def flipped(data, position, bit):
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def test_a_damaged_newest_checkpoint_does_not_stand_in_the_way_of_the_next(run, tmp_path):
    """Training goes on from step 2 and is stopped at 3: the one of step 4, whose state is cut off, is not read."""
    whole = run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", KillAfter(5))
    state = tmp_path / "cut" / "step-000004" / "state.json"
    state.write_bytes(state.read_bytes()[:50])
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", StopAfter(1))
    assert sorted(path.name for path in (tmp_path / "cut").glob("step-*")) == ["step-000002", "step-000003"]
    assert same(whole.drafter.state_dict(), run(tmp_path / "cut").drafter.state_dict())


def test_the_last_two_checkpoints_and_the_best_weights_are_kept(run, tmp_path):
    result = run(tmp_path)
    best = f"best-{result.metrics.best.step:06d}.safetensors"
    names = {path.name for path in tmp_path.iterdir()}
    assert {"step-000004", "step-000006", best} <= names
    assert "step-000002" not in names
    assert len([name for name in names if name.startswith("best-")]) <= 2
    assert not [name for name in names if name.startswith(".")]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".bin", ".pkl")]


def test_the_best_weights_are_handed_on_not_the_last(run, tmp_path):
    result = run(tmp_path, learning_rate=0.3, steps=8)  # diverges
    best = result.metrics.best.step
    kept = load_file(tmp_path / f"best-{best:06d}.safetensors")
    scale, shift = result.metrics.best.dev_confidence_fit
    kept["confidence_head.proj.weight"] *= scale
    kept["confidence_head.proj.bias"] = kept["confidence_head.proj.bias"] * scale + shift
    assert (scale, shift) != (1, 0) and same(result.drafter.state_dict(), kept)
    assert result.metrics.best.dev_anchor_tau >= result.metrics.final.dev_anchor_tau
    assert result.metrics.final.step == 8


def test_the_head_stays_as_it_was_trained_on_request(run, tmp_path):
    result = run(tmp_path, fit_confidence=False)
    kept = load_file(tmp_path / f"best-{result.metrics.best.step:06d}.safetensors")
    assert same(result.drafter.state_dict(), kept)


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_best_weights_that_are_gone_or_damaged_are_made_again(run, tmp_path, damage):
    """No checkpoint that refers to them counts: training goes on from one that does not, or begins anew."""
    whole = run(tmp_path)
    path = tmp_path / f"best-{whole.metrics.best.step:06d}.safetensors"
    if damage == "gone":
        path.unlink()
    else:
        flip(path, len(path.read_bytes()) - 3, 1)
    assert same(run(tmp_path).drafter.state_dict(), whole.drafter.state_dict())
    assert read_latest(tmp_path)[0].step == 6


def test_changed_settings_or_data_are_refused_with_the_difference(run, tmp_path, make_sequences):
    run(tmp_path, steps=2)
    with pytest.raises(DataError, match=r"training\.learning_rate: was 0\.005, is 0\.01"):
        run(tmp_path, steps=2, learning_rate=0.01)
    with pytest.raises(DataError, match=r"train_tokens: was \"[0-9a-f]{64}\""):
        run(tmp_path, steps=2, rows=make_sequences(9, seed=5))


def test_a_reduced_vocabulary_trains_and_its_constant_channel_stays(run, tmp_path, config):
    reduced = config.model_copy(update={"draft_vocab_size": 12})
    result = run(tmp_path, drafter=reduced, weight_decay=0.1)
    assert (result.drafter.markov_head.markov_w1.weight[:, 0] == 1).all()
    ids = result.drafter.draft_token_ids.tolist()
    assert 2 in ids
    assert 1 not in ids
    assert 0 < result.metrics.draft_vocab_coverage < 1


def test_results_are_written_for_the_next_stages(run, tmp_path, target):
    result = run(tmp_path / "work")
    record = SimpleNamespace(
        name="tiny",
        public_id=None,
        architecture="LlamaForCausalLM",
        revision="x",
        embedding_digest="e",
        head_digest="h",
        eos_token_ids=(2,),
    )
    result.write(tmp_path / "out", record)
    again = read_checkpoint(tmp_path / "out" / "drafter", *target, record=record)
    assert same(again.state_dict(), result.drafter.state_dict())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["schema"] == "dspark/train/1"
    assert metrics["steps"] == 6
    assert metrics["train_sequences"] == 9
    assert metrics["trainable_parameters"] == sum(p.numel() for p in result.drafter.parameters())
    assert metrics["best"]["dev_anchor_tau"] == result.metrics.best.dev_anchor_tau
    with (tmp_path / "out" / "curves.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [bool(row["dev_anchor_tau"]) for row in rows] == [False, True] * 3


def test_progress_shows_the_loss_and_the_latest_dev_result(run, tmp_path):
    progress = StopAfter(99)
    run(tmp_path, progress)
    assert [set(fields) for fields in progress.fields] == [{"loss"}] + [{"loss", "dev_anchor_tau"}] * 5


def test_sequences_too_short_for_an_anchor_are_left_out_and_counted(run, tmp_path, make_sequences):
    rows = make_sequences(5)
    rows[0].prompt_length = len(rows[0].token_ids) - 1
    result = run(tmp_path, rows=rows, steps=2)
    assert result.metrics.train_sequences == 4
    assert result.metrics.skipped_sequences == 1


def test_a_split_without_any_sequence_gets_no_advice_on_lengths(run, tmp_path):
    with pytest.raises(DataError, match="train split has no sequences at all") as caught:
        run(tmp_path, rows=[])
    assert "add prompts" in caught.value.hint and "max_length" not in caught.value.hint


def test_a_split_without_usable_responses_is_refused(run, tmp_path, make_sequences):
    rows = make_sequences(1)
    rows[0].prompt_length = len(rows[0].token_ids)
    with pytest.raises(DataError, match="train split has no response of two tokens"):
        run(tmp_path, rows=rows)


def test_a_gradient_that_is_not_finite_stops_the_run(run, tmp_path, make_sequences):
    rows = make_sequences(4)
    rows[0].taps[:] = float("nan")
    with pytest.raises(StageError, match="step 1: the gradient is not finite"):
        run(tmp_path, rows=rows)


def test_the_learning_rate_warms_up_and_falls_to_zero(make_settings):
    settings = make_settings(steps=100, warmup_share=0.04, learning_rate=1.0)
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[52] == pytest.approx(0.5)  # half-way through the cosine of 96 steps
    assert rates[99] < 1e-3
    assert learning_rate(0, make_settings(steps=1, warmup_share=0.0)) == 5e-3


def test_each_process_takes_its_share_of_the_same_step(config, target, make_sequences, make_settings, tmp_path):
    rows = make_sequences(9)
    trainer = Trainer(config, *target, rows, rows, make_settings(), tmp_path)
    (whole,) = trainer.steps.batches(5)
    trainer.processes.count = 2
    halves = []
    for index in range(2):
        trainer.processes.index = index
        halves += trainer.steps.batches(5)
    labels = torch.cat([half.targets.labels for half in halves])
    assert [len(half.packing.blocks) for half in halves] == [2, 2]
    assert sorted(labels.tolist()) == sorted(whole.targets.labels.tolist())


def test_training_from_the_store_is_training_from_memory(
    config, target, make_sequences, make_settings, store_rows, tmp_path
):
    """To the bit, whatever the budget for reading ahead; a run that is stopped and goes on included."""
    train_rows, dev_rows = make_sequences(9), make_sequences(4, seed=1)
    settings = make_settings()

    def go(work, train_rows, dev_rows, budget=1 << 20, progress=None):
        return train(config, *target, train_rows, dev_rows, settings, work, progress, read_budget=budget)

    memory = go(tmp_path / "memory", train_rows, dev_rows)
    stored = store_rows(train_rows), store_rows(dev_rows)
    step = sum(sorted(row.source.feature_bytes(row.index) for row in stored[0])[-4:])
    for budget in (2 * step, 1 << 20):
        result = go(tmp_path / str(budget), *stored, budget)
        assert same(memory.drafter.state_dict(), result.drafter.state_dict())
        assert memory.metrics == result.metrics
    with pytest.raises(Interrupted):
        go(tmp_path / "cut", *stored, 2 * step, StopAfter(3))
    assert same(memory.drafter.state_dict(), go(tmp_path / "cut", *stored, 2 * step).drafter.state_dict())


def test_a_budget_too_small_for_a_step_is_refused(config, target, make_sequences, make_settings, store_rows, tmp_path):
    rows = store_rows(make_sequences(9))
    with pytest.raises(SettingsError, match=r"store\.read_budget_mib"):
        train(config, *target, rows, rows[:2], make_settings(), tmp_path / "work", read_budget=1000)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_in_parts_is_the_same_step(
    config, target, make_sequences, make_settings, tmp_path, processor_flags, precision
):
    """Denominators are those of the whole step, and gradients are summed in float32 whatever is computed in."""
    processor_flags("avx512_bf16")
    rows, found = make_sequences(9), []
    for parts in (1, 2, 4):
        settings = make_settings(accumulation=parts, precision=precision)
        trainer = Trainer(config, *target, rows, rows, settings, tmp_path)
        assert trainer.low_precision == (precision == "bfloat16")
        assert len(trainer.steps.batches(0)) == parts
        norm, sums = trainer.learner.gradients(trainer.steps.batches(0))
        gradients = {name: parameter.grad for parameter, name in trainer.learner.names.items()}
        assert {value.dtype for value in (*gradients.values(), *trainer.learner.names)} == {torch.float32}
        found.append((norm, sums, gradients))
    for norm, sums, gradients in found[1:]:
        rounding = 1e-6 if precision == "float32" else 3e-2  # matrix units sum in orders of their own
        assert norm == pytest.approx(found[0][0], rel=rounding)
        assert torch.allclose(sums, found[0][1], rtol=rounding)
        for name, value in gradients.items():
            assert (value - found[0][2][name]).norm() <= rounding * value.norm(), name


def test_a_step_needs_a_sequence_for_every_part(run, tmp_path):
    with pytest.raises(SettingsError, match="4 sequences a step cannot be shared by 1 processes"):
        run(tmp_path, accumulation=5)


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_checkpoints_are_kept_as_are_asked_for(run, tmp_path, keep):
    run(tmp_path, keep_checkpoints=keep)
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == ["step-000002", "step-000004", "step-000006"][-keep:]


def test_a_run_goes_on_in_other_parts_and_with_other_retention(run, tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, StopAfter(3))
    again = StopAfter(99)
    run(tmp_path, again, accumulation=2, keep_checkpoints=1)
    assert len(again.fields) == 3


def test_training_ends_before_its_last_step_when_an_evaluation_is_enough(
    config, target, make_sequences, make_settings, tmp_path
):
    arguments = (config, *target, make_sequences(9), make_sequences(4, seed=1), make_settings(), tmp_path)
    seen = []

    def enough(metrics):
        seen.append(metrics["step"])
        return metrics["step"] == 4

    result = train(*arguments, enough=enough)
    assert (result.metrics.steps, seen) == (4, [2, 4])
    again = StopAfter(1)
    assert same(train(*arguments, again, enough=enough).drafter.state_dict(), result.drafter.state_dict())
    assert again.fields == []
