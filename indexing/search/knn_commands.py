"""Exact nearest neighbours within an embedding set, or of one set in another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from infra.options import EmbeddingsHomeOption, JsonOption
from infra.output import print_json

if TYPE_CHECKING:
    from indexing.search.neighbour_tables import KnnRequest, NeighbourTable
    from infra.home import Home

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

SHOWN_QUERIES = 10
_NAMES = ("query_scene_key", "query_item", "place", "scene_key", "item")


@app.command()
def knn(
    set_: Annotated[str, typer.Argument(metavar="SET", help="Name or id of an embedding set.")],
    queries: Annotated[
        str | None, typer.Option(help="Set whose rows ask; default: the set's own, each without itself.")
    ] = None,
    k: Annotated[int, typer.Option(help="Neighbours of each row.")] = 10,
    layer: Annotated[int | None, typer.Option(help="Layer of both sets; default: the last.")] = None,
    shards: Annotated[int, typer.Option(help="Parts of the set, searched on as many workers.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or gpu; the answer is the same.")] = "auto",
    memory: Annotated[str, typer.Option(help="Tiles of both sets in float32.")] = "256MiB",
    gpu_memory: Annotated[str, typer.Option(help="Buffers on the GPU.")] = "1GB",
    out: Annotated[str | None, typer.Option(help="Parquet file or URL to write.")] = None,
    json: JsonOption = False,
    home: EmbeddingsHomeOption = None,
    catalog: Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join; default: start one here.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs of the Ray started here; 0: no Ray.")] = None,
) -> None:
    """Exact nearest neighbours by cosine; ties go to the lower key."""
    from catalog.rows import embeddings
    from indexing.search.index_commands import read_bytes_option
    from indexing.search.knn import KnnOptions
    from indexing.search.neighbour_tables import KnnRequest, write_table
    from infra.home import resolve

    where = resolve(home, catalog)
    request = KnnRequest(
        base=embeddings.find(where, set_),
        queries=None if queries is None else embeddings.find(where, queries),
        k=k,
        layer=layer,
        shards=shards,
        options=KnnOptions(
            device=device,  # type: ignore[arg-type]
            memory_bytes=read_bytes_option(memory, "--memory"),
            gpu_memory_bytes=read_bytes_option(gpu_memory, "--gpu-memory"),
        ),
    )
    table = _answer(where, request, address, num_cpus)
    if out is not None:
        write_table(table, out)
    _print(request, table, out, as_json=json)


def _answer(where: Home, request: KnnRequest, address: str | None, num_cpus: int | None) -> NeighbourTable:
    from indexing.search.neighbour_tables import neighbour_table
    from infra.session import open_workers

    if request.shards == 1:
        return neighbour_table(where, request, None)
    with open_workers(address=address, num_cpus=num_cpus) as workers:
        return neighbour_table(where, request, workers)


def _print(request: KnnRequest, table: NeighbourTable, out: str | None, *, as_json: bool) -> None:
    facts = {
        "set": request.base.name,
        "queries": request.queries.name if request.queries is not None else None,
        "k": request.k,
        "n": table.n,
        "asked": table.queries,
        "undefined": table.n_undefined,
        "ties": table.tie_rate,
        "out": out,
    }
    if as_json:
        found = facts if out is not None else {**facts, "neighbours": table.rows.to_pylist()}
        print_json(found)
        return
    print(
        f"{table.queries:,} queries, {table.n:,} rows, k = {request.k}, {table.tie_rate:.1%} tied at the last place, "
        f"{table.n_undefined:,} zero rows",
        file=sys.stderr,
    )
    if out is not None:
        print(out)
        return
    shown = table.rows.slice(0, SHOWN_QUERIES * request.k).to_pylist()
    for row in shown:
        print(*(row[name] for name in _NAMES), f"{row['score']:.6f}", sep="\t")
    if len(shown) < table.rows.num_rows:
        print(f"{table.rows.num_rows:,} neighbours in all; --out FILE.parquet writes them.", file=sys.stderr)
