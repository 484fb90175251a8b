"""The report in a real browser: nothing to complain of on the console, every figure decoded, text that can be read, no request.

Skips where there is no Chromium. `--dump-dom` prints the page after its scripts have run, and the page has none; so a copy with
a script and without the policy that forbids scripts measures what the browser made of it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from catalog.report.page import ReportConfig, write_report
from infra.cli import run as goodviews
from tests.catalog import scored_home

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
LEAST_FONT_PX, LEAST_CONTRAST = 13.0, 4.5

MEASURE = """
<pre id="measured"></pre>
<script>
addEventListener("load", () => {
  const images = [...document.images].map(i => ({alt: i.alt, width: i.naturalWidth, shown: i.getBoundingClientRect().width}));
  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE"].includes(parent.tagName) || !parent.checkVisibility()) continue;
    const style = getComputedStyle(parent);
    texts.push({text: node.data.trim().slice(0, 40), px: parseFloat(style.fontSize), colour: style.color});
  }
  const requests = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"));
  const wide = document.documentElement.scrollWidth - innerWidth;
  const cut = [...document.querySelectorAll("td, th, figcaption, p, dd, dt, h1, h2, h3")]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline").map(e => e.textContent.slice(0, 60));
  document.getElementById("measured").textContent = JSON.stringify({images, texts, requests, wide, cut});
});
</script>
"""


def browser() -> str:
    """Path of a Chromium."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    return found


def run(words: Sequence[str], page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    """Chromium on the page, with a profile of its own."""
    command = [browser(), *FLAGS, f"--user-data-dir={profile}", *words, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser()
    at = scored_home.full_home(tmp_path_factory.mktemp("page") / "home")
    return Path(write_report(at.home, ReportConfig()).page)


def console(stderr: str) -> list[str]:
    """Lines that the page, and not the browser itself, gave rise to."""
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def measured(page: Path, tmp_path: Path, width: int) -> dict[str, Any]:
    """What the script found in a copy of the page, in a window of that width."""
    html, policies = re.subn(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page.read_text())
    assert policies == 1
    copy = tmp_path / "measured.html"
    copy.write_text(html.replace("</body>", f"{MEASURE}</body>"))
    done = run([f"--window-size={width},1200", "--virtual-time-budget=10000", "--dump-dom"], copy, tmp_path / "profile")
    found = re.search(r"<pre id=\"measured\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert found is not None
    assert found[1], done.stderr
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


def contrast(colour: str) -> float:
    """Of text on white, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05)


def test_the_console_stays_silent(page: Path, tmp_path: Path) -> None:
    done = run([f"--screenshot={tmp_path / 'page.png'}", "--window-size=1100,1600"], page, tmp_path / "profile")
    assert console(done.stderr) == []
    assert (tmp_path / "page.png").stat().st_size > 20_000
    # The check sees what it looks for: a page that breaks its own policy says so.
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</body>", "<script>1</script></body>"))
    assert len(console(run(["--dump-dom"], broken, tmp_path / "other").stderr)) == 1


def test_every_figure_is_decoded_and_nothing_is_requested(page: Path, tmp_path: Path) -> None:
    found = measured(page, tmp_path, 1100)
    images = found["images"]
    assert len(images) > 30
    assert [image["alt"] for image in images if not image["width"] or not image["shown"]] == []
    figures = [image for image in images if image["shown"] > 400]
    assert len(figures) == len(list(page.parent.glob("*.svg"))) >= 9
    assert found["requests"] == []


@pytest.mark.parametrize("width", [1100, 500])
def test_text_can_be_read(page: Path, tmp_path: Path, width: int) -> None:
    found = measured(page, tmp_path, width)
    texts = found["texts"]
    assert len(texts) > 300
    assert [text for text in texts if text["px"] < LEAST_FONT_PX] == []
    assert [text for text in texts if contrast(text["colour"]) < LEAST_CONTRAST] == []
    assert found["cut"] == []
    assert found["wide"] <= 0, "the page itself never scrolls sideways, only wide tables in it do"


def test_a_page_without_scores_is_a_page_too(tmp_path: Path) -> None:
    browser()
    home = str(tmp_path / "home")
    words = ["ingest", "toyworld", "--set", "source.scenes=30", "--set", "source.images=false", "--num-cpus", "0"]
    assert goodviews([*words, "--home", home]) == 0
    assert goodviews(["report", "--home", home, "--out", str(tmp_path / "out")]) == 0
    found = measured(tmp_path / "out" / "index.html", tmp_path, 1100)
    assert [image["width"] > 0 for image in found["images"]] == [True, True]
    assert found["wide"] <= 0
