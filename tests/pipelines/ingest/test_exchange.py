"""The exchange brings every record of a scene to one bucket, and loses nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import storage
from infra.errors import InputError, IntegrityError
from pipelines.ingest.exchange import (
    Buckets,
    Exchange,
    PartitionTask,
    bucket_of,
    fetch,
    partition,
    plan_exchange,
    regroup,
    regroup_tasks,
)
from pipelines.ingest.group import merge
from pipelines.records import RECORDS, TEXTS, Batch, Piece


@dataclass(frozen=True)
class Given:
    """A source whose pieces are what the test says: rows [start, stop) of `ids`, two texts each."""

    ids: tuple[str | None, ...]
    split: str = "train"

    def read(self, piece: Piece) -> Iterator[Batch]:
        for row in range(piece.start, piece.stop):
            yield batch([self.ids[row]], self.split, row)


def batch(ids: list[str | None], split: str = "train", row: int = 0) -> Batch:
    base: dict[str, Any] = dict.fromkeys(RECORDS.names)
    records = [
        base | {"source_id": i, "split": split, "source_uri": "f", "source_row": row + k} for k, i in enumerate(ids)
    ]
    texts = [
        {"record": k, "field": f"t{j}", "role": "human", "text": f"{row + k} {j}".encode(), "broken": None}
        for k in range(len(ids))
        for j in range(2)
    ]
    return Batch(pa.Table.from_pylist(records, RECORDS), pa.Table.from_pylist(texts, TEXTS))


def exchanged(source: Given, folder: Path, pieces: int, buckets: Buckets, slots_max: int) -> Exchange:
    """Run all rounds over `pieces` equal cuts of the source."""
    cuts = [len(source.ids) * i // pieces for i in range(pieces + 1)]
    cut = [Piece(input=None, start=cuts[i], stop=cuts[i + 1], scenes_by_split={source.split: 1}) for i in range(pieces)]
    exchange = plan_exchange(str(folder), cut, buckets, slots_max=slots_max)
    moved = [
        partition(
            PartitionTask(
                source=source,  # type: ignore[arg-type]
                piece=cut[i],
                number=i,
                exchange=exchange,
            )
        )
        for i in range(pieces)
    ]
    assert sum(m.records for m in moved) == len(source.ids)
    again = [regroup(task) for task in regroup_tasks(exchange)]
    assert not again or sum(m.texts for m in again) == sum(m.texts for m in moved)
    return exchange


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=12),
    st.integers(1, 7),
    st.integers(1, 5),
    st.sampled_from([2, 1024]),
)
def test_each_text_arrives_once_and_a_scene_stays_together(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str | None], shards: int, pieces: int, slots_max: int
) -> None:
    source, buckets = Given(tuple(ids)), Buckets(by_split={"train": (0, shards)})
    exchange = exchanged(source, tmp_path_factory.mktemp("x"), pieces, buckets, slots_max)
    assert (exchange.band is None) == (shards <= slots_max)
    arrived: list[tuple[str, str | None, int]] = []
    for shard in range(shards):
        got = merge(fetch(exchange, shard))
        records = got.records.to_pylist()
        assert set(bucket_of(got.records, buckets).tolist()) <= {shard}
        arrived += [
            (t["text"].decode(), records[t["record"]]["source_id"], records[t["record"]]["source_row"])
            for t in got.texts.to_pylist()
        ]
    expected = [(f"{row} {j}", ids[row], row) for row in range(len(ids)) for j in range(2)]
    assert sorted(arrived, key=str) == sorted(expected, key=str)


def test_two_rounds_keep_every_count_near_the_square_root() -> None:
    # All of Recap-DataComp: 94,000 shards from 7,200 pieces.
    cut = [Piece(input=None, start=i, stop=i + 1, scenes_by_split={"train": 1}) for i in range(7200)]
    exchange = plan_exchange("w", cut, Buckets(by_split={"train": (0, 94_000)}))
    assert exchange.band == 307
    assert (exchange.bands, exchange.portions) == (307, 24)
    assert len(regroup_tasks(exchange)) == 307 * 24


def test_buckets_of_splits_do_not_mix() -> None:
    buckets = Buckets(by_split={"train": (0, 3), "val": (3, 2)})
    ids: list[str | None] = [f"id-{i}" for i in range(64)]
    assert set(bucket_of(batch(ids).records, buckets).tolist()) == {0, 1, 2}
    assert set(bucket_of(batch(ids, "val").records, buckets).tolist()) == {3, 4}


def test_a_split_that_was_not_announced_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="'test'"):
        bucket_of(batch(["a"], "test").records, Buckets(by_split={"train": (0, 1)}))


def one_piece(folder: Path) -> Exchange:
    return exchanged(Given(("a", "b")), folder, 1, Buckets(by_split={"train": (0, 2)}), 1024)


def test_a_rerun_reads_the_counts_of_a_file_that_is_there(tmp_path: Path) -> None:
    written = Path(one_piece(tmp_path).piece_url(0))
    before = written.stat().st_mtime_ns
    one_piece(tmp_path)
    assert written.stat().st_mtime_ns == before


def test_files_of_another_cut_are_never_taken_for_these(tmp_path: Path) -> None:
    """A release that cuts pieces elsewhere may resume the same version; its files hold other rows."""
    source, buckets = Given(("a", "b", "c", "d")), Buckets(by_split={"train": (0, 2)})
    exchanged(source, tmp_path, 4, buckets, 1024)
    exchange = exchanged(source, tmp_path, 2, buckets, 1024)
    arrived = [merge(fetch(exchange, shard)).records.num_rows for shard in range(2)]
    assert sum(arrived) == 4


def test_a_cut_exchange_file_is_refused(tmp_path: Path) -> None:
    exchange = one_piece(tmp_path)
    data = storage.read_bytes(exchange.piece_url(0))
    storage.publish(exchange.piece_url(0), data[: len(data) * 9 // 10])
    with pytest.raises(IntegrityError, match="exchange file"):
        list(fetch(exchange, 0))


def test_an_absent_exchange_file_is_an_input_error(tmp_path: Path) -> None:
    cut = [Piece(input=None, start=0, stop=2, scenes_by_split={"train": 2})]
    exchange = plan_exchange(str(tmp_path), cut, Buckets(by_split={"train": (0, 2)}))
    with pytest.raises(InputError, match="no such file"):
        list(fetch(exchange, 0))
