"""Memory is bounded by the shard and the piece: four times the rows, the same peak."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
INGEST = """
import sys
from pathlib import Path
from infra.home import resolve
from infra.progress import peak_rss_bytes
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest
from tests.bench.recap_rows import write_rows

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
write_rows(folder / "in", rows, files=rows // 15_000)
request = build_request("recap-datacomp", [str(folder / "in")], None, None, ["scenes_per_shard=5000"], 0.2)
with open_workers(address=None, num_cpus=0) as workers:
    outcome = ingest(request, resolve(str(folder / "home")), workers)
assert outcome.texts_read == 2 * rows, outcome
print(peak_rss_bytes())  # not ru_maxrss, which begins at the peak of the process that started this one
"""


def peak(folder: Path, rows: int) -> int:
    """Peak RSS (bytes) of a process that ingests `rows` rows."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", INGEST, str(folder), str(rows)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_c3_peak_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    small, large = peak(tmp_path / "small", 15_000), peak(tmp_path / "large", 60_000)
    assert large < 1.2 * small, f"{small:,} bytes for 15,000 rows, {large:,} for 60,000"
