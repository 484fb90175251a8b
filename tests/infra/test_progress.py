"""Progress: true counts, lines where there is no terminal, a live view where there is one, and never a failed job."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra import progress
from infra.progress import Progress

REPOSITORY = Path(progress.__file__).parents[1]
SIZE = r"(\d+ MiB|\d+\.\d\d GiB)"


def test_the_summary_tells_every_count() -> None:
    stream = io.StringIO()
    with Progress(4, label="ingest toy", stream=stream) as shown:
        shown.advance(shards=1, texts=500, rejects={"exact_repeat": 2}, scenes=100)
        shown.advance(shards=2, texts=1000, rejects={"exact_repeat": 1, "missing_text": 1200})
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("ingest toy: 3/4 shards | 100 scenes | 1,500 texts | ")
    assert "| 1,203 rejects (missing_text 1,200, exact_repeat 3) |" in line
    assert re.search(r"\d texts/s \|", line)
    assert re.search(rf"peak RSS {SIZE} \|", line)
    assert re.search(r"\| done in \d+\.\d s$", line)
    assert shown.peak_rss_bytes > 1_000_000


def test_a_job_that_fails_says_stopped_and_its_error_goes_on() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="broken"), Progress(4, label="x", stream=stream) as shown:
        shown.advance(shards=1)
        raise RuntimeError("broken")
    assert "1/4 shards" in stream.getvalue()
    assert "stopped in" in stream.getvalue()


def test_lines_come_by_themselves_while_nothing_advances() -> None:
    stream = io.StringIO()
    with Progress(4, label="x", stream=stream, interval_s=0.01) as shown:
        shown.advance(shards=2, texts=10)
        while stream.getvalue().count("2/4 shards") < 2:
            time.sleep(0.01)
    *lines, summary = stream.getvalue().splitlines()
    assert len(lines) >= 2
    assert re.search(rf"\| RSS {SIZE} \| ETA \d+\.\d s$", lines[-1])
    assert "done in" in summary


def test_quiet_leaves_only_the_summary() -> None:
    stream = io.StringIO()
    with Progress(4, label="x", quiet=True, stream=stream, interval_s=0.001) as shown:
        for _ in range(5):
            shown.advance(texts=1)
            time.sleep(0.005)
    (line,) = stream.getvalue().splitlines()
    assert "5 texts" in line


def test_counts_from_many_threads_add_up() -> None:
    with Progress(0, label="x", stream=io.StringIO()) as shown:

        def work() -> None:
            for _ in range(500):
                shown.advance(1, 2, {"a": 3}, scenes=4)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (shown.shards, shown.texts, shown.rejects["a"], shown.scenes) == (2000, 4000, 6000, 8000)


def test_a_stream_that_is_gone_fails_no_job() -> None:
    stream = io.StringIO()
    with Progress(1, label="x", stream=stream) as shown:
        stream.close()
        shown.advance(shards=1)
    assert shown.shards == 1


IN_A_TERMINAL = """
import sys, time
from infra.progress import Progress
with Progress(4, label="ingest toy") as shown:
    shown.advance(shards=2, texts=10)
    time.sleep(0.1)
    print("the result")
"""


def test_a_terminal_gets_a_live_view_and_stdout_stays_clean() -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL], stdout=subprocess.PIPE, stderr=child, cwd=REPOSITORY, env=environment
    )
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 4096):
            shown += block
    except OSError:
        pass  # Linux reports the closed terminal as an error.
    finally:
        os.close(parent)
    out, _ = process.communicate()
    assert process.returncode == 0, shown
    assert out == b"the result\n"
    assert b"\x1b[" in shown
    assert b"2/4 shards" in shown
    assert b"done in" in shown


def test_memory_counts_the_children_too() -> None:
    alone = progress.rss_bytes()
    assert alone > 1_000_000
    assert progress.peak_rss_bytes() >= 1_000_000
    if not Path("/proc").is_dir():
        pytest.skip("memory of children is read from /proc")
    code = "x = bytearray(80_000_000); x[::4096] = b'1' * len(x[::4096]); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert progress.rss_bytes() > alone + 60_000_000
        assert progress.peak_rss_bytes() > alone + 60_000_000
        child.communicate(b"\n")
