"""FID: extractors, clean-fid's numbers, reference statistics and what they refuse, the stage."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cleanfid import fid as clean_fid
from cleanfid.inception_torchscript import InceptionV3W
from cleanfid.resize import build_resizer
from hydra import compose, initialize_config_dir
from PIL import Image
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from transformers import JanusForConditionalGeneration

from published_janus import write_janus
from ssd_research import evaluate
from ssd_research.metrics import fid
from ssd_research.metrics.fid import Provenance
from ssd_research.metrics.frechet import fit, frechet_distance
from ssd_research.metrics.judges.features import (
    INCEPTION,
    CleanInception,
    center_crop,
    clean_resize,
)
from ssd_research.metrics.judges.janus_features import TokenizerFeatures, VisionFeatures
from ssd_research.metrics.picture_folder import read_pictures
from ssd_research.paths import conf_dir
from ssd_research.prompts import load_prompts
from ssd_research.prompts.coco import read_captions

COUNT = 6


def noise(count: int, *, seed: int, size: tuple[int, int] = (20, 26)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]


def write_folder(folder: Path, images: list[np.ndarray], *, first: int = 1) -> Path:
    """Write pictures under COCO's names."""
    folder.mkdir()
    for number, image in enumerate(images, first):
        Image.fromarray(image).save(folder / f"{number:012d}.png")
    return folder


class Layers(nn.Module):
    """A stand-in for Inception's layers: 2048 features of a picture's coarse colours."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * 4 * 4, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Colours(nn.Module):
    """The cheapest extractor: an image's mean colours in a 2x2 grid."""

    name, revision, resize, num_features = "colours", "0", "clean bicubic 8x8", 12

    def __init__(self, path: str, *, model: str, device: str) -> None:
        super().__init__()

    def prepare(self, image: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(clean_resize(image, (8, 8))).permute(2, 0, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


@pytest.fixture(scope="session")
def inception(tmp_path_factory) -> Path:
    """Write a random network in the TorchScript form of clean-fid's weights."""
    path = tmp_path_factory.mktemp("weights") / INCEPTION
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        torch.jit.save(torch.jit.script(Network()), path)
    return path


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerFeatures:
    return TokenizerFeatures("checkpoints/tiny", model="tiny")


def test_the_resize_is_clean_fids() -> None:
    for image in (*noise(2, seed=0), *noise(1, seed=1, size=(400, 310))):
        np.testing.assert_array_equal(
            clean_resize(image, (299, 299)), build_resizer("clean")(image)
        )
    assert clean_resize(image, (10, 20)).shape == (10, 20, 3)
    same = noise(1, seed=2)[0]
    np.testing.assert_array_equal(clean_resize(same, same.shape[:2]), same)


def test_the_middle_square() -> None:
    image = np.arange(4 * 7 * 3, dtype=np.uint8).reshape(4, 7, 3)
    np.testing.assert_array_equal(center_crop(image), image[:, 1:5])
    np.testing.assert_array_equal(center_crop(image.swapaxes(0, 1)), image.swapaxes(0, 1)[1:5])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_clean_fid_says_the_same(inception, tmp_path) -> None:
    folders = [
        write_folder(tmp_path / str(seed), noise(COUNT, seed=seed), first=1) for seed in (1, 2)
    ]
    ours = CleanInception(inception)
    stored = [
        torch.cat(list(fid.extract(read_pictures(f), ours, store=f / ".store", batch_size=4)))
        for f in folders
    ]
    theirs = InceptionV3W(str(inception.parent), download=False).eval()
    expected = [
        clean_fid.get_folder_features(
            str(f),
            theirs,
            num_workers=0,
            batch_size=4,
            device=torch.device("cpu"),
            verbose=False,
        )
        for f in folders
    ]
    for ours_, theirs_ in zip(stored, expected, strict=True):
        np.testing.assert_allclose(ours_, theirs_, rtol=1e-5, atol=1e-5)


def test_inception_that_is_absent_or_broken(tmp_path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"there is no .*inception-2015-12-05.pt; fetch https://nvlabs"
    ):
        CleanInception(tmp_path)
    (tmp_path / INCEPTION).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ValueError, match=r"is not clean-fid's inception-2015-12-05.pt"):
        CleanInception(tmp_path / INCEPTION)


def test_torchmetrics_takes_the_shapes_extractor() -> None:
    tokenizer = TokenizerFeatures("checkpoints/tiny", model="tiny")
    real, made = (noise(8, seed=seed, size=(48, 48)) for seed in (1, 2))
    metric = FrechetInceptionDistance(feature=tokenizer, input_img_size=(3, 48, 48))
    metric.set_dtype(torch.float64)
    both = []
    for images, is_real in ((real, True), (made, False)):
        prepared = torch.stack([tokenizer.prepare(image) for image in images])
        metric.update(prepared, real=is_real)
        both.append(fit(tokenizer(prepared)))
    assert float(metric.compute()) == pytest.approx(frechet_distance(*both), rel=1e-3)


def test_the_shapes_extractor_tells_worlds_apart(tokenizer) -> None:
    assert (tokenizer.num_features, tokenizer.resize) == (128, "clean bicubic 48x48")
    flat = [np.full((48, 48, 3), 40 * n, np.uint8) for n in range(6)]
    prepared = [torch.stack([tokenizer.prepare(i) for i in one]) for one in (flat, flat[::-1])]
    same, other = (fit(tokenizer(one)) for one in prepared)
    assert frechet_distance(same, other) == pytest.approx(0, abs=1e-4)
    noisy = torch.stack([tokenizer.prepare(i) for i in noise(6, seed=0, size=(48, 48))])
    assert frechet_distance(same, fit(tokenizer(noisy))) > 1


@pytest.mark.parametrize("layer", ["tower", "aligner"])
def test_vision_features_are_what_janus_sees(tmp_path, layer) -> None:
    folder = str(write_janus(tmp_path / "janus"))
    extractor = VisionFeatures(folder, layer=layer)
    pixels = torch.stack([extractor.prepare(image) for image in noise(2, seed=0)])
    model = JanusForConditionalGeneration.from_pretrained(folder).model.eval()
    with torch.no_grad():
        seen = model.get_image_features(pixels)
    states = seen.last_hidden_state if layer == "tower" else seen.pooler_output
    torch.testing.assert_close(extractor(pixels), states.mean(1))
    assert extractor.num_features == states.shape[-1]


def test_vision_features_that_cannot_be(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"eval.extractor.layer=head .* tower, aligner"):
        VisionFeatures("checkpoints/tiny", layer="head")
    with pytest.raises(FileNotFoundError, match=r"no preprocessor_config.json"):
        VisionFeatures("checkpoints/tiny")


# --- reference statistics ---------------------------------------------------------------------


@pytest.fixture
def made(tokenizer, tmp_path) -> tuple[Path, Provenance]:
    wanted = Provenance.of(tokenizer, preprocess="none", images="0123")
    gaussian = fit(torch.randn(140, 128, generator=torch.Generator().manual_seed(0)))
    path = tmp_path / "deep" / "reference.npz"
    fid.write_reference(path, fid.Reference(gaussian, wanted))
    return path, wanted


def test_statistics_are_read_as_they_were_written(made) -> None:
    path, wanted = made
    found = fid.read_reference(path, wanted)
    assert found.provenance == wanted
    assert found.gaussian.count == 140
    assert frechet_distance(found.gaussian, found.gaussian) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("extractor", "clean-fid-inception"),
        ("revision", "ffff"),
        ("resize", "legacy"),
        ("preprocess", "center_crop"),
        ("images", "4567"),
    ],
)
def test_statistics_made_differently_are_refused_in_one_line(made, field, other) -> None:
    path, wanted = made
    asked = Provenance(**{**vars(wanted), field: other})
    with pytest.raises(ValueError, match=f"made with {field} '.*', not '{other}'") as caught:
        fid.read_reference(path, asked)
    assert "\n" not in str(caught.value)


def test_any_list_will_do_where_none_is_named(made) -> None:
    path, wanted = made
    found = fid.read_reference(path, Provenance(**{**vars(wanted), "images": ""}))
    assert found.provenance.images == "0123"


def test_files_that_do_not_say_how_they_were_made(made, tmp_path) -> None:
    path, wanted = made
    foreign = tmp_path / "clean_fid.npz"
    np.savez(foreign, mu=np.zeros(128), sigma=np.eye(128))
    with pytest.raises(ValueError, match=r"does not say how it was made \(it lacks n, extractor"):
        fid.read_reference(foreign, wanted)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"is not a whole .npz file"):
        fid.read_reference(path, wanted)
    np.save(tmp_path / "array.npy", np.eye(3))
    for other in (tmp_path, tmp_path / "array.npy"):
        with pytest.raises(ValueError, match=r"is not a whole .npz file"):
            fid.read_reference(other, wanted)


@pytest.mark.parametrize(
    "odd",
    [
        {"sigma": np.eye(3)},
        {"sigma": -np.eye(2)},
        {"sigma": np.triu(np.ones((2, 2)))},
        {"sigma": np.full((2, 2), np.nan)},
        {"mu": np.zeros((2, 1))},
        {"mu": np.array([0, np.inf])},
        {"mu": np.zeros(2, complex)},
        {"mu": np.array(["a", "b"])},
        {"n": np.array(1)},
        {"n": np.array(3.5)},
        {"n": np.array(np.nan)},
        {"n": np.array([3, 4])},
    ],
    ids=str,
)
def test_statistics_that_are_no_gaussian_are_refused(made, odd) -> None:
    path, wanted = made
    fid.write_reference(path, fid.Reference(fit(torch.eye(3, 2)), wanted))
    fid.read_reference(path, wanted)
    np.savez(path, **{**np.load(path), **odd})
    with pytest.raises(
        ValueError, match=r"mu \[.*\], sigma \[.*\] and n=.* are not the finite mean"
    ):
        fid.read_reference(path, wanted)


# --- COCO captions ----------------------------------------------------------------------------


@pytest.fixture
def captions(tmp_path) -> Path:
    """Write a caption file whose images and captions are out of order."""
    images = [{"id": n, "file_name": f"{n:012d}.jpg"} for n in range(COUNT, 0, -1)]
    entries = [
        {"id": 10 * k + n, "image_id": n, "caption": f" picture {n}\nwording {k} "}
        for k in (4, 2, 3, 1)
        for n in range(1, COUNT + 1)
    ]
    entries[-1]["caption"] = entries[-2]["caption"]  # two images may have the same caption
    path = tmp_path / "captions_val.json"
    path.write_text(json.dumps({"info": {}, "images": images, "annotations": entries}))
    return path


def test_one_caption_per_image(captions) -> None:
    found = read_captions(captions)
    assert [c.image_id for c in found] == list(range(1, COUNT + 1))
    assert [c.caption_id for c in found] == [10 + n for n in range(1, COUNT + 1)]
    assert found[0].caption == "picture 1 wording 1"
    assert found[0].file_name == "000000000001.png"
    drawn = [[c.caption_id for c in read_captions(captions, seed=s)] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({c // 10 for c in drawn[0]}) > 1


def test_captions_are_prompts_and_none_is_dropped(captions) -> None:
    prompts = load_prompts(str(captions), {})
    assert [p.id for p in prompts] == [f"{n:012d}" for n in range(1, COUNT + 1)]
    assert prompts[-1].text == prompts[-2].text
    assert prompts[0].metadata["caption_id"] == 11
    seeded = load_prompts(str(captions), {"caption_seed": 0})
    assert [p.metadata["caption_id"] for p in seeded] == [
        c.caption_id for c in read_captions(captions, seed=0)
    ]


def test_broken_caption_files(tmp_path) -> None:
    path = tmp_path / "captions.json"
    path.write_text('{"images": [{"id": 1}], "annotations": []}')
    with pytest.raises(ValueError, match="1 images have no caption, the first 1"):
        read_captions(path)
    path.write_text('{"annotations": [{"id": 1}], "images": []}')
    with pytest.raises(ValueError, match="is not a COCO caption file"):
        load_prompts(str(path), {})
    image = {"images": [{"id": 1}]}
    for caption, words in ((None, "is not a COCO caption file"), (" ", "1 images have no caption")):
        entry = {"id": 2, "image_id": 1, "caption": caption}
        path.write_text(json.dumps({**image, "annotations": [entry]}))
        with pytest.raises(ValueError, match=words):
            read_captions(path)
    path.write_text('{"images": [], "annotations": []}')
    with pytest.raises(ValueError, match=r"captions.json lists no images"):
        read_captions(path)
    for content in (b"{", b"", b"\xff", b"[]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"captions.json is not a COCO caption file"):
            read_captions(path)


def test_a_byte_order_mark_before_captions(captions) -> None:
    plain = load_prompts(str(captions), {})
    captions.write_bytes(b"\xef\xbb\xbf" + captions.read_bytes())
    assert load_prompts(str(captions), {}) == plain
    assert len(read_captions(captions)) == COUNT


# --- the stage --------------------------------------------------------------------------------


def configure(name: str, images: Path, out: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose(
            "config",
            [
                f"eval={name}",
                f"evaluate.images={images}",
                f"output_dir={out}",
                "runtime=cpu",
                *overrides,
            ],
        )


@pytest.fixture
def coco(captions, tmp_path):
    """Return the configuration of an evaluation of six pictures against eight."""
    images = write_folder(tmp_path / "images", noise(COUNT, seed=1))
    real = write_folder(tmp_path / "real", noise(8, seed=2, size=(30, 17)))

    def with_(*overrides: str):
        return configure(
            "coco_fid",
            images,
            tmp_path / "out",
            f"eval.captions={captions}",
            f"eval.reference.images={real}",
            "eval/extractor=tokenizer",
            "eval.extractor._target_=test_fid.Colours",  # Inception's 2048 would take minutes
            "eval.batch_size=4",
            *overrides,
        )

    return with_


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_coco_end_to_end(coco, tmp_path) -> None:
    folder = evaluate.run(coco(f"eval.export={tmp_path}/flat"))
    scores = scores_of(folder)
    assert (scores["n_expected"], scores["n_scored"], scores["missing"]) == (COUNT, COUNT, [])
    assert scores["reference"]["n"] == 8
    assert scores["higher_is_better"] is False
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    colours = Colours("", model="", device="cpu")
    real = torch.stack([colours.prepare(i) for i in noise(8, seed=2, size=(30, 17))])
    expected = frechet_distance(
        fit(torch.tensor([row["features"] for row in rows])), fit(colours(real))
    )
    assert scores["fid"] == pytest.approx(expected, rel=1e-5)
    assert sorted(p.name for p in (tmp_path / "flat").iterdir())[0] == "000000000001.png"
    assert evaluate.run(coco()) == folder
    cropped = scores_of(evaluate.run(coco("eval.reference.preprocess=center_crop")))
    assert cropped["fid"] != scores["fid"]
    assert cropped["reference"]["preprocess"] == "center_crop"


def test_statistics_in_a_user_path(coco, tmp_path) -> None:
    stats = f"eval.reference.statistics={tmp_path}/stats.npz"
    first = evaluate.run(coco(stats))
    alone = coco(stats, "eval.reference.images=null")
    assert evaluate.run(alone) == first
    with pytest.raises(ValueError, match="was made with preprocess 'none', not 'center_crop'"):
        evaluate.run(coco(stats, "eval.reference.preprocess=center_crop"))
    Image.fromarray(noise(1, seed=9)[0]).save(tmp_path / "real" / "000000000099.png")
    with pytest.raises(ValueError, match="was made with images"):
        evaluate.run(coco(stats))
    with pytest.raises(ValueError, match="preprocess=crop is not known; accepted: none, center"):
        evaluate.run(coco("eval.reference.preprocess=crop"))
    with pytest.raises(ValueError, match="needs reference images or their statistics"):
        evaluate.run(coco("eval.reference.images=null"))
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        evaluate.run(coco("eval.reference.images=null", "eval.reference.statistics=/none.npz"))


def test_missing_images_are_one_line_unless_allowed(coco, tmp_path) -> None:
    (tmp_path / "images" / "000000000003.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 6 images .*prompts 000000000003\)"):
        evaluate.run(coco())
    scores = scores_of(evaluate.run(coco("evaluate.allow_missing=true")))
    assert (scores["coverage"], scores["missing"]) == (5 / 6, ["000000000003"])
    with pytest.raises(FileNotFoundError, match=r"4995 of 5000 images are missing; score"):
        evaluate.run(coco("eval.captions=null"))
    for expected in ("null", "0", "4.5", "all"):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            evaluate.run(coco("eval.captions=null", f"eval.expected={expected}"))


def test_what_a_resize_or_a_second_name_would_hide(coco, tmp_path) -> None:
    image = tmp_path / "images" / "000000000002.png"
    whole = image.read_bytes()
    Image.open(image).resize((1, 1)).save(image)
    with pytest.raises(ValueError, match=r"1 of 6 images are not 26x20 .*000000000002.png is 1x1"):
        evaluate.run(coco())
    image.write_bytes(b"")
    with pytest.raises(ValueError, match=r"000000000002.png is not a readable image"):
        evaluate.run(coco())
    image.write_bytes(whole)
    twin = image.with_suffix(".jpg")
    Image.open(image).save(twin)
    with pytest.raises(ValueError, match=r"2.jpg and .*2.png are both image 0 of prompt 0"):
        evaluate.run(coco())
    twin.unlink()
    for other in image.parent.glob("*[!2].png"):
        other.unlink()
    with pytest.raises(FileNotFoundError, match="images holds 1 image; a covariance needs"):
        evaluate.run(coco())


def test_options_that_would_do_nothing(coco) -> None:
    with pytest.raises(ValueError, match=r"images and eval.reference.render both say .*=null"):
        evaluate.run(coco("eval.reference.render=2"))
    with pytest.raises(ValueError, match=r"caption_seed=3 does nothing without eval.captions"):
        evaluate.run(coco("eval.captions=null", "selection.caption_seed=3"))
    with pytest.raises(ValueError, match=r"allow_missing=maybe must be true or false"):
        evaluate.run(coco("evaluate.allow_missing=maybe"))


def test_exports_hold_nothing_else(coco, tmp_path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "000000000077.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"eval.export=.*flat holds 000000000077.png: name an"):
        evaluate.run(coco(f"eval.export={tmp_path}/flat"))
    with pytest.raises(ValueError, match=r"eval.export=.* is not a folder"):
        evaluate.run(coco(f"eval.export={tmp_path}/flat/000000000077.png"))


def test_features_that_are_not_finite_name_their_image(coco, monkeypatch) -> None:
    forward = Colours.forward
    spoilt = torch.tensor([0.0, torch.inf, torch.nan, 0.0])[:, None]
    monkeypatch.setattr(
        Colours, "forward", lambda self, x: forward(self, x) + spoilt[: len(x)].to(x)
    )
    with pytest.raises(ValueError, match=r"colours finds no finite features in .*real/0+2.png"):
        evaluate.run(coco())


def write_run(folder: Path, images: list[np.ndarray], ids: list[str]) -> Path:
    """Write what a finished generate run leaves, as far as FID reads it."""
    rows = []
    for index, (image, prompt_id) in enumerate(zip(images, ids, strict=True)):
        path = f"{index:05d}/samples/0000.png"
        (folder / "images" / path).parent.mkdir(parents=True)
        Image.fromarray(image).save(folder / "images" / path)
        rows.append({"prompt_id": prompt_id, "prompt": None, "image_index": 0, "path": path})
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    (folder / "DONE").write_text("")
    return folder


def test_every_run_has_a_score_of_its_own_though_its_images_are_anothers(coco, tmp_path) -> None:
    """Lossless decoders at top-k 1 draw the same images; each must have a score to compare."""
    ids = [f"{n:012d}" for n in range(1, COUNT + 1)]
    runs = [write_run(tmp_path / name, noise(COUNT, seed=1), ids) for name in ("a1", "b2")]
    scores = [scores_of(evaluate.run(coco(f"evaluate.images={run}"))) for run in runs]
    assert scores[0]["fid"] == scores[1]["fid"]
    assert [one["images"] for one in scores] == [str(run / "images") for run in runs]


def test_runs_that_are_not_as_they_were_made(coco, tmp_path) -> None:
    ids = [f"{n:012d}" for n in range(1, COUNT + 1)]
    run = write_run(tmp_path / "run", noise(COUNT, seed=1), ids)
    ask = f"evaluate.images={run}"
    extra = run / "images" / "00001" / "samples" / "0001.png"
    Image.fromarray(noise(1, seed=4)[0]).save(extra)
    with pytest.raises(ValueError, match=r"0001.png does not belong here: images.parquet does not"):
        evaluate.run(coco(ask))
    extra.rename(extra.with_name("0000.png"))
    evaluate.run(coco(ask))
    extra.with_name("0000.png").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 6 images are missing: 00001/samples/0000"):
        evaluate.run(coco(ask))
    for content in (b"", b"PAR1"):
        (run / "images.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"images.parquet is not the table of a generate run"):
            evaluate.run(coco(ask))


def test_truncated_and_foreign_files_are_one_line(coco, tmp_path) -> None:
    image = tmp_path / "images" / "000000000002.png"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"000000000002.png is damaged or cut short") as caught:
        evaluate.run(coco())
    assert "\n" not in str(caught.value)
    image.write_bytes(whole)
    (tmp_path / "images" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"notes.txt does not belong here"):
        evaluate.run(coco())
    (tmp_path / "images" / "notes.txt").unlink()
    image.rename(tmp_path / "images" / "cat.png")
    with pytest.raises(ValueError, match="of prompt cat, which coco_fid does not have"):
        evaluate.run(coco())


def test_a_killed_evaluation_extracts_only_what_is_left(coco, monkeypatch) -> None:
    calls = []
    forward = Colours.forward

    def dies(self, images):
        calls.append(len(images))
        if sum(calls) > 8 + 4:
            raise KeyboardInterrupt
        return forward(self, images)

    monkeypatch.setattr(Colours, "forward", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(coco())
    assert calls == [4, 4, 4, 2]
    calls.clear()
    folder = evaluate.run(coco())
    assert calls == [2]
    assert not (folder / "features").exists()


def test_shapes_from_a_fresh_clone(tmp_path) -> None:
    images = tmp_path / "made"
    for index, image in enumerate(noise(12, seed=3, size=(48, 48))):
        samples = images / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        Image.fromarray(image).save(samples / "0000.png")
    out = ["eval.per_kind=2", "eval.reference.render=2"]
    scores = scores_of(evaluate.run(configure("shapes_fid", images, tmp_path / "out", *out)))
    assert scores["reference"]["n"] == 24
    renders = next((tmp_path / "out" / "reference").glob("shapes-*"))
    right = tmp_path / "right"
    right.mkdir()
    for path in renders.glob("*-0000.png"):
        shutil.copyfile(path, right / f"{path.name[:5]}.png")
    better = scores_of(evaluate.run(configure("shapes_fid", right, tmp_path / "out", *out)))
    assert better["fid"] < scores["fid"] / 10
    with pytest.raises(ValueError, match="of prompt 00006, which shapes_fid does not have"):
        evaluate.run(configure("shapes_fid", right, tmp_path / "out", "eval.per_kind=1"))
    with pytest.raises(ValueError, match=r"images of 12 prompts, eval\.expected=6"):
        evaluate.run(configure("shapes_fid", right, tmp_path / "out", "eval.expected=6"))
    (right / "00003.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 12 images .* \(of prompts 00003\)"):
        evaluate.run(configure("shapes_fid", right, tmp_path / "out", *out))
    (images / "00003" / "metadata.jsonl").write_text('{"prompt": "a zebra"}')
    with pytest.raises(ValueError, match=r"was made for 'a zebra', but prompt 00003 of shapes_fid"):
        evaluate.run(configure("shapes_fid", images, tmp_path / "out", *out))
