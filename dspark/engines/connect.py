"""Which engine answers at an address."""

from __future__ import annotations

from collections.abc import Callable

from dspark.engines.client import Client
from dspark.engines.http import NobodyThereError
from dspark.engines.llamacpp import LlamaCppClient
from dspark.engines.sglang_client import SGLangClient
from dspark.engines.vllm_client import VLLMClient
from dspark.errors import ServiceError

CLIENTS: dict[str, Callable[..., Client]] = {
    "llamacpp": LlamaCppClient,
    "sglang": SGLangClient,
    "vllm": VLLMClient,
}


def connect(address: str, engine: str | None = None, *, patience: float = 600.0) -> Client:
    """A client of the server at an address; the server has answered.

    Args:
        engine: which it is; None: whichever answers as one of them does.
        patience: seconds until it must have answered a request.
    Raises:
        SettingsError: no such address.
        ServiceError: nobody answers, or no engine that is known; says what each of them was asked and answered.
    """
    refused = []
    for name in CLIENTS if engine is None else (engine,):
        client = CLIENTS[name](address, patience=patience)
        try:
            client.served()
        except NobodyThereError as reason:
            raise _nobody(reason, address, engine) from None
        except ServiceError as reason:
            refused.append(reason)
        else:
            return client
    if len(refused) == 1:
        raise refused[0]
    told = "".join(f"\n    {reason.message}" for reason in refused)
    raise ServiceError(
        f"no llama.cpp, SGLang or vLLM with a DSpark drafter answers at {address}:{told}", refused[0].hint
    )


def _nobody(reason: NobodyThereError, address: str, engine: str | None) -> ServiceError:
    """That nobody listens, in the words of the engine that was asked for if it was one."""
    if engine is not None:
        return reason
    why = reason.message.rpartition(": ")[2]
    return ServiceError(f"nothing answers at {address}: {why}", "start the server there, or correct the address")
