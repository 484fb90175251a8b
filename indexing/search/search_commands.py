"""Find the scenes that a text describes, with their captions."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infra.options import EmbeddingsHomeOption, JsonOption
from infra.output import print_json

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

SHOWN_CAPTIONS = 2


@app.command()
def search(
    text: Annotated[str, typer.Argument(help='Words, such as "a dog in snow".')],
    in_: Annotated[str, typer.Option("--in", help="Name or id of an embedding set of texts, or of an index.")],
    k: Annotated[int, typer.Option(help="Scenes to find.")] = 10,
    layer: Annotated[int | None, typer.Option(help="Layer of the set; default: the last.")] = None,
    map_: Annotated[str | None, typer.Option("--map", help="Map between texts and the set, by `rotate`.")] = None,
    json: JsonOption = False,
    home: EmbeddingsHomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
) -> None:
    """Find the scenes that a text describes, with their captions."""
    from indexing.search.text_search import find_target, search_scenes
    from infra.home import resolve

    where = resolve(home, catalog)
    answer = search_scenes(where, text, find_target(where, in_), k=k, layer=layer, map_id=map_)
    if json:
        print_json(answer)
        return
    how = "exact" if answer.exact else f"by index {answer.index_id}"
    print(f"{len(answer.scenes)} scenes of {answer.set_name}, layer {answer.layer}, {how}", file=sys.stderr)
    for scene in answer.scenes:
        print(f"{scene.place}\t{scene.score:.4f}\t{scene.scene_key}\t{' | '.join(scene.captions[:SHOWN_CAPTIONS])}")
