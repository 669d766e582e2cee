"""A model's config with everything that it leaves to the defaults of its transformers class. Loads no torch itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.errors import SettingsError
from dspark.io.jsonfile import strict_loads
from dspark.targets.traits import unsupported


def complete(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text part of a config, complete.

    Args:
        config: as `config.json` has it, `model_type` included.
        where: it stands, for messages.
    Raises:
        SettingsError: transformers does not take it, or no target can have it (with the reason).
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(**config)
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as reason:
        told = str(reason).strip().splitlines()
        raise SettingsError(f"{where}: {told[-1].strip() if told else repr(reason)}") from None
    if mistake := unsupported({**config, **strict_loads(whole.to_json_string(use_diff=False))}):
        raise SettingsError(f"{where}: {mistake}")
    text: dict[str, Any] = strict_loads(whole.get_text_config().to_json_string(use_diff=False))
    return text
