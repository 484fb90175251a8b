"""Where things live: HOME with its folders, and the catalog URL that belongs to it.

`--home` (GOODVIEWS_HOME, default ./goodviews-home) holds datasets, runs, embeddings, reports; `--catalog`
(GOODVIEWS_CATALOG, default HOME/catalog.sqlite) names the metadata database: a SQLite file or `postgres:...`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from infra import storage
from infra.errors import UsageError

DEFAULT_HOME = "./goodviews-home"


@dataclass(frozen=True, kw_only=True)
class Home:
    """A resolved HOME: `url` is absolute; `catalog` is an absolute SQLite path or a `postgres:` string."""

    url: str
    catalog: str

    def __repr__(self) -> str:
        # A Postgres string may carry a password, and reprs end in logs.
        catalog = "postgres:..." if self.catalog.startswith("postgres:") else self.catalog
        return f"Home(url={self.url!r}, catalog={catalog!r})"

    def datasets(self, *names: str) -> str:
        """URL below HOME/datasets."""
        return storage.join(self.url, "datasets", *names)

    def work(self, *names: str) -> str:
        """URL below HOME/work, where jobs keep what they remove at their end."""
        return storage.join(self.url, "work", *names)

    @property
    def lake_data(self) -> str:
        """Folder of the data files that DuckLake itself writes; never holds a shard of ours."""
        return storage.join(self.url, "lake")


def resolve(home: str | None = None, catalog: str | None = None) -> Home:
    """HOME and catalog from arguments, then environment, then defaults.

    Raises UsageError when HOME is not local and no catalog is named.
    """
    url = storage.absolute(home or os.environ.get("GOODVIEWS_HOME") or DEFAULT_HOME)
    named = catalog or os.environ.get("GOODVIEWS_CATALOG") or None
    if named is None:
        if storage.is_remote(url):
            message = (
                f"HOME {url} is not a local folder, so a SQLite catalog cannot live in it. Name a Postgres catalog, for"
                " example `--catalog 'postgres:dbname=goodviews host=db'`."
            )
            raise UsageError(message)
        return Home(url=url, catalog=os.path.join(url, "catalog.sqlite"))
    if named.startswith(("postgres:", "postgresql:")):
        return Home(url=url, catalog="postgres:" + named.split(":", 1)[1])
    if storage.is_remote(named):
        message = (
            f"The catalog {named.split('://', 1)[0]}://... is neither a SQLite path nor `postgres:...`. Name one of the"
            " two."
        )
        raise UsageError(message)
    if storage.is_remote(url):
        message = (
            f"HOME {url} is shared but the catalog {named} is a SQLite file on one machine. Name a Postgres catalog,"
            " for example `--catalog 'postgres:dbname=goodviews host=db'`."
        )
        raise UsageError(message)
    return Home(url=url, catalog=storage.absolute(named))
