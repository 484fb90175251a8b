"""Options that many commands share: one name, one help text."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
HomeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Folder or URL of datasets and runs [env GOODVIEWS_HOME].")
]
DatasetsHomeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Folder or URL of datasets [env GOODVIEWS_HOME].")
]
EmbeddingsHomeOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Folder or URL of embeddings [env GOODVIEWS_HOME].")
]
