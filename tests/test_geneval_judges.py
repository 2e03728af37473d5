"""Mask2Former and CLIP as judges: against references, on tiny models of the real classes."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
)

from ssd_research import evaluate
from ssd_research.metrics.geneval import Detection, Rules
from ssd_research.metrics.geneval_folder import Sample
from ssd_research.metrics.geneval_words import COLOURS, OBJECTS
from ssd_research.metrics.judges import pretrained
from ssd_research.metrics.judges.clip_colour import ClipColours, cut_out
from ssd_research.metrics.judges.geneval import GenEvalJudge
from ssd_research.metrics.judges.mask2former import (
    MEAN,
    STD,
    Mask2FormerDetector,
    box_of,
    check_classes,
    full_size_masks,
    instances,
)
from ssd_research.paths import conf_dir
from ssd_research.prompts import Prompt

SWIN = SwinConfig(
    image_size=64,
    embed_dim=8,
    depths=[1, 1, 1, 1],
    num_heads=[1, 1, 2, 2],
    window_size=4,
    out_features=["stage1", "stage2", "stage3", "stage4"],
)


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory) -> Path:
    """A tiny random Mask2Former as published, with a processor configuration as a trap."""
    torch.manual_seed(0)
    config = Mask2FormerConfig(
        backbone_config=SWIN,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        num_labels=80,
        init_std=0.5,
    )
    folder = tmp_path_factory.mktemp("mask2former")
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    trap = {"size": {"height": 384, "width": 384}, "image_mean": [0.5] * 3, "size_divisor": 0}
    (folder / "preprocessor_config.json").write_text(json.dumps(trap))
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A tiny random CLIP in Hugging Face layout, whose tokenizer knows single letters."""
    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz-"
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {word: n for n, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    size = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**size, "vocab_size": len(vocab), "max_position_embeddings": 64}
    text |= {"bos_token_id": len(vocab) - 2, "eos_token_id": len(vocab) - 1}
    vision = {**size, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    CLIPTokenizer(vocab=vocab, merges=[]).save_pretrained(folder)
    return folder


def picture(height: int = 48, width: int = 70, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def resample(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize [h, w] bilinearly, one pixel at a time, by the distance of pixel centres."""
    out = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            v = max((y + 0.5) * values.shape[0] / height - 0.5, 0)
            u = max((x + 0.5) * values.shape[1] / width - 0.5, 0)
            top, left = int(v), int(u)
            low, right = min(top + 1, values.shape[0] - 1), min(left + 1, values.shape[1] - 1)
            a, b = v - top, u - left
            upper = values[top, left] * (1 - b) + values[top, right] * b
            lower = values[low, left] * (1 - b) + values[low, right] * b
            out[y, x] = upper * (1 - a) + lower * a
    return out


def reference(classes, masks, *, resized, original, floor) -> list[tuple]:
    """Return (label, score, box, mask) query by query and pixel by pixel."""
    full = []
    for mask in masks:
        padded = resample(mask, *(math.ceil(side / 32) * 32 for side in resized))
        full.append(resample(padded[: resized[0], : resized[1]], *original))
    pairs = []
    for q, logits in enumerate(classes):
        weights = np.exp(logits - logits.max())
        for label, weight in enumerate(weights[:-1]):
            pairs.append((weight / weights.sum(), q, label))
    found = []
    for probability, q, label in sorted(pairs, reverse=True)[:100]:
        inside = [(y, x) for y, x in np.ndindex(*original) if full[q][y, x] > 0]
        if not inside:
            continue
        mean = sum(1 / (1 + math.exp(-full[q][place])) for place in inside) / len(inside)
        rows, columns = zip(*inside, strict=True)
        box = (min(columns), min(rows), max(columns) + 1, max(rows) + 1)
        if probability * mean > floor:
            found.append((label, probability * mean, box, full[q] > 0))
    return sorted(found, key=lambda one: -one[1])


def same(found, expected) -> None:
    assert len(found) == len(expected) > 0
    for one, (label, score, box, mask) in zip(found, expected, strict=True):
        assert (one.label, one.box) == (label, box)
        assert one.score == pytest.approx(score, rel=1e-5)
        assert np.array_equal(one.mask, mask)


@pytest.mark.parametrize(
    ("resized", "original", "floor"),
    [((32, 32), (20, 20), 0.0), ((20, 50), (12, 30), 0.01), ((40, 24), (50, 30), 0.05)],
)
def test_post_processing_is_that_of_a_pixel_by_pixel_reference(resized, original, floor):
    rng = np.random.default_rng(1)
    padded = [math.ceil(side / 32) * 32 for side in resized]
    masks = rng.normal(0, 3, (5, padded[0] // 4, padded[1] // 4))
    masks[3] = -1.0  # a query without any pixel
    masks[4] = 2.0  # and one with all of them
    classes = rng.normal(0, 3, (5, 81))
    options = {"resized": resized, "original": original, "floor": floor}
    found = instances(torch.tensor(classes), torch.tensor(masks), **options)
    same(found, reference(classes, masks, **options))
    assert len(found) < 100


def test_only_the_likeliest_hundred_pairs_count():
    classes = np.zeros((3, 81))  # 240 pairs, all alike but one
    classes[1, 7] = 1.0
    found = instances(
        torch.tensor(classes), torch.ones(3, 8, 8), resized=(32, 32), original=(8, 8), floor=0.0
    )
    assert len(found) == 100
    assert found[0].label == 7


def test_synthetic_masks_come_back_at_full_resolution():
    """A rectangle and a small object that 384x384 nearest neighbours would move."""
    logits = torch.full((2, 64, 64), -9.0)
    logits[0, 10:20, 30:50] = 9.0
    logits[1, 63, 63] = 9.0
    classes = torch.full((2, 81), -20.0)
    classes[0, 16], classes[1, 65] = 20.0, 20.0
    dog, remote = instances(classes, logits, resized=(256, 256), original=(256, 256), floor=0.5)
    assert (OBJECTS[dog.label], OBJECTS[remote.label]) == ("dog", "tv remote")
    assert dog.box == (120, 40, 200, 80)
    assert remote.box == (252, 252, 256, 256)
    assert dog.mask.sum() > 0.98 * 80 * 40


def test_a_mask_of_one_pixel_is_as_sure_as_that_pixel():
    logits = torch.full((2, 32, 32), -9.0)
    logits[0, 5, 7] = 2.0
    masks, sure = full_size_masks(logits, resized=(32, 32), original=(32, 32))
    assert masks[0].nonzero().tolist() == [[5, 7]]
    assert sure.tolist() == pytest.approx([1 / (1 + math.exp(-2)), 0])


def test_box_of_a_mask():
    mask = np.zeros((5, 7), bool)
    mask[2, 3] = mask[4, 1] = True
    assert box_of(mask) == (1, 2, 4, 5)


def test_the_detector_runs_the_published_class(mask2former):
    detector = Mask2FormerDetector(
        str(mask2former), floor=0.0, shortest_edge=64, longest_edge=100, device="cpu"
    )
    image = picture(48, 70)
    found = detector.detect(image)
    # The same by hand: sides 64 x 93 with the aspect ratio kept, padded with zeros to 64 x 96.
    pixels = torch.nn.functional.pad(detector._prepare(image), (0, 3))
    assert pixels.shape == (1, 3, 64, 96)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(mask2former).eval()
    with torch.no_grad():
        seen = model(pixel_values=pixels)
    expected = reference(
        seen.class_queries_logits[0].numpy().astype(float),
        seen.masks_queries_logits[0].numpy().astype(float),
        resized=(64, 93),
        original=(48, 70),
        floor=0.0,
    )
    assert [OBJECTS.index(d.label) for d in found] == [label for label, *_ in expected]
    for one, (_, score, box, mask) in zip(found, expected, strict=True):
        assert one.score == pytest.approx(score, rel=1e-4)
        assert one.box == box
        assert np.array_equal(one.mask, mask)


def test_the_floor_leaves_out_what_scores_less(mask2former):
    options = {"shortest_edge": 64, "longest_edge": 64, "device": "cpu"}
    every = Mask2FormerDetector(str(mask2former), floor=0.0, **options).detect(picture(64, 64))
    floor = every[3].score
    some = Mask2FormerDetector(str(mask2former), floor=floor, **options).detect(picture(64, 64))
    assert some == every[:3]
    with pytest.raises(ValueError, match=r"eval\.detector\.floor=1"):
        Mask2FormerDetector(str(mask2former), floor=1.0)


def test_the_detector_prepares_images_as_mmdetection_does(mask2former):
    detector = Mask2FormerDetector(str(mask2former))
    assert detector._prepare(picture(384, 384)).shape == (1, 3, 800, 800)
    assert detector._prepare(picture(100, 300)).shape == (1, 3, 444, 1333)
    same_size = Mask2FormerDetector(str(mask2former), shortest_edge=64)
    image = picture(64, 70)
    expected = (image / 255 - np.array(MEAN)) / np.array(STD)
    assert np.allclose(same_size._prepare(image)[0].permute(1, 2, 0), expected, atol=1e-5)


def test_classes_are_cocos_by_index():
    coco = dict(enumerate(OBJECTS)) | {64: "mouse", 65: "remote", 66: "keyboard"}
    check_classes(coco, path="x")
    check_classes({n: f"LABEL_{n}" for n in range(80)}, path="x")
    with pytest.raises(ValueError, match=r"eval\.detector\.path=x knows 133 classes"):
        check_classes(dict.fromkeys(range(133), "thing"), path="x")
    with pytest.raises(ValueError, match=r"class 0 is toothbrush, which COCO has at 79"):
        check_classes(dict(enumerate(reversed(OBJECTS))), path="x")


def test_a_detector_that_lacks_weights_is_refused(mask2former, tmp_path):
    weights = load_file(mask2former / "model.safetensors")
    gone = next(name for name in weights if name.startswith("class_predictor"))
    del weights[gone]
    weights.pop("criterion.empty_weight")  # of the training loss: nobody misses it
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (mask2former / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    detector = Mask2FormerDetector(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=f"eval.detector.path=.* lacks 1 weights, .* {gone}"):
        detector.detect(picture())
    with pytest.raises(ValueError, match=r"eval\.detector\.path=no/such .*cannot be loaded"):
        Mask2FormerDetector("no/such")
    with pytest.raises(ValueError, match=r"eval\.detector\.dtype=int8 is not known"):
        Mask2FormerDetector(str(mask2former), dtype="int8").detect(picture())


def test_versions_settle_the_weights(mask2former, tmp_path, monkeypatch):
    version = Mask2FormerDetector(str(mask2former)).version
    assert version.startswith("sha256:")
    assert version.endswith("800/1333 float32")
    assert Mask2FormerDetector(str(mask2former), shortest_edge=64).version != version
    commit = "0123456789abcdef0123456789abcdef01234567"
    # Of a hub repository: the commit that its branch stands at, as the hub's cache has it.
    cached = tmp_path / "models--own--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert pretrained.version("own/name", None, key="k") == commit[:12]
    assert pretrained.version("owner/name", commit, key="k") == commit[:12]


def square(label: str, *, at: int, side: int = 12, mask: np.ndarray | None = None) -> Detection:
    return Detection(label, 0.9, (at, at, at + side, at + side), mask=mask)


def test_objects_are_cut_out_on_grey():
    image = picture(30, 40)
    mask = np.zeros((30, 40), bool)
    mask[6:9, 5:20] = True
    found = Detection("cup", 0.9, (5.0, 4.0, 20.0, 10.0), mask=mask)
    cut = np.array(cut_out(image, found))
    assert cut.shape == (6, 15, 3)
    assert np.array_equal(cut[2:5], image[6:9, 5:20])
    assert (cut[:2] == 0x99).all()
    assert (cut[5:] == 0x99).all()
    bare = Detection("cup", 0.9, (5.0, 4.0, 20.0, 10.0))
    assert np.array_equal(np.array(cut_out(image, bare)), image[4:10, 5:20])


def test_the_colour_is_the_nearest_text(clip):
    """By hand: three templates, each text alone, normalised, averaged, normalised; then argmax."""
    classifier = ClipColours(str(clip), device="cpu")
    image = picture(40, 40)
    mask = np.zeros((40, 40), bool)
    mask[2:9, 3:10] = True
    objects = [square("cup", at=2, mask=mask), square("cup", at=20)]
    model = CLIPModel.from_pretrained(clip).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip)
    likeness = np.zeros((2, 10))
    with torch.no_grad():
        for c, colour in enumerate(COLOURS):
            total = torch.zeros(16)
            for text in (
                f"a photo of a {colour} cup",
                f"a photo of a {colour}-colored cup",
                f"a photo of a {colour} object",
            ):
                read = model.get_text_features(**tokenizer(text, return_tensors="pt"))
                total += read.pooler_output[0] / read.pooler_output[0].norm()
            for k, found in enumerate(objects):
                small = cut_out(image, found).resize((16, 16), 3)  # bicubic
                pixels = torch.tensor(np.array(small) / 255).float()
                mean = torch.tensor((0.48145466, 0.4578275, 0.40821073))
                std = torch.tensor((0.26862954, 0.26130258, 0.27577711))
                pixels = ((pixels - mean) / std).permute(2, 0, 1)[None]
                seen = model.get_image_features(pixels).pooler_output[0]
                likeness[k, c] = torch.nn.functional.cosine_similarity(seen, total, dim=0)
    expected = [COLOURS[n] for n in likeness.argmax(1)]
    assert classifier.classify(image, objects) == expected
    assert classifier.classify(image, []) == []
    best = np.sort(likeness, 1)
    assert (best[:, -1] - best[:, -2] > 1e-4).all()


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_plain_gelu_is_refused_for_openais_weights(clip, tmp_path, part):
    for file in clip.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((clip / "config.json").read_text())
    config[part]["hidden_act"] = "gelu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"eval\.colours\.path=.* computes with gelu.*quick_gelu"):
        ClipColours(str(tmp_path), device="cpu").classify(picture(), [square("cup", at=2)])
    for other in ("text_config", "vision_config"):
        config[other]["hidden_act"] = "gelu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    laion = ClipColours(str(tmp_path), device="cpu", activation="gelu")
    assert laion.classify(picture(), [square("cup", at=2)])[0] in COLOURS


def test_the_two_activations_differ(clip, tmp_path):
    """The trap: the same weights with plain GELU run without complaint and answer otherwise."""
    pixels = torch.rand(2, 3, 16, 16)
    seen = []
    for activation in ("quick_gelu", "gelu"):
        config = CLIPConfig.from_pretrained(clip)
        config.vision_config.hidden_act = activation
        model = CLIPModel.from_pretrained(clip, config=config).eval()
        with torch.no_grad():
            seen.append(model.get_image_features(pixels).pooler_output)
    assert not torch.allclose(*seen, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_refused_and_not_scored(mask2former, clip, monkeypatch, value):
    """Half precision overflows: NaN would find nothing, and would be red, the first colour."""
    detector = Mask2FormerDetector(str(mask2former), shortest_edge=64, device="cpu")
    colours = ClipColours(str(clip), device="cpu")
    for parameter in (*detector._model.parameters(), *colours._model.parameters()):
        parameter.fill_(value)
    with pytest.raises(ValueError, match=r"eval\.detector\.path=.* no finite .*dtype=float32"):
        detector.detect(picture(64, 64))
    with pytest.raises(ValueError, match=r"eval\.colours\.path=.* no finite .*dtype=float32"):
        colours.classify(picture(), [square("cup", at=2)])


def test_a_box_beyond_the_image_is_black_there():
    image = picture(20, 30)
    cut = np.array(cut_out(image, Detection("cup", 0.9, (-4.0, 12.4, 6.0, 24.0))))
    assert cut.shape == (12, 10, 3)
    assert np.array_equal(cut[:8, 4:], image[12:, :6])
    assert not cut[8:].any()
    assert not cut[:, :4].any()


def test_a_revision_of_a_local_folder_is_refused(mask2former, clip):
    with pytest.raises(
        ValueError, match=r"eval\.detector\.revision=main does nothing.*local folder"
    ):
        Mask2FormerDetector(str(mask2former), revision="main")
    with pytest.raises(ValueError, match=r"eval\.colours\.revision=main does nothing"):
        ClipColours(str(clip), revision="main")


@dataclass(frozen=True)
class Fixed:
    """A detector that always reports the same."""

    found: list[Detection]
    name: str = "fixed"
    version: str = "1"
    floor: float = 0.0
    labels: tuple[str, ...] = ("cup", "dog")
    colours: tuple[str, ...] = ()

    def detect(self, image: np.ndarray) -> list[Detection]:
        return self.found


@pytest.mark.parametrize(
    ("score", "box"),
    [
        (math.nan, (0, 0, 4, 4)),
        (math.inf, (0, 0, 4, 4)),
        (0.5, (0, 0, math.nan, 4)),
        (0.5, (-math.inf, 0, 4, 4)),
        (0.5, (4, 0, 4, 4)),
        (0.5, (0, 5, 4, 4)),
    ],
)
def test_a_detector_that_reports_garbage_is_refused(score, box):
    judge = GenEvalJudge(Fixed([Detection("cup", score, box)]), None, Rules())
    need = {"tag": "single_object", "include": [{"class": "cup", "count": 1}]}
    with pytest.raises(ValueError, match=r"^fixed reported cup of score .* in x\.png$"):
        judge.look(picture(), Sample(0, 0, "x.png", "00", need))


def test_a_floor_is_a_score():
    for floor in (math.nan, -0.1, 1.0):
        with pytest.raises(ValueError, match=r"^eval\.detector\.floor=.* must be in \[0, 1\)"):
            GenEvalJudge(Fixed([], floor=floor), None, Rules())


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ({"class": "mouse"}, r"asks for class='mouse'; fixed knows cup, dog"),
        (
            {"class": "cup", "color": "grey"},
            r"asks for color='grey'; clip-vit-l-14 knows red, oran",
        ),
    ],
)
def test_what_no_judge_can_name_is_not_asked(clip, need, reason):
    """COCO's name of a class that GenEval renamed would never be found, and score 0."""
    judge = GenEvalJudge(Fixed([]), ClipColours(str(clip)), Rules())
    fine = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}]}
    judge.refuse_unknown([Prompt("0", "fine", fine)])
    asked = {"tag": "colors", "include": [{"count": 1, **need}]}
    with pytest.raises(ValueError, match=reason):
        judge.refuse_unknown([Prompt("0", "fine", fine), Prompt("1", "asked", asked)])
    with pytest.raises(ValueError, match=reason):
        judge.refuse_unknown([Prompt("2", "banned", {**fine, "exclude": asked["include"]})])
    # Without a classifier, the detector must name the colours.
    with pytest.raises(ValueError, match=r"color='red'; fixed knows none"):
        GenEvalJudge(Fixed([]), None, Rules()).refuse_unknown([Prompt("0", "fine", fine)])


def test_both_models_judge_one_image(mask2former, clip):
    """Colours only for the most confident object of the class that needs one; no masks are kept."""
    detector = Mask2FormerDetector(
        str(mask2former), floor=0.0, shortest_edge=64, longest_edge=64, device="cpu"
    )
    image = picture(64, 64)
    label = detector.detect(image)[4].label
    judge = GenEvalJudge(detector, ClipColours(str(clip), device="cpu"), Rules())
    need = {"tag": "colors", "include": [{"class": label, "count": 1, "color": "red"}]}
    record = judge.look(image, Sample(0, 0, "x.png", "00", {**need, "prompt": "a photo"}))
    coloured = [d for d in record.detections if d.colour]
    assert [d.label for d in coloured] == [label]
    assert coloured[0].colour in COLOURS
    assert all(d.mask is None for d in record.detections)
    assert judge.settled(need, record.detections)
    plain = judge.look(image, Sample(0, 0, "x.png", "00", {"tag": "single_object", "include": []}))
    assert not any(d.colour for d in plain.detections)
    assert judge.label.startswith("hf-m2f-swin-s sha256:")
    assert " + clip-vit-l-14 sha256:" in judge.label


def test_a_benchmark_by_both_models_is_scored_again_without_them(mask2former, clip, tmp_path):
    """The published classes from the command's configuration to scores; then with them deleted."""
    models = {"detector": tmp_path / "m2f", "colours": tmp_path / "clip"}
    for source, target in zip((mask2former, clip), models.values(), strict=True):
        shutil.copytree(source, target)
    include = [{"class": "dog", "count": 1, "color": "red"}]
    lines = [
        {"tag": "colors", "include": include, "prompt": "a photo of a red dog"},
        {"tag": "single_object", "include": [{"class": "cup", "count": 1}], "prompt": "a cup"},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for index, line in enumerate(lines):
        samples = tmp_path / "made" / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        (samples.parent / "metadata.jsonl").write_text(json.dumps(line))
        Image.fromarray(picture(64, 64, seed=index)).save(samples / "0000.png")
    options = [
        *("eval=geneval", "eval.images_per_prompt=1", "evaluate.bootstrap=10", "runtime=cpu"),
        *(f"eval.{key}.path={folder}" for key, folder in models.items()),
        *("eval.detector.shortest_edge=64", "eval.detector.floor=0", "eval.rules.threshold=0"),
        *(f"prompts={prompts}", f"evaluate.images={tmp_path}/made", f"output_dir={tmp_path}/out"),
    ]

    def run(*more: str) -> Path:
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return evaluate.run(compose("config", [*options, *more]))

    first = run()
    records = [json.loads(text) for text in (first / "detections.jsonl").read_text().splitlines()]
    assert all(len(record["detections"]) > 10 for record in records)
    for folder in models.values():
        shutil.rmtree(folder)
    with pytest.raises(InstantiationException, match=r"detector\.path=.*m2f cannot be loaded"):
        run()
    stored = f"eval.detections={first}/detections.jsonl"
    assert run(stored) == first
    none = run(stored, "eval.rules.threshold=0.99")
    assert none != first
    assert json.loads((none / "scores.json").read_text())["images_correct"] == 0
    assert (none / "detections.jsonl").read_bytes() == (first / "detections.jsonl").read_bytes()
