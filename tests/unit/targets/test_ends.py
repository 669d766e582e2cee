from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dspark.config.models import FolderSource, TargetSpec
from dspark.errors import PreflightError
from dspark.targets.ends import read_ends, read_weight
from dspark.targets.loading import tensor_digest
from dspark.targets.materialise import materialise


def test_both_ends_are_what_the_loaded_model_has(target, workspace):
    ends = read_ends(target.record, workspace)
    assert torch.equal(ends.embedding, target.embedding)
    assert torch.equal(ends.head, target.head)
    assert (ends.head is ends.embedding) == (target.head is target.embedding)
    assert tensor_digest(ends.embedding) == target.record.embedding_digest
    assert tensor_digest(ends.head) == target.record.head_digest


def test_they_come_in_the_targets_dtype_whatever_the_files_hold(make_folder, tmp_path):
    spec = TargetSpec(name="half", source=FolderSource(kind="folder", path=str(make_folder())), dtype="bfloat16")
    record = materialise(spec, root=tmp_path)
    ends = read_ends(record, tmp_path)
    assert ends.embedding.dtype == ends.head.dtype == torch.bfloat16
    assert tensor_digest(ends.head) == record.head_digest


def test_weights_in_several_files_are_found_by_their_index(make_folder):
    from safetensors.torch import load_file, save_file

    folder = make_folder()
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors")
    save_file(head, folder / "model-2.safetensors")
    names = dict.fromkeys(tensors, "model-1.safetensors") | {"lm_head.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    assert torch.equal(read_weight(folder, "lm_head.weight"), head["lm_head.weight"])
    assert torch.equal(read_weight(folder, "model.embed_tokens.weight"), tensors["model.embed_tokens.weight"])


def test_what_is_not_there_is_named(target, workspace, tmp_path, make_folder):
    with pytest.raises(PreflightError, match="is not in"):
        read_ends(target.record, tmp_path)
    with pytest.raises(PreflightError, match=r"hold no nothing\.weight"):
        read_weight(make_folder(), "nothing.weight")


def test_reading_them_loads_no_transformers():
    code = "import sys, dspark.targets.ends; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
