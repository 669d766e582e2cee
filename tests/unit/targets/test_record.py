from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from dspark.errors import DataError
from dspark.io.jsonfile import model_json, write_model
from dspark.targets.record import TargetRecord, read_record, spread_taps, taps_mistake

ZERO = "0" * 64


def record(**changes):
    fields = {
        "name": "t",
        "source": {"kind": "random"},
        "revision": "seed 0",
        **dict.fromkeys(
            (
                "digest",
                "weights_digest",
                "embedding_digest",
                "head_digest",
                "tokenizer_digest",
                "chat_template_digest",
            ),
            ZERO,
        ),
        "dtype": "float32",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "text_config": {},
        "hidden_size": 8,
        "num_layers": 6,
        "vocab_logical": 90,
        "vocab_physical": 100,
        "max_position": 64,
        "taps": (1, 2),
        "mask_token_id": 95,
        "eos_token_ids": (2,),
    }
    return TargetRecord.model_validate({**fields, **changes})


def test_taps_are_those_of_the_released_drafters():
    """DeepSpec's configs list them for Qwen3-4B/8B (36 layers) and Qwen3-14B (40 layers)."""
    assert spread_taps(36) == (1, 9, 17, 25, 33)
    assert spread_taps(40) == (1, 10, 19, 28, 37)


@pytest.mark.parametrize("layers", range(2, 100))
def test_spread_taps_are_valid_for_every_depth_and_never_hold_the_last_layer(layers):
    taps = spread_taps(layers)
    assert taps_mistake(taps, layers) is None
    assert layers - 1 not in taps
    # All layers but the last of the shallowest, then 1 to L - 3, of which five are chosen.
    assert len(taps) == (layers - 1 if layers < 5 else min(5, layers - 3))


def test_a_target_of_one_layer_has_nothing_to_tap():
    with pytest.raises(ValueError, match="fewer than two layers"):
        spread_taps(1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"taps": (2, 1)}, "ascend"),
        ({"taps": (1, 1)}, "ascend"),
        ({"taps": (-1, 2)}, "leave"),
        ({"taps": (1, 6)}, "leave"),
        ({"taps": (1, 5)}, "last layer"),
        ({"taps": ()}, "at least 1"),
        ({"vocab_logical": 101}, "101"),
        ({"mask_token_id": 100}, "outside the vocabulary"),
        ({"eos_token_ids": (100,)}, "outside the vocabulary"),
        ({"mask_token_id": 2}, "end-of-sequence"),
        ({"eos_token_ids": ()}, "at least 1"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        record(**changes)


def test_a_record_survives_the_file_and_lies_where_its_digest_says(tmp_path):
    write_model(tmp_path / "t.json", record())
    assert read_record(tmp_path / "t.json") == record()
    assert json.loads((tmp_path / "t.json").read_text())["schema"] == "dspark/target/1"
    assert record().folder(tmp_path) == tmp_path / ".dspark/store/targets" / ZERO


def test_a_record_of_another_version_names_both(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(model_json(record()) | {"schema": "dspark/target/2"}))
    with pytest.raises(DataError, match=r"dspark/target/2.*dspark/target/1"):
        read_record(tmp_path / "t.json")


def test_a_missing_record_says_how_to_make_it(tmp_path):
    with pytest.raises(DataError) as caught:
        read_record(tmp_path / "smol.json")
    assert caught.value.hint == "dspark targets fetch smol"


def test_records_catalogue_preflight_and_feature_manifests_load_no_torch():
    modules = ["targets.record", "targets.catalogue", "targets.materialise", "targets.template", "features.store"]
    code = "".join(f"import dspark.{module}\n" for module in [*modules, "corpus.responses"])
    code += "import sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
