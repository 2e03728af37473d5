"""The likelihood metric against a loop by hand over decoding states, and its coverage."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir

from ssd_research import evaluate
from ssd_research.evaluations import likelihood as stage
from ssd_research.metrics import likelihood
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a photo of a blue square"]


def random_codes(backbone, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (count, backbone.grid.size)
    return torch.randint(backbone.codebook_size, shape, generator=generator)


def nll_by_hand(backbone, prompt: str, codes: list[int], sampling: Sampling) -> float:
    """Feed one code at a time, as AR does, and add up -log p of the next one."""
    state, total = backbone.start([prompt], sampling=sampling), 0.0
    for n, code in enumerate(codes):
        total -= math.log(state.distribution(range(n, n + 1))[0, 0, code].item())
        if n + 1 < len(codes):
            state.forward(torch.tensor([[code]]), range(n, n + 1), phase="commit")
    return total / len(codes)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_mean_nll_is_that_of_ar_sampling(random_backbone, guidance, temperature) -> None:
    sampling = Sampling(guidance, temperature)
    codes = random_codes(random_backbone)
    nll = likelihood.mean_nll(random_backbone, PROMPTS, codes, sampling)
    expected = [
        nll_by_hand(random_backbone, prompt, row.tolist(), sampling)
        for prompt, row in zip(PROMPTS, codes, strict=True)
    ]
    torch.testing.assert_close(nll, torch.tensor(expected, dtype=torch.float64))


def test_chunks_change_nothing(random_backbone, monkeypatch) -> None:
    codes = random_codes(random_backbone)
    whole = likelihood.mean_nll(random_backbone, PROMPTS, codes, Sampling(3.0))
    monkeypatch.setattr(likelihood, "CHUNK", 7)
    torch.testing.assert_close(
        likelihood.mean_nll(random_backbone, PROMPTS, codes, Sampling(3.0)), whole
    )


def write_images(folder: Path, codes: torch.Tensor) -> Path:
    rows = [
        {"prompt_id": f"p{n}", "prompt": prompt, "image_index": 0, "codes": row.tolist()}
        for n, (prompt, row) in enumerate(zip(PROMPTS, codes, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    return folder / "images.parquet"


def test_scores_name_the_codes_that_p_cannot_emit(random_backbone, tmp_path) -> None:
    codes, sampling = random_codes(random_backbone), Sampling(3.0, top_k=1)
    rows = likelihood.score_images(
        random_backbone, write_images(tmp_path, codes), sampling=sampling, batch_size=1
    )
    # Under top-k 1 every possible code has p = 1, so NLL 0; nearly all random codes are impossible.
    assert all(row["nll"] in (0.0, math.inf) and 0.5 < row["outside"] <= 1 for row in rows)


def test_aggregate_of_scored_images(random_backbone, tmp_path) -> None:
    codes, sampling = random_codes(random_backbone), Sampling(3.0)
    images = write_images(tmp_path, codes)
    rows = likelihood.score_images(random_backbone, images, sampling=sampling, batch_size=2)
    nll = likelihood.mean_nll(random_backbone, PROMPTS, codes, sampling)
    scores = likelihood.aggregate(rows)
    assert scores["n_scored"] == 2
    assert scores["outside"] == 0
    assert scores["nll"] == pytest.approx(nll.mean().item())
    assert scores["nll_stderr"] == pytest.approx(nll.std().item() / 2**0.5)


def test_codes_of_another_grid_are_refused(random_backbone, tmp_path) -> None:
    images = write_images(tmp_path, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="an image has 5 codes, but random has 36"):
        likelihood.score_images(random_backbone, images, sampling=Sampling(3.0), batch_size=1)


def test_no_image_is_an_error() -> None:
    with pytest.raises(ValueError, match="no image to score"):
        likelihood.aggregate([])


def finished_run(folder: Path, model, **identity) -> Path:
    """Write what a generate run of random codes leaves for this metric."""
    (folder / "images").mkdir(parents=True)
    write_images(folder, random_codes(model))
    facts = {"backbone": model.fingerprint, "sampling": {"guidance": 2.0}, **identity}
    (folder / "meta.json").write_text(json.dumps({"identity": facts}))
    return folder


def test_the_stage_scores_under_the_law_of_the_run(random_backbone, tmp_path, monkeypatch) -> None:
    made = finished_run(tmp_path / "made", random_backbone)
    monkeypatch.setattr(stage, "load_backbone", lambda cfg: random_backbone)
    with initialize_config_dir(str(conf_dir()), version_base=None):
        overrides = [f"output_dir={tmp_path}", "eval=likelihood", f"evaluate.images={made}"]
        folder = evaluate.run(compose("config", overrides=overrides))
    scores = json.loads((folder / "scores.json").read_text())
    codes = random_codes(random_backbone)
    expected = likelihood.mean_nll(random_backbone, PROMPTS, codes, Sampling(2.0)).mean().item()
    assert scores["nll"] == pytest.approx(expected)
    assert (scores["benchmark"], scores["images"]) == ("likelihood", str(made))
    assert pq.read_table(folder / "per_image.parquet").num_rows == 2
    assert (folder / "DONE").exists()


def test_images_of_another_backbone_are_refused(random_backbone, tmp_path) -> None:
    made = finished_run(tmp_path / "made", random_backbone, backbone="other")
    with pytest.raises(ValueError, match="made with backbone other"):
        likelihood.sampling_of(made, random_backbone)


def test_a_folder_without_codes_is_refused(random_backbone, tmp_path) -> None:
    with pytest.raises(ValueError, match="not a finished generate run"):
        likelihood.sampling_of(tmp_path, random_backbone)
