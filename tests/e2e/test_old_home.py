"""A HOME made today holds the bytes and ids that the code before the move into one folder a verb gave it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e import old_home


def test_the_recipe_gives_the_ids_digests_and_scores_of_the_old_code_and_all_of_it_is_read(tmp_path: Path) -> None:
    wanted = json.loads(Path(old_home.__file__).with_suffix(".json").read_text())
    assert len(wanted["files"]) > 100 and len(wanted["scores"]) == 13
    old_home.make(tmp_path / "home")
    assert old_home.facts(tmp_path / "home") == wanted
    old_home.read(tmp_path / "home")
