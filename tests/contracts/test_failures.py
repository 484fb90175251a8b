"""`docs/failures.md` has a row for every known case, and every row a test that is there or a reason why there is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CASES = {
    "A": [1, 2, 3, 5, 6, 8, 10, 12],
    "B": [1, 2, 3, 5, 8, 9, 10, 11, 13, 14, 16, 18],
    "C": [1, 2, 3, 4, 6, 7, 8, 11, 12, 15, 16, 17],
    "D": [1, 2, 3, 4, 6, 7, 8, 10, 12, 14, 16],
    "E": [1, 2, 3, 4, 5, 6, 8, 9, 11, 14, 15, 16, 18, 20, 21, 22, 23, 24],
    "F": [1, 3, 4, 6, 8, 9, 10, 11, 13, 14, 16, 17, 18, 20, 21, 23, 24],
    "G": [1, 3, 5, 6, 8, 11, 13, 14, 16],
    "H": [1, 2, 3, 4, 5, 6, 7],
}
"The cases by group; their numbers have gaps."


def rows(text: str) -> list[tuple[str, str, str]]:
    """Case, what happens here, and what shows it."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if re.match(r"\| [A-H]\d+ \|", line)]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [(case, here, shown) for case, here, shown in cells]


def named_tests(shown: str) -> list[str]:
    return re.findall(r"`([\w./-]+::\w+)`", shown)


def problems(text: str, tests: Path) -> list[str]:
    """Rows that name no test and give no reason, and tests that are not there."""
    found = []
    for case, here, shown in rows(text):
        names = named_tests(shown)
        if not here or not (names or re.match(r"cannot occur: \w+", shown)):
            found.append(f"{case}: {shown!r} is neither a test nor a reason")
        for name in names:
            file, _, function = name.partition("::")
            if not (tests / file).is_file() or function not in functions(tests / file):
                found.append(f"{case}: there is no {name}")
    return found


def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_case_has_one_row() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    assert [case for case, _, _ in rows(text)] == [f"{group}{n}" for group, ns in CASES.items() for n in ns]


def test_every_row_names_tests_that_are_there_or_says_why_it_cannot_occur() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    assert sum(len(named_tests(shown)) for _, _, shown in rows(text)) > 100
    assert problems(text, REPOSITORY / "tests") == []


def test_a_row_without_a_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_it() -> None: ...\n")
    good = "| A1 | It holds. | `test_a.py::test_it` |\n| A2 | It holds. | cannot occur: nothing is pickled |\n"
    assert problems(good, tmp_path) == []
    bad = "| A1 | It holds. | soon |\n| A2 | It holds. | `test_a.py::test_that` |\n| A3 | It holds. | `test_b.py::test_it` |\n"
    assert [line.split(":")[0] for line in problems(bad, tmp_path)] == ["A1", "A2", "A3"]
