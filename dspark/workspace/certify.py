"""`dspark certify`: an existing drafter on a server that runs already. Nothing is trained, nothing is built."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dspark.config.build import FOLDERS
from dspark.config.declared import declared_names, read_declared
from dspark.config.models import CorpusSettings, DomainSpec
from dspark.corpus.prompts import read_prompts
from dspark.drafters.base import Drafter
from dspark.errors import DataError, SettingsError
from dspark.evaluation.server import ServerCertificate, certify_server
from dspark.io.digest import digest_file, digest_tree
from dspark.io.progress import Progress, install_stop_signals
from dspark.targets.catalogue import read_target
from dspark.targets.loading import Target
from dspark.targets.materialise import materialise
from dspark.workspace.layout import Workspace
from dspark.workspace.listener import ListenedProgress, Listener
from dspark.workspace.lock import run_lock

STAGE = "certify"


@dataclass(frozen=True)
class CertifyRequest:
    """What was asked for.

    Attributes:
        drafter: a GGUF file for llama.cpp, or the folder of a checkpoint for the other engines.
        url: of the server that speculates with it.
        target: a target of the workspace: the weights that the server has.
        domains: to take prompts from; empty: all of the workspace.
        prompts_per_domain: at most.
        max_new_tokens: of each reply.
    """

    drafter: Path
    url: str
    target: str
    domains: tuple[str, ...] = ()
    prompts_per_domain: int = 8
    max_new_tokens: int = 96


def certify(workspace: Workspace, request: CertifyRequest, listener: Listener) -> ServerCertificate:
    """Fetch the target if need be, take eval prompts of the workspace's domains, and certify.

    Raises:
        SettingsError: no such target, domain or drafter.
        DataError, IntegrityError: the drafter's file is none, or another target's.
        ServiceError: the server cannot be reached, or does not do what is needed.
    """
    from dspark.engines.connect import connect
    from dspark.targets.loading import load_target

    if not request.drafter.exists():
        raise SettingsError(
            f"{request.drafter}: not found", "name the drafter's GGUF file, or the folder of its checkpoint"
        )
    if request.drafter.is_dir() and not (request.drafter / "config.json").is_file():
        raise DataError(
            f"{request.drafter} holds no drafter's config.json",
            "name the folder of the checkpoint (`drafter` in a package), or the file engines/llamacpp/drafter.gguf",
        )
    spec = read_target(workspace.root / FOLDERS["target"], request.target, root=workspace.root)
    client = connect(request.url)  # a server that is not there is said at once
    install_stop_signals()
    progress = ListenedProgress(listener, f"{STAGE}@{request.target}")
    started = time.monotonic()
    with run_lock(workspace, f"dspark certify {request.drafter.name}", listener.note):
        record = materialise(spec, root=workspace.root, progress=progress)
        # A few replies: the GPU may be full of the server that is asked.
        target = load_target(record, workspace.root, dtype="float32", device="cpu")
        drafter = _drafter(request.drafter, target)
        prompts = _prompts(workspace, request, target, progress)
        certificate = certify_server(
            client,
            target,
            drafter,
            prompts,
            drafter_file=request.drafter,
            drafter_sha256=_digest(request.drafter),
            max_new_tokens=request.max_new_tokens,
            progress=progress,
        )
    progress.end(time.monotonic() - started)
    return certificate


def _drafter(path: Path, target: Target) -> Drafter:
    """A drafter from a GGUF file or a checkpoint folder; float32."""
    from dspark.drafters.foreign import load_drafter
    from dspark.export.gguf import load_drafter_gguf

    load = load_drafter if path.is_dir() else load_drafter_gguf
    return load(path, target.record, target.embedding, target.head)


def _digest(path: Path) -> str:
    """Of a file, or of everything in a folder."""
    return digest_tree(path) if path.is_dir() else digest_file(path)


def _prompts(workspace: Workspace, request: CertifyRequest, target: Target, progress: Progress) -> list[list[int]]:
    """The first eval prompts of each domain, as a build on the same domains would have them."""
    import tempfile

    from dspark.corpus.prepare import prepare_prompts
    from dspark.evaluation.decoding import first_prompts

    folder = workspace.root / FOLDERS["domain"]
    known = declared_names(folder)
    names = request.domains or tuple(known)
    specs = [read_declared(folder, name, DomainSpec, word="domain", root=workspace.root) for name in names]
    trained = tuple(spec.name for spec in specs if not spec.evaluation_only)
    if not specs:
        raise SettingsError(f"{folder} declares no domains", "add one, or restore the folder")
    settings = CorpusSettings(
        name="certify",
        target=request.target,
        domains=trained,
        evaluation_domains=tuple(spec.name for spec in specs if spec.evaluation_only),
    )
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "prompts"
        prepare_prompts(settings, specs, folder, target.template, out, progress, needed=["eval"])
        chosen = first_prompts(read_prompts(out / "eval.jsonl"), request.prompts_per_domain)
    return [list(prompt.token_ids) for prompt in chosen]
