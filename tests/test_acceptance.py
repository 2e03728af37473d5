"""Acceptance by offset against a loop by hand, with a head that is always right, and the stage."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir

from alone import lumina_like
from conftest import both_streams, make_heads
from ssd_research import evaluate
from ssd_research.evaluations import acceptance as stage
from ssd_research.heads import DraftHeads
from ssd_research.metrics.acceptance import MEASURES, Offset, by_offset, summarise
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling
from ssd_research.training.losses import targets

PROMPTS = ["a red circle", "a photo of a blue square"]


def random_codes(backbone, count: int = 2) -> torch.Tensor:
    shape = (count, backbone.grid.size)
    generator = torch.Generator().manual_seed(3)
    return torch.randint(backbone.codebook_size, shape, generator=generator)


def law(backbone, h: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution [K] of one state in both streams [2, D]."""
    cond, uncond = backbone.image_head(backbone.decoder.norm.forward(h))
    logits = uncond + sampling.guidance * (cond - uncond)
    p = (logits / sampling.temperature).softmax(-1)
    if sampling.top_k is not None:
        p = p * (p >= p.sort(descending=True).values[sampling.top_k - 1])
    return p / p.sum()


def by_hand(backbone, heads, image: int, sampling: Sampling) -> dict[tuple[str, int], list[float]]:
    """Return the means of one image, target by target."""
    codes, grid = random_codes(backbone)[image], backbone.grid
    h = both_streams(backbone, [PROMPTS[image]], codes[None])  # [2, N, D]
    found: dict[tuple[str, int], list[list[float]]] = {}
    for axis, offset in heads.offsets():
        for y in range(grid.rows):
            for x in range(grid.cols):
                down = axis == "vertical"
                row, col = (y + offset, x) if down else (y, x + offset)
                if row >= grid.rows or col >= grid.cols:
                    continue
                source, target = y * grid.cols + x, row * grid.cols + col
                e = backbone.code_embeddings[codes[source]].expand(2, -1)
                q = law(backbone, heads.head(axis, offset)(h[:, source], e), sampling)
                p = law(backbone, h[:, target], sampling)
                c = int(q.argmax())
                kept = [sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True))]
                kept += [min(1.0, float(p[c] / q[c])), float(p[c])]
                found.setdefault((axis, offset), []).append(kept)
    return {key: np.mean(values, 0).tolist() for key, values in found.items()}


@pytest.mark.parametrize("sampling", [Sampling(3.0), Sampling(2.0, 1.3, top_k=5)])
@pytest.mark.parametrize("rows_end", [False, True])
def test_every_offset_against_a_loop(random_backbone, sampling, rows_end) -> None:
    backbone = lumina_like(4, 5) if rows_end else random_backbone
    heads = make_heads(backbone, horizontal=2, vertical=3)
    found = list(by_offset(backbone, heads, PROMPTS, random_codes(backbone), sampling))
    assert [(one.axis, one.offset) for one in found] == list(heads.offsets())
    for image in range(2):
        expected = by_hand(backbone, heads, image, sampling)
        for one in found:
            measured = [getattr(one, name)[image] for name in MEASURES]
            np.testing.assert_allclose(measured, expected[one.axis, one.offset], atol=1e-9)


def test_without_guidance_there_is_one_stream(random_backbone, random_heads) -> None:
    found = list(
        by_offset(
            random_backbone, random_heads, PROMPTS, random_codes(random_backbone), Sampling(1.0)
        )
    )
    assert len(found) == 8
    assert [one.positions for one in found] == [30, 24, 18, 12, 6, 30, 24, 18]


def test_a_head_that_knows_the_answer_is_always_accepted(random_backbone, monkeypatch) -> None:
    heads = make_heads(random_backbone, horizontal=1, vertical=1)
    codes = random_codes(random_backbone)
    h = both_streams(random_backbone, PROMPTS, codes)

    def told(self, axis, offset, *_):
        return targets(h, random_backbone.grid, axis, offset)

    monkeypatch.setattr(DraftHeads, "predict", told)
    for one in by_offset(random_backbone, heads, PROMPTS, codes, Sampling(3.0)):
        np.testing.assert_allclose(one.sampled, 1)
        np.testing.assert_allclose(one.argmax, 1)
        assert (one.match < 1).all()


def test_chunks_and_batches_change_nothing(random_backbone, random_heads, monkeypatch) -> None:
    codes, sampling = random_codes(random_backbone), Sampling(3.0)
    whole = list(by_offset(random_backbone, random_heads, PROMPTS, codes, sampling))
    monkeypatch.setattr("ssd_research.metrics.acceptance.CHUNK", 7)
    parts = [
        one
        for n in range(2)
        for one in by_offset(
            random_backbone, random_heads, PROMPTS[n : n + 1], codes[n : n + 1], sampling
        )
    ]
    rows = [summarise(found, samples=10, seed=0) for found in (whole, parts)]
    for one, other in zip(*rows, strict=True):
        for key in ("axis", "offset", "images"):
            assert one[key] == other[key]
        for name in MEASURES:
            assert one[name] == pytest.approx(other[name])
            assert one[f"{name}_ci"] == pytest.approx(other[f"{name}_ci"])


def test_the_interval_is_over_images() -> None:
    values = np.array([0.2, 0.4, 0.6])
    row = summarise([Offset("vertical", 1, 9, values, values, values)], samples=300, seed=0)[0]
    assert row["sampled"] == pytest.approx(0.4)
    low, high = row["sampled_ci"]
    assert 0.2 <= low < 0.4 < high <= 0.6


def write_run(folder: Path, backbone) -> Path:
    (folder / "images").mkdir(parents=True)
    rows = [
        {"prompt_id": f"p{n}", "prompt": prompt, "image_index": 0, "codes": codes.tolist()}
        for n, (prompt, codes) in enumerate(zip(PROMPTS, random_codes(backbone), strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    identity = {"backbone": backbone.fingerprint, "sampling": {"guidance": 2.0}}
    (folder / "meta.json").write_text(json.dumps({"identity": identity}))
    return folder


def configure(tmp_path: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        options = ["eval=acceptance", f"evaluate.images={tmp_path}/made", "runtime=cpu"]
        return compose(
            "config",
            [*options, f"output_dir={tmp_path}/out", "evaluate.bootstrap=5", *overrides],
        )


def test_the_stage(random_backbone, random_heads, tmp_path, monkeypatch) -> None:
    write_run(tmp_path / "made", random_backbone)
    random_heads.save(
        tmp_path / "heads",
        {"backbone": random_backbone.name, "fingerprint": random_backbone.fingerprint},
    )
    monkeypatch.setattr(stage, "load_backbone", lambda cfg: random_backbone)
    heads = f"heads.path={tmp_path}/heads"
    folder = evaluate.run(configure(tmp_path, heads, "batch_size=1"))
    scores = json.loads((folder / "scores.json").read_text())
    codes = random_codes(random_backbone)
    found = by_offset(random_backbone, random_heads, PROMPTS, codes, Sampling(2.0))
    for row, one in zip(scores["offsets"], found, strict=True):
        assert (row["axis"], row["offset"]) == (one.axis, one.offset)
        assert row["argmax"] == pytest.approx(one.argmax.mean(), abs=1e-5)
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert {row["prompt_id"]: row["vertical_3_match"] for row in rows} == pytest.approx(
        {"p0": one.match[0], "p1": one.match[1]}, abs=1e-5
    )
    few = json.loads(
        (evaluate.run(configure(tmp_path, heads, "eval.limit=1")) / "scores.json").read_text()
    )
    assert few["n_scored"] == 1
    table = tmp_path / "made" / "images.parquet"
    whole = pq.read_table(table).to_pylist()
    other_words = [{**row, "prompt": PROMPTS[0]} for row in whole]
    pq.write_table(pa.Table.from_pylist(other_words), table)
    assert evaluate.run(configure(tmp_path, heads, "batch_size=1")) != folder
    with pytest.raises(ValueError, match=r"heads.path=/none does not exist"):
        evaluate.run(configure(tmp_path, "heads.path=/none"))
    with pytest.raises(ValueError, match=r"measures draft heads and heads.path is null"):
        evaluate.run(configure(tmp_path, "heads.path=null"))


def test_tables_that_no_run_of_this_model_wrote(random_backbone, tmp_path) -> None:
    table = write_run(tmp_path / "made", random_backbone) / "images.parquet"
    good = pq.read_table(table).to_pylist()
    cfg = configure(tmp_path)
    assert len(stage.chosen(table, cfg, random_backbone)) == 2
    spoilt = {
        "lists an image twice": [*good, good[0]],
        "an image of prompt p1 is not 36 codes below 32": [good[0], {**good[1], "codes": [1]}],
        "an image of prompt p0 is not": [{**good[0], "codes": [32] * 36}],
        "of prompt p0 is not": [{**good[0], "codes": [-1] * 36}],
    }
    for words, rows in spoilt.items():
        pq.write_table(pa.Table.from_pylist(rows), table)
        with pytest.raises(ValueError, match=words):
            stage.chosen(table, cfg, random_backbone)
    pq.write_table(pa.Table.from_pylist(good).slice(0, 0), table)
    with pytest.raises(ValueError, match="lists no images"):
        stage.chosen(table, cfg, random_backbone)
    for content in (b"", b"PAR1"):
        table.write_bytes(content)
        with pytest.raises(ValueError, match="is not the table of a generate run"):
            stage.chosen(table, cfg, random_backbone)
