"""The shipped tiny backbone and its heads: what a user's clone decodes with."""

import json
import math

import numpy as np
import pytest
import torch

from ssd_research.backbones.janus import JanusBackbone
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.noise import sample_key
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.heads import DraftHeads
from ssd_research.metrics.geneval import judge
from ssd_research.metrics.judges.shapes import ShapesDetector
from ssd_research.paths import resolve_path
from ssd_research.shapes.benchmark import geneval_metadata

PROMPTS = [
    "a red circle",
    "a photo of three blue stars",
    "a large pink square left of a small black circle",
    "a photo of a ring and a cross",
    "four green triangles",
    "a photo of a yellow ring",
    "an orange star above a red square",
    "a green cross",
]
KEYS = [sample_key(text, 0) for text in PROMPTS]


@pytest.fixture(scope="module")
def folder():
    return resolve_path("checkpoints/tiny")


def load(folder, dtype=torch.float32):
    return JanusBackbone.load(str(folder), name="tiny", guidance=2.0, dtype=dtype)


@pytest.fixture(scope="module")
def tiny(folder):
    return load(folder)


@pytest.fixture(scope="module")
def heads(folder, tiny):
    return DraftHeads.load(folder / "heads", tiny)


def test_the_checkpoint_is_small_and_says_how_it_was_made(folder):
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= 16 * 2**20
    record = json.loads((folder / "record.json").read_text())
    assert record["recipe"]["lm"]["steps"] > 0
    assert record["validation"]["vq/val_mse"] < 0.01


def test_codes_alone_and_in_a_batch_of_eight_are_identical_in_float64(folder):
    backbone = load(folder, torch.float64)
    heads = DraftHeads.load(folder / "heads", backbone)
    options = {"sampling": backbone.defaults, "seed": 0}
    for decoder in (SpatiallySpeculative(r=2), SpatiallySpeculative(v=3, b=2, i=1)):
        together = decoder.decode(backbone, PROMPTS, sample_keys=KEYS, heads=heads, **options)
        for n in range(len(PROMPTS)):
            alone = decoder.decode(
                backbone, PROMPTS[n : n + 1], sample_keys=KEYS[n : n + 1], heads=heads, **options
            )
            assert torch.equal(alone.codes[0], together.codes[n])
    together = Autoregressive().decode(backbone, PROMPTS, sample_keys=KEYS, **options)
    alone = Autoregressive().decode(backbone, PROMPTS[:1], sample_keys=KEYS[:1], **options)
    assert torch.equal(alone.codes[0], together.codes[0])


def test_cached_blocks_equal_a_teacher_forced_pass(tiny):
    made = Autoregressive().decode(tiny, PROMPTS, sampling=tiny.defaults, seed=1, sample_keys=KEYS)
    flags = (torch.full((len(PROMPTS),), drop) for drop in (False, True))
    want = torch.cat([tiny.hidden_states(PROMPTS, made.codes, unconditional=f) for f in flags])
    state = tiny.start(PROMPTS, sampling=tiny.defaults)
    wrong = made.codes.flip(1)
    for y in range(tiny.grid.rows):
        row = tiny.grid.row(y)
        for codes in (wrong, made.codes):
            state.forward(codes[:, row.start : row.stop], row, phase="verify")
    scale = want.abs().max()
    torch.testing.assert_close(state.h_pre / scale, want / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("r", "nfe"), [(0, 18), (1, 29), (2, 40), (3, 51), (4, 62)])
def test_steps_of_an_image(tiny, heads, r, nfe):
    made = SpatiallySpeculative(r=r).decode(
        tiny, PROMPTS[:1], sampling=tiny.defaults, seed=0, sample_keys=KEYS[:1], heads=heads
    )
    assert set(made.nfe) == {nfe}
    assert tiny.decode_images(made.codes).shape == (1, 48, 48, 3)


def test_heads_of_another_backbone_are_refused(folder, random_backbone):
    with pytest.raises(ValueError, match=r"tiny.*random"):
        DraftHeads.load(folder / "heads", random_backbone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "least"),
    [(Autoregressive(), 0.7), (SpatiallySpeculative(r=4), 0.5)],
    ids=["ar", "ssd_r4"],
)
def test_images_obey_their_prompts(tiny, heads, decoder, least):
    """Scores 16 prompts of each GenEval kind; limits lie well below the published figures."""
    lines, detector = geneval_metadata(per_kind=16), ShapesDetector()
    verdicts: dict[str, list[bool]] = {}
    for start in range(0, len(lines), 16):
        part = lines[start : start + 16]
        texts = [line["prompt"] for line in part]
        keys = [sample_key(str(start + n), 0) for n in range(len(part))]
        made = decoder.decode(
            tiny, texts, sampling=tiny.defaults, seed=0, sample_keys=keys, heads=heads
        )
        for line, image in zip(part, tiny.decode_images(made.codes), strict=True):
            verdict = judge(line, detector.detect(np.asarray(image)))
            verdicts.setdefault(line["tag"], []).append(verdict.correct)
    overall = math.fsum(np.mean(v) for v in verdicts.values()) / len(verdicts)
    assert overall >= least
