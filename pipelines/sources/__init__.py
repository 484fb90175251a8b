"""The table of sources: a source is one class, registered by its line here."""

from __future__ import annotations

import importlib
from typing import Any, Final, cast

from infra.errors import UsageError

SOURCES: Final = {
    "coco": "pipelines.sources.sets.coco:Coco",
    "datacomp": "pipelines.sources.sets.datacomp:DataComp",
    "flickr30k": "pipelines.sources.sets.flickr:Flickr30k",
    "flickr8k": "pipelines.sources.sets.flickr:Flickr8k",
    "img2dataset": "pipelines.sources.tars.img2dataset:Img2dataset",
    "msrvtt": "pipelines.sources.sets.msrvtt:MsrVtt",
    "multi30k": "pipelines.sources.sets.multi30k:Multi30k",
    "recap-datacomp": "pipelines.sources.sets.recap:RecapDataComp",
    "table": "pipelines.sources.tables.table:Table",
    "toyworld": "pipelines.sources.toyworld.source:Toyworld",
    "webdataset": "pipelines.sources.tars.webdataset_tars:WebdatasetTars",
    "wit": "pipelines.sources.sets.wit:Wit",
}
"""Name of the source -> its class. The class is a frozen keyword-only dataclass of its options (`--set source.x=y`)."""


def source_class(name: str) -> type[Any]:
    """The class of a source. Raises UsageError with the known names."""
    if name not in SOURCES:
        from pipelines.sources.formats.names import nearest

        known = ", ".join(sorted(SOURCES))
        raise UsageError(f"There is no source {name!r}.{nearest(name, SOURCES)} Known sources: {known}.")
    module, _, attribute = SOURCES[name].partition(":")
    return cast(type[Any], getattr(importlib.import_module(module), attribute))
