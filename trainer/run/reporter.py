"""Reports of rank 0 during a training: metrics, ledger, status, heartbeat, trackers, catalog rows.

Invariant: the files of the run are the truth. The catalog follows them at most every `run.catalog_every_s`; when it is
locked or away, the next report tries again, because a training of days must not end for a lock.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from catalog.rows.runs import METRICS, append_metrics
from infra.errors import GoodviewsError
from infra.home import Home
from trainer.run import records
from trainer.run.heartbeat import HeartbeatWriter
from trainer.run.recorder import Totals
from trainer.run.records import RunRecord, RunStatus
from trainer.run.trackers import open_trackers

CATALOG_TIMEOUT_S: Final = 10.0

_log = logging.getLogger(__name__)


class Reporter:
    """Reports of one run from `step` on. ranks: processes of this training; heartbeat: takes the live line."""

    def __init__(self, home: Home, url: str, record: RunRecord, *, ranks: int, step: int) -> None:
        self._home, self._url, self._record, self._ranks = home, url, record, ranks
        self._run = record.config["run"]
        # Steps after the checkpoint will be done again, so their rows of the killed process go.
        for kind in ("ledger", "metrics"):
            records.drop_parts(url, kind, from_step=step)
        self._rows: list[dict[str, Any]] = []
        self._uncatalogued: list[pa.Table] = []
        self._catalogued_s = time.monotonic()
        self.heartbeat = HeartbeatWriter(url)
        excluded = self._run["exclude_trackers"]
        self._trackers = open_trackers(url, record.run_id, record.config, step=step, exclude=excluded)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take metrics measured after `step` steps."""
        at = datetime.datetime.now(datetime.UTC)
        self._rows += [{"step": step, "name": n, "value": float(v), "recorded_at": at} for n, v in values.items()]
        for tracker in self._trackers:
            tracker.log(step, values)

    def record(self, ledger: pa.Table, totals: Totals) -> None:
        """Publish the rows of `ledger` and the metrics since the last call, then the status."""
        if ledger.num_rows == 0:
            return
        first = int(ledger.column("step")[0].as_py())
        metrics = pa.Table.from_pylist(self._rows, schema=METRICS)
        self._rows = []
        records.write_part(self._url, "ledger", ledger, first_step=first)
        if metrics.num_rows:
            records.write_part(self._url, "metrics", metrics, first_step=first)
            self._uncatalogued.append(metrics)
        status = RunStatus(
            status="running",
            ranks=self._ranks,
            steps=totals.step,
            samples=totals.samples,
            tokens=totals.tokens,
            updated_at=time.time(),
        )
        records.write_status(self._url, status)
        if self._uncatalogued and time.monotonic() - self._catalogued_s >= self._run["catalog_every_s"]:
            self._update_catalog(status)

    def close(self) -> None:
        """Close the trackers. The command writes the last rows of the catalog when all ranks have returned."""
        for tracker in self._trackers:
            tracker.close()

    def _update_catalog(self, status: RunStatus) -> None:
        self._catalogued_s = time.monotonic()
        row = records.catalog_row(self._url, self._record, status)
        try:
            # A short wait for the lock: the ranks wait for rank 0 at the next collective.
            append_metrics(self._home, row, pa.concat_tables(self._uncatalogued), timeout_s=CATALOG_TIMEOUT_S)
            self._uncatalogued = []
        except GoodviewsError as error:
            _log.warning(
                "The catalog could not be updated for run %s; the next report tries again: %s",
                self._record.run_id,
                error,
            )
