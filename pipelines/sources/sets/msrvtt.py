"""MSR-VTT: 20 captions of each of 10,000 clips, and the split 1k-A that papers on retrieval use.

Invariant: every sentence of every file is one text of exactly one clip; a sentence of no listed clip becomes a reject.
Captions that the protocol 1k-A leaves out are not read, and a note says how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.names import base, listed, none_read
from pipelines.sources.formats.rows import Record, Text, batches
from pipelines.sources.options import check_choice
from pipelines.sources.sets.msrvtt_files import Clip, clips_of, is_annotation, is_list, listed_clips

SPLIT_NAMES: Final = {"validate": "val", "validation": "val"}
OFFICIAL_TRAIN: Final = 6_513
OFFICIAL_TRAIN_VAL: Final = 7_010
OFFICIAL_CLIPS: Final = 10_000
MEANINGS: Final = {
    "video_id": "scene id",
    "url, start time, end time": "image uri, with the time as a media fragment",
    "caption / sentence": "text:human",
    "split": "split",
}


@dataclass(frozen=True, kw_only=True)
class AnnotationFile(Input):
    """An annotation file or, when no annotations are given, a list; with the list that decides the test clips."""

    lists: tuple[Input, ...] = ()

    @property
    def files(self) -> tuple[Input, ...]:
        """The file and the list."""
        return (self, *self.lists)


@dataclass(frozen=True, kw_only=True)
class MsrVtt(Source):
    """MSR-VTT annotations (JSON, or the zip it comes in), with MSRVTT_JSFUSION_test.csv for the split 1k-A."""

    splits: str = "file"
    "`file`: as the annotations say. `official`: by the number of the clip, for copies that call every clip `train`."
    test_captions: str = "protocol"
    "Of the 1,000 test clips of 1k-A: the one caption that its list names (`protocol`), or `all`."
    scene: str = "clip"
    "`clip`, or `video`: clips of one video become one scene, as they are near-duplicates."

    name = "msrvtt"
    bad_passes = 20

    def __post_init__(self) -> None:
        check_choice("splits", self.splits, ("file", "official"))
        check_choice("test_captions", self.test_captions, ("protocol", "all"))
        check_choice("scene", self.scene, ("clip", "video"))

    def reads(self, name: str) -> bool:
        """JSON and CSV, plain or gzipped."""
        return is_annotation(base(name)) or is_list(base(name))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Parses every file. Raises InputError for other JSON, for a clip in two files, for a list of unknown clips."""
        files, lists, notes = _chosen_files(inputs)
        test = _read_list(lists)
        pieces: list[Piece] = []
        holders: dict[str, str] = {}
        splits: Counter[str] = Counter()
        texts = left_out = 0
        videos: Counter[tuple[str, str]] = Counter()
        for file in files:
            left = None if limit is None else limit - sum(piece.stop for piece in pieces)
            counts: dict[str, set[str]] = {}
            stop = 0
            for clip in clips_of(file, file_is_list=is_list(base(file.uri))):
                if clip.id is not None and holders.setdefault(clip.id, file.uri) != file.uri:
                    raise InputError(
                        f"Clip {clip.id} is in {holders[clip.id]} and in {file.uri}. "
                        "The merged file holds what the others hold; name one."
                    )
                if clip.is_orphan or (left is not None and clip.row >= left):
                    continue
                stop = clip.row + 1
                splits[clip.split] += 1
                videos[self._split(clip, test), clip.video or ""] += 1
                texts += len(clip.texts)
                left_out += max(0, len(clip.texts) - len(self._texts(clip, test)))
                counts.setdefault(self._split(clip, test), set()).add(self._scene(clip))
            if stop or left is None:
                by_split = {split: len(scenes) for split, scenes in sorted(counts.items())}
                pieces.append(Piece(input=file, start=0, stop=stop, scenes_by_split=by_split))
        if self.scene == "video":
            _refuse_shared_videos(videos)
        notes += self._notes(splits, test, set(holders), left_out) + _shared_videos(videos)
        if not texts:
            raise InputError(
                f"{listed([file.uri for file in files])} hold {splits.total():,} clips and no sentence: a copy without "
                "captions (`_nosen`). Fetch the annotations that have them."
            )
        protocol = ", split 1k-A" if test is not None else ""
        return Survey(
            format=f"MSR-VTT annotations, {splits.total():,} clips{protocol}",
            pieces=pieces,
            columns=MEANINGS,
            notes=notes,
            cuttable=False,
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Clips [start, stop) of one file; sentences of unlisted clips come with the piece that begins at 0."""
        yield from batches(piece.input_as(AnnotationFile).uri, self._records(piece))

    def _records(self, piece: Piece) -> Iterator[Record]:
        file = piece.input_as(AnnotationFile)
        test = _read_list(file.lists)
        for clip in clips_of(file, file_is_list=is_list(base(file.uri))):
            if piece.start == 0 if clip.is_orphan else piece.start <= clip.row < piece.stop:
                # An orphan has no split; any split that the survey announced will do for a reject.
                split = next(iter(piece.scenes_by_split)) if clip.is_orphan else self._split(clip, test)
                yield Record(
                    source_id=None if clip.id is None else self._scene(clip),
                    split=split,
                    row=clip.row,
                    texts=self._texts(clip, test),
                    columns={"image_uri": clip.uri},
                )

    def _scene(self, clip: Clip) -> str:
        return clip.video if self.scene == "video" and clip.video else clip.id or ""

    def _split(self, clip: Clip, test: Mapping[str, bytes] | None) -> str:
        if test is not None:
            # 1k-A has no validation clips: 9,000 train, 1,000 test.
            return "test" if clip.id in test else "train"
        if self.splits == "official" and clip.number is not None:
            return "train" if clip.number < OFFICIAL_TRAIN else "val" if clip.number < OFFICIAL_TRAIN_VAL else "test"
        return SPLIT_NAMES.get(clip.split, clip.split)

    def _texts(self, clip: Clip, test: Mapping[str, bytes] | None) -> Sequence[Text]:
        if test is None or self.test_captions == "all" or clip.id not in test or clip.is_of_list:
            return clip.texts
        return [("sentence", "human", test[clip.id or ""], None)]

    def _notes(
        self, splits: Counter[str], test: Mapping[str, bytes] | None, clips: set[str], left_out: int
    ) -> list[str]:
        notes = []
        if test is not None:
            unknown = sorted(set(test) - clips)
            if unknown:
                notes.append(f"{len(unknown):,} clips of the list 1k-A are in no annotation file: {listed(unknown)}")
            if left_out:
                notes.append(
                    f"{left_out:,} captions of test clips are left out, as 1k-A shows one a clip; "
                    "source.test_captions=all keeps them"
                )
        elif splits["train"] == splits.total() == OFFICIAL_CLIPS and self.splits == "file":
            notes.append(
                "all 10,000 clips are of the split train; in the official release 2,990 are test. "
                "source.splits=official restores it"
            )
        return notes


def _refuse_shared_videos(clips: Mapping[tuple[str, str], int]) -> None:
    """Raises InputError when clips of one video are in two splits: they cannot be one scene."""
    splits: dict[str, set[str]] = {}
    for split, video in clips:
        if video:
            splits.setdefault(video, set()).add(split)
    shared = sorted(video for video, found in splits.items() if len(found) > 1)
    if shared:
        raise InputError(
            f"{len(shared):,} videos have clips in several splits (such as {shared[0]}), so source.scene=video would "
            "put one scene into two. Use source.scene=clip, or the official split, in which no video is in two."
        )


def _shared_videos(clips: Mapping[tuple[str, str], int]) -> list[str]:
    """A note when test clips are cut from videos of train: the scenes are near-duplicates. clips: by (split, video)."""
    train = {video for split, video in clips if split == "train" and video}
    test = {video: count for (split, video), count in clips.items() if split == "test" and video}
    shared, total = sum(count for video, count in test.items() if video in train), sum(test.values())
    if not shared:
        return []
    return [f"{shared:,} of {total:,} test clips are cut from a video that has train clips, so their scores flatter"]


def _chosen_files(inputs: Sequence[Input]) -> tuple[list[AnnotationFile], tuple[Input, ...], list[str]]:
    """(files to read, list of 1k-A, notes); a list alone is read as annotations. Raises InputError without either."""
    every = sorted(inputs, key=lambda source: source.uri)
    files = [source for source in every if is_annotation(base(source.uri))]
    lists = [source for source in every if is_list(base(source.uri))]
    if not files and not lists:
        hint = "Name `*videodatainfo.json`, `MSRVTT_data.json` or the zip that holds one."
        raise none_read(every, "an annotation file of MSR-VTT", hint)
    if len(lists) > 1:
        raise InputError(
            f"{listed([source.uri for source in lists])} are lists of clips, and two would decide which are test. "
            "Name MSRVTT_JSFUSION_test.csv alone."
        )
    if not files:
        return [AnnotationFile(uri=s.uri, url=s.url) for s in lists], (), []
    found = tuple(lists)
    skipped = len(inputs) - len(files) - len(lists)
    notes = [f"{skipped} inputs are neither annotations nor a list of clips and are not read"] if skipped else []
    return [AnnotationFile(uri=s.uri, url=s.url, lists=found) for s in files], found, notes


def _read_list(lists: Sequence[Input]) -> dict[str, bytes] | None:
    """Clip -> its caption by the protocol 1k-A; None without a list."""
    return listed_clips(lists[0]) if lists else None
