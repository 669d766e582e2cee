"""`dspark targets export`: a target as ONNX, into a folder of the user's choice."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config.build import FOLDERS
from dspark.config.declared import declared_names, read_declared
from dspark.config.models import DomainSpec
from dspark.corpus.domains import read_domain
from dspark.corpus.screening import screen
from dspark.corpus.splits import order_key
from dspark.errors import DataError, Interrupted, PreflightError
from dspark.io.progress import install_stop_signals
from dspark.targets.catalogue import read_target
from dspark.targets.materialise import materialise
from dspark.workspace.exports import ExportRecord, clear_killed, write_export
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock

if TYPE_CHECKING:
    from dspark.engines.onnx_target_io import OnnxTargetIO
    from dspark.targets.loading import Target

STAGE = "export"
_PROMPTS_PER_DOMAIN = 3
_LONGEST_PROMPT = 256  # tokens
_NEW_TOKENS = 16  # of each answer that torch and the graph are compared on


def export_target(workspace: Workspace, name: str, out: Path, listener: Listener) -> OnnxTargetIO:
    """Fetch a target if need be, write it as ONNX and compare it with torch on prompts of the workspace's domains.

    Raises:
        SettingsError: no such target, or `out` holds something else.
        PreflightError: packages are missing, or the target cannot be had.
        GateError: what was written is not the target; nothing is left at `out`.
        Interrupted: at a safe point; nothing is left at `out`.
    """
    spec = read_target(workspace.root / FOLDERS["target"], name, root=workspace.root)
    needed = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    if missing := [module for module in needed if importlib.util.find_spec(module) is None]:
        raise PreflightError(f"not installed: {', '.join(missing)}", "pip install 'dspark[pipeline,cpu]'")
    from dspark.export.onnx_target import check_place
    from dspark.export.onnx_target import export_target as write_target
    from dspark.targets.loading import load_target

    out = out.absolute()
    check_place(out)  # before anything is fetched
    install_stop_signals()
    started = time.monotonic()
    progress = ListenedProgress(listener, f"{STAGE}@{name}")
    with run_lock(workspace, f"dspark targets export {name}", listener.note), _noted(workspace, name, out, listener):
        record = materialise(spec, root=workspace.root, progress=progress)
        target = load_target(record, workspace.root, dtype="float32", device="cpu")
        prompts = _prompts(workspace, target)
        description = write_target(target, prompts, out, new_tokens=_NEW_TOKENS, progress=progress)
    progress.end(time.monotonic() - started)
    return description


@contextmanager
def _noted(workspace: Workspace, name: str, out: Path, listener: Listener) -> Iterator[None]:
    """Clear up after killed exports, and note how this one stands and ends.

    Raises:
        Interrupted: saying that the same command begins anew.
    """
    clear_killed(workspace, out, listener.note)
    record = ExportRecord(target=name, out=str(out), pid=os.getpid(), started=time.time())
    write_export(workspace, record)
    try:
        yield
        record.state = "done"
    except (Interrupted, KeyboardInterrupt):
        record.state, record.message = "interrupted", f"nothing was written to {out}"
        raise Interrupted(
            f"the export of {name} was stopped: {record.message}", "the same command begins the export anew"
        ) from None
    except BaseException as reason:
        record.state, record.message = "failed", str(reason)
        raise
    finally:
        record.finished = time.time()
        write_export(workspace, record)


def _prompts(workspace: Workspace, target: Target) -> list[list[int]]:
    """Token ids of a few prompts of each domain; those that only evaluate may need a package, and are left out.

    Raises:
        DataError: no domain has a prompt that fits.
    """
    folder = workspace.root / FOLDERS["domain"]
    longest = min(_LONGEST_PROMPT, target.record.max_position - _NEW_TOKENS)
    chosen: list[list[int]] = []
    for name in declared_names(folder):
        spec = read_declared(folder, name, DomainSpec, word="domain", root=workspace.root)
        if spec.evaluation_only:
            continue
        screened = (
            screen(prompt, target.template, longest)
            for prompt in sorted(read_domain(spec, folder).prompts, key=order_key)
        )
        chosen += islice((found for found in screened if isinstance(found, list)), _PROMPTS_PER_DOMAIN)
    if not chosen:
        raise DataError(
            f"{folder}: no domain has a prompt of at most {longest} tokens to compare the export on",
            "add one, or restore the folder",
        )
    return chosen
