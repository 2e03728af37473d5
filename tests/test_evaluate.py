"""The evaluate stage on folders of rendered scenes, whose scores are known."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

from ssd_research import evaluate
from ssd_research.evaluations.images import image_root
from ssd_research.metrics.geneval import TASKS
from ssd_research.metrics.judges.shapes import ShapesDetector
from ssd_research.paths import conf_dir
from ssd_research.shapes import benchmark
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import Item, Spec, sample_scene

PER_KIND = 2


def specs() -> list[Spec]:
    drawn = [benchmark._draw(kind, PER_KIND, 0) for kind in benchmark.GENEVAL_KINDS]
    return [spec for kind in drawn for spec, _ in kind]


def picture(spec: Spec, seed: int) -> Image.Image:
    return Image.fromarray(render(sample_scene(spec, np.random.default_rng(seed))))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two right pictures of two prompts of each kind, in the official layout."""
    root = tmp_path / "made"
    for index, spec in enumerate(specs()):
        samples = root / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        (samples.parent / "metadata.jsonl").write_text(json.dumps(benchmark.metadata(spec)) + "\n")
        for k in range(2):
            picture(spec, 10 * index + k).save(samples / f"{k:04d}.png")
    return root


def configure(images: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose(
            "config",
            [
                f"evaluate.images={images}",
                f"output_dir={images.parent}/outputs",
                f"eval.per_kind={PER_KIND}",
                "evaluate.bootstrap=50",
                "runtime=cpu",
                *overrides,
            ],
        )


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_right_pictures_score_one(images):
    folder = evaluate.run(configure(images))
    scores = scores_of(folder)
    assert scores["overall"] == 1
    assert scores["overall_ci95"] == [1, 1]
    assert scores["n_scored"] == scores["n_expected"] == 24
    assert scores["coverage"] == 1
    assert scores["higher_is_better"] is True
    assert scores["judge"] == "shapes-parser 1"
    assert list(scores["tasks"]) == list(TASKS)
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert len(rows) == 24
    assert rows[0]["filename"] == "00000/samples/0000.png"
    assert json.loads(rows[0]["metadata"]) == benchmark.metadata(specs()[0])
    assert (folder / "DONE").exists()


def test_wrong_pictures_lower_the_score_by_what_they_are_worth(images):
    for index in (0, 1):  # both prompts of single_object
        shape = specs()[index].items[0].shape
        wrong = Spec("single_object", (Item("ring" if shape != "ring" else "star"),))
        picture(wrong, index).save(images / f"{index:05d}" / "samples" / "0001.png")
    blank = Image.new("RGB", (48, 48), (210, 210, 220))
    for index, k in ((10, 0), (10, 1), (11, 0), (11, 1)):  # all of color_attr
        blank.save(images / f"{index:05d}" / "samples" / f"{k:04d}.png")
    folder = evaluate.run(configure(images))
    scores = scores_of(folder)
    assert scores["tasks"]["single_object"]["score"] == 0.5
    assert scores["tasks"]["color_attr"]["score"] == 0
    assert scores["overall"] == pytest.approx(4.5 / 6)
    assert scores["images_correct"] == pytest.approx(18 / 24)
    assert scores["prompts_correct"] == pytest.approx(10 / 12)
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert [r["correct"] for r in rows if r["tag"] == "color_attr"] == [False] * 4
    assert "found 0" in rows[-1]["reason"]


def test_swapped_left_and_right_is_wrong(images):
    for sample in sorted(images.glob("*/samples/*.png")):
        metadata = json.loads((sample.parents[1] / "metadata.jsonl").read_text())
        relation = str(metadata["include"][-1].get("position", [""])[0])
        if relation:
            flip = "LEFT_RIGHT" if relation in ("left of", "right of") else "TOP_BOTTOM"
            with Image.open(sample) as image:
                flipped = image.transpose(Image.Transpose[f"FLIP_{flip}"])
            flipped.save(sample)
    scores = scores_of(evaluate.run(configure(images)))
    assert scores["tasks"]["position"]["score"] == 0


def test_a_finished_run_is_reused_and_a_broken_one_resumed(images, monkeypatch):
    calls = []
    detect = ShapesDetector.detect

    def counted(self, image):
        calls.append(1)
        return detect(self, image)

    monkeypatch.setattr(ShapesDetector, "detect", counted)
    folder = evaluate.run(configure(images))
    first = (folder / "scores.json").read_bytes()
    assert len(calls) == 24
    assert evaluate.run(configure(images)) == folder
    assert len(calls) == 24
    # An interruption in the middle of the eleventh line.
    (folder / "DONE").unlink()
    store = folder / "detections.jsonl"
    whole = store.read_text()
    store.write_text("".join(whole.splitlines(keepends=True)[:10]) + whole.splitlines()[10][:30])
    assert evaluate.run(configure(images)) == folder
    assert len(calls) == 24 + 14
    assert store.read_text() == whole
    assert (folder / "scores.json").read_bytes() == first
    # Other pictures or other rules are another run.
    assert evaluate.run(configure(images, "eval.rules.threshold=0.5")) != folder
    picture(specs()[0], 99).save(images / "00000" / "samples" / "0000.png")
    assert evaluate.run(configure(images)) != folder


def test_every_run_has_scores_of_its_own_though_its_images_are_anothers(images, tmp_path):
    """Lossless decoders at top-k 1 draw the same images; each must have scores to compare."""
    found = []
    for name in ("a1", "b2"):
        shutil.copytree(images, tmp_path / name / "images")
        (tmp_path / name / "DONE").touch()
        found.append(evaluate.run(configure(tmp_path / name, f"output_dir={tmp_path}/out")))
    assert [Path(scores_of(run)["images"]).parent.name for run in found] == ["a1", "b2"]
    stored = (run / "detections.jsonl" for run in found)
    assert len({path.read_text() for path in stored}) == 1


def test_part_of_the_benchmark_is_scored_only_on_request(images):
    with pytest.raises(FileNotFoundError, match=r"24 of 48 .*00002/samples/0000.*allow_missing"):
        evaluate.run(configure(images, "eval.per_kind=4"))
    part = ["eval.per_kind=4", "evaluate.allow_missing=true"]
    scores = scores_of(evaluate.run(configure(images, *part)))
    assert (scores["n_expected"], scores["n_scored"], scores["coverage"]) == (48, 24, 0.5)
    # The benchmark's ids, whatever the numbers of the folders.
    assert len(scores["missing"]) == 24
    assert scores["missing"][:3] == [
        f"0000{n}/samples/000{k}.png" for n, k in ((2, 0), (2, 1), (3, 0))
    ]


def test_missing_images_are_one_clear_line(images):
    (images / "00003" / "samples" / "0001.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 24 images are missing: 00003/samples/0001"):
        evaluate.run(configure(images))


def test_a_missing_prompt_is_found(images):
    (images / "00004").rename(images.parent / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"2 of 24 images are missing: 00004/samples/0000"):
        evaluate.run(configure(images))
    scores = scores_of(evaluate.run(configure(images, "evaluate.allow_missing=true")))
    assert (scores["n_scored"], scores["missing"]) == (
        22,
        ["00004/samples/0000.png", "00004/samples/0001.png"],
    )
    assert scores["tasks"]["counting"]["images"] == 2


def test_missing_or_broken_metadata(images):
    path = images / "00002" / "metadata.jsonl"
    path.write_text('{"prompt": "a red circle"}\n')
    with pytest.raises(
        ValueError, match=r"00002/metadata.jsonl has no GenEval metadata: without tag, include"
    ):
        evaluate.run(configure(images))
    path.write_text("{")
    with pytest.raises(ValueError, match=r"metadata.jsonl is not one line of JSON"):
        evaluate.run(configure(images))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"00002/metadata.jsonl is missing"):
        evaluate.run(configure(images))


def test_extra_files_odd_sizes_and_unreadable_images(images):
    samples = images / "00000" / "samples"
    (samples / "copy.png").write_bytes((samples / "0000.png").read_bytes())
    with pytest.raises(ValueError, match=r"00000/samples/copy.png does not belong here"):
        evaluate.run(configure(images))
    (samples / "copy.png").unlink()
    Image.new("RGB", (64, 64)).save(samples / "0001.png")
    with pytest.raises(ValueError, match=r"1 of 24 images are not 48x48 .*0001.png is 64x64"):
        evaluate.run(configure(images))
    whole = (samples / "0000.png").read_bytes()
    for cut in (30, len(whole) // 2, len(whole) - 20, len(whole) - 5):
        (samples / "0001.png").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"0001.png is (damaged or cut short|not a readable)"):
            evaluate.run(configure(images, "evaluate.allow_missing=true"))
    (samples / "0001.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"00000/samples/0001.png is not a readable image"):
        evaluate.run(configure(images))
    (samples / "0001.png").write_bytes(whole)
    (samples / "00001.png").write_bytes(whole)
    with pytest.raises(ValueError, match=r"does not belong here: .* has the same number"):
        evaluate.run(configure(images))


def test_which_folder_is_evaluated(images, tmp_path):
    with pytest.raises(ValueError, match=r"evaluate\.images is null"):
        evaluate.run(configure(images, "evaluate.images=null"))
    run = tmp_path / "run"
    run.mkdir()
    images.rename(run / "images")
    (run / "config.yaml").write_text("")
    with pytest.raises(ValueError, match="unfinished run"):
        image_root(str(run))
    (run / "DONE").write_text("")
    assert image_root(str(run)) == run / "images"
    pq.write_table(pa.table({"path": ["x"] * 25}), run / "images.parquet")
    with pytest.raises(FileNotFoundError, match=r"holds 24 images, images.parquet lists 25"):
        evaluate.run(configure(run, f"output_dir={tmp_path}/outputs"))
