"""`catalog.rows.theory`: a check and all of its numbers, replaced whole, carried through a rebuild."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from catalog import layout
from catalog.lake import lake
from catalog.rows.theory import Check, latest_checks, record_check
from catalog.versions.rebuild import rebuild
from infra.home import Home, resolve

CHECK = Check(
    kind="grid",
    seed=3,
    config={"dims": 4},
    result={"rows_below": 2, "above_r": {1: 2}},
    points={
        "below": [{"beta": 0.25, "error": 1e-15}, {"beta": 0.5, "error": 0.0}],
        "mismatch": [{"by_both": math.inf}],
    },
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def read(home: Home) -> dict[str, Check]:
    with lake.reading(home) as reader:
        return latest_checks(reader)


def test_a_check_is_read_as_it_was_written(home: Home) -> None:
    assert record_check(home, CHECK) == CHECK.theory_id
    assert read(home) == {"grid": dataclasses.replace(CHECK, result={"rows_below": 2, "above_r": {"1": 2}})}


def test_a_check_of_the_same_settings_is_replaced_and_the_newest_of_a_kind_is_shown(home: Home) -> None:
    record_check(home, CHECK)
    fewer = dataclasses.replace(CHECK, points={"below": [{"beta": 0.75}]}, result={"rows_below": 1})
    record_check(home, fewer)
    assert read(home) == {"grid": fewer}
    other = dataclasses.replace(fewer, seed=4)
    bridge = dataclasses.replace(fewer, kind="bridge")
    assert len({CHECK.theory_id, fewer.theory_id, other.theory_id, bridge.theory_id}) == 3
    record_check(home, other)
    record_check(home, bridge)
    assert read(home) == {"grid": other, "bridge": bridge}
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM main.theory_values") == [(3,)]


def test_a_rebuild_carries_checks_over(home: Home) -> None:
    record_check(home, CHECK)
    before = read(home)
    assert rebuild(home).carried_rows == 1 + 5
    assert read(home) == before


def test_a_catalog_of_layout_2_has_no_check_is_rebuilt_and_takes_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as past:
        past.setattr(layout, "NUMBER", 2)
        past.setitem(layout.VIEWS, "versions.layout", "SELECT 2 AS number")
        past.setattr(layout, "INLINED", tuple(n for n in layout.INLINED if n != "theory"))
        for name in ("main.theory", "main.theory_values"):
            past.delitem(layout._COLUMNS, name)
            past.delitem(layout.DESCRIPTIONS, name)
        with lake.writing(home) as writer:
            writer.connection.execute("INSERT INTO main.runs (run_id, seed) VALUES ('old', 1)")
    assert read(home) == {}
    done = rebuild(home)
    assert (done.carried_rows, done.lost) == (1, None)
    record_check(home, CHECK)
    assert list(read(home)) == ["grid"]
