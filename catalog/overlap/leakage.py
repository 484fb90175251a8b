"""Find the scored scenes that a training set holds: by caption, scene key or source id.

Invariant: everything that may be the same counts as leaked; a scene counts once in a kind, however many captions match.

  exact        a caption of the scene is a caption of the training set, character by character
  normalised   the same after case folding and without punctuation (`catalog.wording`); includes every exact match
  scene        the training set holds that scene key of the same dataset, in any version
  source_id    another dataset holds the identity of the scene (`catalog.overlap.identity`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.overlap.identity import sql_identity
from catalog.overlap.parts import WHERE, Part, source_of
from catalog.wording import PYTHON_FUNCTION, normal_form, sql_normal_form
from infra.errors import InputError, StorageError
from infra.home import Home

KINDS: Final = ("exact", "normalised", "scene", "source_id")


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """Scored scenes that a training set holds: keys by kind."""

    training: Part
    keys: dict[str, frozenset[str]]

    @property
    def leaked(self) -> frozenset[str]:
        """Keys of any kind."""
        return frozenset().union(*self.keys.values())

    @property
    def counts(self) -> dict[str, int]:
        """Scenes of each kind, and of any."""
        return {**{kind: len(found) for kind, found in self.keys.items()}, "any": len(self.leaked)}


def find_leaks(home: Home, training: Part, scored: Part, scene_keys: Sequence[str]) -> Leaks:
    """The scenes of `scored` with these keys that `training` holds.

    Raises InputError when the catalog does not hold one of the parts, which would otherwise look like no leak.
    """
    keys = pa.table({"scene_key": pa.array(scene_keys, pa.large_string())})
    with lake.reading(home) as reader:
        try:
            reader.connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
            reader.connection.register("scored_keys", keys)
            for part in (training, scored):
                _refuse_absent(reader, part)
            found = {
                "exact": _by_text(reader, training, scored, 'c."text"'),
                "normalised": _by_text(reader, training, scored, sql_normal_form('c."text"')),
                "scene": _by_key(reader, training) if training.dataset == scored.dataset else frozenset[str](),
                "source_id": _by_source_id(reader, training, scored),
            }
        except lake.DatabaseError as error:
            raise StorageError(
                f"The catalog could not compare {scored.name} with {training.name}: {database.scrub(home, str(error))}."
            ) from error
    return Leaks(training=training, keys=found)


def _refuse_absent(reader: Lake, part: Part) -> None:
    query = f"SELECT 1 FROM versions.scenes AS s WHERE {WHERE} LIMIT 1"
    if not reader.rows(query, part.values):
        raise InputError(
            f"The catalog holds no scene of {part.name}, so nobody can say what of it leaked. Ingest it again, "
            "or rebuild the catalog."
        )


def _by_text(reader: Lake, training: Part, scored: Part, form: str) -> frozenset[str]:
    """Scenes with a caption of equal form. The hash table holds the scored texts; the training texts stream past it."""
    query = f"""WITH wanted AS (SELECT DISTINCT scene_key, {form} AS form FROM (
            SELECT s.scene_key, unnest(s.captions) AS c FROM versions.scenes AS s
            SEMI JOIN scored_keys AS k ON (s.scene_key = k.scene_key) WHERE {WHERE})
            WHERE (len(?) = 0 OR list_contains(?, c.role))),
        seen AS (SELECT DISTINCT {form} AS form FROM (
            SELECT unnest(s.captions) AS c FROM versions.scenes AS s WHERE {WHERE})
            WHERE (len(?) = 0 OR list_contains(?, c.role)) AND {form} IN (SELECT form FROM wanted))
        SELECT DISTINCT scene_key FROM wanted SEMI JOIN seen USING (form) WHERE form <> ''"""
    values: list[object] = []
    for part in (scored, training):
        values += [*part.values, list(part.roles), list(part.roles)]
    return frozenset(str(key) for (key,) in reader.rows(query, values))


def _by_key(reader: Lake, training: Part) -> frozenset[str]:
    query = (
        "SELECT s.scene_key FROM versions.scenes AS s SEMI JOIN scored_keys AS k ON (s.scene_key = k.scene_key) "
        f"WHERE {WHERE}"
    )
    return frozenset(str(key) for (key,) in reader.rows(query, training.values))


def _by_source_id(reader: Lake, training: Part, scored: Part) -> frozenset[str]:
    """Compares identities, not ids: `12` of one source and `12` of another name different things."""
    if training.dataset == scored.dataset:
        return frozenset()
    trained, wanted = (sql_identity(source_of(reader, part), "s") for part in (training, scored))
    query = f"""SELECT DISTINCT w.scene_key FROM (SELECT s.scene_key, {wanted} AS name FROM versions.scenes AS s
            SEMI JOIN scored_keys AS k ON (s.scene_key = k.scene_key) WHERE {WHERE}) AS w
        SEMI JOIN (SELECT {trained} AS name FROM versions.scenes AS s WHERE {WHERE}) AS t ON (w.name = t.name)"""
    return frozenset(str(key) for (key,) in reader.rows(query, [*scored.values, *training.values]))
