"""Leave out of a dataset the scenes that an evaluation set also holds.

Invariant: a scene is left out whole or not at all; its texts become rejects `excluded` that name the set and the kind
of match. Which scenes are left out depends on the scene and the versions of the sets alone.

Two scenes count as one when they have one photo (`id`), the same bytes (`sha256`) or the same set of captions
(`caption_set`). One shared caption is not enough: `a dog runs` describes many photos. To keep every evaluated caption
out of the training texts, add `captions`; it leaves out every scene that holds one of them. `catalog.overlap.exclusion`
has the keys of the sets.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from catalog.overlap import exclusion, identity
from catalog.overlap.parts import Part
from infra import storage
from infra.errors import ConfigError, InputError, UsageError
from infra.home import Home
from pipelines.arrays import Ints, column, is_none, run_starts
from pipelines.ingest import lookup
from pipelines.ingest.group import Scenes, kept_forms

PART_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class ExcludeConfig:
    """Sets whose scenes are left out; their versions are part of the version of the dataset."""

    sets: tuple[str, ...] = ()
    "Each `DATASET[@VERSION][:SPLIT]`, ingested before."
    by: str = "id,sha256,caption_set"
    "What makes two scenes one: id, sha256, caption_set, captions; separated by commas."

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
    """The file of keys and the meaning of its numbers; small, because every task carries it."""

    url: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    source: str
    "Name of the source of the scenes that are ingested."


def resolve(home: Home, dataset: str, config: ExcludeConfig) -> tuple[Part, ...]:
    """The parts that the options name, at their current versions.

    Raises UsageError when one is of the dataset itself, InputError when the catalog does not hold one, or no scene of
    one can be recognised: then nothing would be left out, as if the two had nothing in common.
    """
    if not config.sets:
        return ()
    parts = exclusion.resolve_parts(home, config.sets)
    for part in parts:
        if part.dataset == dataset:
            raise UsageError(
                f"--exclude {part.name} is of the dataset that is ingested, so every scene would be left out. Ingest "
                "the evaluation set under a name of its own."
            )
    if mute := exclusion.mute_parts(home, parts, config.kinds):
        raise InputError(
            f"Nothing of {', '.join(mute)} can be recognised by {', '.join(config.kinds)}: its ids name nothing "
            "outside it, it records no image hash, or its scenes have one caption each. So nothing would be left out; "
            "add captions to exclude.by, or ingest it with ids or hashes."
        )
    return parts


def publish_keys(home: Home, parts: tuple[Part, ...], task: Exclusion) -> None:
    """Write the file of keys, unless a killed run wrote it."""
    if not storage.exists(task.url):
        lookup.publish(task.url, exclusion.keys_of(home, parts, task.kinds))


def leave_out(scenes: Scenes, task: Exclusion) -> Scenes:
    """The same scenes with a reason for every text of the scenes that a set also holds."""
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
    # Of several matches of a scene, the first kind and then the first set is its reason.
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
    """(scene, value) of every match of one kind that a scene could have."""
    if kind == "id":
        return _identities(scenes, task.source)
    if kind == "sha256":
        shas = column(scenes.records, "image_sha256").to_pylist()
        pairs = zip(scenes.record_scene.tolist(), shas, strict=True)
        return [(scene, sha.lower()) for scene, sha in pairs if scene >= 0 and sha and sha.lower() != identity.NO_BYTES]
    rows, texts = kept_forms(scenes)
    forms = list(zip(scenes.text_scene[rows].tolist(), texts, strict=True))
    if kind == "captions":
        return forms
    by_scene: dict[int, list[str]] = {}
    for scene, form in forms:
        by_scene.setdefault(scene, []).append(form)
    sets = ((scene, identity.caption_set(captions)) for scene, captions in by_scene.items())
    return [(scene, name) for scene, name in sets if name is not None]


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
