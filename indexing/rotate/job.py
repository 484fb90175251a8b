"""The job behind `goodviews rotate`: fit a map between two embedding sets, score it on other scenes, and save it.

Invariants: no scene is both fitted on and scored; every result stands beside a random map and a map fitted on shuffled
pairs; a baseline is fitted and scored on the same scenes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from catalog.rows import embeddings
from catalog.rows.alignments import difference_row, digest_of, record_alignments
from catalog.rows.embeddings import EmbeddingRecord
from indexing.rotate import maps
from indexing.rotate.outcomes import Setting, Trial, differences, picks_table, rows_of, trial_of
from indexing.rotate.recall import Captions
from indexing.rotate.rotation import FittedMap, MapConfig, fit
from indexing.scores.records import place_of, plain
from indexing.sets.joins import ONE_A_SCENE, JoinConfig, Joined, common_rows, join, on_common_scenes, scene_vectors
from indexing.sets.leakage import leakage
from indexing.sets.spaces import differing, space_of
from indexing.uncertainty.bootstrap import BootstrapConfig
from indexing.uncertainty.divisions import Division, hashed_order, random_divisions
from infra import seeds
from infra.errors import InputError, UsageError
from infra.home import Home
from infra.vectors import Ids
from infra.version import code_version

LEAST_SCORED: Final = 2


@dataclass(frozen=True, kw_only=True)
class MappingConfig:
    """One call of `goodviews rotate`. Exactly one of fit, fit_pairs and fit_share chooses the fit pairs."""

    left: str
    right: str
    fit: str | None = None
    "Split to fit on; both models need a set of it."
    fit_pairs: int | None = None
    "Number of scenes of LEFT and RIGHT to fit on, drawn by hash; the others are scored."
    fit_share: float | None = None
    splits: int = 20
    "Random divisions, with fit_pairs and fit_share."
    pairs: int | None = None
    "Most fit pairs that are used."
    curve: tuple[int, ...] = ()
    "Further numbers of pairs to score."
    against: str | None = None
    map: MapConfig = field(default_factory=MapConfig)
    join: JoinConfig = field(default_factory=JoinConfig)
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.fit, self.fit_pairs, self.fit_share)) != 1:
            raise UsageError(
                "Where do the fit pairs come from? Name exactly one of --fit SPLIT, --fit-pairs N and --fit-share P."
            )
        if self.map.kind == "random":
            raise UsageError("The random map is a control and stands beside every other one. Name another --map.")
        if self.fit_share is not None and not 0 < self.fit_share < 1:
            raise UsageError(f"--fit-share is {self.fit_share}; it is a share between 0 and 1.")
        if self.splits < 1 or any(pairs is not None and pairs < 2 for pairs in (self.pairs, *self.curve)):
            raise UsageError("--splits must be 1 or more, --pairs and --curve 2 or more.")


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Scenes to fit on and to score, one table under random divisions. captions: of the scored scenes."""

    fit: Joined
    scored: Joined
    captions: Captions | None
    divisions: tuple[Division, ...]
    source: str

    @property
    def scored_digest(self) -> str:
        """Digest of the scored scenes and those to fit on, which with seed and number decide the random divisions."""
        return digest_of(self.scored.keys_S, self.fit.keys_S, [str(self.most)])

    @property
    def most(self) -> int:
        """Number of fit pairs of a division."""
        return len(self.divisions[0].fit)


def rotate_sets(home: Home, config: MappingConfig) -> list[dict[str, Any]]:
    """Fit, score, save the map of the first division, record; return the rows, then the differences to `against`.

    Raises InputError for sets that are not there or do not join, and where a side of a division would be empty.
    """
    left, right = embeddings.find(home, config.left), embeddings.find(home, config.right)
    tables = _tables(home, left, right, config)
    baseline = None if config.against is None else embeddings.find(home, config.against)
    if baseline is not None:
        tables, baseline_tables = _paired(tables, _tables(home, baseline, right, config))
    pairs = _divided(home, tables, config)
    main = _trial(pairs, config, config.map.kind, _most(pairs, config))
    more = [("random", main.pairs), ("shuffled", main.pairs)]
    more += [(config.map.kind, n) for n in config.curve if n != main.pairs]
    trials = [main, *(dataclasses.replace(_trial(pairs, config, kind, n), brief=True) for kind, n in more)]
    saved = _save(home, pairs, config, trials)
    setting = Setting(
        joined=pairs.scored,
        selection=_selection(pairs, config),
        scored=pairs.scored_digest,
        seed=config.map.seed,
        divisions=len(pairs.divisions),
        map_id=saved,
        leaked=leakage(home, [left, right], pairs.scored.keys_S.tolist()),
    )
    rows = [row for trial in trials for row in rows_of(setting, trial)]
    gaps: list[dict[str, Any]] = []
    gap_rows = []
    if baseline is not None:
        other = _trial(_divided(home, baseline_tables, config), config, config.map.kind, main.pairs)
        gaps = list(differences(main, other, (left.name, baseline.name), config.bootstrap))
        of = {(row.metric, row.protocol, row.direction): row for row in rows_of(setting, main)}
        named = (baseline.embedding_id, baseline.name)
        for gap in gaps:
            row = of[gap["metric"], gap["protocol"], gap["direction"]]
            gap_rows.append(difference_row(row, named, gap))
    record_alignments(home, rows + gap_rows)
    return [*(plain(row) for row in rows), *gaps]


def _selection(pairs: Pairs, config: MappingConfig) -> str:
    options = [name for name, on in (("centred", config.map.centre), ("unit", config.map.unit)) if on]
    rows = "rows " + (" and ".join(options) or "as they are")
    return "; ".join([f"{config.map.kind} fitted on {pairs.source}", rows, pairs.scored.rule])


# --- which scenes -------------------------------------------------------------------------------------------------


def _tables(home: Home, left: EmbeddingRecord, right: EmbeddingRecord, config: MappingConfig) -> tuple[Joined, Joined]:
    """The join to fit on and the join to score, the same one under random divisions."""

    def joined(a: EmbeddingRecord, b: EmbeddingRecord) -> Joined:
        return join(*(scene_vectors(home, record, None, config.join) for record in (a, b)), least=LEAST_SCORED)

    scored = joined(left, right)
    if config.fit is None:
        return scored, scored
    fitted = joined(*(sibling(home, record, config.fit) for record in (left, right)))
    both, _ = common_rows(fitted.keys_S, scored.keys_S)
    if len(both):
        raise InputError(
            f"{len(both):,} scenes, among them {fitted.keys_S[both[0]]!r}, are in the fit split {config.fit} and among "
            "the scored ones; a map knows the answers it was fitted on. Name another split with --fit."
        )
    return fitted, scored


def sibling(home: Home, record: EmbeddingRecord, split: str) -> EmbeddingRecord:
    """The newest set of the same space, version and kind on another split.

    Raises InputError without one. Two sets with one label of a model may be of two spaces, since a label can outlive
    the weights; the message then names the facts that differ.
    """
    facts = ("dataset", "version", "observation", "roles", "pooling", "averaging", "layers", "max_length")
    others = [other for other in embeddings.list_sets(home) if other.split == split and other.dataset == record.dataset]
    wrong = {
        other.embedding_id: [n for n in facts if getattr(other, n) != getattr(record, n)] + differing(record, other)
        for other in others
    }
    alike = [other for other in others if not wrong[other.embedding_id]]
    if alike:
        return alike[-1]
    near = [other for other in others if other.model == record.model and other.observation == record.observation]
    hint = ""
    if near:
        differ = ", ".join(dict.fromkeys(wrong[near[-1].embedding_id]))
        hint = f" ({near[-1].name!r} has that label, but differs in {differ}, so a map fitted on it would mean nothing)"
    raise InputError(
        f"There is no embedding set of {record.model!r} ({record.observation}) for split {split} of "
        f"{record.dataset}{hint}. Make it with `goodviews embed --model {record.model} --dataset {record.dataset} "
        f"--split {split} --of {record.observation}`, or divide the scored scenes with --fit-pairs."
    )


def _paired(
    own: tuple[Joined, Joined], other: tuple[Joined, Joined]
) -> tuple[tuple[Joined, Joined], tuple[Joined, Joined]]:
    """Both systems on the scenes that both have, in the fit tables and in the scored ones."""
    (fit_a, fit_b), (scored_a, scored_b) = (on_common_scenes(a, b) for a, b in zip(own, other, strict=True))
    return (fit_a, scored_a), (fit_b, scored_b)


def _divided(home: Home, tables: tuple[Joined, Joined], config: MappingConfig) -> Pairs:
    fitted, scored = tables
    if config.fit is not None:
        rows = np.arange(len(scored.keys_S))
        divisions = [Division(fit=hashed_order(fitted.keys_S, config.map.seed, 0), scored=rows)]
        source = f"split {config.fit}"
    else:
        n = config.fit_pairs or round((config.fit_share or 0) * len(scored.keys_S))
        divisions = list(random_divisions(scored.keys_S, n, config.splits, config.map.seed))
        source = f"{config.splits} random divisions (seed {config.map.seed})"
    captions = all_captions(home, scored)
    return Pairs(fit=fitted, scored=scored, captions=captions, divisions=tuple(divisions), source=source)


def all_captions(home: Home, joined: Joined) -> Captions | None:
    """Every caption of the scored scenes, of the side that has several a scene; the right one if both have."""
    for side, vectors in (("right", joined.right), ("left", joined.left)):
        record = vectors.record
        if record.observation != "captions" or vectors.rule == ONE_A_SCENE:
            continue
        keys = embeddings.read_keys(home, record)
        names_C = keys["scene_key"].to_numpy(zero_copy_only=False)
        scenes = np.searchsorted(joined.keys_S.astype(str), names_C.astype(str))
        # A key beyond the last one has no place; it is compared with the last and left out.
        scenes = np.minimum(scenes, len(joined.keys_S) - 1)
        known = joined.keys_S[scenes] == names_C
        layer = embeddings.read_layer(home, record, max(vectors.layers))
        return Captions(
            side=side,
            vectors=layer[known],
            scenes_C=scenes[known].astype(np.int64),
            items_C=keys["item"].to_numpy()[known],
        )
    return None


def _most(pairs: Pairs, config: MappingConfig) -> int:
    wanted = [n for n in (config.pairs, *config.curve) if n is not None]
    if wanted and max(wanted) > pairs.most:
        raise InputError(
            f"{max(wanted):,} pairs are asked for, and there are {pairs.most:,} to fit on. "
            "Ask for fewer, or fit on a larger split."
        )
    return config.pairs or pairs.most


# --- fitting and scoring ------------------------------------------------------------------------------------------


def _trial(pairs: Pairs, config: MappingConfig, kind: str, n_pairs: int) -> Trial:
    maps_of = (
        (_fitted(pairs, config, kind, number, division.fit[:n_pairs]), division.scored)
        for number, division in enumerate(pairs.divisions)
    )
    return trial_of(kind, n_pairs, maps_of, pairs.scored, pairs.captions, config.bootstrap)


def _fitted(pairs: Pairs, config: MappingConfig, kind: str, number: int, rows: Ids) -> FittedMap:
    seed = seeds.derive(config.map.seed, "indexing.mapping", kind, number)
    x, y = pairs.fit.left.last[rows], pairs.fit.right.last[rows]
    if kind == "shuffled":
        y = y[np.random.Generator(np.random.PCG64(seed)).permutation(len(y))]
        kind = config.map.kind
    return fit(x, y, dataclasses.replace(config.map, kind=kind, seed=seed))


def _save(home: Home, pairs: Pairs, config: MappingConfig, trials: Sequence[Trial]) -> str:
    main, shuffled = trials[0], trials[2]
    division = pairs.divisions[0]
    fit_keys = pairs.fit.keys_S[division.fit[: main.pairs]]
    left, right = _side(pairs.fit, "left"), _side(pairs.fit, "right")
    place = place_of(pairs.fit.left.record, pairs.fit.right.record)
    del place["dataset_versions"]
    record = maps.MapRecord(
        map_id=maps.map_id_of(left, right, main.first.config, fit_keys, pairs.fit.rule, _scored_by(pairs)),
        kind=main.map,
        config=dataclasses.asdict(main.first.config),
        left=left,
        right=right,
        **place,
        pairs=main.pairs,
        rule=pairs.fit.rule,
        facts=dict(main.first.facts),
        code_version=code_version(),
        created_at=time.time(),
        files={},
    )
    picks = picks_table(pairs.scored, division.scored, main.picks)
    return maps.save_map(home, record, main.first, shuffled.first, fit_keys, picks).map_id


def _scored_by(pairs: Pairs) -> str:
    """Digest of the scored sets and scenes. With it in its id, a map scored on other scenes keeps its own picks."""
    sides = (pairs.scored.left.record.embedding_id, pairs.scored.right.record.embedding_id)
    return digest_of(sides, [pairs.scored.rule], pairs.scored.keys_S[pairs.divisions[0].scored])


def _side(joined: Joined, name: str) -> dict[str, Any]:
    vectors = joined.left if name == "left" else joined.right
    facts = ("name", "embedding_id", "model", "observation", "pooling", "dims")
    known = {fact: getattr(vectors.record, fact) for fact in facts}
    return known | {"layer": max(vectors.layers), "space": space_of(vectors.record)}
