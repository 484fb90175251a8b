"""Scenes that an evaluation set holds too, left out of a dataset as it is ingested.

Owns: the options, the keys of a scene, and the reason of its texts. Does not own: the keys of the sets (`catalog.overlap.exclusion`).
Invariant: a scene is left out whole or not at all; its texts are rejects `excluded` that name the set and the kind of match, so
texts read stay kept + rejects. Which scenes are left out depends on the scene and the sets' versions alone.

Two scenes are taken for one when they are one photo (`id`), the same bytes (`sha256`) or described by the same set of captions
(`caption_set`). One shared caption does not make them one: `a dog runs` is said of many photos. Whoever wants no evaluated caption
in the training texts at all adds `captions`; it leaves out every scene that holds one of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from catalog.overlap import exclusion, identity
from catalog.overlap.leakage import Part
from catalog.wording import normal_form
from infra import storage
from infra.errors import ConfigError, InputError, UsageError
from infra.home import Home
from pipelines.arrays import Ints, column, is_none, run_starts
from pipelines.ingest import lookup
from pipelines.ingest.group import Scenes

PART_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class ExcludeConfig:
    """Sets whose scenes are left out; the versions they are found at are part of the dataset's version."""

    sets: tuple[str, ...] = ()
    "Each `DATASET[@VERSION][:SPLIT]`, ingested before."
    by: str = "id,sha256,caption_set"
    "What makes two scenes one: id, sha256, caption_set, captions; commas between."

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - set(exclusion.BY))
        if unknown or not self.kinds:
            named = f"names {unknown[0]!r}" if unknown else "is empty"
            raise ConfigError(f"exclude.by {named}; known are {', '.join(exclusion.BY)}, separated by commas.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds in `by`, in the order in which they are tried."""
        names = {name.strip() for name in self.by.split(",") if name.strip()}
        return tuple(sorted(names, key=lambda n: (exclusion.BY.index(n) if n in exclusion.BY else -1, n)))


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """What a shard task needs: the file of keys and what its numbers mean. Small, because every task carries it."""

    url: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    source: str
    "Kind of source of the scenes that are ingested."


def resolve(home: Home, dataset: str, config: ExcludeConfig) -> tuple[Part, ...]:
    """The parts that the options name, at their versions of now.

    Raises UsageError when one is of the dataset itself, InputError when the catalog does not hold one, or nothing of one
    can be recognised: leaving out nothing would look like having nothing in common.
    """
    if not config.sets:
        return ()
    parts = exclusion.resolve_parts(home, config.sets)
    for part in parts:
        if part.dataset == dataset:
            message = f"--exclude {part.name} is of the dataset that is ingested, so all of it would leave itself out. Ingest the evaluation set under a name of its own."
            raise UsageError(message)
    if mute := exclusion.mute_parts(home, parts, config.kinds):
        message = f"Nothing of {', '.join(mute)} can be recognised by {', '.join(config.kinds)}: its ids name nothing outside it, it records no image hash, or its scenes have one caption each. So nothing would be left out; add captions to exclude.by, or ingest it with ids or hashes."
        raise InputError(message)
    return parts


def publish_keys(home: Home, parts: tuple[Part, ...], task: Exclusion) -> None:
    """Write the file of keys, unless it is there already (a rerun of a killed job)."""
    if not storage.exists(task.url):
        lookup.publish(task.url, exclusion.keys_of(home, parts, task.kinds))


def leave_out(scenes: Scenes, task: Exclusion) -> Scenes:
    """The same scenes with a reason for every text of those that a set holds."""
    keys: list[bytes] = []
    owners: list[int] = []
    ranks: list[int] = []
    for rank, kind in enumerate(task.kinds):
        for owner, value in _values(scenes, task, kind):
            keys.append(identity.key(kind, value))
            owners.append(owner)
            ranks.append(rank)
    found, numbers = lookup.find(task.url, keys, width=PART_BYTES)
    part = np.ascontiguousarray(numbers).view("<u2").reshape(-1)
    best: dict[int, tuple[int, int]] = {}
    for row in np.flatnonzero(found).tolist():
        match = ranks[row], int(part[row])
        best[owners[row]] = min(best.get(owners[row], match), match)
    if not best:
        return scenes
    reason, detail = scenes.reason.copy(), dict(scenes.detail)
    gone = is_none(reason) & np.isin(scenes.text_scene, np.fromiter(best, np.int64, len(best)))
    for row in np.flatnonzero(gone).tolist():
        rank, number = best[int(scenes.text_scene[row])]
        reason[row], detail[row] = "excluded", f"{task.names[number]} by {task.kinds[rank]}"
    return dataclasses.replace(scenes, reason=reason, detail=detail)


def _values(scenes: Scenes, task: Exclusion, kind: str) -> list[tuple[int, str]]:
    """(scene, value) of every thing of one kind; a scene without a kept text has none, since it is left out anyway."""
    if kind == "id":
        return _identities(scenes, task.source)
    if kind == "sha256":
        shas = column(scenes.records, "image_sha256").to_pylist()
        pairs = zip(scenes.record_scene.tolist(), shas, strict=True)
        return [(scene, sha.lower()) for scene, sha in pairs if scene >= 0 and sha and sha.lower() != identity.NO_BYTES]
    forms = _forms(scenes)
    if kind == "captions":
        return forms
    by_scene: dict[int, list[str]] = {}
    for scene, form in forms:
        by_scene.setdefault(scene, []).append(form)
    sets = ((scene, identity.caption_set(said)) for scene, said in by_scene.items())
    return [(scene, said) for scene, said in sets if said is not None]


def _identities(scenes: Scenes, source: str) -> list[tuple[int, str]]:
    first: Ints = run_starts(scenes.record_scene)
    first = first[scenes.record_scene[first] >= 0]
    taken = scenes.records.take(first)
    ids, uris, images = (column(taken, name).to_pylist() for name in ("source_id", "source_uri", "image_uri"))
    rows = column(taken, "source_row").to_pylist()
    found = []
    for scene, id_, uri, row, image in zip(scenes.record_scene[first].tolist(), ids, uris, rows, images, strict=True):
        if name := identity.identity(source, id_, address=f"{uri}#{row}", image_uri=image):
            found.append((scene, name))
    return found


def _forms(scenes: Scenes) -> list[tuple[int, str]]:
    """(scene, normal form) of every text that is kept so far and says something."""
    rows = np.flatnonzero(is_none(scenes.reason))
    texts = scenes.cleaned.take(rows).to_pylist()
    pairs = zip(scenes.text_scene[rows].tolist(), map(normal_form, texts), strict=True)
    return [(scene, form) for scene, form in pairs if form]
