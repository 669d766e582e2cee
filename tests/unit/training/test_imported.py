"""Stage `train` of an imported drafter: the tensors are the release's, and nothing is said that was not measured."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "drafters"))  # foreign_layouts.py

from foreign_layouts import LAYOUTS, chain, flat, moved, write

from dspark.drafters.checkpoint import read_checkpoint, write_union
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.kinds import build_drafter
from dspark.drafters.origin import LISTING, DrafterOrigin
from dspark.drafters.reduced import read_trainable
from dspark.drafters.released import read_released
from dspark.errors import DataError, IntegrityError
from dspark.io.digest import digest_file
from dspark.io.jsonfile import write_model
from dspark.training.imported import take_over
from dspark.training.results import COLUMNS
from dspark.training.trainer import train
from dspark.training.warm_start import Initial

RECORD = SimpleNamespace(
    name="tiny",
    public_id="org/tiny",
    architecture="LlamaForCausalLM",
    model_type="llama",
    revision="x",
    embedding_digest="e",
    head_digest="h",
    eos_token_ids=(2,),
    hidden_size=16,
    num_layers=4,
    vocab_physical=24,
    max_position=64,
    taps=(0, 1),
    mask_token_id=1,
    text_config={
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
    },
)


@pytest.fixture
def drafter(config, target):
    return moved(DSparkDrafter(config, *target, seed=4))


@pytest.fixture
def imported(tmp_path, drafter):
    """Put a drafter into a folder as the store has it; the folder, and sha256 of its files."""

    def keep(layout="deepspec", dtype=torch.float32, one=drafter):
        folder = tmp_path / "stored"
        write(folder, LAYOUTS[layout](one), {name: value.to(dtype) for name, value in one.state_dict().items()})
        return listed(folder, layout)

    return keep


def listed(folder, layout):
    files = {name: digest_file(folder / name) for name in ("config.json", "model.safetensors")}
    stored = {name: {"sha256": sha256, "bytes": (folder / name).stat().st_size} for name, sha256 in files.items()}
    source = {"kind": "hub", "repo": "org/drafter", "revision": "abc"}
    write_model(folder / LISTING, DrafterOrigin.model_validate({"layout": layout, "source": source, "files": stored}))
    return folder, files


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checkpoint_holds_the_release_tensor_by_tensor(
    imported, drafter, target, make_sequences, make_settings, tmp_path, layout, dtype
):
    folder, files = imported(layout, dtype)
    taken = take_over(folder, files, *target, RECORD, make_sequences(4, seed=1), make_settings())
    taken.write(tmp_path / "out", RECORD)
    read = read_checkpoint(tmp_path / "out/drafter", *target, record=RECORD)
    assert read.config == drafter.config
    assert read.state_dict().keys() == drafter.state_dict().keys()
    for name, value in read.state_dict().items():
        assert torch.equal(value.to(dtype), drafter.state_dict()[name].to(dtype))
    # And what engines load is the release again.
    write_union(tmp_path / "union", read, RECORD, dtype="bfloat16")
    union = read_checkpoint(tmp_path / "union", *target, record=RECORD).state_dict()
    assert all(torch.equal(value, drafter.state_dict()[name].bfloat16()) for name, value in union.items())


def test_what_is_measured_is_what_training_would_have_measured_before_its_first_step(
    imported, drafter, target, config, make_sequences, make_settings, tmp_path
):
    folder, files = imported()
    rows, settings = make_sequences(5, seed=1), make_settings()
    metrics = take_over(folder, files, *target, RECORD, rows, settings).metrics
    trained = train(config, *target, make_sequences(9), rows, settings, tmp_path / "work", initial=Initial(drafter))
    assert metrics.dev == trained.metrics.initial
    assert metrics.dev_sequences == 5 and metrics.draft_vocab_coverage == 1.0 and 1 <= metrics.dev.dev_anchor_tau <= 4


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_drafters_without_heads_are_handed_on_and_measured_as_their_kind(
    config, target, make_sequences, make_settings, tmp_path, kind
):
    headless = config.model_copy(update={"kind": kind, "markov_type": "none", "markov_rank": 0, "confidence": False})
    drafter = moved(build_drafter(headless, *target, seed=4))
    layout = {"dspark": flat, "eagle3": chain}[kind]
    folder, files = listed(write(tmp_path / "stored", layout(drafter), drafter.state_dict()), "deepspec")
    rows, settings = make_sequences(4, seed=1), make_settings()
    taken = take_over(folder, files, *target, RECORD, rows, settings)
    trained = train(headless, *target, make_sequences(6), rows, settings, tmp_path / "work", initial=Initial(drafter))
    assert taken.metrics.dev == trained.metrics.initial and taken.metrics.dev.dev_confidence is None
    assert taken.metrics.geometry == {"dspark": "dflash-g3-l1-v24", "eagle3": "eagle3-g3-l1-v24"}[kind]
    taken.write(tmp_path / "out", RECORD)
    read = read_checkpoint(tmp_path / "out/drafter", *target, record=RECORD)
    assert read.config == headless
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in read.state_dict().items())
    # A package's folder of such a drafter is read as it was trained, not as engines are given it.
    write_union(tmp_path / "union", read, RECORD, dtype="float32")
    again = read_released(tmp_path / "union", RECORD, *target)
    assert again.config == headless and again.state_dict().keys() == drafter.state_dict().keys()


def test_of_many_processes_only_the_first_writes(imported, target, make_sequences, make_settings, tmp_path):
    folder, files = imported()
    taken = take_over(folder, files, *target, RECORD, make_sequences(4, seed=1), make_settings())
    assert taken.first  # of one
    replace(taken, first=False).write(tmp_path / "out", RECORD)
    assert not (tmp_path / "out").exists()


def test_the_metrics_say_imported_and_name_no_step_and_no_training_loss(
    imported, drafter, target, make_sequences, make_settings, tmp_path
):
    folder, files = imported()
    taken = take_over(folder, files, *target, RECORD, make_sequences(4, seed=1), make_settings())
    taken.write(tmp_path / "out", RECORD)
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    assert found["schema"] == "dspark/train-imported/1"
    assert found["source"] == {"kind": "hub", "repo": "org/drafter", "revision": "abc"}
    assert (found["layout"], found["geometry"]) == ("deepspec", "dspark-g3-l1-r4-v24")
    assert found["parameters"] == sum(value.numel() for value in drafter.state_dict().values())
    assert not {"steps", "best", "final", "train_sequences", "loss"} & found.keys()
    with (tmp_path / "out/curves.csv").open(newline="") as handle:
        assert list(csv.reader(handle)) == [list(COLUMNS)]


def test_a_reduced_vocabulary_keeps_its_tokens(config, target, make_sequences, make_settings, tmp_path):
    """One of our own: engines see the whole vocabulary, the build goes on with the tokens that it was trained with."""
    ids = torch.tensor([0, *range(2, 13)])
    reduced = moved(DSparkDrafter(config.model_copy(update={"draft_vocab_size": 12}), *target, ids, seed=4))
    write_union(tmp_path / "stored", reduced, RECORD, dtype="float32")
    folder, files = listed(tmp_path / "stored", "dspark")
    rows = make_sequences(4, seed=1)
    taken = take_over(folder, files, *target, RECORD, rows, make_settings())
    said = torch.cat([row.token_ids[row.prompt_length :] for row in rows])
    assert taken.metrics.draft_vocab_coverage == pytest.approx(float(torch.isin(said, ids).double().mean()))
    taken.write(tmp_path / "out", RECORD)
    read = read_trainable(tmp_path / "out/drafter", *target, record=RECORD)
    assert torch.equal(read.draft_token_ids, ids)
    assert all(torch.equal(value, reduced.state_dict()[name]) for name, value in read.state_dict().items())


def test_what_is_read_must_be_what_was_imported(imported, target, make_sequences, make_settings):
    folder, files = imported()
    rows, settings = make_sequences(4, seed=1), make_settings()
    for name in files:
        with pytest.raises(IntegrityError, match=f"{name}: missing, or not the file that was imported"):
            take_over(folder, files | {name: "0" * 64}, *target, RECORD, rows, settings)
    other = SimpleNamespace(**{**vars(RECORD), "mask_token_id": 3})
    with pytest.raises(DataError, match="its mask token is 1, the target's is 3"):
        take_over(folder, files, *target, other, rows, settings)
    (folder / LISTING).unlink()
    with pytest.raises(IntegrityError, match=r"dspark\.json: file not found"):
        take_over(folder, files, *target, RECORD, rows, settings)
