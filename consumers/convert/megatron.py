"""Megatron-core's `dist_ckpt` in its format torch_dist, for models of Llama's and Qwen2's kind.

A DCP folder whose tensors have Megatron's names and joined matrices. Layers are stacked along a
first dimension (`decoder.layers.mlp...`, a chunk a layer) or numbered (`decoder.layers.3.mlp...`).
`common.pt` holds no weights and is never opened. H hidden size, F feed-forward size.

Source: megatron/core/transformer/{transformer_block,mlp,attention}.py, megatron-core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .boxes import Box, Shape
from .dcp import METADATA, Chunk, Stored, check_files, read_chunks, read_index
from .errors import ConvertFailed
from .layout import Layout, Piece, note
from .target import Target, matched

_LAYER = re.compile(r"(?P<before>.*?)decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)\Z")
_MODEL = ("decoder.", "embedding.", "output_layer.")
_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_norm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_PER_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}


class Segment(NamedTuple):
    """Rows [first, first + num) of a Megatron tensor are rows [to, to + num) of `name`."""

    name: str
    first: int
    num: int
    to: int


class _Key(NamedTuple):
    """A Megatron key taken apart: `layer` is None outside of layers and in stacked ones."""

    rest: str
    in_layers: bool
    layer: int | None


def is_megatron(keys: Iterable[str]) -> bool:
    """Whether a DCP folder's keys are Megatron's."""
    return any(k.endswith("embedding.word_embeddings.weight") for k in keys)


class MegatronFolder:
    """A `dist_ckpt` folder, seen as the Hugging Face model that it holds."""

    kind = "Megatron dist_ckpt"

    def __init__(self, folder: Path, target: Target) -> None:
        """Read the metadata, not the weights.

        Raises:
            ConvertFailed: a tensor that is not in models of this kind, or of another shape.
        """
        self._where = folder / METADATA
        self._target = target
        index = {k: s for k, s in read_index(folder).items() if k.startswith(_MODEL)}
        self._index: Mapping[str, Stored] = index
        self._chunks = [c for s in index.values() for c in s.chunks]
        self.files: Sequence[Path] = [self._where, *check_files(self._chunks)]
        self._segments = {key: self._route(key, stored) for key, stored in index.items()}

    def layouts(self) -> dict[str, Layout]:
        """See Source."""
        layouts: dict[str, Layout] = {}
        for chunk in self._chunks:
            stored = self._index[chunk.key]
            for name, box, _ in self._parts(chunk):
                shape = self._target.shapes.get(name, self._shape(chunk.key, name))
                note(layouts, name, shape, (box, chunk.path), stored.dtype)
        matched(layouts, self._target, self._where)
        return layouts

    def pieces(self) -> Iterator[Piece]:
        """See Source."""
        for chunk, tensor in read_chunks(self._chunks):
            for name, box, cut in self._parts(chunk):
                yield Piece(name, box, _cut(tensor, cut), chunk.path)

    def _shape(self, key: str, name: str) -> Shape:
        """The shape of a tensor that the target has not, from its segments."""
        parsed, stored = _parse(key), self._index[key]
        tail = stored.shape[2:] if _is_stacked(parsed) else stored.shape[1:]
        suffix = name.split(".", 3)[-1] if parsed.in_layers else name
        return (sum(s.num for s in self._segments[key] if s.name == suffix), *tail)

    def _parts(self, chunk: Chunk) -> Iterator[tuple[str, Box, tuple[int | None, int, int]]]:
        """Where a chunk's rows go: name, box there, and (layer in the chunk, first row, end)."""
        parsed = _parse(chunk.key)
        is_stacked = _is_stacked(parsed)
        start, shape = chunk.box.start, chunk.box.shape
        layers: list[tuple[int | None, int | None]] = [(None, parsed.layer)]
        if is_stacked:
            layers = [(n, start[0] + n) for n in range(shape[0])]
            start, shape = start[1:], shape[1:]
        for inside, layer in layers:
            before = "" if layer is None else f"model.layers.{layer}."
            for segment in self._segments[chunk.key]:
                low = max(segment.first, start[0])
                high = min(segment.first + segment.num, start[0] + shape[0])
                if low < high:
                    to = (low - segment.first + segment.to, *start[1:])
                    box = Box(to, (high - low, *shape[1:]))
                    yield before + segment.name, box, (inside, low - start[0], high - start[0])

    def _route(self, key: str, stored: Stored) -> list[Segment]:
        """Where the rows of a tensor belong.

        Raises:
            ConvertFailed: an unknown name, or a number of rows that config.json does not give.
        """
        parsed = _parse(key)
        num_rows = stored.shape[1] if _is_stacked(parsed) else stored.shape[0]
        if not parsed.in_layers and parsed.rest in _WHOLE:
            return self._whole(key, _WHOLE[parsed.rest], num_rows)
        if parsed.in_layers and parsed.rest in _PER_LAYER:
            return [Segment(_PER_LAYER[parsed.rest], 0, num_rows, 0)]
        what, _, kind = parsed.rest.rpartition(".")
        joined = {"self_attention.linear_qkv": self._qkv, "mlp.linear_fc1": self._gate_up}
        segments = joined.get(what)
        if not parsed.in_layers or segments is None or kind not in ("weight", "bias"):
            raise ConvertFailed(
                f"{self._where}: {key} is in no Llama or Qwen2 model; experts, vision parts and "
                "adapters are not supported. Convert it with Megatron's own tool."
            )
        found = segments(kind)
        if (wanted := sum(s.num for s in found)) != num_rows:
            raise ConvertFailed(
                f"{self._where}: {key} has {num_rows} rows, the model of {self._target.config} "
                f"{wanted}. Name the model that was trained with --base-model-dir."
            )
        return found

    def _whole(self, key: str, name: str, num_rows: int) -> list[Segment]:
        """A tensor that has one name; rows that only pad the vocabulary are left out."""
        wanted = self._target.shapes.get(self._target.tied.get(name, name), (num_rows,))[0]
        if num_rows < wanted:
            raise ConvertFailed(
                f"{self._where}: {key} has {num_rows} rows, the model of {self._target.config} "
                f"{wanted}. Name the model that was trained with --base-model-dir."
            )
        return [Segment(name, 0, wanted, 0)]

    def _qkv(self, kind: str) -> list[Segment]:
        """Rows of one group after the other: its queries, its key, its value."""
        heads, groups, width = self._heads()
        per_group, segments, row = heads // groups * width, [], 0
        for group in range(groups):
            for name, num in (("q", per_group), ("k", width), ("v", width)):
                segments.append(Segment(f"self_attn.{name}_proj.{kind}", row, num, group * num))
                row += num
        return segments

    def _gate_up(self, kind: str) -> list[Segment]:
        """The gate's rows, then the up projection's."""
        num = int(self._value("intermediate_size"))
        return [
            Segment(f"mlp.gate_proj.{kind}", 0, num, 0),
            Segment(f"mlp.up_proj.{kind}", num, num, 0),
        ]

    def _heads(self) -> tuple[int, int, int]:
        """Query heads, key-value groups, rows a head."""
        heads = int(self._value("num_attention_heads"))
        groups = int(self._target.values.get("num_key_value_heads") or heads)
        width = self._target.values.get("head_dim") or self._value("hidden_size") // heads
        return heads, groups, int(width)

    def _value(self, key: str) -> int:
        value = self._target.values.get(key)
        if not isinstance(value, int):
            raise ConvertFailed(f"{self._target.config}: has no {key}, which the split needs.")
        return value


def _parse(key: str) -> _Key:
    match = _LAYER.match(key)
    if match is None:
        return _Key(key, False, None)
    layer = match["layer"]
    return _Key(match["rest"], True, None if layer is None else int(layer))


def _is_stacked(key: _Key) -> bool:
    return key.in_layers and key.layer is None


def _cut(tensor: Tensor, cut: tuple[int | None, int, int]) -> Tensor:
    layer, low, high = cut
    return (tensor if layer is None else tensor[layer])[low:high]
