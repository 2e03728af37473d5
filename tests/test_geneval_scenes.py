"""GenEval from pictures to scores: official prompts, emoji pasted on canvases, verdicts by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

from emoji import DATA, Canvas, PaletteColours, TemplateDetector, sprites
from ssd_research import evaluate
from ssd_research.metrics.geneval import TASKS
from ssd_research.paths import conf_dir

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="GenEval's prompts and the emoji are not beside this repository"
)

CELLS = [(x, y) for y in (43, 128, 213) for x in (43, 128, 213)]
CENTRE = (128, 128)
SIDES = {"left of": (43, 128), "right of": (213, 128), "above": (128, 43), "below": (128, 213)}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
WORSE = 0.8  # a score that counts everywhere but in counting
FAINT = 0.25  # a score that counts nowhere

Scene = tuple[Canvas, str | None]  # a picture, and why it is wrong


def official() -> list[dict]:
    text = (DATA / "geneval" / "evaluation_metadata.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def chosen() -> list[dict]:
    """Return one official prompt of each task, and of each relation, that sprites can show."""
    found: dict[tuple, dict] = {}
    for line in official():
        needs = line["include"]
        if all(need["class"] in sprites() for need in needs):
            relation = needs[-1].get("position", [None])[0]
            found.setdefault((line["tag"], relation), line)
    return list(found.values())


def single_object(line: dict) -> list[Scene]:
    name = line["include"][0]["class"]
    other = "dog" if name != "dog" else "cat"
    missing = f"expected {name}>=1, found 0"
    return [
        (Canvas.blank().put(name, at=CENTRE), None),
        (Canvas.blank().put(name, at=CELLS[0]).put(name, at=CELLS[8]).put(other, at=CENTRE), None),
        (Canvas.blank().put(other, at=CENTRE), missing),
        (Canvas.blank().put(name, at=CENTRE, score=FAINT), missing),
    ]


def two_object(line: dict) -> list[Scene]:
    first, second = (need["class"] for need in line["include"])
    return [
        (Canvas.blank().put(first, at=CELLS[0]).put(second, at=CELLS[8]), None),
        (Canvas.blank().put(first, at=CELLS[0]).put(second, at=CENTRE, score=WORSE), None),
        (Canvas.blank().put(first, at=CELLS[0]).put(second, at=CENTRE, score=0.32), None),
        (Canvas.blank().put(first, at=CELLS[0]), f"expected {second}>=1, found 0"),
    ]


def counting(line: dict) -> list[Scene]:
    need = line["include"][0]
    name, count = need["class"], need["count"]

    def crowd(number: int, *, spoilt: int = 0) -> Canvas:
        canvas = Canvas.blank()
        for place in CELLS[:number]:
            canvas.put(name, at=place)
        for place in CELLS[number : number + spoilt]:
            canvas.put(name, at=place, score=WORSE)
        return canvas

    short = f"expected {name}>={count}, found {count - 1}"
    return [
        (crowd(count), None),
        (crowd(count - 1, spoilt=1), short),
        (crowd(count - 1), short),
        (crowd(count + 1), f"expected {name}<{count + 1}, found {count + 1}"),
    ]


def colors(line: dict) -> list[Scene]:
    need = line["include"][0]
    name, colour = need["class"], need["color"]
    wrong = "purple" if colour != "purple" else "green"
    reason = f"expected {colour} {name}>=1, found 0 {colour}; and 1 {wrong}"
    one = Canvas.blank().put(name, at=CENTRE, colour=colour)
    return [
        (one, None),
        (
            Canvas.blank().put(name, at=CENTRE, colour=colour, score=FAINT),
            f"expected {name}>=1, found 0",
        ),
        (Canvas.blank().put(name, at=CENTRE, colour=wrong), reason),
        # The right colour, but on the less confident of two.
        (
            Canvas.blank()
            .put(name, at=CELLS[0], colour=colour, score=WORSE)
            .put(name, at=CELLS[8], colour=wrong),
            reason,
        ),
    ]


def position(line: dict) -> list[Scene]:
    target, subject = (need["class"] for need in line["include"])
    relation = line["include"][1]["position"][0]
    (x, y), (cx, cy) = SIDES[relation], CENTRE
    corner = (x if x != cx else 213, y if y != cy else 213)
    other = OPPOSITE[relation]
    both = Canvas.blank().put(target, at=CENTRE).put(subject, at=corner)
    swapped = Canvas.blank().put(target, at=CENTRE).put(subject, at=SIDES[other])
    alone = Canvas.blank().put(subject, at=SIDES[relation])
    return [
        (Canvas.blank().put(target, at=CENTRE).put(subject, at=SIDES[relation]), None),
        (both, None),
        (swapped, f"expected {subject} {relation} target, found {other} target"),
        (alone, f"expected {target}>=1, found 0\nno target for {subject} to be {relation}"),
    ]


def color_attr(line: dict) -> list[Scene]:
    (a, p), (b, q) = ((need["class"], need["color"]) for need in line["include"])
    swapped = Canvas.blank().put(a, at=CELLS[0], colour=q).put(b, at=CELLS[8], colour=p)
    reasons = [
        f"expected {p} {a}>=1, found 0 {p}; and 1 {q}",
        f"expected {q} {b}>=1, found 0 {q}; and 1 {p}",
    ]
    return [
        (Canvas.blank().put(a, at=CELLS[0], colour=p).put(b, at=CELLS[8], colour=q), None),
        (swapped, "\n".join(reasons)),
        (Canvas.blank().put(a, at=CENTRE, colour=p), f"expected {b}>=1, found 0"),
        (
            Canvas.blank().put(a, at=CELLS[0], colour=q).put(b, at=CELLS[8], colour=q),
            reasons[0],
        ),
    ]


KINDS: dict[str, Callable[[dict], list[Scene]]] = {
    "single_object": single_object,
    "two_object": two_object,
    "counting": counting,
    "colors": colors,
    "position": position,
    "color_attr": color_attr,
}
SCORES = {
    "single_object": 0.5,
    "two_object": 0.75,
    "counting": 0.25,
    "colors": 0.25,
    "position": 0.5,
    "color_attr": 0.25,
}


@pytest.fixture(scope="module")
def drawn() -> list[tuple[dict, list[Scene]]]:
    return [(line, KINDS[line["tag"]](line)) for line in chosen()]


@pytest.fixture
def images(tmp_path: Path, drawn) -> Path:
    """The scenes in the official layout, beside the file of their prompts."""
    root = tmp_path / "made"
    for index, (line, scenes) in enumerate(drawn):
        samples = root / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        (samples.parent / "metadata.jsonl").write_text(json.dumps(line) + "\n")
        for k, (canvas, _) in enumerate(scenes):
            Image.fromarray(canvas.pixels).save(samples / f"{k:04d}.png")
    lines = [json.dumps(line) + "\n" for line, _ in drawn]
    (tmp_path / "evaluation_metadata.jsonl").write_text("".join(lines))
    return root


JUDGES = [
    "~eval.detector",
    "+eval.detector={_target_: emoji.TemplateDetector}",
    "~eval.colours",
    "+eval.colours={_target_: emoji.PaletteColours}",
]


def overrides(images: Path, *more: str, output: str = "outputs") -> list[str]:
    return [
        f"evaluate.images={images}",
        f"output_dir={images.parent}/{output}",
        "eval=geneval",
        f"prompts={images.parent}/evaluation_metadata.jsonl",
        "evaluate.bootstrap=50",
        *JUDGES,
        *more,
    ]


def configure(images: Path, *more: str, output: str = "outputs") -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides(images, *more, output=output))


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


@pytest.fixture
def looked(monkeypatch) -> dict[str, int]:
    """Count what the detector and the colour classifier are asked."""
    seen = {"images": 0, "colours": 0}
    detect, classify = TemplateDetector.detect, PaletteColours.classify

    def count_detect(self, image):
        seen["images"] += 1
        return detect(self, image)

    def count_classify(self, image, objects):
        seen["colours"] += len(objects)
        return classify(self, image, objects)

    monkeypatch.setattr(TemplateDetector, "detect", count_detect)
    monkeypatch.setattr(PaletteColours, "classify", count_classify)
    return seen


def test_every_rule_has_its_known_verdict(images, drawn, looked):
    folder = evaluate.run(configure(images))
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    expected = [reason or "" for _, scenes in drawn for _, reason in scenes]
    assert len(expected) == 9 * 4
    assert [row["reason"] for row in rows] == expected
    assert [row["correct"] for row in rows] == [not reason for reason in expected]
    scores = scores_of(folder)
    assert {task: scores["tasks"][task]["score"] for task in TASKS} == SCORES
    assert scores["overall"] == pytest.approx(2.5 / 6)
    assert (scores["detector"], scores["colours"]) == ("emoji-templates", "emoji-palette")
    assert (scores["n_expected"], scores["n_scored"], scores["missing"]) == (36, 36, [])
    # Colours: 1 to warm up, 4 scenes with one object asked, and 4 with a pair, one of them short.
    assert looked == {"images": 36, "colours": 1 + 4 + 7}


def test_details_are_the_official_ones(images):
    folder = evaluate.run(configure(images))
    row = pq.read_table(folder / "per_image.parquet").to_pylist()[0]
    name = json.loads(row["metadata"])["include"][0]["class"]
    ((label, boxes),) = json.loads(row["details"]).items()
    height, width = sprites()[name].mask.shape
    x, y = 128 - width // 2, 128 - height // 2
    assert (label, boxes) == (name, [[x, y, x + width, y + height, 1.0]])
    assert (row["prompt_id"], row["filename"]) == ("00000", "00000/samples/0000.png")


def test_other_rules_need_no_judge(images, looked):
    first = evaluate.run(configure(images))
    looked.update(images=0, colours=0)
    # The faint objects count: one more single object, one more colour; counting as before.
    again = evaluate.run(configure(images, "eval.rules.threshold=0.2"))
    assert again != first
    assert looked == {"images": 0, "colours": 0}
    tasks = scores_of(again)["tasks"]
    assert tasks["single_object"]["score"] == 0.75
    assert tasks["colors"]["score"] == 0.5
    assert tasks["counting"]["score"] == 0.25
    assert (again / "detections.jsonl").read_text() == (first / "detections.jsonl").read_text()
    # With the usual threshold for counting, the spoilt one completes the number.
    lenient = evaluate.run(configure(images, "eval.rules.counting_threshold=0.3"))
    assert scores_of(lenient)["tasks"]["counting"]["score"] == 0.5
    assert looked == {"images": 0, "colours": 0}


def test_stored_detections_say_what_they_leave_out(images, looked):
    folder = evaluate.run(configure(images, "+eval.detector.floor=0.3"))
    record = json.loads((folder / "detections.jsonl").read_text().splitlines()[0])
    assert (record["judge"], record["floor"]) == ("emoji-templates 1 + emoji-palette 1", 0.3)
    assert set(record["detections"][0]) == {"label", "score", "box", "colour"}
    with pytest.raises(
        ValueError, match=r"eval\.rules\.threshold=0\.2 is below eval\.detector\.fl"
    ):
        evaluate.run(configure(images, "+eval.detector.floor=0.3", "eval.rules.threshold=0.2"))
    looked.update(images=0)
    evaluate.run(configure(images, "+eval.detector.floor=0.1", "eval.rules.threshold=0.2"))
    assert looked["images"] == 36
    looked.update(images=0)
    evaluate.run(configure(images, "+eval.detector.floor=0.2", "eval.rules.threshold=0.25"))
    assert looked["images"] == 0


def test_another_judge_looks_again(images, looked):
    first = evaluate.run(configure(images))
    looked.update(images=0)
    second = evaluate.run(configure(images, "+eval.detector.version=2"))
    assert (second != first, looked["images"]) == (True, 36)


def test_a_colour_that_was_not_asked_for_is_asked_later(images, looked):
    """Metadata that a file carries now may ask for what nobody looked at before."""
    evaluate.run(configure(images))
    looked.update(images=0, colours=0)
    lines = images.parent / "evaluation_metadata.jsonl"
    bench = json.loads((images / "00000" / "metadata.jsonl").read_text())
    bench["include"][0]["color"] = "red"
    bench["tag"] = "colors"
    (images / "00000" / "metadata.jsonl").write_text(json.dumps(bench) + "\n")
    lines.write_text("".join([json.dumps(bench) + "\n", *lines.read_text().splitlines(True)[1:]]))
    evaluate.run(configure(images))
    # Three of the four pictures have the object (one of them faint), one has it twice.
    assert looked == {"images": 3, "colours": 1 + 3}


def test_a_judge_that_dies_loses_only_its_image(images, monkeypatch):
    whole = evaluate.run(configure(images, output="whole"))
    detect, calls = TemplateDetector.detect, []

    def dying(self, image):
        calls.append(1)
        if len(calls) == 11:
            raise RuntimeError("the detector died")
        return detect(self, image)

    monkeypatch.setattr(TemplateDetector, "detect", dying)
    with pytest.raises(RuntimeError, match="the detector died"):
        evaluate.run(configure(images))
    (store,) = (images.parent / "outputs").rglob("detections.jsonl")
    assert len(store.read_text().splitlines()) == 10
    assert not (store.parent / "scores.json").exists()
    folder = evaluate.run(configure(images))
    assert len(calls) == 37
    for name in ("detections.jsonl", "scores.json", "per_image.parquet"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_what_is_not_in_the_benchmark_is_refused(images):
    lines = (images.parent / "evaluation_metadata.jsonl").read_text().splitlines(True)
    # More images than there should be.
    with pytest.raises(ValueError, match=r"9 images are more than eval\.images_per_prompt=3"):
        evaluate.run(configure(images, "eval.images_per_prompt=3"))
    # A prompt folder that the file does not know, or knows once only.
    (images.parent / "evaluation_metadata.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"1 of 9 prompt folders are not in the benchmark.*00000"):
        evaluate.run(configure(images))
    (images.parent / "evaluation_metadata.jsonl").write_text("".join(lines))
    (images / "00003" / "metadata.jsonl").write_text(lines[2])
    with pytest.raises(ValueError, match=r"or once too often, the first 00003"):
        evaluate.run(configure(images, "evaluate.allow_missing=true"))


def test_folders_in_another_order_are_known_by_their_prompts(images):
    first = scores_of(evaluate.run(configure(images, output="first")))
    (images / "00000").rename(images / "aside")
    (images / "00005").rename(images / "00000")
    (images / "aside").rename(images / "00005")
    folder = evaluate.run(configure(images))
    assert scores_of(folder)["tasks"] == first["tasks"]
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert [row["prompt_id"] for row in rows[:4]] == ["00005"] * 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("shapes", r"prompts=shapes is no file|have no keys tag and include"),
        ("vivym/midjourney-prompts", r"eval=geneval needs prompts=.* is no file"),
        ("plain.txt", r"2 prompts of .*plain\.txt have no keys tag and include, the first 'a cup'"),
    ],
)
def test_the_benchmark_must_be_genevals(images, monkeypatch, source, reason):
    monkeypatch.chdir(images.parent)
    (images.parent / "plain.txt").write_text("a cup\na dog\n")
    with pytest.raises(ValueError, match=reason):
        evaluate.run(configure(images, f"prompts={source}"))


@pytest.mark.slow
def test_killed_evaluation_resumes(images, tmp_path):
    whole = evaluate.run(configure(images, output="whole"))
    command = [sys.executable, "-m", "ssd_research.evaluate", *overrides(images)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        stores = list((tmp_path / "outputs").rglob("detections.jsonl"))
        if stores and len(stores[0].read_text().splitlines()) >= 5:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert stores
    assert not (stores[0].parent / "DONE").exists()
    folder = evaluate.run(configure(images))
    assert folder == stores[0].parent
    for name in ("detections.jsonl", "scores.json", "per_image.parquet"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
