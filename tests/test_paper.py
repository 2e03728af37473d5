"""The paper's data files against the paper's text, its own arithmetic, and our schedule."""

import re
from pathlib import Path

import pytest

from ssd_research import paper
from ssd_research.schedule import SpatialSchedule

GRIDS = {"janus_pro": 24, "lumina_mgpt": 48, "emu3": 90}
AR_STEPS = {"janus_pro": 576, "lumina_mgpt": 2352, "emu3": 8190}
AR_SECONDS = {"janus_pro": 7.87, "lumina_mgpt": 96.23, "emu3": 278.33}  # Tables 14-16, captions
SINGLE_MODEL = {3: "lumina_mgpt", 4: "janus_pro", 20: "lumina_mgpt", 21: "lumina_mgpt"}
SSD_ROWS = {3: 1, 4: 3, 7: 14, 14: 10, 15: 19, 16: 21, 20: 3, 21: 5}
TEXT = Path(__file__).parents[2] / "shared" / "paper" / "ssd-paper-v3.md"

# Printed ratios that no values which round to the printed ones give: (table, ratio, steps).
OFF = {
    (4, "step_acceleration", 34),  # 16.90, AR / SSD is 16.94
    (4, "step_acceleration", 57),  # 10.10, is 10.11
    (7, "step_acceleration", 34),
    (7, "step_acceleration", 57),
}


def ssd_rows(number: int) -> list[dict]:
    rows = [r for r in paper.table(number) if r.get("method", "ssd") == "ssd"]
    return rows[:1] if number == 3 else rows  # Table 3's three lines share one schedule


@pytest.mark.parametrize(("number", "count"), SSD_ROWS.items())
def test_printed_steps_follow_the_closed_form(number: int, count: int) -> None:
    rows = ssd_rows(number)
    assert len(rows) == count
    for row in rows:
        side = GRIDS[row.get("model") or SINGLE_MODEL[number]]
        v, b, i = row.get("v", 1), row.get("b", row.get("r")), row.get("i", 0)
        assert SpatialSchedule(side, side, v=v, b=b, i=i).nfe() == row["steps"], row


def test_the_closed_form_covers_76_figures() -> None:
    assert sum(SSD_ROWS.values()) == 76


def half_unit(value: float) -> float:
    """Return half a unit of the second decimal; whole numbers are exact counts."""
    return 0.005 if isinstance(value, float) else 0.0


def reference(number: int, row: dict, column: str) -> float:
    """Return AR's printed value of `column` for the model of `row`."""
    if number in (14, 15, 16):
        return {"latency_s": AR_SECONDS, "steps": AR_STEPS}[column][row["model"]]
    same = [r for r in paper.table(number) if r.get("model") == row.get("model")]
    return next(r for r in same if r["method"] == "ar")[column]


def ratio_agrees(numerator: float, denominator: float, ratio: float, slack: float) -> bool:
    """Return whether values that round to the printed ones can have the printed ratio."""
    low = (numerator - half_unit(numerator)) / (denominator + half_unit(denominator))
    high = (numerator + half_unit(numerator)) / (denominator - half_unit(denominator))
    return low - slack <= ratio <= high + slack


@pytest.mark.parametrize("number", [1, 2, 4, 7, 8, 9, 14, 15, 16, 20, 21])
@pytest.mark.parametrize(
    ("ratio", "column"), [("latency_acceleration", "latency_s"), ("step_acceleration", "steps")]
)
def test_printed_accelerations_are_ratios_of_printed_values(number, ratio, column) -> None:
    for row in paper.table(number):
        if ratio not in row or column not in row:
            continue
        one_decimal = number == 16 and row["v"] == 1 and row[ratio] > 11
        slack = 0.05 if one_decimal else 0.005
        ar = reference(number, row, column)
        agrees = ratio_agrees(ar, row[column], row[ratio], slack + 1e-9)
        assert agrees == ((number, ratio, row.get("steps")) not in OFF), row


def test_step_accelerations_of_table_1_are_those_of_the_schedules() -> None:
    printed = {r["model"]: r["step_acceleration"] for r in paper.table(1) if r["method"] == "ssd"}
    nfe = {"janus_pro": 80, "lumina_mgpt": 280, "emu3": 571}
    assert printed == {m: round(AR_STEPS[m] / nfe[m], 2) for m in nfe}


def test_every_table_has_rows_of_equal_columns() -> None:
    for number in paper.TABLES:
        rows = paper.table(number)
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(ValueError, match="tables 1 to 21, not 22"):
        paper.table(22)


def test_sweep_is_empty_for_a_model_that_the_paper_lacks() -> None:
    assert paper.sweep("tiny") == []
    assert {r["method"] for r in paper.sweep("janus_pro")} == {"ar", "zipar", "ssd"}


# --- the data files against the markdown text of the paper -----------------------------------


def printed_cells(number: int) -> list[list[str]]:
    """Return the body cells of a table in the paper's text, without empty cells and headings."""
    lines = iter(TEXT.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"Table {number}:"))
    body = [next(line for line in lines if line.startswith("|"))]
    for line in lines:
        if not line.startswith("|"):
            break
        body.append(line)
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in body[2:]]
    return [[c for c in row if c] for row in cells]


def numbers(cell: str) -> list[float]:
    """Return the numbers in one cell; superscripts, subscripts and LaTeX commands left out."""
    text = re.sub(r"[\^_]\{?[A-Za-z0-9\\{}-]*", "", cell.replace("{,}", "").replace(",", ""))
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)]


def printed(number: int, skip: int) -> list[list[float]]:
    """Return the numbers of every printed row after its first `skip` cells."""
    rows = [[n for c in row[skip:] for n in numbers(c)] for row in printed_cells(number)]
    return [row for row in rows if row]


def stored(number: int, first: str) -> list[list[float]]:
    """Return the numbers of every data row from the column `first` on."""
    rows = []
    for row in paper.table(number):
        columns = list(row)
        tail = [row[c] for c in columns[columns.index(first) :]]
        rows.append([float(x) for x in tail if type(x) in (int, float)])
    return rows


BY_ROW = {
    1: "latency_s", 2: "latency_s", 3: "steps", 4: "steps", 7: "steps", 8: "fid",
    9: "clean_fid_mean", 10: "win_rate_percent_mean", 14: "v", 15: "v", 16: "v", 19: "dpg",
    20: "steps",
}  # fmt: skip
needs_text = pytest.mark.skipif(not TEXT.exists(), reason="the paper's text is not beside the repo")


@needs_text
@pytest.mark.parametrize(("number", "first"), BY_ROW.items())
def test_rows_equal_the_text(number: int, first: str) -> None:
    skip = 2 if number == 19 else 1
    assert printed(number, skip) == stored(number, first)


@needs_text
def test_tables_5_13_and_21_equal_the_text() -> None:
    assert [[s * 1000, d] for s, d in printed(5, 0)] == stored(5, "training_samples")
    assert [r[-3:] for r in printed(13, 0)] == stored(13, "tokens")
    assert [r[-5:] for r in printed(21, 0)] == stored(21, "steps")
    assert [r[:2] for r in printed(21, 0)[1:]] == [r[1:3] for r in stored(21, "v")[1:]]


@needs_text
def test_table_12_equals_the_text_column_by_column() -> None:
    body = [row[1:] for row in printed_cells(12)[2:] if len(row) > 1]
    columns = [[n for c in column for n in numbers(c)] for column in zip(*body, strict=True)]
    assert columns == stored(12, "backbone_tflops")


TRANSPOSED = {
    (6, "Training prompts"): ["training_prompts"],
    (6, "Token grid"): ["grid_rows", "grid_cols"],
    (6, "Params per head (M)"): ["params_per_head_millions"],
    (6, "Batch size / GPU"): ["batch_size_per_gpu"],
    (6, "GPUs"): ["gpus"],
    (6, "Epochs"): ["epochs"],
    (6, "Gradient accumulation"): ["gradient_accumulation"],
    (6, "CFG drop rate"): ["condition_drop_percent"],
    (6, "Training cost (GPU-h)"): ["training_gpu_hours"],
    (6, "Temperature"): ["temperature"],
    (6, "CFG weight"): ["guidance"],
    (6, "Horizontal heads $k_{h}$"): ["horizontal_heads"],
    (6, "Horizontal verify rounds"): ["horizontal_rounds"],
    (6, "Vertical heads $k_{v}$"): ["vertical_heads"],
    (17, "Median length (words)"): ["median_words"],
    (17, "Word types unseen in training"): ["word_types_unseen_percent"],
    (17, "5-grams shared with training"): ["shared_5grams_percent"],
    (17, "Midjourney style modifiers"): ["style_modifiers_percent"],
    (17, "Explicit spatial relations"): ["spatial_relations_percent"],
    (17, "Colour–attribute binding"): ["color_binding_percent"],
    (17, "Explicit counting"): ["counting_percent"],
    (18, "Resolution"): ["resolution_px"],
    (18, "Codebook size"): ["codebook_size"],
    (18, "Token grid"): ["grid_rows", "grid_cols"],
    (18, "Tokens per image"): ["tokens_per_image"],
    (18, "Training images"): ["training_images"],
    (18, "DPG-Bench, AR $\\to$ SSD"): ["dpg_ar", "dpg_ssd"],
    (18, "Wall-clock speedup"): ["latency_acceleration"],
}


@needs_text
@pytest.mark.parametrize(("place", "columns"), TRANSPOSED.items())
def test_transposed_tables_equal_the_text(place: tuple[int, str], columns: list[str]) -> None:
    number, label = place
    row = next(r for r in printed_cells(number) if r[0] == label)
    values = [[r[c] for c in columns if r[c] is not None] for r in paper.table(number)]
    assert [numbers(cell) for cell in row[1:]] == values


@needs_text
def test_table_11_equals_the_text() -> None:
    found = [float(n) for row in printed_cells(11) for n in re.findall(r"=(0\.\d+)", row[1])]
    assert found == [row["value"] for row in paper.table(11)]
    relative = [n for row in printed_cells(11) for n in numbers(row[2])]
    assert relative == [r["relative_to_ar"] for r in paper.table(11) if r["relative_to_ar"]]
