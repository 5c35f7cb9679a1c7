"""Sequences end to end in one row, each attended to alone: no padding and no cross-talk.

All but attention works token by token, so a row costs what its tokens cost; attention cuts the row
where sequences end. T tokens of S sequences, A heads of size D, hidden size H.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...schemas.errors import ConfigError

NAME = "sequences"
logger = logging.getLogger("streamrft")


class Packing:
    """How one network is told where the sequences of a row end.

    Attributes:
        is_cut: attention cuts the row. Otherwise transformers makes a dense mask of the positions,
            which is slower: so it is where a layer sees a window only, or has its own attention.
    """

    def __init__(self, network: Any, path: str) -> None:
        """Ask the network to give two sequences in a row what it gives each alone.

        Raises:
            ConfigError: it does not; it keeps a state along the row, for instance.
        """
        self.is_cut = _is_plain(network)
        if self.is_cut:
            network.set_attn_implementation(NAME)
        else:
            logger.info("%s: attention is not causal alone, rows get a dense mask", path)
        if not _is_exact(network, self):
            raise ConfigError(
                f"model.model_path: {path} ({network.config.model_type}) mixes sequences that lie "
                "in one row, so it cannot be trained here; use a model with causal attention only."
            )

    def options(self, lengths: list[int], device: torch.device) -> dict[str, Tensor]:
        """What a network takes beside the row's tokens: positions [1, T], and where to cut.

        transformers hands a mask of four dimensions to every layer as it is. One of whole numbers
        is none of its own, so it can hold the lengths; it stays on the CPU, where they are read.
        """
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        options = {"position_ids": positions[None]}
        return options | {"attention_mask": torch.tensor([[[lengths]]])} if self.is_cut else options


def _is_plain(network: Any) -> bool:
    """Whether every layer takes the attention that it is given, and sees all that came before."""
    config = network.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    has_window = getattr(config, "sliding_window", None) is not None and not kinds
    is_given = network.config._attn_implementation == "sdpa"
    return is_given and not has_window and kinds <= {"full_attention"}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Outputs [1, T, A, D] of a row whose mask holds lengths; with any other mask, sdpa's.

    Neighbours of one length are attended to together: [count, A, length, D] instead of
    [1, A, count * length, D].
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert options.get("sliding_window") is None, f"{type(module).__name__} sees a window only"
    runs = [(n, len(list(same))) for n, same in groupby(attention_mask.flatten().tolist())]
    start, outputs = 0, list[Tensor]()
    for length, count in runs:
        end = start + length * count
        q, k, v = (
            t[0, :, start:end].unflatten(1, (count, length)).transpose(0, 1)
            for t in (query, key, value)
        )
        outputs.append(sdpa_attention_forward(module, q, k, v, None, **options)[0].flatten(0, 1))
        start = end
    return torch.cat(outputs)[None], None


@torch.no_grad()
def _is_exact(network: Any, packing: Packing) -> bool:
    """Whether sequences of 9 and 7 tokens come out of a row as they come out alone."""
    lengths, device = [9, 7], network.device
    ids = torch.arange(1, 17, device=device) % network.get_input_embeddings().weight.shape[0]
    rows = [(ids, packing.options(lengths, device)), *((part, {}) for part in ids.split(lengths))]
    was_training = network.training
    network.eval()
    together, *alone = [
        network.base_model(input_ids=row[None], use_cache=False, **options).last_hidden_state[0]
        for row, options in rows
    ]
    network.train(was_training)
    return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
