"""Sequences of different length through one transformer pass: no padding outside attention, little inside it.

Invariant: sequence i gets the hidden states that it would get alone, whatever the batch holds beside it.

All tokens run as one row of T through embeddings, linear layers and norms, where padding would cost as much as words (8
views of a caption in one padded block: 68 % padding). Only attention needs sequences apart: there the tokens are copied
into a few blocks of like length (6 groups: 11 %), and back. One pass also launches each GPU kernel once, not once a
group.

Shapes: N sequences, T tokens, P positions of all padded blocks, H heads, d dimensions a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from infra.errors import InputError
from trainer.data.ragged import Ragged, length_groups

ATTENTION = "goodviews_packed"
"Name under which `register_attention` makes the attention known to transformers."


@dataclass(frozen=True, eq=False, kw_only=True)
class Packing:
    """Where each token stands in the padded blocks that attention sees."""

    index_P: Tensor
    "Token at each position of the blocks, one block after another; token 0 where there is padding."
    is_token_P1: Tensor
    "Whether the position holds a token."
    place_T: Tensor
    "Position of each token: the inverse of `index_P`."
    blocks: tuple[tuple[int, int, Tensor | None], ...]
    "Sequences, longest length and key mask (n, 1, 1, length) of each block; no mask where nothing is padded."


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """N sequences on a device, ordered by length inside; everything an encoder returns is back in the order given."""

    ids_T: Tensor
    positions_T: Tensor
    lengths_N: Tensor
    "Tokens of each sequence, in the inner order."
    restore_N: Tensor
    "Inner place of each sequence as it was given."
    followed_M: Tensor
    "Tokens that have a next one in their sequence, M = T - N."
    packing: Packing
    longest: int
    largest_id: int

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences, T."""
        return len(self.ids_T)

    @property
    def padding_share(self) -> float:
        """Share of padding among the positions that attention works on; nothing else is padded."""
        return 1.0 - self.n_tokens / len(self.packing.index_P)

    @classmethod
    def from_ragged(cls, ragged: Ragged, *, groups: int = 6, device: torch.device | str = "cpu") -> TokenBatch:
        """The sequences on `device`, in at most `groups` blocks of like length.

        Raises InputError when there is no sequence, or an empty one: its mean would be 0 / 0.
        """
        shortest = int(ragged.lengths.min()) if len(ragged) else 0
        if shortest < 1:
            raise InputError(
                f"A batch of {len(ragged):,} sequences with {shortest} tokens in the shortest cannot be encoded: each "
                "needs at least one token. Check the tokenizer, which should add [CLS] and [SEP]."
            )
        by_group = length_groups(ragged.lengths, groups)
        order = np.concatenate(by_group)
        inner = ragged.take(order)
        positions = np.arange(len(inner.tokens)) - np.repeat(inner.offsets[:-1], inner.lengths)
        is_last = np.zeros(len(inner.tokens), bool)
        is_last[inner.offsets[1:] - 1] = True
        target = torch.device(device)
        return cls(
            ids_T=_to(inner.tokens.astype(np.int64), target),
            positions_T=_to(positions, target),
            lengths_N=_to(inner.lengths, target),
            restore_N=_to(np.argsort(order), target),
            followed_M=_to(np.flatnonzero(~is_last), target),
            packing=_packing(inner, [len(rows) for rows in by_group], target),
            longest=int(inner.lengths.max()),
            largest_id=int(inner.tokens.max()),
        )


def _packing(inner: Ragged, sizes: list[int], device: torch.device) -> Packing:
    indices, is_token, blocks, first = [], [], [], 0
    for size in sizes:
        starts = inner.offsets[first : first + size, None]
        lengths = inner.lengths[first : first + size, None]
        columns = np.arange(int(lengths.max()))
        mask = columns < lengths
        indices.append(np.where(mask, starts + columns, 0).ravel())
        is_token.append(mask.ravel())
        block_mask = None if mask.all() else _to(mask[:, None, None, :], device)
        blocks.append((size, len(columns), block_mask))
        first += size
    flags = np.concatenate(is_token)
    return Packing(
        index_P=_to(np.concatenate(indices), device),
        is_token_P1=_to(flags[:, None], device),
        place_T=_to(np.flatnonzero(flags), device),
        blocks=tuple(blocks),
    )


def moved(x: Tensor, device: torch.device) -> Tensor:
    """`x` of the host on `device`, without waiting for what is queued there (a copy from pageable memory would)."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return moved(torch.from_numpy(array), device)


def register_attention() -> None:
    """Make `ATTENTION` known to transformers; harmless when it is already."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of each token to its own sequence: query, key, value (1, H, T, d) in, (1, T, H, d) out.

    The signature is transformers'; `packing` comes through the model's keyword arguments. Raises InputError without it.
    """
    packing: Packing | None = options.get("packing")
    if packing is None or attention_mask is not None or len(query) != 1:
        raise InputError(
            "Packed attention was called without its packing or with a mask, so it cannot tell the sequences apart. "
            "Call `TextEncoder.pooled`, or load an exported encoder with AutoModel."
        )
    heads, width = query.shape[1], query.shape[3]
    q_PHd, k_PHd, v_PHd = (_padded(x[0].transpose(0, 1), packing) for x in (query, key, value))
    mixed, first = [], 0
    for n, length, mask in packing.blocks:
        rows = slice(first, first + n * length)
        q, k, v = (x[rows].view(n, length, heads, width).transpose(1, 2) for x in (q_PHd, k_PHd, v_PHd))
        # Padding stands behind the tokens, so a causal mask hides it already; SDPA takes one of the two.
        attended = functional.scaled_dot_product_attention(
            q, k, v,
            attn_mask=None if module.is_causal else mask,
            is_causal=bool(module.is_causal),
            dropout_p=options.get("dropout", 0.0),
            scale=options.get("scaling"),
        )  # fmt: skip
        mixed.append(attended.transpose(1, 2).reshape(n * length, heads, width))
        first += n * length
    return _unpadded(torch.cat(mixed), packing)[None], None


def _padded(x_THd: Tensor, packing: Packing) -> Tensor:
    padded: Tensor = _Pad.apply(x_THd, packing.index_P, packing.place_T)  # type: ignore[no-untyped-call]
    return padded


def _unpadded(x_PHd: Tensor, packing: Packing) -> Tensor:
    places = packing.index_P, packing.place_T, packing.is_token_P1
    unpadded: Tensor = _Unpad.apply(x_PHd, *places)  # type: ignore[no-untyped-call]
    return unpadded


class _Pad(torch.autograd.Function):
    """Tokens into blocks. Both directions are gathers: autograd's own scatter is slower, and unordered on a GPU.

    What flows back into padding is dropped: padded keys are masked and padded queries unread, so it is exactly zero.
    """

    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, index_P: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        return x_THd.index_select(0, index_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Blocks back into tokens; padding gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x_PHd: Tensor, index_P: Tensor, place_T: Tensor, is_token_P1: Tensor) -> Tensor:
        ctx.save_for_backward(index_P, is_token_P1)
        return x_PHd.index_select(0, place_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        index_P, is_token_P1 = ctx.saved_tensors
        return grads[0].index_select(0, index_P) * is_token_P1[..., None], None, None, None
