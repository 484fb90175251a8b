"""`pipelines.ingest.caption_cap` and `pipelines.ingest.lookup`: exact, by hash, whatever the shards and partitions."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.wording import normal_form
from infra.errors import IntegrityError
from infra.home import resolve
from infra.session import open_workers
from pipelines.ingest import caption_cap, lookup
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest

WORDS = ["a dog", "A DOG.", "a cat", "two cats", "...", "!", "rare one", "rare two", "Straße", "STRASSE"]


def rows(seed: int, scenes: int = 60) -> list[tuple[str, str]]:
    """(id, caption): a few captions under many scenes, in any order."""
    draw = random.Random(seed)
    made = [(f"s{i:03d}", text) for i in range(scenes) for text in draw.sample(WORDS, draw.randint(1, 4))]
    made += [(f"s{i:03d}", f"own words of {i}") for i in range(0, scenes, 3)]
    draw.shuffle(made)
    return made


def run(home: Path, table: list[tuple[str, str]], *sets: str) -> IngestOutcome:
    path = home / "in.parquet"
    home.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": [i for i, _ in table], "caption": [t for _, t in table]}), path)
    sets = ("source.id=id", "source.text=caption", "scenes_per_shard=9", "views=", *sets)
    request = build_request("table", [str(path)], "web", None, list(sets), 1.0)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, resolve(str(home)), workers)
    assert outcome.texts_read == len(table) == outcome.texts_kept + sum(outcome.rejects.values())
    return outcome


def table_of(outcome: IngestOutcome, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset(Path(outcome.url) / kind, format="parquet").to_table().to_pylist()
    return found


def holders(outcome: IngestOutcome) -> dict[str, set[str]]:
    """Scenes by the normal form of their captions."""
    found: dict[str, set[str]] = defaultdict(set)
    for scene in table_of(outcome, "scenes"):
        for caption in scene["captions"]:
            found[normal_form(caption["text"])].add(scene["scene_key"])
    return found


@pytest.mark.parametrize("most", [1, 3, 12])
def test_a_common_caption_keeps_exactly_so_many_scenes_and_a_rare_one_all(tmp_path: Path, most: int) -> None:
    before = holders(run(tmp_path, rows(1)))
    after = holders(outcome := run(tmp_path, rows(1), f"max_scenes_per_caption={most}"))
    assert len(before["a dog"]) > 12 and len(before[""]) > 12
    for form, scenes in before.items():
        assert after[form] <= scenes
        # A text of signs alone is no caption that could be common.
        assert len(after[form]) == (len(scenes) if form == "" else min(most, len(scenes))), form
    lost = [r for r in table_of(outcome, "rejects") if r["reason"] == "common_caption"]
    assert len(lost) == sum(len(before[form]) - len(after[form]) for form in before) > 0
    counts = {normal_form(r["text"]): r["detail"] for r in lost}
    assert counts["a dog"] == f"under {len(before['a dog'])} scenes, {most} keep it"


def test_neither_order_nor_shards_nor_partitions_decide_who_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rows(2)
    cap = "max_scenes_per_caption=3"
    reference = holders(run(tmp_path / "a", table, cap))
    assert holders(run(tmp_path / "b", sorted(table), cap, "scenes_per_shard=1000")) == reference
    monkeypatch.setattr(caption_cap, "PARTITION_ROWS", 7)
    monkeypatch.setattr(lookup, "BLOCK_RECORDS", 2)
    assert holders(run(tmp_path / "c", table, cap)) == reference
    other = holders(run(tmp_path / "d", table, cap, "seed=1"))
    assert {form: len(scenes) for form, scenes in other.items()} == {f: len(s) for f, s in reference.items()}
    assert other["a dog"] != reference["a dog"]


def test_those_that_keep_it_are_no_prefix_and_differ_from_caption_to_caption(tmp_path: Path) -> None:
    table = [(f"s{i:03d}", text) for i in range(80) for text in ("one thing", "another thing", f"own {i}")]
    found = holders(run(tmp_path, table, "max_scenes_per_caption=20"))
    assert found["one thing"] != found["another thing"]
    for form in ("one thing", "another thing"):
        places = sorted(int(key[1:]) for key in found[form])
        assert len(places) == 20 and 5 < sum(place < 40 for place in places) < 15


def test_a_scene_that_loses_all_of_its_captions_is_no_scene(tmp_path: Path) -> None:
    table = [(f"s{i}", "the same") for i in range(30)]
    outcome = run(tmp_path, table, "max_scenes_per_caption=2")
    assert (outcome.scenes, outcome.rejects) == (2, {"common_caption": 28})


def test_a_caption_counts_once_a_scene_and_after_cleaning(tmp_path: Path) -> None:
    # Four times in two scenes; and `&amp;` is `&` by then.
    table = [("a", "x &amp; y"), ("a", "X y."), ("b", "x  y"), ("b", "x y"), ("c", "z"), ("d", "nan"), ("e", "z")]
    for repeats in ("true", "false"):
        kept = run(tmp_path, table, "max_scenes_per_caption=2", f"clean.repeats={repeats}")
        assert "common_caption" not in kept.rejects
    one = run(tmp_path, table, "max_scenes_per_caption=1", "clean.repeats=false")
    # Both spellings of the scene that does not keep it go.
    assert one.rejects == {"missing_text": 1, "common_caption": 3}


def test_without_a_cap_the_version_is_as_it_was(tmp_path: Path) -> None:
    table = rows(3, 20)
    plain = run(tmp_path, table)
    wide = run(tmp_path, table, "max_scenes_per_caption=1000")
    assert plain.version != wide.version and holders(plain) == holders(wide)


# --- look-up ------------------------------------------------------------------------------------------------------

KEYS = st.binary(min_size=16, max_size=16) | st.sampled_from(
    [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), bytes(14) + b"\1\0", b"\xff" * 16]
)


@given(st.dictionaries(KEYS, st.binary(min_size=3, max_size=3), max_size=20), st.lists(KEYS, max_size=20))
def test_a_look_up_is_that_of_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, held: dict[bytes, bytes], others: list[bytes]
) -> None:
    url = str(tmp_path_factory.mktemp("lookup") / "some.keys")
    records = np.frombuffer(b"".join(k + v for k, v in sorted(held.items())), np.uint8).reshape(-1, 19)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "BLOCK_RECORDS", 3)
        lookup.publish(url, [records[:5], records[5:]])
        wanted = [*others, *held]
        found, values = lookup.find(url, wanted, width=3)
    assert found.tolist() == [key in held for key in wanted]
    assert [v.tobytes() for v in values] == [held.get(key, bytes(3)) for key in wanted]


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "some.keys")
    Path(url).write_bytes(bytes(37))
    with pytest.raises(IntegrityError, match="no whole number of records of 19"):
        lookup.find(url, [bytes(16)], width=3)
