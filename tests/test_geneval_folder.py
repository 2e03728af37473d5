"""Folders and options that GenEval cannot score: one line each, never a score of fewer images."""

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

from ssd_research import evaluate
from ssd_research.evaluations.images import image_root
from ssd_research.metrics.geneval_folder import read_samples
from ssd_research.metrics.judges.shapes import ShapesDetector
from ssd_research.metrics.picture_folder import read_pictures
from ssd_research.metrics.pixels import read_rgb
from ssd_research.paths import conf_dir
from ssd_research.shapes import benchmark
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import sample_scene

LINES = benchmark.geneval_metadata(per_kind=1)
FIRST = "00000/samples/0000.png"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A right picture of each of six prompts, in the official layout."""
    root = tmp_path / "made"
    for index, line in enumerate(LINES):
        samples = root / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        (samples.parent / "metadata.jsonl").write_text(json.dumps(line) + "\n")
        ((spec, _),) = benchmark._draw(benchmark.GENEVAL_KINDS[index], 1, 0)
        scene = sample_scene(spec, np.random.default_rng(index))
        Image.fromarray(render(scene)).save(samples / "0000.png")
    return root


def run(images: Path, *overrides: str) -> Path:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = compose(
            "config",
            [
                f"evaluate.images={images}",
                f"output_dir={images.parent}/outputs",
                "eval.per_kind=1",
                "evaluate.bootstrap=10",
                "runtime=cpu",
                *overrides,
            ],
        )
    return evaluate.run(cfg)


def score(images: Path, *overrides: str) -> dict:
    return json.loads((run(images, *overrides) / "scores.json").read_text())


def rewrite(mode: str, **how) -> Callable[[Path], None]:
    return lambda root: Image.open(root / FIRST).convert(mode).save(root / FIRST, **how)


def content(data: bytes, name: str = FIRST) -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(data)


def deep(root: Path) -> None:
    Image.fromarray(np.full((48, 48), 40_000, np.uint16)).save(root / FIRST)


def folder_for_file(root: Path) -> None:
    (root / FIRST).unlink()
    (root / FIRST).mkdir()


def huge(root: Path) -> None:
    """Say in the header of a picture that it is 20,000 pixels wide and high."""
    whole = (root / FIRST).read_bytes()
    head = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + whole[24:29]
    crc = zlib.crc32(head).to_bytes(4, "big")
    (root / FIRST).write_bytes(whole[:12] + head + crc + whole[33:])


LINE = "00000/metadata.jsonl"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no bytes": (content(b""), f"{FIRST} is not a readable image"),
    "text": (content(b"hello"), f"{FIRST} is not a readable image"),
    "jpeg": (rewrite("RGB", format="JPEG"), f"{FIRST} is not a readable image"),
    "16 bits": (deep, f"{FIRST} has more than 8 bits a channel"),
    "huge": (huge, f"{FIRST} is damaged or cut short .*exceeds limit"),
    "folder": (folder_for_file, f"{FIRST} does not belong here: expected 0000.png"),
    "file": (content(b"", "00009"), "00009 does not belong here: expected 00000, ..."),
    "other digits": (lambda r: (r / "0000\u0663").mkdir(), "does not belong here: expected 00000"),
    "short name": (lambda r: (r / "0007").mkdir(), "0007 does not belong here: expected 00000"),
    "number": (content(b"5", LINE), f"{LINE} is not one line of JSON with keys: 5"),
    "list": (content(b"[1, 2]", LINE), f"{LINE} is not one line of JSON with keys"),
    "null": (content(b"null", LINE), f"{LINE} is not one line of JSON with keys: None"),
    "two lines": (content(b"{}\n{}", LINE), f"{LINE} is not one line of JSON: Extra data"),
    "latin-1": (content(b'{"prompt": "\xe9"}', LINE), f"{LINE} is not one line of JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused(images, name):
    spoil, reason = BROKEN[name]
    spoil(images)
    with pytest.raises(ValueError, match=reason):
        read_samples(images)


def test_what_is_broken_is_not_missing(images):
    (images / FIRST).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{FIRST} is not a readable image"):
        score(images, "evaluate.allow_missing=true")
    assert not (images.parent / "outputs").exists()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
def test_8_bit_images_of_every_kind_are_read(images, mode):
    rewrite(mode)(images)
    assert len(read_samples(images)) == 6
    expected = np.array(Image.open(images / FIRST).convert("RGB"))
    assert np.array_equal(read_rgb(images / FIRST, "x"), expected)


def test_windows_line_ends_and_hidden_files_are_harmless(images):
    (images / LINE).write_bytes(json.dumps(LINES[0]).encode() + b"\r\n")
    (images / ".DS_Store").write_bytes(b"x")
    (images / "00000" / "grid.png").write_bytes(b"x")
    assert len(read_samples(images)) == 6


def test_spoilt_bytes_are_an_error_or_leave_the_pixels_alone(images):
    """Any of 300 damages, and a good file again afterwards."""
    rng = random.Random(0)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(images / FIRST)
    whole = (images / FIRST).read_bytes()
    refusals = []
    for _ in range(300):
        spoilt = bytearray(whole)
        for _ in range(rng.choice((1, 1, 5))):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        end = rng.choice((len(spoilt), rng.randrange(len(spoilt))))
        (images / FIRST).write_bytes(bytes(spoilt[:end]))
        try:
            read_samples(images)
            assert np.array_equal(read_rgb(images / FIRST, FIRST), pixels)
        except ValueError as error:
            refusals.append(str(error))
    assert all(line.startswith(f"{FIRST} is ") for line in refusals)
    assert len(refusals) > 250
    (images / FIRST).write_bytes(whole)
    assert len(read_samples(images)) == 6


def test_one_prompt_and_one_image_are_part_of_the_benchmark(images):
    for folder in images.iterdir():
        if folder.name != "00003":
            shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="5 of 6 images are missing: 00000/samples/0000"):
        score(images)
    scores = score(images, "evaluate.allow_missing=true")
    assert (scores["n_scored"], scores["n_expected"], scores["overall"]) == (1, 6, None)
    shutil.rmtree(images / "00003" / "samples")
    with pytest.raises(FileNotFoundError, match="holds no images"):
        score(images, "evaluate.allow_missing=true")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("evaluate.bootstrap=0", r"evaluate\.bootstrap=0 must be a whole number of at least 1"),
        ("evaluate.bootstrap=1.5", r"evaluate\.bootstrap=1\.5 must be a whole number"),
        ("evaluate.allow_missing=maybe", r"evaluate\.allow_missing=maybe must be true or false"),
        ("eval.images_per_prompt=0", r"eval\.images_per_prompt=0 must be a whole number"),
        ("eval.images_per_prompt=x", r"eval\.images_per_prompt=x must be a whole number"),
        ("+eval.rules.nms=1", r"eval\.rules: nms is not known; accepted: threshold, counting_th"),
        ("eval.rules=null", r"eval\.rules: None is not known; accepted: threshold"),
        ("eval.rules.threshold=high", r"eval\.rules\.threshold=high must be a number"),
        ("eval.rules.threshold=null", r"eval\.rules\.threshold=None must be a number"),
        ("eval.rules.max_overlap=true", r"eval\.rules\.max_overlap=True must be a number"),
        ("eval.rules.max_objects=2.5", r"eval\.rules\.max_objects=2\.5 must be a whole number"),
        ("eval.detector=null", r"eval\.detector: None lacks what a detector must have"),
        ("eval.prompts=shapes_dpg", r"prompts of shapes_dpg have no keys tag and include"),
        ("eval.detections=nothing.jsonl", r"eval\.detections=nothing\.jsonl does not exist"),
    ],
)
def test_options_are_checked_before_anything_is_looked_at(images, option, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        score(images, option)
    assert not (images.parent / "outputs").exists()


def test_a_prompt_file_that_asks_the_impossible_is_refused(images):
    lines = [*LINES[1:], {**LINES[0], "include": [{"class": "bench", "count": 1}]}]
    asked = images.parent / "asked.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"class='bench'; shapes-parser knows circle, square"):
        score(images, f"eval.prompts={asked}")
    del lines[5]["include"][0]["count"]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"asked\.jsonl, prompt 00005 .*include\[0\]\.count=None"):
        score(images, f"eval.prompts={asked}")


def test_stored_detections_are_scored_again_without_a_judge(images, monkeypatch, tmp_path):
    first = run(images)
    stored = f"eval.detections={first}/detections.jsonl"
    elsewhere = f"output_dir={tmp_path}/elsewhere"

    def look(self, image):
        raise AssertionError("looked at an image")

    monkeypatch.setattr(ShapesDetector, "detect", look)
    again = run(images, stored, elsewhere, "eval.detector._target_=no.such.Detector")
    for name in ("detections.jsonl", "per_image.parquet"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    scores = json.loads((again / "scores.json").read_text())
    assert (scores["overall"], scores["judge"]) == (1, "shapes-parser 1")
    assert run(images, stored) == first  # the same judge, images and rules
    strict = score(images, stored, elsewhere, "eval.rules.position_threshold=5")
    assert strict["overall"] == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match=r"threshold=-0\.1 must be in"):
        score(images, stored, "eval.rules.threshold=-0.1")
    # Another picture under the same name.
    Image.new("RGB", (48, 48)).save(images / "00004" / "samples" / "0000.png")
    with pytest.raises(ValueError, match=r"asked of 1 of 6 images, the first 00004/samples/0000"):
        score(images, stored, elsewhere)


def test_stored_detections_are_of_one_judge(images):
    lines = (run(images) / "detections.jsonl").read_bytes().splitlines(True)
    store = images.parent / "stored.jsonl"
    option = f"eval.detections={store}"
    cases = {
        b"": "holds no detections; it must be of one judge",
        b"\xff\n5\n[]\n{}\n" + lines[0][:40]: "holds no detections",
        lines[0] + lines[1].replace(b"parser 1", b"parser 2"): "parser 1 and shapes-parser 2",
        lines[0] + lines[1].replace(b'"floor": 0.0', b'"floor": 0.95'): r"below .*floor=0\.95",
        b"".join(lines[1:]) + lines[0][:-9]: "of 1 of 6 images, the first 00000/samples/0000.png",
    }
    for text, reason in cases.items():
        store.write_bytes(text)
        with pytest.raises(ValueError, match=reason):
            score(images, option, f"output_dir={images.parent}/elsewhere")
    store.write_bytes(b"\r\n".join(line.strip() for line in [*reversed(lines), b"noise"]))
    assert score(images, option)["overall"] == 1


def test_which_folder_is_meant(images):
    with pytest.raises(FileNotFoundError, match=r"^evaluate\.images=/no/such does not exist$"):
        image_root("/no/such")
    with pytest.raises(ValueError, match=r"^evaluate\.images=.*0000\.png is not a folder$"):
        image_root(str(images / FIRST))
    # The images of an unfinished run, named themselves.
    images.rename(images.with_name("images"))
    (images.parent / "config.yaml").write_text("")
    for named in ("", "images"):
        with pytest.raises(ValueError, match="is an unfinished run"):
            image_root(str(images.parent / named))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            content(b"", "00000/samples/copy.png"),
            "copy.png does not belong here: expected 0000.png",
        ),
        (content(b"", "00000/samples/0001.jpg"), "0001.jpg does not belong here"),
        (content(b"[]", LINE), "is not one line of JSON with keys"),
        (content(b"", "Thumbs.db"), "Thumbs.db does not belong here: expected 00000"),
    ],
)
def test_other_metrics_meet_the_same_folder_as_strictly(images, spoil, reason):
    assert [p.name for p in read_pictures(images)] == [
        f"0000{n}/samples/0000.png" for n in range(6)
    ]
    spoil(images)
    with pytest.raises(ValueError, match=reason):
        read_pictures(images)


def test_flat_folders_hold_pictures_of_8_bits_only(images):
    flat = images.parent / "flat"
    flat.mkdir()
    (flat / "1.png").write_bytes((images / FIRST).read_bytes())
    Image.fromarray(np.full((48, 48), 40_000, np.uint16)).save(flat / "2.png")
    good, bad = read_pictures(flat)
    assert good.read().shape == (48, 48, 3)
    with pytest.raises(ValueError, match=r"2\.png has more than 8 bits a channel"):
        bad.read()
    (flat / "3.png").mkdir()
    with pytest.raises(ValueError, match=r"3\.png does not belong here"):
        read_pictures(flat)
