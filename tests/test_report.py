"""The report stage on a small tree of made-up runs: numbers exact, no unfair comparison."""

import csv
import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from ssd_research import report
from ssd_research.metrics.geneval import TASKS
from ssd_research.paths import conf_dir
from ssd_research.reporting import page, tables
from ssd_research.reporting.cells import find_cells, groups

PROMPTS = ["a red circle", "a blue square | left of a cross", "two stars"]
CPU = "cpu x86_64, 1 threads"


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides=["name=fake", *overrides])


def configured(folder: Path, *overrides: str, **report_options) -> DictConfig:
    cfg = composed(*overrides).copy()
    cfg.output_dir = str(folder)
    cfg.report.update(report_options)
    return cfg


def image_rows(*, nfe: int, seconds: float, batch_size: int, accepted: int, drafted: int):
    for n, prompt in enumerate(PROMPTS):
        yield {
            "prompt_id": f"p{n}",
            "prompt": prompt,
            "prompt_index": n,
            "image_index": 0,
            "path": f"{n:05d}/samples/0000.png",
            "batch_size": batch_size,
            "nfe": nfe,
            "seconds_total": seconds,
            "rounds": json.dumps([["horizontal", 1, 5, 5], ["base", 1, drafted, accepted]]),
            "codes": [0, 1],
        }


def generate(
    folder: Path,
    run: str,
    *overrides: str,
    nfe: int = 144,
    seconds: float = 1.0,
    batch_size: int = 2,
    accepted: int = 0,
    drafted: int = 0,
    device: str = CPU,
    seed: int = 0,
) -> Path:
    """Write a finished generate run of three images."""
    cfg = configured(folder, f"seed={seed}", *overrides)
    place = folder / "generate" / cfg.model.name / "fake" / run
    rows = list(
        image_rows(
            nfe=nfe, seconds=seconds, batch_size=batch_size, accepted=accepted, drafted=drafted
        )
    )
    for n, row in enumerate(rows):
        path = place / "images" / row["path"]
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((48, 48, 3), 40 * n, np.uint8)).save(path)
    pq.write_table(pa.Table.from_pylist(rows), place / "images.parquet")
    (place / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    identity = {
        "backbone": "abc",
        "dtype": "float32",
        "sampling": {"guidance": 3.0, "temperature": 1.0, "top_k": None},
        "seed": seed,
        "prompts": "def",
        "images_per_prompt": 1,
    }
    meta = {
        "identity": identity,
        "device": device,
        "versions": {"python": "3.11.9", "torch": "2.11.0"},
        "git_sha": "0123abc",
        "started": "2026-11-30T09:00:00+00:00",
    }
    (place / "meta.json").write_text(json.dumps(meta))
    (place / "DONE").touch()
    return place


def evaluate(folder: Path, run: Path, name: str, *, started: str = "2026", **scores) -> None:
    """Write a finished evaluate run of a generate run."""
    place = folder / "evaluate" / "tiny" / "fake" / f"{name}-{run.name}-{started}"
    place.mkdir(parents=True)
    content = {"benchmark": name, "images": str(run / "images"), **scores}
    (place / "scores.json").write_text(json.dumps(content))
    (place / "meta.json").write_text(json.dumps({"started": started}))
    (place / "DONE").touch()


def geneval_scores(overall: float) -> dict:
    task = {"score": overall, "ci95": [overall - 0.1, overall + 0.1], "images": 1, "prompts": 1}
    return {
        "overall": overall,
        "overall_ci95": [overall - 0.05, overall + 0.05],
        "tasks": dict.fromkeys(TASKS, task),
        "coverage": 1.0,
        "judge": "shapes 1",
    }


def dpg_scores(average: float, *, judge: str = "shapes 1", coverage: float = 1.0) -> dict:
    category = {"score": average, "ci95": [average - 0.25, average + 0.25], "questions": 4}
    return {
        "average": average,
        "average_ci95": [average - 0.125, average + 0.125],
        "categories": dict.fromkeys(("global", "entity"), category),
        "protocol": "fixed",
        "protocols": {},
        "judge": judge,
        "coverage": coverage,
    }


def fid_scores(fid: float, *, scored: int = 3) -> dict:
    reference = {"n": 7, "images": "0123456789", "preprocess": "none"}
    return {"fid": fid, "judge": "vq 1", "n_scored": scored, "reference": reference, "coverage": 1}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return an output folder with AR, SSD r=2 and SSD v=2, and their scores."""
    ar = generate(tmp_path, "aaa", "decoder=ar", nfe=144, seconds=2.0)
    ssd = generate(
        tmp_path, "bbb", "decoder=ssd", "decoder.r=2", nfe=40, seconds=0.5, accepted=3, drafted=4
    )
    generate(tmp_path, "ccc", "decoder=ssd", "decoder.v=2", "decoder.b=5", "decoder.i=4", nfe=64)
    evaluate(tmp_path, ar, "shapes_geneval", **geneval_scores(0.75))
    evaluate(tmp_path, ssd, "shapes_geneval", **geneval_scores(0.5))
    evaluate(tmp_path, ar, "likelihood", nll=1.25, outside=0.0)
    evaluate(tmp_path, ssd, "likelihood", started="2025", nll=9.0, outside=0.0)
    evaluate(tmp_path, ssd, "likelihood", started="2026", nll=1.5, outside=0.0)
    return tmp_path


def read_csv(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return {row["decoder"]: row for row in csv.DictReader(file)}


def test_numbers_are_exact(tree: Path) -> None:
    rows = read_csv(report.run(configured(tree)))
    assert list(rows) == ["AR", "SSD r=2", "SSD v=2, b=5, i=4"]
    ar, ssd = rows["AR"], rows["SSD r=2"]
    assert (ar["law"], ssd["law"]) == ("lossless", "lossy")
    expected = {
        "images": 3,
        "steps": 40,
        "step_acceleration": 3.6,
        "seconds_per_image": 0.25,
        "speedup": 4,
        "acceptance_rate": 0.75,
        "geneval": 0.5,
        "geneval_ci_low": 0.45,
        "geneval_counting": 0.5,
        "geneval_counting_ci_high": 0.6,
        "nll": 1.5,
        "nll_minus_ar": 0.25,
    }
    assert {key: float(ssd[key]) for key in expected} == pytest.approx(expected)
    assert (ar["step_acceleration"], ar["speedup"], ar["nll_minus_ar"]) == ("1.0", "1.0", "0.0")
    assert ar["acceptance_rate"] == ""
    assert rows["SSD v=2, b=5, i=4"]["nll"] == ""


def test_every_kind_of_score_has_its_table(tree: Path) -> None:
    ar, ssd = (tree / "generate" / "tiny" / "fake" / run for run in ("aaa", "bbb"))
    evaluate(tree, ar, "shapes_dpg", **dpg_scores(0.75))
    evaluate(tree, ssd, "shapes_dpg", **dpg_scores(0.5, coverage=0.5))
    evaluate(tree, ar, "shapes_fid", **fid_scores(28.95))
    evaluate(tree, ssd, "shapes_fid", **fid_scores(29.19))
    evaluate(
        tree,
        ssd,
        "deviation",
        judge="vq 1",
        location=0.7038,
        location_debiased=0.5,
        scale=0.2453,
        split_half_null={"shift_debiased": 0.25},
        trace_ar=4.0,
        prompts=3,
        images_per_prompt=4,
    )
    folder = report.run(configured(tree))
    text = (folder / "report.md").read_text()
    assert "DPG-Bench in percent with shapes 1, fixed protocol." in text
    assert "| AR | 75.00 [62.50, 87.50] | 75.00 [50.00, 100.00] |" in text
    assert "SSD r=2: DPG-Bench covers 50% of its images." in text
    assert "against 7 reference images (01234567, preprocess none)" in text
    assert "| SSD r=2 | 29.190 |" in text
    assert "by vq 1, 4 images of 3 prompts" in text
    assert "| SSD r=2 | 0.70 | 0.50 | 0.25 | +24.5 % |" in text
    row = read_csv(folder)["SSD r=2"]
    assert (float(row["dpg"]), float(row["dpg_entity_ci_high"])) == (50.0, 75.0)


@pytest.mark.parametrize("kind", ["dpg", "fid"])
def test_scores_of_different_judges_are_not_mixed_in_one_column(tree: Path, kind: str) -> None:
    """Nor are FIDs over different numbers of images, which are biased differently."""
    ar, ssd = (tree / "generate" / "tiny" / "fake" / run for run in ("aaa", "bbb"))
    ours, other = {
        "dpg": (dpg_scores(0.75), dpg_scores(0.5, judge="blip 2")),
        "fid": (fid_scores(1.0), fid_scores(2.0, scored=2)),
    }[kind]
    evaluate(tree, ar, f"shapes_{kind}", **ours)
    evaluate(tree, ssd, f"shapes_{kind}", **other)
    row = read_csv(report.run(configured(tree)))["SSD r=2"]
    assert row[kind] == ""
    assert row[f"{kind}_note"].startswith("n/a (")


def test_every_file_holds_the_same_table(tree: Path) -> None:
    folder = report.run(configured(tree))
    html, markdown, latex = (
        (folder / name).read_text() for name in ("report.html", "report.md", "table.tex")
    )
    for text in ("3.60×", "0.250", "0.750", "+0.250"):
        assert text in markdown
        assert text in html
        assert text.replace("×", r"$\times$") in latex
    assert "0.50 [0.40, 0.60]" in markdown
    assert (folder / "DONE").exists()


def test_the_page_needs_no_other_file(tree: Path) -> None:
    html = (report.run(configured(tree)) / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == 9  # three prompts, three decoders
    assert html.count("src=") == 9
    assert "href=" not in html
    assert 'width="144"' in html  # 48 pixels, three times
    assert html.index(">AR<") < html.index(">SSD r=2<")


def test_pictures_are_spread_over_the_prompts(tree: Path) -> None:
    html = (report.run(configured(tree, images=2)) / "report.html").read_text()
    assert html.count("data:image/png") == 6


def test_devices_are_not_mixed_in_one_latency_column(tree: Path) -> None:
    generate(tree, "ddd", "decoder=ssd", "decoder.r=1", nfe=30, device="NVIDIA H200")
    folder = report.run(configured(tree))
    row = read_csv(folder)["SSD r=1"]
    assert (row["seconds_per_image"], row["speedup"]) == ("", "")
    assert row["seconds_per_image_note"] == "n/a (NVIDIA H200, float32, batch 2)"
    assert float(row["step_acceleration"]) == 4.8
    assert "n/a (NVIDIA H200, float32, batch 2)" in (folder / "report.md").read_text()


def test_batch_sizes_are_not_mixed_in_one_latency_column(tree: Path) -> None:
    generate(tree, "ddd", "decoder=ssd", "decoder.r=1", batch_size=8)
    row = read_csv(report.run(configured(tree)))["SSD r=1"]
    assert row["seconds_per_image_note"] == f"n/a ({CPU}, float32, batch 8)"


def test_a_missing_ar_run_is_named_with_its_command(tmp_path: Path) -> None:
    generate(tmp_path, "bbb", "decoder=ssd", "decoder.r=2", nfe=40)
    folder = report.run(configured(tmp_path))
    text = (folder / "report.md").read_text()
    assert "python -m ssd_research.generate model=tiny name=fake decoder=ar" in text
    row = read_csv(folder)["SSD r=2"]
    assert (row["step_acceleration"], row["speedup"]) == ("", "")
    assert float(row["seconds_per_image"]) == 0.5


def test_runs_of_another_seed_are_not_compared(tree: Path) -> None:
    generate(tree, "ddd", "decoder=ssd", "decoder.r=1", nfe=30, seed=1)
    folder = report.run(configured(tree))
    assert read_csv(folder)["SSD r=1"]["step_acceleration"] == ""
    assert [len(group) for group in groups(find_cells(tree, "tiny", "fake", folders=None))] == [
        3,
        1,
    ]


def test_no_run_is_one_line_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished generate run .* decoder=ar"):
        report.run(configured(tmp_path))


def test_an_unfinished_run_is_refused_by_name(tree: Path) -> None:
    place = tree / "generate" / "tiny" / "fake" / "bbb"
    (place / "DONE").unlink()
    with pytest.raises(ValueError, match="bbb is not a finished generate run"):
        report.run(configured(tree, generate=[str(place)]))
    assert list(read_csv(report.run(configured(tree)))) == ["AR", "SSD v=2, b=5, i=4"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta.json", ""),
        ("meta.json", "{}"),
        ("config.yaml", "a: ["),
        ("config.yaml", ""),
        ("images.parquet", "PAR1"),
        ("scores.json", "{"),
        ("scores.json", "[]"),
    ],
)
def test_a_broken_file_of_a_run_is_named(tree: Path, file: str, content: str) -> None:
    place = next(tree.glob(f"*/tiny/fake/*bbb*/{file}"))
    place.write_text(content)
    with pytest.raises(ValueError, match=rf"{file} .*make this run again"):
        report.run(configured(tree))


def test_a_scale_without_a_table_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match="scale= does nothing without experiment="):
        report.run(configured(tree, "scale=tiny"))


def test_a_page_shows_the_papers_number_below_ours() -> None:
    ours, theirs, alone = (tables.Column(k, k) for k in ("a", "paper_a", "paper_b"))
    assert page.stacked([ours, theirs, alone]) == [(ours, theirs), (alone, None)]


def test_listed_runs_only(tree: Path) -> None:
    place = tree / "generate" / "tiny" / "fake" / "bbb"
    assert list(read_csv(report.run(configured(tree, generate=[str(place)])))) == ["SSD r=2"]


def test_a_paper_backbone_is_shown_beside_the_paper(tmp_path: Path) -> None:
    generate(tmp_path, "aaa", "model=janus_pro", "decoder=ar", nfe=576)
    text = (report.run(configured(tmp_path, "model=janus_pro")) / "report.md").read_text()
    assert "| SSD r=2 | 80 | 7.20× | 1.38 | 5.70× | 83.40 |" in text
    assert "| ZIPAR w=8 | 209 |" in text


def test_readme_gets_the_tables_between_its_markers(tree: Path, monkeypatch) -> None:
    home = tree / "home"
    home.mkdir()
    (home / "README.md").write_text(
        "# A\n<!-- results:begin -->\nold\n<!-- results:end -->\nrest\n"
    )
    monkeypatch.chdir(home)
    report.run(configured(tree, readme=True))
    text = (home / "README.md").read_text()
    assert text.startswith("# A\n<!-- results:begin -->\nSpeed.")
    assert text.endswith("<!-- results:end -->\nrest\n")
    assert "old" not in text
    assert "| SSD r=2 |" in (home / "results" / "tiny_fake.md").read_text()


def test_a_readme_without_markers_is_left_alone(tree: Path, monkeypatch) -> None:
    (tree / "README.md").write_text("# A\n")
    monkeypatch.chdir(tree)
    with pytest.raises(ValueError, match="results:begin"):
        report.run(configured(tree, readme=True))
    assert (tree / "README.md").read_text() == "# A\n"


def test_a_report_is_made_again_by_the_same_command(tree: Path) -> None:
    first = report.run(configured(tree))
    (first / "report.html").write_text("")
    assert report.run(configured(tree)) == first
    assert (first / "report.html").read_text()


def test_cells_of_tables_are_escaped() -> None:
    columns, rows = [tables.Column("a_b", "100% & more")], [{"a_b": "x | y_z"}]
    assert tables.markdown(columns, rows).splitlines()[2] == r"| x \| y_z |"
    assert r"100\% \& more" in tables.latex(columns, rows)
    assert r"x | y\_z" in tables.latex(columns, rows)


def test_markup_in_prompts_is_escaped(tree: Path) -> None:
    one = page.section(find_cells(tree, "tiny", "fake", folders=None), pictures=1)
    one.pictures[0] = type(one.pictures[0])("<b>bold</b>", 0, one.pictures[0].images)
    assert "&lt;b&gt;bold" in page.to_html([one])
