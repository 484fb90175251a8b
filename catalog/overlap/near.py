"""Find nearly equal captions with MinHash and compute the similarity of each candidate.

Invariant: every pair in `near_pairs` has at least the requested Jaccard similarity, computed from the 64-bit hashes of
all its shingles. Signatures only select candidates; at the threshold they miss at most the share `MISSED`, fewer above.

Similarity is the Jaccard index of the sets of word pairs of two normal forms (a single word stands for itself), so
order matters: `man bites dog` and `dog bites man` share nothing. Signatures and banding: Broder 1997; Leskovec et al.,
Mining of Massive Datasets, 3.4. `rensa` computes signatures in about 6 microseconds a caption; DuckDB joins bands and
spills.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from catalog.lake.lake import Lake
from catalog.overlap.parts import WHERE, Part
from catalog.wording import sql_normal_form
from infra.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIND: Final = "near"
PERMUTATIONS: Final = 128
SEED: Final = 1
MISSED: Final = 0.05
BATCH_CAPTIONS: Final = 8_192

BLOCK_CANDIDATES: Final = 10_000_000
"Candidates made at a time, counted once a band they share; some 160 MB before the distinct ones are taken."

MOST_CANDIDATES: Final = 500_000_000
"""Candidates, so counted, above which the comparison is refused: at 11 microseconds a distinct pair (one busy
core) some 7 minutes where pairs share 15 bands, over an hour where they share one."""


def shingles(form: str) -> list[str]:
    """The distinct pairs of neighbouring words of a normal form, sorted; the word itself when there is one."""
    words = form.split(" ")
    return sorted({f"{a} {b}" for a, b in itertools.pairwise(words)}) if len(words) > 1 else words


def rows_a_band(threshold: float) -> int:
    """The longest band that finds a pair of exactly this similarity with a probability of at least 1 - `MISSED`.

    Raises UsageError when no band does, or when it is no similarity.
    """
    if not 0 < threshold < 1:
        raise UsageError(
            f"The threshold is {threshold}; a Jaccard similarity lies between 0 and 1. About 0.7 is usual."
        )
    for rows in range(16, 0, -1):
        if (1 - threshold**rows) ** (PERMUTATIONS // rows) <= MISSED:
            return rows
    raise UsageError(f"The threshold {threshold} is too small to be found by {PERMUTATIONS} hashes. Use 0.03 or more.")


def load(reader: Lake, left: Part, right: Part, *, threshold: float) -> None:
    """Tables `near_pairs` (l, r: items), and `l_near`, `r_near` as `catalog.overlap.comparison` counts them.

    Needs the tables `l_caption` and `r_caption`. An item of `near` is the normal form on the right. Only the pairs that
    the counts need are kept: one partner of a form in each split that has any. Raises UsageError when there are too
    many candidates.
    """
    rows = rows_a_band(threshold)
    run = reader.connection.execute
    for side, part in (("l", left), ("r", right)):
        _load_forms(reader, side, part)
        run(f"CREATE TEMP TABLE {side}_bands (number BIGINT, band UHUGEINT)")
        run(f"CREATE TEMP TABLE {side}_shingles (number BIGINT, hashes UBIGINT[])")
        for numbers, forms in _batches(reader, side):
            _insert(reader, side, numbers, [shingles(form) for form in forms], rows)
    blocks = _plan_blocks(reader, left, right)
    _find_pairs(reader, threshold, blocks)
    run("""CREATE TEMP TABLE near_pairs AS SELECT a.item AS l, b.item AS r FROM near_kept AS p
        JOIN l_forms AS a ON (a.number = p.l) JOIN r_forms AS b ON (b.number = p.r)""")
    run("""CREATE TEMP TABLE l_near AS SELECT DISTINCT p.r AS item, c.scene, c.split
        FROM l_caption AS c JOIN near_pairs AS p ON (c.item = p.l)""")
    run("""CREATE TEMP TABLE r_near AS SELECT DISTINCT c.item, c.scene, c.split
        FROM r_caption AS c SEMI JOIN near_pairs AS p ON (c.item = p.r)""")


def _plan_blocks(reader: Lake, left: Part, right: Part) -> list[int]:
    """Table `near_blocks` (number, block): forms on the left that share a band; returns the blocks.

    Raises UsageError when there is too much to compare. What it counts is pairs by band, before any pair is made.
    """
    reader.connection.execute(
        """CREATE TEMP TABLE near_blocks AS
            SELECT number, pairs, CAST((sum(pairs) OVER (ORDER BY number) - pairs) // ? AS BIGINT) AS block
            FROM (SELECT a.number, CAST(sum(b.n) AS BIGINT) AS pairs FROM l_bands AS a
                JOIN (SELECT band, count(*) AS n FROM r_bands GROUP BY band) AS b USING (band) GROUP BY a.number)""",
        [BLOCK_CANDIDATES],
    )
    total = int(reader.rows("SELECT coalesce(sum(pairs), 0) FROM near_blocks")[0][0])
    if total > MOST_CANDIDATES:
        message = (
            f"{left.name} and {right.name} have {total:,} candidates of nearly equal captions, and --near compares "
            f"at most {MOST_CANDIDATES:,}. Captions of one template do that. Raise --threshold, name single splits, "
            "or leave --near out."
        )
        raise UsageError(message)
    return [int(row[0]) for row in reader.rows("SELECT DISTINCT block FROM near_blocks ORDER BY block")]


def _find_pairs(reader: Lake, threshold: float, blocks: Sequence[int]) -> None:
    """Table `near_kept` (l, r: numbers): of the near pairs, those that the counts need."""
    run = reader.connection.execute
    for side in "lr":
        run(f"""CREATE TEMP TABLE {side}_splits AS SELECT DISTINCT f.number, c.split
            FROM {side}_forms AS f JOIN {side}_caption AS c USING (item)""")
    run("CREATE TEMP TABLE near_found (l BIGINT, r BIGINT)")
    common = "len(list_intersect(a.hashes, b.hashes))"
    for block in blocks:
        # Compare the quotient: in floating point 0.56 * 25 is more than 14, so a product would miss pairs.
        run(
            f"""CREATE OR REPLACE TEMP TABLE near_block AS SELECT c.l, c.r FROM (
                SELECT DISTINCT a.number AS l, b.number AS r FROM near_blocks AS w
                JOIN l_bands AS a USING (number) JOIN r_bands AS b USING (band) WHERE w.block = ?) AS c
                JOIN l_shingles AS a ON (a.number = c.l) JOIN r_shingles AS b ON (b.number = c.r)
                WHERE {common} / (len(a.hashes) + len(b.hashes) - {common}) >= ?""",
            [block, threshold],
        )
        run(f"INSERT INTO near_found {_thinned('near_block')}")
    run(f"CREATE TEMP TABLE near_kept AS {_thinned('near_found')}")


def _thinned(pairs: str) -> str:
    """One partner for each form and split of the other side: the same counts as of all pairs, without their square."""
    return f"""SELECT p.l, min(p.r) AS r FROM {pairs} AS p JOIN r_splits AS s ON (s.number = p.r) GROUP BY p.l, s.split
        UNION SELECT min(p.l), p.r FROM {pairs} AS p JOIN l_splits AS s ON (s.number = p.l) GROUP BY p.r, s.split"""


def _load_forms(reader: Lake, side: str, part: Part) -> None:
    """Table `<side>_forms` (number, item, form): the distinct normal forms of a side, numbered from 0."""
    reader.connection.execute(
        f"""CREATE TEMP TABLE {side}_forms AS SELECT row_number() OVER () - 1 AS number, md5_number(form) AS item, form
            FROM (SELECT DISTINCT {sql_normal_form('c."text"')} AS form FROM (SELECT unnest(s.captions) AS c
            FROM versions.scenes AS s WHERE {WHERE})) WHERE form <> ''""",
        part.values,
    )


def _batches(reader: Lake, side: str) -> Iterator[tuple[pa.Array, list[str]]]:
    """(numbers, normal forms) in batches, each a query of its own: another statement would end a running result."""
    total = int(reader.rows(f"SELECT count(*) FROM {side}_forms")[0][0])
    for start in range(0, total, BATCH_CAPTIONS):
        query = f"SELECT number, form FROM {side}_forms WHERE number >= ? AND number < ?"
        table = reader.connection.execute(query, [start, start + BATCH_CAPTIONS]).to_arrow_table().combine_chunks()
        yield table.column(0).chunk(0), table.column(1).to_pylist()


def _insert(reader: Lake, side: str, numbers: pa.Array, sets: Sequence[Sequence[str]], rows: int) -> None:
    hashes, offsets, signatures = _signatures(sets)
    bands = PERMUTATIONS // rows
    # A band is identified by its position and the bytes of its hashes, so different bands cannot collide.
    cut = np.ascontiguousarray(signatures[:, : bands * rows]).reshape(len(sets) * bands, rows)
    words = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 * rows), len(cut), [None, pa.py_buffer(cut)])
    run, register = reader.connection.execute, reader.connection.register
    register("incoming", pa.table({"number": numbers, "hashes": pa.LargeListArray.from_arrays(offsets, hashes)}))
    run(f"INSERT INTO {side}_shingles SELECT number, hashes FROM incoming")
    place = pa.array(np.tile(np.arange(bands), len(sets)))
    owner = numbers.take(pa.array(np.repeat(np.arange(len(sets)), bands)))
    register("incoming", pa.table({"number": owner, "place": place, "words": words}))
    run(f"INSERT INTO {side}_bands SELECT number, md5_number(place || ':' || hex(words)) FROM incoming")
    reader.connection.unregister("incoming")


def _signatures(sets: Sequence[Sequence[str]]) -> tuple[pa.Array, pa.Array, NDArray[np.uint32]]:
    """Shingle hashes (flat) with offsets (N + 1,), and MinHash signatures (N, PERMUTATIONS)."""
    from rensa import RMinHash

    token_hashes = RMinHash.hash_token_sets(sets)
    matrix = RMinHash.digest_matrix_from_token_hash_sets(token_hashes, PERMUTATIONS, SEED)
    offsets = np.zeros(len(sets) + 1, np.int64)
    np.cumsum([len(one) for one in token_hashes], out=offsets[1:])
    flat = np.fromiter((h for one in token_hashes for h in one), np.uint64, int(offsets[-1]))
    return pa.array(flat), pa.array(offsets), np.asarray(matrix.to_rows(), np.uint32)
