"""Views: each draws a caption from its sample's group, then takes a span of it and hides some tokens.

Invariants: a view depends on (seed, epoch, scene key, view) and the caption, not on batch, rank or order; a view is
[CLS] span [SEP] with at least one token in the span, and at least one that is not hidden; [CLS] and [SEP] never are.
Randomness is a 64-bit hash of those names (`infra.seeds`), never a generator's state, so there is nothing to save or to
seed.

Good sample: each view draws its own caption of the scene, with replacement. Bad sample: all views share the caption at
place (epoch mod P) mod n of the scene's permutation, which is what pass (epoch mod P) of the bad tars holds. Source:
Balestriero and LeCun 2026, arXiv 2610.39302 (2 global spans of 50 to 100 %, 6 local of 15 to 50 %, 15 % hidden).
Legend: V views of a sample, S samples, C captions of all of them, T tokens of all views without [CLS] and [SEP].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from infra.errors import ConfigError, IntegrityError
from infra.seeds import derive, mix, permutation_places
from trainer.data.captions import I64, U64, Captions, ranges
from trainer.data.ragged import Ragged, offsets_of
from trainer.data.tokenizer import SpecialIds

_CAPTION, _LENGTH, _START, _MASK, _VISIBLE = (np.uint64(i) for i in range(1, 6))
_ROUNDING: Final = 1e-9
"Below the share of one token in any caption: .15 x 20 is 3 tokens although the product is 3.0000000000000004."


@dataclass(frozen=True, kw_only=True)
class ViewsConfig:
    """What a sample is cut into. Spans are shares of the caption's tokens (after `max_tokens`), lower and upper end."""

    n_global: int = 2
    n_local: int = 6
    global_span: tuple[float, float] = (0.5, 1.0)
    local_span: tuple[float, float] = (0.15, 0.5)
    masked: float = 0.15
    "Share of a view's tokens that are hidden behind [MASK], each by itself."
    max_tokens: int = 128
    "Of a view with its [CLS] and [SEP]: longer captions lose their end."
    distinct_captions: bool = False
    "A good sample's views take different captions as long as there are any, instead of drawing with replacement."

    def __post_init__(self) -> None:
        if self.n_global < 1 or self.n_local < 0:
            raise ConfigError(
                f"views.n_global is {self.n_global} and views.n_local {self.n_local}; a sample needs a global view at"
                " least."
            )
        for name, (low, high) in (("global_span", self.global_span), ("local_span", self.local_span)):
            if not 0.0 < low <= high <= 1.0:
                raise ConfigError(
                    f"views.{name} is [{low}, {high}]; it is a range of shares of the caption, such as [0.5, 1.0]."
                )
        if not 0.0 <= self.masked < 1.0:
            raise ConfigError(f"views.masked is {self.masked}; it is a share of the tokens, from 0 to below 1.")
        if self.max_tokens < 3:
            raise ConfigError(f"views.max_tokens is {self.max_tokens}; [CLS], one token and [SEP] take 3.")

    @property
    def n_views(self) -> int:
        """V."""
        return self.n_global + self.n_local

    @property
    def spans(self) -> NDArray[np.float64]:
        """(V, 2) lower and upper share of each view, the global ones first."""
        return np.array([self.global_span] * self.n_global + [self.local_span] * self.n_local, np.float64)


def whole_captions(n: int, *, max_tokens: int) -> ViewsConfig:
    """n whole captions, nothing hidden: next-token prediction (n = 1) and the arm of caption pairs (n = 2)."""
    return ViewsConfig(
        n_global=n, n_local=0, global_span=(1.0, 1.0), masked=0.0, max_tokens=max_tokens, distinct_captions=n > 1
    )


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What the draws of one epoch depend on besides the scene. caption_seed, bad_passes: of the dataset version."""

    seed: int
    epoch: int
    good_fraction: float
    caption_seed: int
    bad_passes: int


def make_views(captions: Captions, draws: Draws, config: ViewsConfig, special: SpecialIds) -> tuple[Ragged, int]:
    """The views of all samples, view-major: row v * S + i is view v of sample i, the global views first.

    Returns (V * S sequences, caption tokens read): a good sample reads all its captions, a bad one its single caption,
    as in the paper's count of 116B tokens for 940M images. Raises IntegrityError for a scene without captions.
    """
    if len(captions) and int(captions.counts.min()) == 0:
        raise IntegrityError(
            "A scene of the batch has no caption to show. The plan and the token cache disagree; delete the cache."
        )
    room = config.max_tokens - 2
    is_good_S = good_samples(captions.scene_hashes, draws)
    sample_S = mix(captions.scene_hashes ^ np.uint64(derive(draws.seed, "views", draws.epoch)))
    view_VS = mix(sample_S ^ mix(np.arange(config.n_views, dtype=np.uint64))[:, None])
    chosen_VS = _choose(captions, is_good_S, view_VS, draws, config)
    length_VS = np.minimum(captions.caption_offsets[chosen_VS + 1] - captions.caption_offsets[chosen_VS], room)
    start_VS, size_VS = _spans(view_VS, length_VS, config)
    views = _cut(captions, captions.caption_offsets[chosen_VS] + start_VS, size_VS, special)
    if config.masked:
        _hide(views, view_VS.ravel(), size_VS.ravel(), config.masked, special.mask)
    return views, _tokens_read(captions, is_good_S, chosen_VS[0], room)


def good_samples(scene_hashes: U64, draws: Draws) -> NDArray[np.bool_]:
    """(S,) whether each sample is good, with probability `good_fraction`, by hash of (seed, epoch, scene)."""
    if draws.good_fraction >= 1.0:
        return np.ones(len(scene_hashes), bool)
    salt = np.uint64(derive(draws.seed, "good", draws.epoch))
    return mix(scene_hashes ^ salt) < np.uint64(int(draws.good_fraction * 2.0**64))


def _choose(captions: Captions, is_good_S: NDArray[np.bool_], view_VS: U64, draws: Draws, config: ViewsConfig) -> I64:
    """Row among the captions (C,) that each view shows, (V, S)."""
    first, counts = captions.scene_offsets[:-1], captions.counts
    if config.distinct_captions:
        by_place = _by_place(captions, derive(draws.seed, "distinct", draws.epoch))
        chosen = by_place[first + np.arange(len(view_VS))[:, None] % counts]
    else:
        chosen = first + _below(view_VS + _CAPTION, counts)
    if not is_good_S.all():
        shown = _by_place(captions, draws.caption_seed)[first + draws.epoch % draws.bad_passes % counts]
        chosen = np.where(is_good_S, chosen, shown)
    return chosen


def _by_place(captions: Captions, seed: int) -> I64:
    """Captions (C,) in the order of the seeded permutation of their scene, scene after scene."""
    counts = captions.counts
    places = permutation_places(np.repeat(captions.scene_hashes, counts), captions.caption_index, seed)
    ordered = np.empty(len(places), np.int64)
    ordered[np.repeat(captions.scene_offsets[:-1], counts) + places] = np.arange(len(places))
    return ordered


def _spans(view_VS: U64, length_VS: I64, config: ViewsConfig) -> tuple[I64, I64]:
    """Start and size of each span: the size uniform among the whole numbers in its range of shares, at least 1."""
    low, high = config.spans[:, 0, None], config.spans[:, 1, None]
    smallest = np.maximum(1, np.ceil(low * length_VS - _ROUNDING)).astype(np.int64)
    largest = np.maximum(smallest, np.floor(high * length_VS + _ROUNDING).astype(np.int64))
    size = smallest + _below(view_VS + _LENGTH, largest - smallest + 1)
    return _below(view_VS + _START, length_VS - size + 1), size


def _cut(captions: Captions, source_VS: I64, size_VS: I64, special: SpecialIds) -> Ragged:
    """[CLS], `size` tokens from `source` on, [SEP], for each view."""
    source, size = source_VS.ravel(), size_VS.ravel()
    offsets = offsets_of(size + 2)
    tokens = np.empty(int(offsets[-1]), np.int32)
    is_text = np.ones(len(tokens), bool)
    is_text[offsets[:-1]] = is_text[offsets[1:] - 1] = False
    tokens[offsets[:-1]] = special.cls
    tokens[offsets[1:] - 1] = special.sep
    tokens[is_text] = captions.tokens[ranges(source, size)]
    return Ragged(tokens=tokens, offsets=offsets)


def _hide(views: Ragged, view_N: U64, size_N: I64, share: float, mask: int) -> None:
    """Put `mask` in the place of tokens, in place; each with probability `share`, but never all of a view."""
    edges = offsets_of(size_N)
    place_T = (np.arange(int(edges[-1])) - np.repeat(edges[:-1], size_N)).astype(np.uint64)
    draw_T = mix(np.repeat(mix(view_N + _MASK), size_N) + place_T)
    hidden_T = draw_T < np.uint64(int(share * 2.0**64))
    blind = np.flatnonzero(np.logical_and.reduceat(hidden_T, edges[:-1])) if len(size_N) else np.zeros(0, np.int64)
    hidden_T[edges[blind] + _below(view_N[blind] + _VISIBLE, size_N[blind])] = False
    # Text token t of view n stands behind n + 1 [CLS] and n [SEP].
    at = np.flatnonzero(hidden_T)
    views.tokens[at + 2 * (np.searchsorted(edges, at, side="right") - 1) + 1] = mask


def _tokens_read(captions: Captions, is_good_S: NDArray[np.bool_], shown_S: I64, room: int) -> int:
    lengths = np.minimum(captions.lengths, room)
    in_good = np.repeat(is_good_S, captions.counts)
    return int(lengths[in_good].sum() + lengths[shown_S[~is_good_S]].sum())


def _below(draw: U64, bound: NDArray[np.integer[Any]]) -> I64:
    """Numbers in [0, bound) from 64 random bits each: the upper 32 bits by multiply and shift (Lemire 2019).

    bound < 2^31. The bias is below bound / 2^32.
    """
    return ((mix(draw) >> np.uint64(32)) * bound.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
