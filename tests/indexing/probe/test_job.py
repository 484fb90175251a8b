"""`indexing.probe.job`: what was read off a set, and from which labels, is told apart in the catalog."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catalog.rows import embeddings
from indexing.probe.job import ProbingConfig, probe_set
from indexing.probe.labels import read_labels
from indexing.probe.probes import ProbeConfig
from indexing.uncertainty.bootstrap import BootstrapConfig
from infra.home import Home, resolve
from tests.catalog.stored_rows import list_alignments
from tests.indexing.embedding_sets import put_set, scene_keys

N = 40


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = resolve(str(tmp_path / "home"))
    put_set(made, "x", scene_keys(N), {0: np.random.default_rng(0).normal(size=(N, 6))})
    return made


def label_file(path: Path, **classes: int) -> str:
    """A CSV that gives scene i the label i modulo the number of classes, in a column each."""
    lines = [",".join([key, *(str(i % n) for n in classes.values())]) for i, (key, _) in enumerate(scene_keys(N))]
    path.write_text("\n".join([",".join(["scene_key", *classes]), *lines]))
    return str(path)


def probed(home: Home, labels: str, label: str = "label") -> dict[str, Any]:
    how = ProbeConfig(kinds=("knn",), bootstrap=BootstrapConfig(draws=0))
    (row,) = probe_set(home, ProbingConfig(name="x", labels=labels, label=label, probe=how))
    return row


def test_two_files_two_columns_and_a_changed_file_are_rows_of_their_own(home: Home, tmp_path: Path) -> None:
    colours, places = label_file(tmp_path / "colour.csv", label=2, shape=5), label_file(tmp_path / "place.csv", label=4)
    first, second, third = probed(home, colours), probed(home, places), probed(home, colours, "shape")
    digest = hashlib.sha256((tmp_path / "colour.csv").read_bytes()).hexdigest()[:16]
    assert first["right"] == f"colour.csv:label ({digest})" and first["right"] in first["selection"]
    label_file(tmp_path / "colour.csv", label=8)
    fourth = probed(home, colours)
    stored = {row["alignment_id"]: row["chance"] for row in list_alignments(home)}
    assert stored == {
        row["alignment_id"]: chance
        for row, chance in ((first, 1 / 2), (second, 1 / 4), (third, 1 / 5), (fourth, 1 / 8))
    }
    assert probed(home, colours)["alignment_id"] == fourth["alignment_id"] and len(list_alignments(home)) == 4


def test_labels_that_read_like_nothing_are_labels_and_an_empty_one_is_none(home: Home, tmp_path: Path) -> None:
    words = ["NA", "null", "nan", "N/A", "", "None"]
    path = tmp_path / "l.csv"
    path.write_text("\n".join(["scene_key,label", *(f"s{i},{word}" for i, word in enumerate(words)), "NA,1"]))
    found = read_labels(home, str(path), embeddings.find(home, "x"), ("scene_key", "label"))
    assert found == {"s0": "NA", "s1": "null", "s2": "nan", "s3": "N/A", "s5": "None", "NA": "1"}
