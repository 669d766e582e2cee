"""What every engine's server is asked for, and how it answers: replies, when their tokens came, what was counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.engines.counters import Counters, summed


@dataclass(frozen=True)
class DraftedBlock:
    """A block as an engine's log shows it.

    Attributes:
        slot: of the server.
        position: of the anchor in the sequence, 0-based.
        anchor: the last committed token.
        tokens: all that were drafted.
        offered: how many of them were verified.
    """

    slot: int
    position: int
    anchor: int
    tokens: tuple[int, ...]
    offered: int


@dataclass(frozen=True)
class Completion:
    """A reply of a server.

    Attributes:
        token_ids: what it said; the token that ended it is not among them, whoever reads it out.
        ended: True at an end-of-sequence token, False at the limit.
        predicted: tokens it counts, the one that ended the reply included.
        seconds: wall time, the transport included.
        counters: what this request added, if no other ran at the same time.
        shortened: True if the server chose to verify less than whole blocks, by confidences or by load.
        blocks: what was drafted for it, where the engine's log shows it.
        request: what the engine calls the request in its records; None: it does not say.
    """

    token_ids: tuple[int, ...]
    ended: bool
    predicted: int
    seconds: float
    counters: Counters
    shortened: bool = False
    blocks: tuple[DraftedBlock, ...] = ()
    request: str | None = None


@dataclass(frozen=True)
class Streamed:
    """A reply as it came in.

    Attributes:
        token_ids: what it said.
        seconds: from the question to the arrival of each token, [tokens].
        whole_seconds: until the reply had ended.
        counters: what this request added, of engines whose replies say so.
    """

    token_ids: tuple[int, ...]
    seconds: tuple[float, ...]
    whole_seconds: float
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class Drafting:
    """How often blocks were drafted since the server started, and how long that took, the features' intake left out."""

    calls: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Drafting) -> Drafting:
        """What was drafted since `other`."""
        return Drafting(self.calls - other.calls, self.seconds - other.seconds)


@dataclass(frozen=True)
class Together:
    """What a server did with requests that ran at the same time.

    Attributes:
        seconds: wall time of all of them.
        replies: in the order of the prompts.
        counters: of all together.
        drafting: of all together; None: the engine does not tell drafting from verifying.
    """

    seconds: float
    replies: tuple[Streamed, ...]
    counters: Counters
    drafting: Drafting | None


@dataclass(frozen=True)
class Served:
    """What a server says about itself.

    Attributes:
        engine: its name and version.
        target: what it calls the model that it serves, without a path.
        gamma: drafts of a block that it verifies at most; None: it does not say.
    """

    engine: str
    target: str
    gamma: int | None = None


class Client(Protocol):
    """A server that runs somewhere.

    Attributes:
        name: of its engine, a key of `engines.ENGINES`.
        address: of the server.
        cuts_last_block: whether a block is cut to what a reply may still hold. Else it is verified, and counted, to its
            end, although the tokens behind the limit are thrown away.
        how_to_draft: how the server is started so that it drafts whole blocks.
    """

    name: str
    address: str
    cuts_last_block: bool
    how_to_draft: str

    @property
    def room(self) -> int | None:
        """Positions of a request, prompt and reply together; None: it does not say.

        Raises:
            ServiceError: as `served`.
        """
        ...

    def served(self) -> Served:
        """What it says about itself.

        Raises:
            ServiceError: it does not answer, or not as its engine does.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What of a fingerprint (package.md) the server itself tells: version, parallelism, dtypes, limits.

        Raises:
            ServiceError: as `served`.
        """
        ...

    def totals(self) -> Counters | None:
        """Counts of everybody together since the server started; None: each reply carries its own, or nothing drafts.

        Raises:
            ServiceError: the engine died.
        """
        ...

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Continue a prompt of token ids greedily.

        Raises:
            DataError: the prompt is empty or does not fit.
            ServiceError: the engine died or refused.
        """
        ...

    def stream(self, prompt: Sequence[int], max_new_tokens: int, *, endless: bool = False) -> Streamed:
        """As `complete`, with the time at which each token came.

        Args:
            endless: go on to the limit, whatever token would end the reply.
        Raises:
            DataError, ServiceError: as `complete`.
        """
        ...


class Fleet(Protocol):
    """A server for each way of decoding, by the name of its arm."""

    def __getitem__(self, name: str) -> Client:
        """The server of an arm."""
        ...

    def together(self, name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Together:
        """Let an arm's server decode prompts at the same time."""
        ...


class AttachedServers:
    """Servers that run already, by the name of the arm that each of them is."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = dict(clients)

    def __getitem__(self, name: str) -> Client:
        """The server of an arm."""
        return self._clients[name]

    def together(self, name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Together:
        """Let an arm's server decode prompts at the same time."""
        client = self._clients[name]
        before = client.totals()
        seconds, replies = stream_together(client, prompts, max_new_tokens)
        after = client.totals()
        counted = (
            after - before if before is not None and after is not None else summed(one.counters for one in replies)
        )
        return Together(seconds, replies, counted, None)


def stream_together(
    client: Client, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, endless: bool = False
) -> tuple[float, tuple[Streamed, ...]]:
    """Ask for all prompts at the same time: wall time until the last reply has ended, and the replies in order."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = tuple(pool.map(lambda prompt: client.stream(prompt, max_new_tokens, endless=endless), prompts))
    return time.perf_counter() - began, replies


def file_name(path: object) -> str:
    """The last part of what a server calls its model: where it lies on that machine is nobody's business."""
    return str(path or "unknown").rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or "unknown"
