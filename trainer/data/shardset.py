"""The shards of one split of a published version: what a plan is computed from, without reading a sample.

Invariants: the manifests define the set, so gaps in shard numbers mean nothing; a missing or cut-off tar is found here,
before any process group exists. Small and picklable: block lists stay in the manifests until a tar is read. Shapes: S
shards with at least one scene, in the order of their numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog import schema
from catalog.manifest import Manifest
from catalog.versions.published import Version, folder_sizes, missing_or_resized, read_records
from infra import seeds, storage
from infra.errors import ConfigError, InputError, IntegrityError
from infra.home import Home

THREADS: Final = 8

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSet:
    """S shards of one split. kind: which tars are read, good or bad."""

    folder: str
    "URL of the version."
    dataset: str
    version: str
    split: str
    kind: str
    numbers: I64
    "(S,) shard numbers, ascending"
    scenes: I64
    "(S,)"
    captions: I64
    "(S,)"
    captions_per_scene: dict[int, int]
    "Number of scenes by number of captions, all shards together."
    caption_seed: int
    "Root seed of the permutation of each scene's captions that the bad passes follow."
    bad_passes: int
    "P: epoch e of the bad arm shows the caption at place (e mod P) mod n."

    @property
    def name(self) -> str:
        """`dataset@version`, for messages."""
        return f"{self.dataset}@{self.version}"

    def manifest(self, ordinal: int) -> Manifest:
        """The whole manifest of the shard at place `ordinal`, block lists included.

        Raises IntegrityError when it is not the one this set was made from.
        """
        url = storage.join(self.folder, schema.manifest_path(self.split, int(self.numbers[ordinal])))
        manifest = Manifest.from_json(storage.read_bytes(url), url=url)
        found = (manifest.dataset, manifest.version, manifest.split, manifest.shard, manifest.scenes)
        if found != (self.dataset, self.version, self.split, int(self.numbers[ordinal]), int(self.scenes[ordinal])):
            raise IntegrityError(f"{url} changed since the plan was made: it is now of {found}. Make the plan again.")
        return manifest

    def facts(self) -> dict[str, Any]:
        """What of this set decides an order, as JSON values; not `kind`, as good and bad tars hold the same scenes."""
        rows = np.stack([self.numbers, self.scenes]).astype("<i8").tobytes()
        return {
            "dataset": self.dataset,
            "version": self.version,
            "split": self.split,
            "shards": hashlib.sha256(rows).hexdigest(),
            "caption_seed": self.caption_seed,
            "bad_passes": self.bad_passes,
        }


def open_shards(home: Home, dataset: str, version: str, split: str, *, kind: str = "good") -> ShardSet:
    """The shards of `split`, checked against job record, manifests and file sizes.

    Raises InputError for an unknown dataset, version or split, or when the version has no tars of that kind;
    IntegrityError when a tar is missing or has another size than its manifest says.
    """
    found = read_records(home, dataset, version)
    manifests = _with_scenes(found, split)
    seed = _single("caption seed", found.name, {m.seed for m in manifests})
    written = _single("number of bad passes", found.name, {m.bad_passes for m in manifests})
    # A version without bad tars still has the number of its source, which the bad arm at read time follows.
    passes = max(1, int(found.job.content.get("bad_passes") or written))
    _check_tars(found, manifests, split, kind, [None] if kind == "good" else list(range(passes)))
    histogram: Counter[int] = Counter()
    for m in manifests:
        histogram.update({int(n): count for n, count in m.captions_per_scene.items()})
    return ShardSet(
        folder=found.folder,
        dataset=dataset,
        version=version,
        split=split,
        kind=kind,
        numbers=np.array([m.shard for m in manifests], np.int64),
        scenes=np.array([m.scenes for m in manifests], np.int64),
        captions=np.array([m.captions for m in manifests], np.int64),
        captions_per_scene=dict(sorted(histogram.items())),
        caption_seed=seed,
        bad_passes=passes,
    )


def _with_scenes(found: Version, split: str) -> list[Manifest]:
    """Manifests of the split that hold a scene, by shard number."""
    of_split = [m for m in found.manifests if m.split == split]
    if not of_split:
        splits = sorted({m.split for m in found.manifests})
        raise InputError(f"{found.name} has no split {split!r}. Its splits are {', '.join(splits)}.")
    manifests = sorted((m for m in of_split if m.scenes), key=lambda m: m.shard)
    if not manifests:
        raise InputError(
            f"Split {split!r} of {found.name} holds no scene. All its texts were rejected; see its rejects."
        )
    return manifests


def _check_tars(found: Version, manifests: list[Manifest], split: str, kind: str, passes: Sequence[int | None]) -> None:
    """Raises InputError when a shard lacks a tar of that kind and passes, IntegrityError for one of another size."""
    kept = [dataclasses.replace(m, files=[f for f in m.files if f.kind == kind]) for m in manifests]
    if kind not in ("good", "bad") or any({f.bad_pass for f in m.files} != set(passes) for m in kept):
        there = sorted({f.kind for m in manifests for f in m.files} & {"good", "bad"})
        raise InputError(
            f"{found.name} has no {kind} tars in split {split!r}, or not all (it has: {', '.join(there) or 'none'})."
            f" Ingest it with `--set views={kind}`."
        )
    problems = missing_or_resized(dataclasses.replace(found, manifests=kept), folder_sizes(found.folder))
    if problems:
        more = f" ({len(problems) - 1} more tars are wrong too.)" if len(problems) > 1 else ""
        raise IntegrityError(problems[0][1] + more)


def _single(what: str, name: str, values: set[int]) -> int:
    if len(values) != 1:
        raise IntegrityError(
            f"The manifests of {name} disagree on the {what}: {sorted(values)}. They are of different jobs; ingest"
            " again."
        )
    return values.pop()


# --- selections ---------------------------------------------------------------------------------------------------


def role_mask(roles: tuple[str, ...]) -> NDArray[np.bool_]:
    """For each place in `catalog.schema.ROLES` whether its captions may be drawn; no roles means all.

    Raises ConfigError for an unknown role.
    """
    unknown = [role for role in roles if role not in schema.ROLES]
    if unknown:
        raise ConfigError(f"There is no role {unknown[0]!r}. Roles are {', '.join(schema.ROLES)}.")
    return np.array([not roles or role in roles for role in schema.ROLES])


def read_excluded(url: str | None) -> U64:
    """Sorted hashes of the scene keys in a text file, one a line; empty lines and none at all are fine."""
    if url is None:
        return np.zeros(0, np.uint64)
    try:
        lines = storage.read_bytes(url).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The list of excluded scenes {url} is not UTF-8 text. Write one scene key a line."
        ) from error
    return np.unique(seeds.hash_keys([line.strip() for line in lines if line.strip()]))


def count_selected(shards: ShardSet, home: Home, *, roles: tuple[str, ...], excluded: U64) -> I64:
    """Scenes of each shard (S,) that are not excluded and have a caption of one of `roles`.

    Manifests do not count roles, so the key and role columns of the scenes are read once (no text) and the counts kept
    below HOME/cache/selections. The stream counts again when it reads a shard and refuses a difference.
    """
    wanted = role_mask(roles)
    if wanted.all() and not len(excluded):
        return shards.scenes.copy()
    content = orjson.dumps(
        [shards.facts(), wanted.tolist(), hashlib.sha256(excluded.astype("<u8").tobytes()).hexdigest()]
    )
    name = f"{shards.split}-{hashlib.sha256(content).hexdigest()[:16]}.json"
    url = storage.join(home.url, "cache", "selections", shards.dataset, shards.version, name)
    if storage.exists(url):
        return np.array(orjson.loads(storage.read_bytes(url))["scenes"], np.int64)
    count = _counter(shards, wanted, excluded)
    with ThreadPoolExecutor(THREADS) as pool:
        counts = np.array(list(pool.map(count, shards.numbers.tolist())), np.int64)
    storage.publish(url, orjson.dumps({"roles": list(roles), "scenes": counts.tolist()}))
    return counts


def _counter(shards: ShardSet, wanted: NDArray[np.bool_], excluded: U64) -> Callable[[int], int]:
    names = {role for role, is_wanted in zip(schema.ROLES, wanted.tolist(), strict=True) if is_wanted}

    def count(shard: int) -> int:
        url = storage.join(shards.folder, schema.scenes_path(shards.split, shard))
        with storage.open_read(url) as file:
            table = pq.ParquetFile(file).read(columns=["scene_key", "captions.list.element.role"])
        captions = table["captions"].combine_chunks()
        role = captions.flatten().field("role").dictionary_encode()
        has = np.array([name in names for name in role.dictionary.to_pylist()], bool)[role.indices.to_numpy()]
        offsets = captions.offsets.to_numpy()
        kept = np.add.reduceat(np.append(has, False).astype(np.int64), offsets[:-1]) > 0
        if len(excluded):
            kept &= ~np.isin(seeds.hash_keys(table["scene_key"].to_pylist()), excluded)
        return int(np.count_nonzero(kept))

    return count
