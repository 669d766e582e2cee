"""Requests that a llama.cpp server decodes at the same time, and one server for each way of decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from dspark.decoding.policies import Fixed, Policy, Threshold
from dspark.engines.client import Drafting, Together, stream_together
from dspark.engines.llamacpp import LlamaCppServer, LlamaCppSettings
from dspark.errors import SettingsError


class Servers:
    """A server for every policy, all running at once; use as `with Servers(...) as servers`.

    This engine takes the number of drafts when it starts and not with a request, so each policy needs a server of its
    own if they are to be measured in turn. A server that waits uses no processor, and all map the same files.

    Args:
        settings: how each is started, but for what its policy decides.
        policies: by the name that `together` knows them by.
        gamma: of the drafter.
        logs: folder for what the engines say.
    """

    def __init__(self, settings: LlamaCppSettings, policies: Mapping[str, Policy], gamma: int, logs: Path) -> None:
        self._settings, self._policies, self._gamma, self._logs = settings, dict(policies), gamma, logs
        self._stack = ExitStack()
        self._servers: dict[str, LlamaCppServer] = {}

    def __enter__(self) -> Servers:
        with ExitStack() as stack:
            for number, (name, policy) in enumerate(self._policies.items()):
                settings = settings_for(self._settings, policy, self._gamma)
                server = LlamaCppServer(settings, self._logs / f"server-{number}.log")
                self._servers[name] = stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> LlamaCppServer:
        """The server of a policy."""
        return self._servers[name]

    def together(
        self, name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, endless: bool = False
    ) -> Together:
        """Let a policy's server decode prompts at the same time.

        Args:
            prompts: token ids; at most as many as the server has slots, or some wait.
            endless: let no token end a reply.
        """
        server = self._servers[name]
        start = server.log.stat().st_size
        counters, drafting = server.counters(), server.drafting(0, 0)
        seconds, replies = stream_together(server, prompts, max_new_tokens, endless=endless)
        after = server.drafting(start, len(prompts))
        spent = after - drafting if after.calls else Drafting()
        return Together(seconds, replies, server.counters() - counters, spent)


def settings_for(settings: LlamaCppSettings, policy: Policy, gamma: int) -> LlamaCppSettings:
    """How a server is started that decodes by a policy.

    Raises:
        SettingsError: a policy that this engine does not have.
    """
    match policy:
        case Fixed():
            return replace(settings, n_max=gamma if policy.k is None else min(policy.k, gamma), p_min=0.0)
        case Threshold():
            return replace(settings, n_max=gamma, p_min=policy.value)
        case _ if not policy.drafts:
            return replace(settings, drafter=None)
    raise SettingsError(f"llama.cpp has no policy {policy.name}", "it has none, fixed, fixed(k) and threshold(x)")
