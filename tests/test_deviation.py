"""Deviation from AR: the paper's own numbers, the bias that it has, and the stage."""

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

from ssd_research import evaluate, paper
from ssd_research.metrics.deviation import (
    Deviation,
    independent_noise,
    intervals,
    normalise,
    per_prompt,
    pool,
    split_half_null,
)
from ssd_research.paths import conf_dir


def table_11() -> Deviation:
    shift, ar, ssd = (row["value"] for row in paper.table(11))
    return Deviation(shift, ar, ssd, independent_noise(ar, ssd, 10))


def test_table_11_from_the_papers_own_inputs() -> None:
    found = table_11()
    relative = [row["relative_to_ar"] for row in paper.table(11) if row["relative_to_ar"]]
    assert [round(found.location, 2), round(100 * found.scale)] == relative
    assert found.location == pytest.approx(0.7038, abs=1e-4)
    assert found.scale == pytest.approx(0.2453, abs=1e-4)


def test_nearly_half_of_table_11s_shift_is_noise() -> None:
    found = table_11()
    assert found.noise == pytest.approx(0.00961)
    assert found.shift_debiased == pytest.approx(0.0116, abs=1e-4)
    assert round(found.location_debiased, 2) == 0.52
    assert round((found.noise / found.trace_ar) ** 0.5, 2) == 0.47


def draws(prompts: int, images: int, *, seed: int, shift: float = 0, scale: float = 1):
    """Return features whose true squared shift is 4 shift^2 and whose trace is 4 scale^2."""
    rng = np.random.default_rng(seed)
    centre = np.random.default_rng(99).normal(size=(prompts, 1, 4))
    return centre + shift + scale * rng.normal(size=(prompts, images, 4))


def test_against_a_loop_over_prompts() -> None:
    ar, decoder = draws(7, 5, seed=0), draws(7, 5, seed=1, shift=0.5, scale=2)
    for k, row in enumerate(per_prompt(ar, decoder, shared_seeds=False)):
        covariances = [np.trace(np.cov(x[k].T)) for x in (ar, decoder)]
        shift = np.linalg.norm(decoder[k].mean(0) - ar[k].mean(0)) ** 2
        np.testing.assert_allclose(row, [shift, *covariances, sum(covariances) / 5])
    for k, row in enumerate(per_prompt(ar, decoder, shared_seeds=True)):
        assert row[3] == pytest.approx(np.trace(np.cov((decoder[k] - ar[k]).T)) / 5)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_debiased_shift_is_right_on_average_and_the_plug_in_is_not(shift) -> None:
    ar, decoder = draws(20_000, 4, seed=2), draws(20_000, 4, seed=3, shift=shift)
    found = pool(per_prompt(ar, decoder, shared_seeds=False))
    assert found.shift_debiased == pytest.approx(4 * shift**2, abs=0.03)
    assert found.shift == pytest.approx(4 * shift**2 + 2, abs=0.03)


def test_shared_seeds_need_the_bias_of_paired_differences() -> None:
    """Methods that move each image alike have almost no noise between their means."""
    ar = draws(500, 4, seed=4)
    decoder = ar + 0.3 + 0.01 * draws(500, 4, seed=5)
    paired = pool(per_prompt(ar, decoder, shared_seeds=True))
    apart = pool(per_prompt(ar, decoder, shared_seeds=False))
    assert paired.shift_debiased == pytest.approx(4 * 0.3**2, rel=0.05)
    assert apart.shift_debiased < -1


def test_the_null_of_ar_against_itself_is_zero_when_debiased() -> None:
    ar = draws(2_000, 10, seed=6)
    null = split_half_null(ar, splits=5, seed=0)
    assert null["images"] == 5
    assert null["shift_debiased"] == pytest.approx(0, abs=0.05)
    assert null["shift"] == pytest.approx(2 * 4 / 5, rel=0.05)
    with pytest.raises(ValueError, match="at least 4 images per prompt, not 3"):
        split_half_null(ar[:, :3], splits=1, seed=0)


def test_intervals_hold_the_figures() -> None:
    rows = per_prompt(draws(40, 5, seed=7), draws(40, 5, seed=8, shift=0.4), shared_seeds=False)
    found, ends = pool(rows), intervals(rows, samples=200, seed=0)
    for name in ("shift", "location", "scale", "shift_debiased", "location_debiased"):
        low, high = ends[f"{name}_ci95"]
        assert low < getattr(found, name) < high


def test_unit_length() -> None:
    np.testing.assert_allclose(np.linalg.norm(normalise(draws(2, 3, seed=0)), axis=-1), 1)
    with pytest.raises(ValueError, match="length 0 cannot be normalised"):
        normalise(np.zeros((1, 2, 4)))
    with pytest.raises(ValueError, match="at least 2 images per prompt"):
        per_prompt(draws(2, 1, seed=0), draws(2, 1, seed=0), shared_seeds=False)


# --- the stage --------------------------------------------------------------------------------


def write_run(
    root: Path,
    *,
    seed: int,
    tint: int,
    images: int = 4,
    prompts: int = 3,
    side: int = 48,
    text: str = "x",
) -> Path:
    """Write a generate run whose pictures of a prompt differ from seed to seed."""
    rng, rows = np.random.default_rng(seed), []
    for k in range(prompts):
        for n in range(images):
            path = f"{k:05d}/samples/{n:04d}.png"
            (root / "images" / path).parent.mkdir(parents=True, exist_ok=True)
            picture = rng.integers(0, 60, (side, side, 3)) + np.array([tint, 60 * k, 100])
            Image.fromarray(picture.astype(np.uint8)).save(root / "images" / path)
            rows.append({"prompt_id": f"p{k}", "prompt": text, "image_index": n, "path": path})
    pq.write_table(pa.Table.from_pylist(rows), root / "images.parquet")
    (root / "meta.json").write_text(json.dumps({"identity": {"seed": seed}}))
    return root


def measure(tmp_path: Path, *overrides: str) -> dict:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        options = ["eval=deviation", f"output_dir={tmp_path}/out", "runtime=cpu", *overrides]
        cfg = compose("config", ["evaluate.bootstrap=20", "eval.splits=3", *options])
    folder = evaluate.run(cfg)
    assert not list(folder.glob("features-*"))
    return json.loads((folder / "scores.json").read_text())


def test_the_stage_end_to_end(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)  # a broken format of what it says would raise
    ar = write_run(tmp_path / "ar", seed=0, tint=40)
    other = write_run(tmp_path / "other", seed=1, tint=120)
    base = f"eval.baseline={ar}"
    scores = measure(tmp_path, base, f"evaluate.images={other}")
    assert (scores["prompts"], scores["images_per_prompt"]) == (3, 4)
    assert scores["shared_seeds"] is False
    assert scores["location_debiased"] > 2
    assert scores["location"] == pytest.approx((scores["shift"] / scores["trace_ar"]) ** 0.5)
    assert scores["split_half_null"]["location"] < scores["location"]
    assert scores["judge"].startswith("janus-vq-encoder ")
    said = f"centre shift {scores['location']:.2f} AR s.d."
    assert f"{said} (debiased" in caplog.text
    assert f"spread {100 * scores['scale']:+.0f} %" in caplog.text
    same = write_run(tmp_path / "same", seed=0, tint=40)
    none = measure(tmp_path, base, f"evaluate.images={same}")
    assert (none["shared_seeds"], none["shift"], none["scale"]) == (True, 0, 0)


def test_runs_that_do_not_match(tmp_path) -> None:
    ar = write_run(tmp_path / "ar", seed=0, tint=40)
    images = f"evaluate.images={write_run(tmp_path / 'few', seed=1, tint=40, prompts=2)}"
    with pytest.raises(ValueError, match=r"eval.baseline is null; name AR's generate run"):
        measure(tmp_path, images)
    with pytest.raises(ValueError, match="image 0 of prompt p2 is in one of them only"):
        measure(tmp_path, images, f"eval.baseline={ar}")
    single = write_run(tmp_path / "single", seed=2, tint=40, images=1)
    with pytest.raises(ValueError, match="at least 2; generate with images_per_prompt=10"):
        measure(tmp_path, f"evaluate.images={single}", f"eval.baseline={single}")
    small = write_run(tmp_path / "small", seed=3, tint=40, side=24)
    with pytest.raises(ValueError, match=r"12 of 24 images are not 48x48 pixels: .* is 24x24"):
        measure(tmp_path, f"evaluate.images={small}", f"eval.baseline={ar}")
    other = write_run(tmp_path / "other", seed=3, tint=40, text="another")
    with pytest.raises(ValueError, match="p0 is 'x' in one and 'another' in the other"):
        measure(tmp_path, f"evaluate.images={other}", f"eval.baseline={ar}")
    with pytest.raises(FileNotFoundError, match=r"eval.baseline=/none does not exist"):
        measure(tmp_path, f"evaluate.images={ar}", "eval.baseline=/none")
    for option in ("normalize", "shared_seeds"):
        with pytest.raises(ValueError, match=f"eval.{option}=maybe must be true"):
            measure(
                tmp_path, f"evaluate.images={ar}", f"eval.baseline={ar}", f"eval.{option}=maybe"
            )
    for content in ("{}", "{", None):
        (ar / "meta.json").write_text(content) if content else (ar / "meta.json").unlink()
        with pytest.raises(ValueError, match=r"set eval.shared_seeds=true or false"):
            measure(tmp_path, f"evaluate.images={ar}", f"eval.baseline={ar}")


def test_prompts_with_different_numbers_of_images_are_refused(tmp_path) -> None:
    """Three and five make the eight of two prompts with four: a bare reshape would mix them."""
    root = tmp_path / "ragged"
    for k, count in enumerate((3, 5)):
        (root / f"{k:05d}" / "samples").mkdir(parents=True)
        for n in range(count):
            picture = Image.new("RGB", (48, 48), (9 * n, 40, 40))
            picture.save(root / f"{k:05d}" / "samples" / f"{n:04d}.png")
    with pytest.raises(ValueError, match="8 images of 2 prompts: every prompt needs the same"):
        measure(tmp_path, f"evaluate.images={root}", f"eval.baseline={root}")


def test_images_without_any_spread_are_one_line() -> None:
    alike = np.ones((3, 4, 2))
    with pytest.raises(ValueError, match="all alike, so there is no spread to measure by"):
        pool(per_prompt(alike, alike + 1, shared_seeds=False))
    with pytest.raises(ValueError, match="no spread"):
        pool(per_prompt(np.full((3, 4, 2), np.nan), alike, shared_seeds=False))
