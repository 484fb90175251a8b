from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from catalog.lake import answers, lake, queries
from catalog.versions.commit import commit_version
from infra.errors import StorageError, UsageError
from infra.home import Home

EVERY_TYPE = """SELECT 'it''s "x", [red]é' AS text, 1 AS int, 170141183460469231731687303715884105727::HUGEINT AS huge,
    12.50::DECIMAL(6, 2) AS part, 3.00::DECIMAL(6, 2) AS whole, 'nan'::DOUBLE AS nan, 'inf'::DOUBLE AS inf, 0.1::DOUBLE AS tenth,
    true AS yes, NULL AS nothing, DATE '2026-01-02' AS day, TIMESTAMP '2026-01-02 03:04:05.6' AS time,
    TIMESTAMPTZ '2026-01-02 03:04:05+02' AS zoned, 'ab'::BLOB AS bytes, [1, NULL] AS list, {'a': {'b': [1]}} AS struct,
    map {1: 'x'} AS map, INTERVAL 1 DAY AS span, uuid '00000000-0000-0000-0000-000000000001' AS id"""


@pytest.fixture
def filled(home: Home, publish: Any) -> Home:
    made = publish()
    commit_version(home, made.dataset, made.version)
    return home


def ask(home: Home, sql: str, **options: Any) -> str:
    out = io.StringIO()
    queries.run_select(home, sql, out=out, **options)
    return out.getvalue()


def test_json_keeps_kinds_and_values(filled: Home) -> None:
    [row] = json.loads(ask(filled, EVERY_TYPE, as_json=True))
    assert row == {
        "text": 'it\'s "x", [red]é',
        "int": 1,
        "huge": 170141183460469231731687303715884105727,
        "part": 12.5,
        "whole": 3,
        "nan": None,
        "inf": None,
        "tenth": 0.1,
        "yes": True,
        "nothing": None,
        "day": "2026-01-02",
        "time": "2026-01-02T03:04:05.600000",
        "zoned": "2026-01-02T01:04:05+00:00",
        "bytes": "6162",
        "list": [1, None],
        "struct": {"a": {"b": [1]}},
        "map": {"1": "x"},
        "span": "1 day, 0:00:00",
        "id": "00000000-0000-0000-0000-000000000001",
    }


def test_csv_is_read_back_cell_by_cell(filled: Home) -> None:
    [names, row] = list(csv.reader(io.StringIO(ask(filled, EVERY_TYPE, as_csv=True))))
    cells = dict(zip(names, row, strict=True))
    assert cells["text"] == 'it\'s "x", [red]é' and cells["nothing"] == "" and cells["nan"] == ""
    assert cells["yes"] == "true" and cells["huge"].endswith("5884105727") and json.loads(cells["list"]) == [1, None]


def test_a_table_in_a_pipe_is_never_cut_and_markup_stays_text(filled: Home) -> None:
    long = "word " * 400
    shown = ask(
        filled,
        f"SELECT '{long}' AS long, '[bold]x[/bold]' AS markup, 'a\x1b[31mb\nc' AS control, 123456789 AS n, 'ö中' AS wide",
    )
    assert long.strip() in shown and "[bold]x[/bold]" in shown and "123456789" in shown and "ö中" in shown
    assert "\x1b" not in shown and r"a\x1b[31mb\nc" in shown and "…" not in shown


def test_a_terminal_gets_its_width_and_a_note_on_stderr_when_rows_are_left_out(
    filled: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    count = queries.run_select(filled, "SELECT range AS n, repeat('x', 200) AS long FROM range(1500)", out=out)
    assert count == 1000
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert len(lines) > 1000 and max(map(len, lines)) <= 60
    assert "first 1,000" in capsys.readouterr().err
    queries.run_select(filled, "SELECT * FROM range(10)", out=Terminal(), limit=10)
    assert capsys.readouterr().err == ""


def test_limit_cuts_every_format_and_no_limit_gives_all(filled: Home) -> None:
    assert len(json.loads(ask(filled, "SELECT * FROM range(2500)", as_json=True))) == 2500
    assert len(json.loads(ask(filled, "SELECT * FROM range(2500)", as_json=True, limit=7))) == 7
    assert len(ask(filled, "SELECT * FROM range(2500)", as_csv=True, limit=1001).splitlines()) == 1002
    assert ask(filled, "SELECT * FROM range(0)", as_json=True) == "[]\n"


def test_json_refuses_two_columns_of_one_name(filled: Home) -> None:
    with pytest.raises(UsageError, match="Two columns are named 'a'"):
        ask(filled, "SELECT 1 AS a, 2 AS a", as_json=True)


def test_two_formats_at_once_are_refused(filled: Home) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        ask(filled, "SELECT 1", as_json=True, as_csv=True)


def test_a_query_sees_no_variable_of_the_program(filled: Home) -> None:
    home = filled
    with pytest.raises(UsageError, match="no table or view 'home'"):
        ask(home, "SELECT * FROM home")


def test_an_error_while_running_is_a_sentence(filled: Home) -> None:
    with pytest.raises(StorageError, match="failed to answer"):
        ask(filled, "SELECT scene_key::INT FROM scenes")


def test_tables_lists_each_with_its_rows(filled: Home) -> None:
    names, rows = queries.list_tables(filled)
    found = {row[0]: row[1:3] for row in rows}
    assert names == ["name", "kind", "rows", "holds"] and len(rows) == 20
    assert (
        found["scenes"] == ("view", 8)
        and found["captions"] == ("view", 14)
        and found["versions.scenes"] == ("table", 8)
    )
    assert found["jobs"] == ("table", 1) and found["runs"] == ("table", 0)


def test_snapshots_name_the_tables_that_changed(filled: Home) -> None:
    names, rows = queries.list_snapshots(filled)
    last = dict(zip(names, rows[-1], strict=True))
    assert last["author"] == "goodviews" and "add toy@0123456789abcdef: 8 scenes" in last["message"]
    assert "versions.scenes" in last["changes"] and "datasets" in last["changes"]


def test_scene_stats_add_up(filled: Home) -> None:
    query = "SELECT scenes, captions, min_captions, mean_captions, max_captions, captions_per_scene, words_per_caption FROM scene_stats"
    with lake.reading(filled) as reader:
        assert reader.rows(query) == [(8, 14, 1, 1.75, 3, {1: 4, 2: 2, 3: 2}, 5.0)]


def test_the_leaderboard_ranks_what_can_be_compared_and_leaves_out_nan(home: Home) -> None:
    with lake.writing(home) as writer:
        for name, value, n in [
            ("a", 0.3, 100),
            ("b", 0.5, 100),
            ("c", float("nan"), 100),
            ("d", 0.9, 50),
            ("e", None, 100),
        ]:
            writer.connection.execute(
                "INSERT INTO main.alignments (alignment_id, metric, value, n, k) VALUES (?, 'mutual_knn', ?, ?, 10)",
                [name, value, n],
            )
        found = writer.rows("SELECT alignment_id, place FROM leaderboard ORDER BY n DESC, place")
    assert found == [("b", 1), ("a", 2), ("d", 1)]


def test_time_travel_reaches_through_the_views(home: Home, publish: Any) -> None:
    old, new = publish(version="a" * 16), publish(version="b" * 16, shards=3)
    first = commit_version(home, "toy", old.version)
    commit_version(home, "toy", new.version)
    query = f"SELECT count(*) AS n, min(version) AS v FROM scenes AT (VERSION => {first.snapshot_id})"
    assert json.loads(ask(home, query, as_json=True)) == [{"n": 8, "v": old.version}]


@pytest.mark.parametrize(
    "text", ["plain é 中", "tab\there", "\x1b]0;title\x07", "zero\x00", "\u202eright to left", "line separator\u2028"]
)
def test_printable_text_moves_no_cursor(text: str) -> None:
    assert answers.printable(text).isprintable()
    assert answers.printable("plain é 中") == "plain é 中"
