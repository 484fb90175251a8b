"""Names, folders and labels of the checkpoints that a run exports."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from infra.models import checkpoints
from infra.models.checkpoints import BEST, FIRST_EPOCH, LAST, UNTRAINED


@pytest.mark.parametrize(
    ("checkpoint", "name", "folder", "label"),
    [
        (UNTRAINED, "run:r1@untrained", "encoder-untrained", "untrained"),
        (FIRST_EPOCH, "run:r1@epoch-001", "encoder-epoch-001", "after one epoch"),
        (BEST, "run:r1@best", "encoder-best", "best validation loss"),
        (LAST, "run:r1", "encoder", "trained"),
        ("epoch-012", "run:r1@epoch-012", "encoder-epoch-012", "epoch-012"),
    ],
)
def test_each_checkpoint_has_one_name_folder_and_label(
    checkpoint: str | None, name: str, folder: str, label: str
) -> None:
    assert checkpoints.model_name("r1", checkpoint) == name
    assert checkpoints.parse_model_name(name) == ("r1", checkpoint)
    assert checkpoints.checkpoint_of(name) == checkpoint
    assert checkpoints.folder_name(checkpoint) == folder
    assert checkpoints.checkpoint_in(folder) == checkpoint
    assert checkpoints.label(checkpoint) == label


@pytest.mark.parametrize("name", ["run:", "run:r1@", "run:r1@first", "run:R1", "run:../r1", "run:r1@epoch-1"])
def test_an_unknown_checkpoint_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="`run:ID`, `run:ID@untrained`, `run:ID@epoch-001` or `run:ID@best`"):
        checkpoints.parse_model_name(name)


def test_other_models_have_no_checkpoint() -> None:
    assert checkpoints.checkpoint_of("sentence-transformers/all@v2") is None
