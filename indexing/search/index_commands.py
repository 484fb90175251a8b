"""Build approximate indexes with a measured recall; list, show and verify them."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import UsageError
from infra.options import JsonOption
from infra.output import print_json

if TYPE_CHECKING:
    from indexing.search.indexes import IndexRecord

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Build approximate indexes over embedding sets, with a measured recall; list, show and verify them.",
)

_log = logging.getLogger(__name__)

_Home = Annotated[str | None, typer.Option(help="Folder or URL of embeddings and indexes [env GOODVIEWS_HOME].")]
_Catalog = Annotated[str | None, typer.Option(help="SQLite path or postgres:... [env GOODVIEWS_CATALOG].")]
_Index = Annotated[str, typer.Argument(help="Name or id of an index.")]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@app.command()
def build(
    set_: Annotated[str, typer.Argument(metavar="SET", help="Name or id of an embedding set.")],
    factory: Annotated[
        str | None, typer.Option(help="FAISS factory such as IVF1024,Flat; default: by the wish.")
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="Such as nprobe=16; default: enough for --recall.")] = None,
    recall: Annotated[float, typer.Option(help="Share of the true neighbours to be found.")] = 0.95,
    memory: Annotated[str | None, typer.Option(help="Most memory, such as 2GB.")] = None,
    ms: Annotated[float | None, typer.Option(help="Most milliseconds a query.")] = None,
    k: Annotated[int, typer.Option(help="Neighbours that are audited.")] = 10,
    layer: Annotated[int | None, typer.Option(help="Layer of the set; default: the last.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the index; default: SET/FACTORY.")] = None,
    json: JsonOption = False,
    home: _Home = None,
    catalog: _Catalog = None,
) -> None:
    """Build an index by a FAISS factory, or the fastest that grants the wish, and audit it against exact neighbours."""
    from catalog.rows import embeddings
    from indexing.search import indexes
    from indexing.search.ann import Wish
    from infra.home import resolve

    where = resolve(home, catalog)
    memory_bytes = None if memory is None else read_bytes_option(memory, "--memory")
    wish = Wish(recall=recall, memory_bytes=memory_bytes, ms_per_query=ms, k=k)
    config = indexes.IndexConfig(wish=wish, factory=factory, parameters=parameters, layer=layer, name=name)
    record = indexes.build_index(where, embeddings.find(where, set_), config)
    for flag in record.flags:
        _log.warning("Index %s falls short of the wish: %s.", record.name, flag)
    _print(_facts(record) | {"audit": indexes.read_audit(where, record)}, as_json=json)


@app.command("list")
def list_(json: JsonOption = False, home: _Home = None, catalog: _Catalog = None) -> None:
    """One line an index, oldest first."""
    from indexing.search import indexes
    from infra.home import resolve

    rows = [_facts(record) for record in indexes.list_indexes(resolve(home, catalog))]
    if json:
        print_json(rows)
        return
    for row in rows:
        print("\t".join(str(row[key]) for key in ("index_id", "name", "factory", "parameters", "rows", "recall")))


@app.command()
def show(index: _Index, json: JsonOption = False, home: _Home = None, catalog: _Catalog = None) -> None:
    """What an index is bound to, and what its audit found."""
    from indexing.search import indexes
    from infra.home import resolve

    where = resolve(home, catalog)
    record = indexes.find_index(where, index)
    _print(_facts(record) | {"audit": indexes.read_audit(where, record)}, as_json=json)


@app.command()
def verify(index: _Index, json: JsonOption = False, home: _Home = None, catalog: _Catalog = None) -> None:
    """Compare an index with its digests and with its embedding set; exit code 1 when anything differs."""
    from indexing.search import indexes
    from infra.home import resolve

    where = resolve(home, catalog)
    record = indexes.find_index(where, index)
    opened = indexes.open_index(where, record)
    found = {"index_id": record.index_id, "name": record.name, "rows": opened.keys.num_rows, "whole": True}
    if json:
        print_json(found)
    else:
        print(f"Index {record.name} ({record.index_id}) is whole: {record.rows:,} rows of {record.set_name}.")


def read_bytes_option(text: str, option: str) -> int:
    """Bytes of a size such as 2GB, 512MiB or 4096. Raises UsageError for anything else, and for 0."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else None
    size = int(float(match[1]) * UNITS[unit]) if match and unit in UNITS else 0
    if size < 1:
        raise UsageError(f"{option} is {text!r}, but must be a size above 0, such as 2GB or 512MiB.")
    return size


def _facts(record: IndexRecord) -> dict[str, Any]:
    import dataclasses

    found = dataclasses.asdict(record)
    del found["set_files"], found["files"]
    return found | {"bytes": sum(int(file["bytes"]) for file in record.files.values())}


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if name != "audit":
            print(f"{name:<15}{value}")
    for audit in facts["audit"]["tried"]:
        print(
            f"tried          {audit['factory']} {audit['parameters']}: recall@{audit['k']} {audit['recall']:.3f}, "
            f"{audit['absent']:.1%} absent, {audit['ms_per_query']:.3g} ms, {audit['bytes']:,} bytes"
        )
