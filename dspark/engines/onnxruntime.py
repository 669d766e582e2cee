"""ONNX Runtime: drafts with the exported graph that keeps the context's keys and values outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.decoding.acceptance import distribution
from dspark.decoding.drafting import Proposal
from dspark.decoding.draws import CounterDraws
from dspark.decoding.truncation import WHOLE, Truncation
from dspark.engines.onnx_io import IO_FILE, OnnxIO
from dspark.errors import IntegrityError, PreflightError, SettingsError
from dspark.io.jsonfile import read_model

if TYPE_CHECKING:
    from dspark.decoding.draws import Draws, Rows
    from dspark.decoding.prefixes import Counts

Provider = str | tuple[str, dict[str, int]]  # a name, with its options

CPU = ("CPUExecutionProvider",)
_INSTALL = {"CPUExecutionProvider": "pip install 'dspark[cpu]'"}
_INSTALL_GPU = "pip install 'dspark[gpu]', in an environment without onnxruntime"

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class OnnxProposer:
    """A `decoding.Proposer` on ONNX Runtime.

    Args:
        folder: holds `io.json` and the files it names.
        threads: intra-op threads of the session; None: as many as torch has.
        providers: execution providers in order of preference (`providers_on`); all of them must be had.
    Raises:
        PreflightError: ONNX Runtime, a provider, or the file that is made from the target is missing.
        IntegrityError: the graph or its weights do not load.
    """

    def __init__(self, folder: Path, *, threads: int | None = None, providers: Sequence[Provider] = CPU) -> None:
        self.io = read_model(folder / IO_FILE, OnnxIO, hint="make it again with `dspark run`")
        if not (folder / self.io.ends.file).exists():
            raise PreflightError(
                f"{folder}: without {self.io.ends.file}, the target's embedding and head, nothing can be drafted",
                "dspark package materialise PACKAGE --target DIR makes it from the target",
            )
        self._session = open_session(
            folder / self.io.cached.file, threads=threads or torch.get_num_threads(), providers=providers
        )
        self._keys: Floats = np.zeros((0,), np.float32)
        self._values: Floats = np.zeros((0,), np.float32)
        self._lengths: Integers = np.zeros((0,), np.int64)
        self._silence: Floats = np.zeros((0,), np.float32)
        self._pending: tuple[Floats, Integers] | None = None

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.io.gamma

    def begin(self, batch: int, max_length: int) -> None:
        """See `Proposer`."""
        shape = (self.io.layers, batch, self.io.num_key_value_heads, max_length, self.io.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._lengths = np.zeros(batch, np.int64)
        self._pending = None

    def extend(self, features: Tensor, counts: Counts, token_ids: Tensor | None = None) -> None:
        """See `Proposer`. The features wait for the next block: one run of the graph does both.

        Raises:
            SettingsError: a row would outgrow the length it began with, or the features are another target's.
        """
        width = len(self.io.taps) * self.io.hidden_size
        if features.shape[-1] != width:
            raise SettingsError(f"the features are {features.shape[-1]} wide, this drafter reads {width}")
        self._flush()
        counts = np.asarray(counts, np.int64)
        longest = int((self._lengths + counts).max(initial=0))
        if longest > self._keys.shape[3] or int(counts.max(initial=0)) > features.shape[1]:
            raise SettingsError(f"a context of {longest} positions does not fit into {self._keys.shape[3]}")
        self._pending = (features.detach().to("cpu", torch.float32).numpy(), counts)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Proposer`."""
        chosen = np.asarray(rows, np.intp)
        for row, source in enumerate(rows):
            if row != source:
                end = self._lengths[source]
                for states in (self._keys, self._values):
                    states[:, row, :, :end] = states[:, source, :, :end]
        self._lengths = self._lengths[chosen]
        if self._pending is not None:
            self._pending = (self._pending[0][chosen], self._pending[1][chosen]) if len(rows) else None

    def join(self, features: Tensor, counts: Counts, token_ids: Tensor | None = None) -> None:
        """See `Proposer`. A run of the graph takes up the new rows' features; the others' go on waiting.

        Raises:
            SettingsError: there is no room for so many rows, or as `extend`.
        """
        first, joining = len(self._lengths), len(counts)
        keys, values, lengths, waiting = self._keys, self._values, self._lengths, self._pending
        if first + joining > keys.shape[1]:
            raise SettingsError(f"there is room for {keys.shape[1]} rows, not for {joining} beside {first}")
        self._keys, self._values = (states[:, first : first + joining] for states in (keys, values))
        self._lengths, self._pending = np.zeros(joining, np.int64), None
        self.extend(features, counts, token_ids)
        self._flush()
        self._keys, self._values = keys, values
        self._lengths = np.concatenate([lengths, self._lengths])
        if waiting is not None:
            nothing = np.zeros((joining, *waiting[0].shape[1:]), np.float32)
            self._pending = np.concatenate([waiting[0], nothing]), np.concatenate([waiting[1], np.zeros_like(counts)])

    def propose(
        self, anchors: Tensor, temperature: float, draws: Draws, requests: Rows, truncation: Truncation = WHOLE
    ) -> Proposal:
        """See `Proposer`. The graph draws with noise that is made here.

        Raises:
            SettingsError: a temperature above 0 and draws that are not made of numbers, or a truncation.
        """
        if not truncation.whole:
            raise SettingsError(
                "the ONNX Runtime drafter draws from whole distributions, which top-k and top-p are to cut",
                "draft in torch",
            )
        shape = (self.io.gamma, self.io.draft_vocab_size)
        if temperature == 0:
            noise = self._quiet(len(self._lengths))
        elif isinstance(draws, CounterDraws):
            noise = draws.gumbel(requests, shape)
        else:
            raise SettingsError(
                f"the ONNX Runtime drafter draws with Gumbel noise, which {type(draws).__name__} does not have",
                "draft in torch",
            )
        drafted, confidence, logits = self._run(anchors.detach().cpu().numpy(), temperature, noise)
        stated = None if confidence is None else torch.from_numpy(confidence).to(anchors.device)
        proposal = Proposal(torch.from_numpy(drafted).to(anchors.device), stated)
        if temperature == 0:
            return proposal
        ids = self.io.draft_token_ids
        # The token says which column won: adding up again might round otherwise.
        columns = drafted if ids is None else np.searchsorted(ids, drafted)
        return replace(
            proposal,
            probs=distribution(torch.from_numpy(logits).to(anchors.device), temperature, torch.float32),
            indices=torch.from_numpy(columns).to(anchors.device),
            token_ids=None if ids is None else torch.tensor(ids, device=anchors.device),
        )

    def _quiet(self, rows: int) -> Floats:
        """Noise that changes nothing, kept for the next block."""
        if len(self._silence) != rows:
            self._silence = np.zeros((rows, self.io.gamma, self.io.draft_vocab_size), np.float32)
        return self._silence

    def _flush(self) -> None:
        """Store the keys and values of features that no block followed."""
        if self._pending is not None:
            rows = len(self._lengths)
            self._run(np.zeros(rows, np.int64), 0.0, self._quiet(rows))

    def _run(self, anchors: Integers, temperature: float, noise: Floats) -> tuple[Integers, Floats | None, Floats]:
        features, counts = self._pending or self._nothing_new()
        rows, past = len(self._lengths), int(self._lengths.max(initial=1))
        names = [item.name for item in self.io.cached.outputs]
        results = self._session.run(
            names,
            {
                "features": np.ascontiguousarray(features),
                "new_count": counts,
                "past_keys": np.ascontiguousarray(self._keys[:, :rows, :, :past]),
                "past_values": np.ascontiguousarray(self._values[:, :rows, :, :past]),
                "past_length": self._lengths,
                "anchor_ids": anchors,
                "temperature": np.full(len(anchors), temperature, np.float32),
                "noise": noise,
            },
        )
        found = dict(zip(names, results, strict=True))
        keys, values = found["new_keys"], found["new_values"]
        for row, (start, count) in enumerate(zip(self._lengths, counts, strict=True)):
            self._keys[:, row, :, start : start + count] = keys[:, row, :, :count]
            self._values[:, row, :, start : start + count] = values[:, row, :, :count]
        self._lengths = self._lengths + counts
        self._pending = None
        return found["draft_ids"], found.get("confidence_logits"), found["draft_logits"]

    def _nothing_new(self) -> tuple[Floats, Integers]:
        rows = len(self._lengths)
        width = len(self.io.taps) * self.io.hidden_size
        return np.zeros((rows, 1, width), np.float32), np.zeros(rows, np.int64)


def providers_on(device: str) -> tuple[Provider, ...]:
    """What drafts beside a target on a device, `cpu` or `cuda:<index>`.

    Features and drafts pass through the machine's memory either way.
    """
    kind, _, index = device.partition(":")
    return CPU if kind == "cpu" else (("CUDAExecutionProvider", {"device_id": int(index or 0)}), *CPU)


def open_session(model: Path, *, threads: int, providers: Sequence[Provider] = CPU) -> Any:
    """An ONNX Runtime session on exactly the providers that were asked for.

    ONNX Runtime falls back to the CPU silently when a provider is missing or fails to start; here that is an error.

    Args:
        model: an .onnx file; its weights lie beside it.
        threads: intra-op threads.
        providers: in order of preference; operators that none of them has run on the CPU.
    Raises:
        PreflightError: ONNX Runtime is not installed or a provider cannot be had; names what to install.
        IntegrityError: the model does not load.
    """
    try:
        import onnxruntime
    except ImportError:
        raise PreflightError("onnxruntime is not installed", _INSTALL["CPUExecutionProvider"]) from None
    available = onnxruntime.get_available_providers()
    names = [one if isinstance(one, str) else one[0] for one in providers]
    if missing := [name for name in names if name not in available]:
        raise PreflightError(
            f"ONNX Runtime has no {', '.join(missing)} here (it has: {', '.join(available)})",
            _INSTALL.get(missing[0], _INSTALL_GPU),
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads would take the cores from the target's own threads, which run in turn with these.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(model), options, providers=list(providers))
    except Exception as reason:
        raise IntegrityError(
            f"{model}: ONNX Runtime cannot load it: {reason}", "make it again with `dspark run`"
        ) from reason
    check_providers(names, session.get_providers())
    return session


def check_providers(asked: Sequence[str], got: Sequence[str]) -> None:
    """Refuse a session that silently fell back.

    Raises:
        PreflightError: a provider that was asked for is not in use, or not at its place.
    """
    if list(got[: len(asked)]) != list(asked):
        raise PreflightError(
            f"ONNX Runtime was asked for {', '.join(asked)} and silently took {', '.join(got)}",
            "install the libraries that the provider needs (its own message says which), or ask for the CPU",
        )
