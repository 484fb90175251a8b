"""The report: every number of the catalog and no other, escaped text, no request, the same bytes twice."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from catalog.lake import lake
from catalog.report import scene_images, score_sections
from catalog.report.canvas import Figure, Palette
from catalog.report.contents import read_contents
from catalog.report.encoders import Encoder
from catalog.report.gallery import drawn, read_gallery, read_neighbourhoods
from catalog.report.page import Report, ReportConfig, write_report
from catalog.report.scores import Score, checkpoint_points, group, spreads
from catalog.report.sections import interval, number, table
from catalog.rows.alignments import AlignmentRow, record_alignments
from infra import storage
from infra.cli import run as goodviews
from infra.errors import InputError, IntegrityError
from infra.home import Home, resolve
from tests.catalog import scored_home
from tests.catalog.scored_home import Scored

SECTIONS = ["alignment", "retrieval", "pairs", "probes", "gallery", "neighbours", "trainings", "data", "theory"]
FIGURES = ["alignment", "alignment-by-samples", "retrieval", "pairs", "probes", "loss", "effective-rank", "captions-per-scene", "rejects", "theory-threshold", "theory-bridge"]  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return scored_home.full_home(tmp_path_factory.mktemp("full") / "home")


@pytest.fixture(scope="module")
def written(full: Scored, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(full.home, ReportConfig(out=str(tmp_path_factory.mktemp("report"))))


@pytest.fixture(scope="module")
def page(written: Report) -> str:
    return Path(written.page).read_text()


class Reader(HTMLParser):
    """Sections of a page: anchor of the last heading -> tables by caption; all attributes; all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._caption = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "caption" in self._open:
            self._caption += data
        elif {"td", "th"} & set(self._open):
            self.tables[self._caption][-1][-1] += data.strip()

    def table(self, beginning: str) -> list[dict[str, str]]:
        """Rows of the one table whose caption begins so."""
        (found,) = [rows for caption, rows in self.tables.items() if caption.startswith(beginning)]
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


# --- numbers ------------------------------------------------------------------------------------------------------


def test_the_scores_of_the_page_are_the_rows_of_the_catalog(page: str, full: Scored) -> None:
    rows = Reader(page).table("Alignment: all scores")
    shown = {row["encoder"]: (row["value"], row["95 % interval"]) for row in rows}
    width = scored_home.HALF_WIDTH
    assert shown == {
        f"{arm}, seed {seed}": (f"{value:.3f}", f"{value - width:.3f} to {value + width:.3f}")
        for (arm, seed), value in scored_home.VALUES.items()
    }
    for row in rows:
        assert (row["chance"], row["untrained"], row["after one epoch"]) == ("0.043", "0.082", "0.091")
        assert (row["metric"], row["against"], row["n"]) == ("mutual 10-NN", "efficientnet-lite0", str(len(full.keys)))
    assert [row["encoder"].partition(",")[0] for row in rows] == ["good", "good", "bad", "bad", "next-token", "next-token"]  # fmt: skip


def test_seeds_are_averaged_and_their_intervals_compared(page: str) -> None:
    rows = [row for row in Reader(page).table("Alignment: encoders trained here")]
    assert [(row["encoder"], row["seeds"], row["mean"]) for row in rows] == [
        ("good", "2", "0.427"),
        ("bad", "2", "0.222"),
        ("next-token", "2", "0.172"),
    ]
    # .4175 - .03125 > .2315 + .03125, but .2115 - .03125 < .1925 + .03125.
    assert [row["touch the next row's"] for row in rows] == ["no", "yes", "–"]
    assert rows[0]["standard deviation over seeds"] == "0.014"


def test_every_score_says_what_it_must_not_be_read_without(page: str, full: Scored) -> None:
    rows = Reader(page).table("Alignment: under which conditions")
    assert len(rows) == len(scored_home.VALUES)
    for row in rows:
        assert row["protocol"] == "plain"
        assert row["leaked"] == "12.5%"
        assert row["snapshot"].isdigit()
        assert row["dataset versions"] == f"toyworld@{full.version}"
        assert row["trained on samples"] == "15,360"


def test_retrieval_stands_beside_its_controls(page: str) -> None:
    reader = Reader(page)
    rows = reader.table("Retrieval: all encoders")
    good = [row for row in rows if row["encoder"] == "good, seed 0"]
    assert {row["asked"] for row in good} == {"captions find pictures", "pictures find captions"}
    assert all((row["R@1"], row["R@5"], row["R@10"]) == ("0.438", "0.637", "0.738") for row in good)
    assert all(row["map"] == "rotation, 20 pairs" for row in rows), "the points of a curve are no rows of this table"
    controls = reader.table("Controls of every map")
    assert len(controls) == len(scored_home.VALUES) * 4
    assert {row["R@1"] for row in controls} == {"0.062"}


def test_counts_of_the_data_add_up(page: str, full: Scored) -> None:
    rows = Reader(page).table("Current versions")
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    total = {name: sum(int(row[name].replace(",", "")) for row in rows) for name in ("scenes", "texts read", "texts kept", "rejects")}  # fmt: skip
    assert total["scenes"] == 60
    assert total["texts read"] == 300 == total["texts kept"] + total["rejects"]
    (overlap,) = Reader(page).table("Overlap")
    assert (overlap["same caption"], overlap["same words"], overlap["any of these"]) == ("3", "4", "4")


def test_the_check_of_the_theorems_is_shown_case_by_regime(page: str) -> None:
    reader = Reader(page)
    rows = reader.table("2 worlds of 12 states, encoders of 2 dimensions, seed 5")
    assert [(row["cases"], row["claim"], row["worst deviation"], row["directions lost, r"]) for row in rows] == [
        ("9", "error 0", "2.0e-15", "0"),
        ("4", "error 0", "3.0e-15", "0"),
        ("3", "error 2r", "5.0e-14", "1 in 2, 2 in 1"),
        ("2", "error 4", "0.0e+00", "2; 1 if the constant is looked for by sorting"),
    ]
    bounds = reader.table("Worlds that pair their states otherwise: 0 errors")
    assert [list(row.values())[1:] for row in bounds] == [["7", "1.3e-02", "2.5e-01"], ["8", "2.0e-03", "1.8e-02"]]
    trained = reader.table("Trained on one world, 2 seeds")
    assert [row["arm and loss"] for row in trained] == [f"{a}: {n}" for a in ("good", "bad") for n in ("whitening", "SIGReg, w 4")]  # fmt: skip
    assert [row["largest angle, degrees"] for row in trained] == ["2.5 ±0.7", "30.5 ±0.7"] * 2
    assert [(row["second largest"], row["alignment error"]) for row in trained] == [("1.0 ±0.0", "1.500 ±0.000"), ("15.0 ±0.0", "1.500 ±0.000")] * 2  # fmt: skip


def test_every_section_and_figure_is_there(written: Report) -> None:
    assert (list(written.shown), list(written.absent)) == (SECTIONS, [])
    assert sorted(written.figures) == sorted(FIGURES)
    for name in FIGURES:
        with Image.open(Path(written.url, f"{name}.png")) as image:
            assert image.width > 800
        assert Path(written.url, f"{name}.svg").read_bytes().startswith(b"<?xml")


def test_a_catalog_with_data_alone_says_what_is_absent(tmp_path: Path) -> None:
    at = scored_home.toy_home(tmp_path / "home")
    done = write_report(at.home, ReportConfig(out=str(tmp_path / "out")))
    assert (list(done.shown), list(done.absent)) == (["data"], [name for name in SECTIONS if name != "data"])
    text = " ".join(Reader((tmp_path / "out" / "index.html").read_text()).text)
    for command in ("align LEFT RIGHT", "rotate LEFT RIGHT", "probe SET", "train --recipe", "theory verify"):
        assert f"goodviews {command}" in text


def test_without_a_catalog_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no catalog"):
        write_report(resolve(str(tmp_path / "nothing")), ReportConfig())
    assert not (tmp_path / "nothing").exists()


# --- bytes, escaping, the network ---------------------------------------------------------------------------------


def test_the_same_snapshot_gives_the_same_bytes(
    full: Scored, written: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here by the command, in a folder that it names itself."""
    assert goodviews(["report", "--home", full.home.url]) == 0
    place = Path(capsys.readouterr().out.partition(": snapshot")[0]).parent
    assert str(place.parent) == storage.join(full.home.url, "reports")
    folders = (Path(written.url), place)
    files = [{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} for folder in folders]
    assert len(files[0]) == 2 * len(FIGURES) + 1
    assert files[0] == files[1]


def test_a_figure_is_the_same_in_another_process() -> None:
    """The layout's solver has gone by addresses in memory, in one of ten processes or so."""
    code = """
import hashlib, sys
from catalog.report import charts
kept = [object() for _ in range(int(sys.argv[1]))]
panels = [charts.Bars(title=f"{n}", axis="scenes", counts=[("4 captions", n), ("5 captions", 21)]) for n in (1, 2, 3)]
print(hashlib.sha256(charts.bars("a", "b", "c", panels).svg).hexdigest())
"""
    made = [subprocess.run([sys.executable, "-c", code, str(997 * i)], capture_output=True, text=True, check=True) for i in range(3)]  # fmt: skip
    assert len({done.stdout for done in made}) == 1
    assert len(made[0].stdout.strip()) == 64


def test_the_page_asks_for_nothing_and_runs_nothing(page: str) -> None:
    reader = Reader(page)
    fetched = [value for tag, at in reader.tags for name, value in at.items() if name in ("src", "href", "srcset", "data", "action")]  # fmt: skip
    assert len(fetched) > len(FIGURES)
    assert [value for value in fetched if value and not value.startswith(("data:", "#"))] == []
    assert not {"script", "iframe", "object", "embed", "form"} & {tag for tag, _ in reader.tags}
    assert not [name for _, at in reader.tags for name in at if name.startswith("on")]
    css = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(css) == 1
    assert "url(" not in css[0]
    assert "@import" not in css[0]
    assert "default-src 'none'" in page


def test_every_picture_says_what_it_shows(page: str) -> None:
    images = [at for tag, at in Reader(page).tags if tag == "img"]
    assert len(images) > len(FIGURES) + 12
    assert all(len(at.get("alt") or "") > 10 for at in images)


NASTY = '<script>alert("1")</script> <img src=x onerror=alert(2)> $x^2$ {{ 7 * 7 }} & 猫'


def test_text_from_outside_is_text(tmp_path: Path) -> None:
    at = scored_home.caption_home(tmp_path / "home", [NASTY, "a dog", *(f"caption {i}" for i in range(22))])
    scored_home.add_runs(at)
    scored_home.add_scores(at, pictures=f"model {NASTY}\a--")
    write_report(at.home, ReportConfig(out=str(tmp_path / "out"), title=f"Title {NASTY}"))
    html = (tmp_path / "out" / "index.html").read_text()
    figures = sorted((tmp_path / "out").glob("*.svg"))
    assert {path.stem for path in figures} == {*FIGURES} - {"rejects", "theory-threshold", "theory-bridge"}, (
        "none is here"
    )
    for path in figures:
        ElementTree.parse(path)
    reader = Reader(html)
    assert "<script" not in html
    assert "onerror=alert" in " ".join(reader.text)
    assert not [at for tag, at in reader.tags if "onerror" in at]
    said = "".join(reader.text)
    assert f"Title {NASTY}" in said
    assert html.count("{{ 7 * 7 }}") == html.count("$x^2$") > 3
    # In the gallery as the caption of a scene that has no picture.
    assert said.count(NASTY) > 3
    assert not [at for tag, at in reader.tags if tag == "img" and at.get("class") != "plot"]


# --- what is compared ---------------------------------------------------------------------------------------------


def scores_of(home: Home) -> tuple[list[Score], list[Encoder]]:
    with lake.reading(home) as reader:
        contents = read_contents(reader)
    return list(contents.scores), list(contents.encoders.values())


@pytest.mark.parametrize(
    "change",
    [
        {"k": 5},
        {"n": 9},
        {"protocol": "huh2024"},
        {"selection": "one caption a scene"},
        {"split": "val"},
        {"map": "ridge"},
    ],
)
def test_scores_that_cannot_be_compared_stand_apart(tmp_path: Path, change: dict[str, object]) -> None:
    home = Home(url=str(tmp_path), catalog=str(tmp_path / "catalog.sqlite"))
    at = Scored(home=home, dataset="toyworld", version="v", keys=[f"s{i}" for i in range(12)])
    left, right = ("a" * 16, "left"), ("b" * 16, "right")
    rows = [
        scored_home.score_row(at, left, right, value=0.5),
        scored_home.score_row(at, ("c" * 16, "other"), right, **{"value": 0.4, **change}),
        scored_home.score_row(at, ("d" * 16, "third"), right, value=0.3),
    ]
    split = change.pop("split", None)
    if split:
        import dataclasses

        rows[1] = dataclasses.replace(
            scored_home.score_row(at, ("c" * 16, "other"), right, value=0.4), split=str(split)
        )
    record_alignments(home, rows)
    groups = group(scores_of(home)[0])
    assert sorted([score.subject.name for score in found.scores] for found in groups) == [["left", "third"], ["other"]]


def test_the_run_is_the_encoder_in_question_on_whichever_side_it_stands(tmp_path: Path, full: Scored) -> None:
    scores, _ = scores_of(full.home)
    turned = [s for s in scores if s.direction]
    assert {(s.row["direction"], s.direction) for s in turned} == {
        ("left_to_right", "captions find pictures"),
        ("right_to_left", "pictures find captions"),
    }
    assert all(s.subject.run_id and s.side == "left" for s in scores)
    home = Home(url=str(tmp_path), catalog=str(tmp_path / "catalog.sqlite"))
    at = Scored(home=home, dataset=full.dataset, version=full.version, keys=full.keys)
    scored_home.add_runs(at)
    image = scored_home.embedding(at, "vit", "images")
    text = scored_home.embedding(at, "run:good-s0", "captions", "good-s0", 5)
    scored_home.register_all(home, [image, text])
    sides = ((image.embedding_id, "vit"), (text.embedding_id, "text"))
    row = scored_home.score_row(at, *sides, value=0.5, direction="left_to_right")
    record_alignments(home, [row])
    ((score,), _) = scores_of(home)
    assert (score.side, score.subject.label, score.against) == ("right", "good", "vit")
    assert score.direction == "pictures find captions"


def test_runs_that_differ_in_more_than_the_seed_are_no_seeds_of_one_system(tmp_path: Path, full: Scored) -> None:
    scores, encoders = scores_of(full.home)
    (main,) = group(s for s in scores if s.metric == "mutual_knn")
    assert {line.label: line.seeds for line in spreads(main)} == {"good": 2, "bad": 2, "next-token": 2}
    points = checkpoint_points(main.scores, encoders)
    assert points["good", "good-s0"] == [(0, 0.0815), (256, 0.0915), (15_360, 0.4375)]


def test_probes_of_captions_and_of_pictures_stand_on_one_axis_unless_an_encoder_stands_there_twice(
    tmp_path: Path,
) -> None:
    home = Home(url=str(tmp_path), catalog=str(tmp_path / "catalog.sqlite"))
    at = Scored(home=home, dataset="toyworld", version="v", keys=[f"s{i}" for i in range(12)])

    def probe(letter: str, label: str, selection: str) -> AlignmentRow:
        facts = {"metric": "probe_linear", "k": None, "value": 0.5, "selection": f"labels {label}; {selection}"}
        return scored_home.score_row(at, (letter * 16, letter), (None, f"states:{label}"), **facts)

    rows = [probe("a", "place", "one caption"), probe("b", "place", "one vector")]
    rows += [probe("a", "sky", "one caption"), probe("a", "sky", "mean of captions"), probe("b", "sky", "one vector")]
    record_alignments(home, rows)
    with lake.reading(home) as reader:
        section = score_sections.probes(read_contents(reader), Palette())
    (figure,) = [piece for piece in section.pieces if isinstance(piece, Figure)]
    titles = re.findall(r"<!-- (linear probe of \w+)", figure.svg.decode())
    assert sorted(titles) == ["linear probe of place", *["linear probe of sky"] * 3]


# --- pictures, picks, neighbours ----------------------------------------------------------------------------------


def test_a_picture_is_that_of_its_scene(full: Scored) -> None:
    with lake.reading(full.home) as reader:
        scenes = scene_images.read_scenes(full.home, reader, full.dataset, full.version, full.keys)
        sums = dict(reader.rows("SELECT scene_key, images[1].sha256 FROM scenes WHERE split = 'test'"))
    assert sorted(scenes) == list(full.keys)
    folder = Path(full.home.datasets(full.dataset, full.version), "views", "good")
    members = tar_members(folder)
    for key, scene in scenes.items():
        data = members[f"{key}.jpg"]
        assert hashlib.sha256(data).hexdigest() == sums[key]
        assert scene.picture == scene_images.data_uri(data)
        assert scene.captions


def tar_members(folder: Path) -> dict[str, bytes]:
    import tarfile

    found = {}
    for path in sorted(folder.glob("test-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    assert found
    return found


def test_a_tar_that_holds_another_scene_is_refused(tmp_path: Path) -> None:
    at = scored_home.toy_home(tmp_path / "home")
    (path,) = Path(at.home.datasets(at.dataset, at.version), "views", "good").glob("test-*.tar")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"toy-00000", b"toy-99999"))
    with lake.reading(at.home) as reader, pytest.raises(IntegrityError, match="where its manifest says"):
        scene_images.read_scenes(at.home, reader, at.dataset, at.version, at.keys[:1])
    path.unlink()
    with lake.reading(at.home) as reader:
        scenes = scene_images.read_scenes(at.home, reader, at.dataset, at.version, at.keys[:1])
    assert scenes[at.keys[0]].picture is None
    assert scenes[at.keys[0]].first_caption


def test_bytes_that_are_no_picture_do_not_reach_the_page() -> None:
    good = io.BytesIO()
    Image.new("RGB", (640, 480), "red").save(good, "JPEG")
    assert (scene_images.data_uri(good.getvalue()) or "").startswith("data:image/jpeg;base64,")
    assert scene_images.data_uri(good.getvalue()[:-200]) is None
    assert scene_images.data_uri(b"<svg onload=alert(1)>") is None


def test_the_gallery_shows_right_and_wrong_picks_by_hash(full: Scored) -> None:
    scores, _ = scores_of(full.home)
    with lake.reading(full.home) as reader:
        gallery = read_gallery(full.home, reader, scores)
        captions = dict(reader.rows("SELECT scene_key, captions[1].text FROM scenes WHERE split = 'test'"))
    assert gallery is not None
    keys = list(full.keys)
    assert [query.scene.key for query in gallery.queries] == drawn(keys, 12)
    assert gallery.hits == {f"{arm}, seed 0": (-(-len(keys) // 3), len(keys)) for arm in scored_home.ARMS}
    for query in gallery.queries:
        place = keys.index(query.scene.key)
        picked = keys[place] if place % 3 == 0 else keys[(place + 1) % len(keys)]
        assert [pick.is_right for pick in query.picks] == [place % 3 == 0] * 3
        assert {pick.text for pick in query.picks} == {captions[picked]}
    assert {pick.is_right for query in gallery.queries for pick in query.picks} == {True, False}


def test_picks_that_are_not_those_of_the_record_are_refused(tmp_path: Path) -> None:
    at = scored_home.toy_home(tmp_path / "home")
    scored_home.add_runs(at)
    scored_home.add_scores(at)
    for path in Path(at.home.url, "maps").glob("*/picks.parquet"):
        path.write_bytes(scored_home.parquet(scored_home.picks(at.keys[::-1])))
    with pytest.raises(IntegrityError, match="another sha256"):
        write_report(at.home, ReportConfig(out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_neighbours_that_both_spaces_share_are_marked(full: Scored) -> None:
    scores, _ = scores_of(full.home)
    (main,) = group(s for s in scores if s.metric == "mutual_knn" and s.subject.seed == 0)
    with lake.reading(full.home) as reader:
        found = read_neighbourhoods(full.home, reader, main.scores)
    assert [member.scene.key for member in found] == drawn(full.keys, 5)
    keys = list(full.keys)
    for member in found:
        assert list(member.lists) == ["efficientnet-lite0", "good, seed 0", "bad, seed 0", "next-token, seed 0"]
        place = keys.index(member.scene.key)
        near, far = ([keys[(place + step * j) % len(keys)] for j in range(1, 11)] for step in (1, 2))
        shared, neighbours = member.lists["good, seed 0"]
        assert shared == len({*near} & {*far})
        assert [n.scene.key for n in neighbours] == near[:5]
        assert [n.is_shared for n in neighbours] == [key in far for key in near[:5]]


# --- cells --------------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_a_dash_and_never_a_zero() -> None:
    assert [number(value) for value in (None, float("nan"), float("inf"), 0.0, -0.25)] == ["–", "–", "–", "0.000", "-0.250"]  # fmt: skip
    assert interval({"low": None, "high": 0.5}) == "–"
    columns: Sequence[str] = table("c", [("a", str), ("b", lambda _: "–"), ("c", lambda n: f"x{n}")], [1, 2]).columns
    assert list(columns) == ["a", "c"]
