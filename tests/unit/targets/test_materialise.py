from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from dspark.config.models import TargetSpec
from dspark.errors import Interrupted, PreflightError, SettingsError
from dspark.io.progress import Progress
from dspark.targets import synthetic
from dspark.targets.description import find_mask_token
from dspark.targets.loading import load_target
from dspark.targets.materialise import is_materialised, materialise, missing_files, require_files
from dspark.targets.synthetic import byte_tokenizer


def folder_spec(path, **fields):
    return TargetSpec.model_validate(
        {"name": "mine", "source": {"kind": "folder", "path": str(path)}, "dtype": "float32", **fields}
    )


def everything_below(root):
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


def test_the_same_seed_gives_the_same_target_and_another_does_not(random_spec, tmp_path):
    first = materialise(random_spec("a"), root=tmp_path / "1")
    assert materialise(random_spec("a"), root=tmp_path / "2") == first
    other = materialise(random_spec("a", seed=1), root=tmp_path / "3")
    assert other.weights_digest != first.weights_digest
    assert other.tokenizer_digest == first.tokenizer_digest


def test_a_target_at_hand_is_recognised_without_torch_and_nothing_is_written(random_spec, tmp_path):
    materialise(random_spec("a"), root=tmp_path)
    before = everything_below(tmp_path)
    code = (
        "import json, sys; from pathlib import Path\n"
        "from dspark.config.models import TargetSpec; from dspark.targets.materialise import materialise\n"
        "spec = TargetSpec.model_validate_json(sys.argv[1])\n"
        "print(materialise(spec, root=Path(sys.argv[2])).name, 'torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, random_spec("a").model_dump_json(), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["a", "False"]
    assert everything_below(tmp_path) == before


def test_a_changed_declaration_changes_the_record_and_not_the_weights(random_spec, tmp_path, processor_flags):
    processor_flags("avx512_bf16")
    first = materialise(random_spec("a"), root=tmp_path)
    second = materialise(random_spec("a", taps=[0, 3], mask_token_id=270, public_id="x/y"), root=tmp_path)
    assert (second.taps, second.mask_token_id, second.public_id) == ((0, 3), 270, "x/y")
    assert second.digest == first.digest
    third = materialise(random_spec("a", dtype="bfloat16"), root=tmp_path)
    assert third.digest != first.digest
    assert load_target(third, tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(("taps", "reason"), [([1, 4], "last layer"), ([3, 9], "leave"), ([2, 1], "ascend")])
def test_taps_that_do_not_fit_name_the_file(random_spec, tmp_path, taps, reason):
    with pytest.raises(SettingsError, match=rf"pipeline/targets/a\.yaml.*{reason}"):
        materialise(random_spec("a", taps=taps), root=tmp_path)


def test_a_config_that_transformers_refuses_is_a_settings_error(random_spec, tmp_path):
    spec = random_spec("a")
    odd = spec.source.model_copy(update={"config": {**spec.source.config, "num_attention_heads": 5}})
    with pytest.raises(SettingsError, match=r"source\.config"):
        materialise(spec.model_copy(update={"source": odd}), root=tmp_path)
    small = spec.source.model_copy(update={"config": {**spec.source.config, "vocab_size": 100}})
    with pytest.raises(SettingsError, match="bytes need 260"):
        materialise(spec.model_copy(update={"source": small}), root=tmp_path)


def test_a_kill_while_the_target_is_made_leaves_nothing_half(random_spec, tmp_path, monkeypatch):
    whole = materialise(random_spec("a"), root=tmp_path / "other")
    real = synthetic.make_target

    def die(source, out, dtype):
        real(source, out, dtype)
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "make_target", die)
    with pytest.raises(KeyboardInterrupt):
        materialise(random_spec("a"), root=tmp_path)
    assert not (tmp_path / "targets").exists()
    assert not (tmp_path / ".dspark/store").exists()
    monkeypatch.setattr(synthetic, "make_target", real)
    assert materialise(random_spec("a"), root=tmp_path) == whole


@pytest.mark.parametrize("damage", ["cut", "gone", "listing"])
def test_a_damaged_store_is_made_again(random_spec, tmp_path, damage):
    record = materialise(random_spec("a"), root=tmp_path)
    weights = record.folder(tmp_path) / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "gone":
        shutil.rmtree(record.folder(tmp_path))
    else:
        (record.folder(tmp_path) / "dspark.json").write_text("{")
    assert materialise(random_spec("a"), root=tmp_path) == record
    load_target(record, tmp_path)


def test_a_copied_workspace_keeps_its_target_by_content(random_spec, tmp_path, monkeypatch):
    """A copy has other modification times: the files are read again, once, and nothing is fetched or made."""
    record = materialise(random_spec("a"), root=tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=shutil.copyfile)
    monkeypatch.setattr(synthetic, "make_target", lambda *arguments: pytest.fail("the target was made again"))
    assert not is_materialised(random_spec("a"), root=tmp_path / "second")
    assert materialise(random_spec("a"), root=tmp_path / "second") == record
    assert is_materialised(random_spec("a"), root=tmp_path / "second")
    # A file of the same length but of other content is not recognised.
    weights = record.folder(tmp_path / "second") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    monkeypatch.undo()
    assert materialise(random_spec("a"), root=tmp_path / "second") == record
    assert weights.read_bytes() != bytes(data)


# ---------------------------------------------------------------- a local folder


def test_a_local_folder_is_linked_and_its_path_stays_out_of_the_record(make_folder, tmp_path):
    model = make_folder()
    root = tmp_path / "workspace"
    assert missing_files(folder_spec(model), root) == []
    assert not root.exists()
    record = materialise(folder_spec(model), root=root)
    assert (record.folder(root) / "model.safetensors").readlink() == model / "model.safetensors"
    assert str(tmp_path) not in (root / "targets/mine.json").read_text()
    assert (record.source, record.public_id) == ({"kind": "folder"}, None)
    assert record.revision == record.weights_digest
    assert load_target(record, root).hidden(torch.tensor([[5, 6]])).taps.shape == (1, 2, 2 * 32)


def test_a_relative_path_counts_from_the_workspace(make_folder, tmp_path, monkeypatch):
    make_folder("workspace/models/m")
    monkeypatch.chdir("/")
    assert materialise(folder_spec("models/m"), root=tmp_path / "workspace").model_type == "qwen3"


def test_changed_weights_give_another_target_and_a_touched_file_the_same(make_folder, tmp_path):
    model, other = make_folder(), make_folder("other", "llama")
    first = materialise(folder_spec(model), root=tmp_path)
    weights = model / "model.safetensors"
    weights.touch()
    assert materialise(folder_spec(model), root=tmp_path) == first
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    second = materialise(folder_spec(model), root=tmp_path)
    assert second.digest != first.digest
    assert second.weights_digest != first.weights_digest
    assert second.tokenizer_digest == first.tokenizer_digest
    assert materialise(folder_spec(other), root=tmp_path).model_type == "llama"


def test_a_new_chat_template_is_noticed(make_folder, tmp_path):
    model = make_folder()
    first = materialise(folder_spec(model), root=tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    second = materialise(folder_spec(model), root=tmp_path)
    assert second.chat_template_digest != first.chat_template_digest
    assert second.weights_digest == first.weights_digest


def test_a_model_in_shards_is_read_like_one_file(make_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    single, sharded = make_folder("single"), make_folder("sharded")
    tensors = load_file(sharded / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, sharded / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    (sharded / "model.safetensors").unlink()
    records = [materialise(folder_spec(folder), root=tmp_path) for folder in (single, sharded)]
    assert records[0].embedding_digest == records[1].embedding_digest
    assert records[0].head_digest == records[1].head_digest
    assert records[0].digest != records[1].digest
    ids = torch.tensor([[5, 6, 7]])
    outputs = [load_target(record, tmp_path).hidden(ids).last_hidden for record in records]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_a_folder_that_is_gone_or_incomplete_is_named(make_folder, tmp_path):
    gone = folder_spec(tmp_path / "nowhere")
    assert missing_files(gone, tmp_path) == [str(tmp_path / "nowhere")]
    with pytest.raises(PreflightError, match=f"^target '{gone.name}': .*nowhere is not a folder$") as caught:
        require_files(gone, tmp_path)
    assert f"pipeline/targets/{gone.name}.yaml" in caught.value.hint
    assert f"dspark run --target {gone.name}" in caught.value.hint
    bare = folder_spec(make_folder(drop=["tokenizer.json"]))
    assert missing_files(bare, tmp_path) == ["tokenizer.json"]
    with pytest.raises(PreflightError, match=r"missing tokenizer\.json"):
        materialise(bare, root=tmp_path)


@pytest.mark.parametrize("damage", [b"", b"1234", None])
def test_weights_that_were_cut_off_are_refused_before_anything_is_made(make_folder, tmp_path, damage):
    model = make_folder()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000] if damage is None else damage)
    with pytest.raises(PreflightError, match=r"model\.safetensors: not a whole safetensors file"):
        require_files(folder_spec(model), tmp_path / "workspace")
    assert not (tmp_path / "workspace").exists()


def test_a_config_that_contradicts_itself_is_named(make_folder, tmp_path):
    model = make_folder(layer_types=["full_attention"] * 9)
    with pytest.raises(PreflightError, match=r"its config\.json: .*num_hidden_layers"):
        materialise(folder_spec(model), root=tmp_path)


def test_weights_that_contradict_the_config_are_refused(make_folder, tmp_path):
    with pytest.raises(PreflightError, match=r"embed_tokens\.weight is \[280, 32\], by config\.json it is \[300, 32\]"):
        materialise(folder_spec(make_folder(vocab_size=300)), root=tmp_path)


def test_a_model_without_a_chat_template_is_refused(make_folder, tmp_path):
    with pytest.raises(PreflightError, match="no chat template"):
        materialise(folder_spec(make_folder(drop=["chat_template.jinja"])), root=tmp_path)


def test_ends_of_turn_come_from_generation_config_and_tokenizer(make_folder, tmp_path):
    model = make_folder()
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert materialise(folder_spec(model), root=tmp_path).eos_token_ids == (0, 2, 7)
    (model / "generation_config.json").unlink()
    assert materialise(folder_spec(model), root=tmp_path).eos_token_ids == (2,)


def test_a_stop_is_obeyed_between_files_and_leaves_no_record(make_folder, tmp_path):
    class Stopped(Progress):
        def advance(self, count=1, **fields):
            raise Interrupted("stop")

    model = make_folder()
    with pytest.raises(Interrupted):
        materialise(folder_spec(model), root=tmp_path, progress=Stopped())
    assert not (tmp_path / "targets").exists()


# ---------------------------------------------------------------- the mask token


class Added:
    def __init__(self, content):
        self.content = content


class Words:
    """A tokenizer as far as the search for a mask token looks."""

    def __init__(self, size, added=(), mask=None):
        self.size, self.mask_token_id = size, mask
        self.added_tokens_decoder = {number: Added(content) for number, content in added}

    def __len__(self):
        return self.size


def test_the_mask_is_the_tokenizers_own_then_an_unused_row_then_a_reserved_token():
    assert find_mask_token(byte_tokenizer(), 300) == 3
    # Qwen3: the tokenizer ends at 151668, the embedding has 151936 rows; DeepSpec uses 151669 (deepspec.md, section 6).
    assert find_mask_token(Words(151669), 151936) == 151669
    reserved = Words(100, [(90, "<|end|>"), (95, "<|reserved_special_token_1|>"), (94, "<unused0>")])
    assert find_mask_token(reserved, 100) == 94
    assert find_mask_token(Words(100, [(90, "<|end|>")]), 100) is None


def test_without_a_mask_token_the_key_to_set_is_named(make_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark.targets.description.find_mask_token", lambda tokenizer, rows: None)
    with pytest.raises(PreflightError) as caught:
        materialise(folder_spec(make_folder()), root=tmp_path)
    assert caught.value.hint == "set mask_token_id in pipeline/targets/mine.yaml"
