"""A loaded target: taps and final hidden states of a forward pass, logits on demand.

Taps are captured by forward hooks on the decoder layers: the output of layer k, 0-based, which transformers calls
hidden_states[k + 1]. Nothing but the tapped layers' outputs is kept, and no logits are computed unless asked for.
"""

from __future__ import annotations

import hashlib
import inspect
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.config.models import DType
from dspark.errors import PreflightError
from dspark.processor import arithmetic
from dspark.targets import attention
from dspark.targets.capping import soft_cap
from dspark.targets.masks import layer_masks
from dspark.targets.record import TargetRecord
from dspark.targets.template import ChatTemplate
from dspark.targets.traits import family_of, logit_cap, windows


class TargetOutput(NamedTuple):
    """What a drafter sees of the target."""

    taps: Tensor  # [B, S, taps * d], concatenated by ascending layer
    last_hidden: Tensor  # [B, S, d], after the final norm


class Target:
    """A frozen language model with its tokenizer.

    Attributes:
        model: the transformers causal language model, in eval mode, without gradients.
        tokenizer: its tokenizer.
        template: how it is prompted.
        family: what is particular about its kind of model.
        windows: how many positions each layer sees; None: all.
        logit_cap: soft cap of its logits, or None.
        cache_argument: what its decoder and layers call the cache.
    """

    def __init__(self, record: TargetRecord, model: Any, tokenizer: Any) -> None:
        self.record = record
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, record.thinking_mode)
        self.eos_token_ids: frozenset[int] = frozenset(record.eos_token_ids)
        self.mask_token_id = record.mask_token_id
        self.taps = record.taps
        self.family = family_of(record.architecture)
        self.windows = windows(self.family, record.text_config, record.num_layers)
        self.logit_cap = logit_cap(record.text_config)
        # transformers renamed the argument in 5.2x and warns about the old name.
        parameters = inspect.signature(self.decoder.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def decoder(self) -> Any:
        """The model without its head, and of a model that also sees or hears its text part."""
        return attrgetter(self.family.decoder)(self.model)

    @property
    def embedding(self) -> Tensor:
        """Input embedding, [V, d]."""
        weight: Tensor = self.decoder.embed_tokens.weight
        return weight

    @property
    def head(self) -> Tensor:
        """Output head, [V, d]; the same tensor as the embedding where the target ties them."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype

    @property
    def dtype_name(self) -> DType:
        """The same as settings spell it."""
        names: dict[torch.dtype, DType] = {
            torch.float32: "float32",
            torch.bfloat16: "bfloat16",
            torch.float16: "float16",
        }
        return names[self.dtype]

    @property
    def packs(self) -> bool:
        """Whether rows of different widths may come as one row of all their tokens (`targets.attention`)."""
        return bool(self.decoder.config._attn_implementation == attention.NAME)

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return self.embedding.device

    @torch.no_grad()
    def hidden(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> TargetOutput:
        """One forward pass without logits.

        Args:
            input_ids: [B, S].
            attention_mask: [B, past + S], 1 for real tokens; or an explicit [B, 1, S, keys] mask, True for visible.
            position_ids: [B, S]; worked out from a 2-D mask when left out, so that padding does not move a token.
            cache: a transformers cache, extended in place.
        """
        captured: list[Tensor] = []
        handles = [self.decoder.layers[tap].register_forward_hook(_capture_into(captured)) for tap in self.taps]
        try:
            last_hidden = self.last_hidden(
                input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache
            )
        finally:
            for handle in handles:
                handle.remove()
        return TargetOutput(torch.cat(captured, dim=-1), last_hidden)

    @torch.no_grad()
    def last_hidden(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Final hidden states after the last norm, [B, S, d]; arguments as in `hidden`."""
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)[:, -input_ids.shape[1] :]
        output = self.decoder(
            input_ids=input_ids,
            attention_mask=self._mask(attention_mask),
            position_ids=position_ids,
            use_cache=cache is not None,
            **{self.cache_argument: cache},
        )
        last: Tensor = output.last_hidden_state
        return last

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Next-token logits of final hidden states [.., d], [.., V] in the model's dtype, capped where it caps them."""
        return soft_cap(torch.nn.functional.linear(last_hidden, self.head), self.logit_cap)

    def _mask(self, mask: Tensor | None) -> Any:
        """What the decoder takes for a mask. It knows itself what windows make of none and of one of padding."""
        return mask if mask is None or mask.ndim == 2 else layer_masks(mask, self.family, self.windows)


def load_target(
    record: TargetRecord, root: Path, *, dtype: DType | None = None, device: str | torch.device = "cpu"
) -> Target:
    """Load a materialised target from the workspace `root`.

    Args:
        dtype: of weights and activations; None: the record's. Float32 takes the place of a bfloat16 that the device
            would only emulate (`processor.arithmetic`).
        device: `device.accelerator()` in stages, or where a serving profile is measured.
    Raises:
        PreflightError: its files are not in the store, or the device has no room for it.
    """
    from transformers import AutoModelForCausalLM

    folder = record.folder(root)
    if not (folder / "config.json").is_file():
        raise PreflightError(f"target {record.name!r} is not in {folder}", f"dspark targets fetch {record.name}")
    quiet_transformers()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, arithmetic(dtype or record.dtype, torch.device(device).type)),
        # On a GPU, masks and grouped heads together fall back to a slow kernel.
        attn_implementation=attention.register() if torch.device(device).type == "cpu" else "sdpa",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    try:
        model = model.to(device)
    except torch.OutOfMemoryError:
        size = sum(parameter.nbytes for parameter in model.parameters())
        raise PreflightError(
            f"target {record.name!r} takes {size / 2**30:.1f} GiB, {device} has no room for it",
            "free the GPU or choose another one (CUDA_VISIBLE_DEVICES); DSPARK_DEVICE=cpu computes on the CPU, slowly",
        ) from None
    return Target(record, model, load_tokenizer(folder))


def quiet_transformers() -> None:
    """Keep transformers from drawing its own progress bars over ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a target's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor: a line `dtype shape`, then its values in row-major order, little endian."""
    tensor = tensor.detach().cpu().contiguous()
    header = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n"
    digest = hashlib.sha256(header.encode("ascii"))
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _capture_into(captured: list[Tensor]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output)

    return hook
