"""Count the scenes and captions that two parts share, by id, image bytes and words.

Invariant: an item counts as shared only when both sides hold it. Values without information (an empty normal form, the
digest of no bytes, an id that is a position) are not items. A kind that one side does not record is unknown, not 0.

  id                 the identity of the scene (`catalog.overlap.identity`)
  sha256             bytes of an image that stand under at most `PLACEHOLDER_SCENES` scenes on each side
  sha256_common      bytes that stand under more scenes, as a placeholder does
  caption            a caption in its normal form (`catalog.wording`)
  caption_set        the whole set of a scene's captions, if it has two or more distinct ones
  id_and_captions    the identity and the whole set of captions, of one or more
  id_and_letters     the same, with blanks removed from the normal forms, so that `close up` equals `closeup`
  near               captions whose Jaccard similarity is at least the threshold, equal ones included

Everything is compared by 128-bit digests, so a caption costs 60 bytes whatever its length; DuckDB keeps at most
`memory_limit` of them in memory and spills the rest to disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.overlap import near
from catalog.overlap.identity import NO_BYTES, SET_MIN, sql_identity
from catalog.overlap.parts import WHERE, Part, resolve, source_of
from catalog.wording import PYTHON_FUNCTION, normal_form, sql_normal_form
from infra.errors import StorageError, UsageError
from infra.home import Home

KINDS: Final = ("id", "sha256", "sha256_common", "caption", "caption_set", "id_and_captions", "id_and_letters")
OF_IDS: Final = ("id", "id_and_captions", "id_and_letters")
MEMORY_LIMIT: Final = "1GB"

PLACEHOLDER_SCENES: Final = 3
"Hosts serve one `not available` picture under thousands of addresses; a photo rarely has more addresses than this."


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side in one kind. known: scenes with such an item; scenes: those whose item the other side has too."""

    scenes: int
    known: int
    total: int
    captions: int | None = None

    @property
    def share(self) -> float:
        """Of all scenes of the side."""
        return self.scenes / self.total if self.total else 0.0


@dataclass(frozen=True, kw_only=True)
class SplitPair:
    """Scenes of one split on the left and one on the right that share something with the other."""

    left_split: str
    right_split: str
    left_scenes: int
    right_scenes: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is shared in one kind. shared: distinct items; of `near`, distinct normal forms of the right side."""

    kind: str
    shared: int
    left: Side
    right: Side
    by_split: tuple[SplitPair, ...]
    threshold: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether both sides have such items; if not, a count means nothing."""
        return self.left.known > 0 and self.right.known > 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two parts and what they share, by kind. notes: limits of the counts."""

    left: Part
    right: Part
    kinds: tuple[Kind, ...]
    notes: tuple[str, ...]


def compare(
    home: Home, left: str, right: str, *, near_from: float | None = None, memory_limit: str = MEMORY_LIMIT
) -> Comparison:
    """Compare two parts, each `DATASET[@VERSION][:SPLIT]`.

    near_from: also find captions of at least this Jaccard similarity, in (0, 1).
    Raises UsageError when one part holds the other, InputError when the catalog does not hold a part.
    """
    with lake.reading(home) as reader, lake.bounded(reader.connection, memory_limit=memory_limit):
        parts = resolve(reader, left), resolve(reader, right)
        _refuse_containment(*parts)
        try:
            reader.connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
            return _compare(reader, *parts, near_from=near_from)
        except lake.DatabaseError as error:
            reason = database.scrub(home, str(error))
            message = (
                f"The catalog could not compare {parts[0].name} with {parts[1].name}: {reason}. With too little "
                "memory or room in TMPDIR, raise --memory or set TMPDIR."
            )
            raise StorageError(message) from error


def _refuse_containment(left: Part, right: Part) -> None:
    same = (left.dataset, left.version) == (right.dataset, right.version)
    if same and (None in (left.split, right.split) or left.split == right.split):
        message = (
            f"{left.name} and {right.name} are one set, or one holds the other, so all of it is shared. Name two "
            "datasets, versions or splits."
        )
        raise UsageError(message)


def _compare(reader: Lake, left: Part, right: Part, *, near_from: float | None) -> Comparison:
    spaces = [_load(reader, side, part) for side, part in (("l", left), ("r", right))]
    _part_common_pictures(reader)
    totals = [_total(reader, part) for part in (left, right)]
    kinds = [_kind(reader, kind, totals) for kind in KINDS]
    if near_from is not None:
        near.load(reader, left, right, threshold=near_from)
        kinds.append(_kind(reader, "near", totals, threshold=near_from))
    return Comparison(left=left, right=right, kinds=tuple(kinds), notes=tuple(_notes(kinds, (left, right), spaces)))


# --- items -------------------------------------------------------------------------------------------------------


def _load(reader: Lake, side: str, part: Part) -> list[str]:
    """Make tables `<side>_<kind>` (item, scene, split), a row an item of a scene; return the sorted id namespaces."""

    def make(table: str, query: str, *, bound: bool = False) -> None:
        reader.connection.execute(f"CREATE TEMP TABLE {side}_{table} AS {query}", part.values if bound else [])

    make(
        "id",
        f"""SELECT md5_number(name) AS item, scene, split, split_part(name, ':', 1) AS space FROM (
            SELECT md5_number(s.scene_key) AS scene, s.split, {sql_identity(source_of(reader, part), "s")} AS name
            FROM versions.scenes AS s WHERE {WHERE}) WHERE name IS NOT NULL""",
        bound=True,
    )
    make(
        "sha256",
        f"""SELECT DISTINCT md5_number(sha) AS item, scene, split FROM (
            SELECT md5_number(scene_key) AS scene, split, lower(i.sha256) AS sha FROM (
                SELECT s.scene_key, s.split, unnest(s.images) AS i FROM versions.scenes AS s WHERE {WHERE}))
            WHERE sha IS NOT NULL AND sha NOT IN ('', '{NO_BYTES}')""",
        bound=True,
    )
    make(
        "caption",
        f"""SELECT md5_number(form) AS item, md5_number(replace(form, ' ', '')) AS letters, scene, split FROM (
            SELECT md5_number(scene_key) AS scene, split, {sql_normal_form('c."text"')} AS form FROM (
                SELECT s.scene_key, s.split, unnest(s.captions) AS c FROM versions.scenes AS s WHERE {WHERE}))
            WHERE form <> ''""",
        bound=True,
    )
    for column, together in (("item", "captions"), ("letters", "letters")):
        # DISTINCT first, and no list of texts: DuckDB does not spill lists that an aggregate collects.
        make(
            f"{together}_of_scene",
            f"""SELECT scene, split, bit_xor({column}) AS item, count(*) AS n
                FROM (SELECT DISTINCT {column}, scene, split FROM {side}_caption) GROUP BY scene, split""",
        )
        make(
            f"id_and_{together}",
            f"""SELECT xor(i.item, w.item) AS item, i.scene, i.split
                FROM {side}_id AS i JOIN {side}_{together}_of_scene AS w USING (scene)""",
        )
    make("caption_set", f"SELECT item, scene, split FROM {side}_captions_of_scene WHERE n >= {SET_MIN}")
    return [str(row[0]) for row in reader.rows(f"SELECT DISTINCT space FROM {side}_id ORDER BY space")]


def _part_common_pictures(reader: Lake) -> None:
    """Move pictures that stand under too many scenes of a side out of `sha256` into `sha256_common`, on both sides."""
    run = reader.connection.execute
    often = " UNION ".join(
        f"SELECT item FROM {side}_sha256 GROUP BY item HAVING count(*) > {PLACEHOLDER_SCENES}" for side in "lr"
    )
    run(f"CREATE TEMP TABLE common_pictures AS {often}")
    for side in "lr":
        run(
            f"CREATE TEMP TABLE {side}_sha256_common AS SELECT * FROM {side}_sha256 SEMI JOIN common_pictures "
            "USING (item)"
        )
        run(f"DELETE FROM {side}_sha256 WHERE item IN (SELECT item FROM common_pictures)")


# --- counts -------------------------------------------------------------------------------------------------------


def _total(reader: Lake, part: Part) -> int:
    query = f"SELECT count(*) FROM versions.scenes AS s WHERE {WHERE}"
    return int(reader.rows(query, part.values)[0][0])


def _kind(reader: Lake, kind: str, totals: list[int], *, threshold: float | None = None) -> Kind:
    def count(query: str) -> int:
        return int(reader.rows(f"SELECT count(*) FROM ({query})")[0][0])

    def side(own: str, other: str, total: int) -> Side:
        mine, theirs = f"{own}_{kind}", f"{other}_{kind}"
        known = f"{own}_caption" if kind == near.KIND else mine
        if kind in OF_IDS:
            # An id of a namespace that the other side lacks can be neither shared nor missing.
            comparable = f"SELECT scene FROM {own}_id WHERE space IN (SELECT space FROM {other}_id)"
            known = f"{mine} SEMI JOIN ({comparable}) USING (scene)"
        return Side(
            scenes=count(f"SELECT DISTINCT scene FROM {mine} SEMI JOIN {theirs} USING (item)"),
            known=count(f"SELECT DISTINCT scene FROM {known}"),
            total=total,
            captions=_captions(count, kind, own, other),
        )

    return Kind(
        kind=kind,
        shared=count(f"SELECT DISTINCT item FROM l_{kind} SEMI JOIN r_{kind} USING (item)"),
        left=side("l", "r", totals[0]),
        right=side("r", "l", totals[1]),
        by_split=_by_split(reader, kind),
        threshold=threshold,
    )


def _captions(count: Any, kind: str, own: str, other: str) -> int | None:
    """Captions of a side that the other side holds; None for kinds that are of scenes."""
    if kind == "caption":
        return int(count(f"SELECT 1 FROM {own}_caption SEMI JOIN {other}_caption USING (item)"))
    if kind == near.KIND:
        return int(count(f"SELECT 1 FROM {own}_caption AS c SEMI JOIN near_pairs AS p ON (c.item = p.{own})"))
    return None


def _by_split(reader: Lake, kind: str) -> tuple[SplitPair, ...]:
    """An item counts once for each split of the other side, so that a caption of many scenes does not multiply."""

    def scenes(own: str, other: str) -> dict[tuple[str, str], int]:
        query = f"""SELECT own_split, other_split, count(*) FROM (
            SELECT DISTINCT o.scene, o.split AS own_split, t.split AS other_split FROM {own}_{kind} AS o
            JOIN (SELECT DISTINCT item, split FROM {other}_{kind}) AS t USING (item)) GROUP BY own_split, other_split"""
        return {(str(a), str(b)): int(n) for a, b, n in reader.rows(query)}

    left, right = scenes("l", "r"), scenes("r", "l")
    return tuple(
        SplitPair(left_split=a, right_split=b, left_scenes=n, right_scenes=right[b, a])
        for (a, b), n in sorted(left.items())
    )


def _notes(kinds: list[Kind], parts: tuple[Part, Part], spaces: list[list[str]]) -> list[str]:
    found = {kind.kind: kind for kind in kinds}
    notes = []
    if not all(spaces):
        lacking = parts[0] if not spaces[0] else parts[1]
        notes.append(f"ids cannot be compared: those of {lacking.dataset} name nothing outside it")
    elif not set(spaces[0]) & set(spaces[1]):
        named = [f"those of {part.dataset} are {', '.join(space)}" for part, space in zip(parts, spaces, strict=True)]
        notes.append(f"ids cannot be compared: {' and '.join(named)}")
    if not (found["sha256"].is_known or found["sha256_common"].is_known):
        notes.append("images cannot be compared: no sha256 is recorded on one of the sides")
    if common := found["sha256_common"].shared:
        notes.append(
            f"{common:,} shared images stand under more than {PLACEHOLDER_SCENES} scenes of a side and may be "
            "placeholders"
        )
    return notes
