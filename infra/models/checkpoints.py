"""Checkpoints of a run's encoder: their names, folders and labels.

A run exports its encoder before training, after the first epoch, at its best validation loss and at the end. A
checkpoint has a suffix in model names (`run:ID@untrained`) and a folder below the run (`encoder-untrained`); the last
one has no suffix and is None here. The files that a killed training goes on from are another thing: see
`trainer.run.checkpoint`.
"""

from __future__ import annotations

import re
from typing import Final

from infra.errors import UsageError

UNTRAINED: Final = "untrained"
FIRST_EPOCH: Final = "epoch-001"
BEST: Final = "best"
LAST: Final = None

SYNTAX: Final = f"run:ID[@{UNTRAINED}|@{FIRST_EPOCH}|@{BEST}]"
"Of model names, for help texts."
RUN_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
FOLDER: Final = "encoder"
RECORD: Final = "goodviews.json"
"In each folder: what the encoder is and where it comes from."
_MODEL: Final = re.compile(rf"run:(?P<run>{RUN_ID.pattern})(@(?P<checkpoint>{BEST}|{UNTRAINED}|epoch-[0-9]{{3,}}))?")
_LABELS: Final = {
    LAST: "trained",
    UNTRAINED: "untrained",
    FIRST_EPOCH: "after one epoch",
    BEST: "best validation loss",
}


def model_name(run_id: str, checkpoint: str | None) -> str:
    """`run:ID` or `run:ID@CHECKPOINT`."""
    return f"run:{run_id}@{checkpoint}" if checkpoint else f"run:{run_id}"


def parse_model_name(name: str) -> tuple[str, str | None]:
    """Run id and checkpoint of a name that begins with `run:`. Raises UsageError for an unknown checkpoint."""
    match = _MODEL.fullmatch(name)
    if match is None:
        known = ", ".join(f"`{model_name('ID', checkpoint)}`" for checkpoint in (LAST, UNTRAINED, FIRST_EPOCH))
        message = (
            f"The model {name!r} is not {known} or `{model_name('ID', BEST)}`. `goodviews runs list` shows the ids."
        )
        raise UsageError(message)
    return match["run"], match["checkpoint"]


def checkpoint_of(model: str) -> str | None:
    """The suffix of a recorded model name, unchecked; None for the last checkpoint and for other models."""
    return (model.partition("@")[2] or None) if model.startswith("run:") else None


def folder_name(checkpoint: str | None) -> str:
    """Folder of a checkpoint below its run."""
    return f"{FOLDER}-{checkpoint}" if checkpoint else FOLDER


def checkpoint_in(folder: str) -> str | None:
    """The checkpoint whose folder has that name: the inverse of `folder_name`."""
    return folder.removeprefix(FOLDER).removeprefix("-") or None


def label(checkpoint: str | None) -> str:
    """The checkpoint in words, for plots and tables."""
    return _LABELS.get(checkpoint, checkpoint or "")
