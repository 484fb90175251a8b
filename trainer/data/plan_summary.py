"""What a plan comes to, in numbers that `--plan` prints before anything is started.

Invariant: steps, samples and drops are exact; tokens are an estimate and say where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog import schema
from infra import storage
from trainer.data.cache import TokenCache
from trainer.data.plan import Plan
from trainer.data.shardset import role_mask

BYTES_PER_TOKEN: Final = 4.6
"With spaces: 4.6 on Flickr30k captions, 3.9 on LAION alt texts, each with a WordPiece vocabulary of 8,192."
SAMPLED_SHARDS: Final = 8
"Whose parquet footers are read when no token file is there."


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """The numbers of a plan. `None`: cannot be known from manifests."""

    dataset: str
    version: str
    split: str
    digest: str
    shards: int
    scenes: int
    "Of the split."
    scenes_left_out: int
    "By roles and exclusions."
    captions: int
    "Of the split, all roles."
    batch_global: int
    lanes: int
    steps_per_epoch: int
    steps: int
    epochs: float
    samples: int
    "Seen in all."
    drops_per_epoch: int
    drops: int
    "Scenes that an epoch leaves out because they do not fill a batch, summed over whole epochs."
    repeats: int | None
    "Samples of the bad arm that show a scene's caption again; 0 for good views, which draw with replacement anyway."
    tokens_per_epoch: int
    tokens: int
    "Caption tokens read in all: all captions of a good sample, one of a bad one."
    tokens_from: str
    "`cache` (all shards), `part of the cache`, or `bytes`."


def plan_facts(plan: Plan, cache: TokenCache | None) -> PlanFacts:
    """Count and estimate; reads headers of token files or a few parquet footers, never a caption."""
    shards, config = plan.shards, plan.config
    per_scene_good, per_caption, source = _tokens(plan, cache)
    share = config.good_fraction
    seen = plan.steps_per_epoch * config.batch_global
    per_sample = share * per_scene_good + (1.0 - share) * per_caption
    samples = plan.total_steps * config.batch_global
    return PlanFacts(
        dataset=shards.dataset,
        version=shards.version,
        split=shards.split,
        digest=plan.digest,
        shards=len(shards.numbers),
        scenes=int(shards.scenes.sum()),
        scenes_left_out=int(shards.scenes.sum()) - plan.scenes_per_epoch,
        captions=int(shards.captions.sum()),
        batch_global=config.batch_global,
        lanes=config.lane_count,
        steps_per_epoch=plan.steps_per_epoch,
        steps=plan.total_steps,
        epochs=plan.total_steps / plan.steps_per_epoch,
        samples=samples,
        drops_per_epoch=plan.drops_per_epoch,
        drops=plan.drops_per_epoch * (plan.total_steps // plan.steps_per_epoch),
        repeats=_repeats(plan),
        tokens_per_epoch=round(per_sample * seen),
        tokens=round(per_sample * samples),
        tokens_from=source,
    )


def _repeats(plan: Plan) -> int | None:
    """Over whole epochs: a scene with n captions shows min(n, P, epochs) different ones."""
    if plan.config.good_fraction > 0:
        return 0 if plan.config.good_fraction == 1 else None
    if plan.config.roles or len(plan.excluded) or plan.drops_per_epoch:
        # The histogram counts all captions of all scenes; what was dropped or left out is not known from it.
        return None
    epochs = plan.total_steps // plan.steps_per_epoch
    shown = {n: min(n, plan.shards.bad_passes, epochs) for n in plan.shards.captions_per_scene}
    return sum(count * (epochs - shown[n]) for n, count in plan.shards.captions_per_scene.items())


def _tokens(plan: Plan, cache: TokenCache | None) -> tuple[float, float, str]:
    """(tokens of a scene, tokens of a caption, source), both over the captions that may be drawn."""
    shards, wanted = plan.shards, role_mask(plan.config.roles)
    scenes = max(1, plan.scenes_per_epoch)
    found = _cached(plan, cache)
    if found is not None:
        tokens, captions, share = found
        wanted_tokens, wanted_captions = float(tokens[wanted].sum()), float(captions[wanted].sum())
        # captions.sum() / share is the split's number of captions when only a part of the shards is cached.
        per_caption = wanted_tokens / max(1.0, wanted_captions)
        per_scene = (
            per_caption * (wanted_captions / max(1.0, float(captions.sum()))) * float(shards.captions.sum()) / scenes
        )
        return per_scene, per_caption, "cache" if share == 1.0 else "part of the cache"
    text_bytes, count = _text_bytes(plan)
    per_caption = text_bytes / max(1, count) / BYTES_PER_TOKEN
    return per_caption * float(shards.captions.sum()) / float(shards.scenes.sum()), per_caption, "bytes"


def _cached(plan: Plan, cache: TokenCache | None) -> tuple[NDArray[np.int64], NDArray[np.int64], float] | None:
    """(tokens by role, captions by role, share of shards) of the good token files that are there."""
    if cache is None or plan.shards.kind != "good":
        return None
    counts = [c for c in (cache.token_counts(i) for i in range(len(plan.scenes))) if c is not None]
    if not counts:
        return None
    return (
        np.sum([c[0] for c in counts], axis=0),
        np.sum([c[1] for c in counts], axis=0),
        len(counts) / len(plan.scenes),
    )


def _text_bytes(plan: Plan) -> tuple[int, int]:
    """(UTF-8 bytes, captions) of a few shards spread over the split, from the footers of their parquet."""
    shards = plan.shards
    ordinals = np.unique(np.linspace(0, len(shards.numbers) - 1, SAMPLED_SHARDS).astype(np.int64))
    total = 0
    for ordinal in ordinals.tolist():
        url = storage.join(shards.folder, schema.scenes_path(shards.split, int(shards.numbers[ordinal])))
        with storage.open_read(url) as file:
            metadata = pq.read_metadata(file)
        for group in range(metadata.num_row_groups):
            columns = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
            total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == "captions.list.element.text")
    captions = int(shards.captions[ordinals].sum())
    return max(0, total - 4 * captions), captions  # a plain value is stored behind its length, 4 bytes
