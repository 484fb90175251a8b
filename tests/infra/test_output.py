"""Results on stdout: facts and tables for people."""

from __future__ import annotations

import pytest

from infra.output import print_facts, print_table


def test_a_long_name_stays_apart_from_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"run": "one", "tokenizer": "[not] loaded"})
    assert capsys.readouterr().out == "run       one\ntokenizer [not] loaded\n"


def test_long_cells_of_a_table_are_folded_and_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "rows"], [["a", "1"], ["x" * 300, "2"]])
    assert capsys.readouterr().out.count("x") == 300
