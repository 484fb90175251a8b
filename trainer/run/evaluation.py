"""Evaluation of an encoder during training: pooled vectors, and the next-token loss of a validation split.

Invariant: no gradients, no dropout, no random numbers, and the encoder is in train mode afterwards, so evaluation does
not change the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from infra.errors import GoodviewsError
from trainer.data.cache import TokenCache
from trainer.data.ragged import Ragged
from trainer.data.shardset import open_shards
from trainer.data.views import Draws, make_views, whole_captions
from trainer.model import distributed
from trainer.model.encoder import TextEncoder
from trainer.run.assembly import Materials

ROWS = 256
"Captions in a forward pass."


@contextlib.contextmanager
def evaluating(encoder: TextEncoder, *, is_bf16: bool) -> Iterator[None]:
    """Eval mode without gradients, in the precision of training; then train mode again."""
    encoder.eval()
    device = next(encoder.parameters()).device.type
    try:
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=is_bf16):
            yield
    finally:
        encoder.train()


def pooled(encoder: TextEncoder, ragged: Ragged, *, rows: int, is_bf16: bool) -> torch.Tensor:
    """Pooled vectors (rows, D) of the first sequences."""
    with evaluating(encoder, is_bf16=is_bf16):
        vectors: torch.Tensor = encoder.pooled(encoder.batch(ragged.take(np.arange(rows))))
    return vectors


def validation_loss(
    encoder: TextEncoder, materials: Materials, split: str, rank: int, world: int, *, is_bf16: bool
) -> float:
    """Mean next-token loss over one whole caption of each scene of `split`, equal on every rank.

    Each epoch measures the same caption, the first of the scene's permutation. A collective: every rank calls it.
    """
    # Sums of losses and of tokens, in float64 so that the mean hardly depends on the number of ranks.
    total = torch.zeros(2, dtype=torch.float64)
    with evaluating(encoder, is_bf16=is_bf16):
        for ragged in _captions(materials, split):
            mine = np.arange(rank, len(ragged), world)
            for start in range(0, len(mine), ROWS):
                loss, count = encoder.next_token_loss(encoder.batch(ragged.take(mine[start : start + ROWS])))
                total += torch.tensor([float(loss), float(count)], dtype=torch.float64)
    device = next(encoder.parameters()).device
    summed, tokens = distributed.all_reduce_sum(total.to(device)).tolist()
    if tokens == 0:
        message = (
            f"Split {split!r} has no token to predict. Set data.validation_split to another split, or leave it out."
        )
        raise GoodviewsError(message)
    return float(summed / tokens)


def _captions(materials: Materials, split: str) -> Iterator[Ragged]:
    """One whole caption of each scene, shard by shard."""
    data = materials.recipe.data
    shards = open_shards(materials.home, data.dataset, materials.shards.version, split)
    cache = TokenCache(shards, materials.tokenizer, materials.home)
    # Caption 0 of the permutation, whatever the seed of the training.
    draws = Draws(seed=0, epoch=0, good_fraction=0.0, caption_seed=shards.caption_seed, bad_passes=1)
    views = whole_captions(1, max_tokens=materials.recipe.views.max_tokens)
    for ordinal in range(len(shards.numbers)):
        yield make_views(cache.open(ordinal).captions, draws, views, materials.tokenizer.special)[0]
