"""The script that times full-size backbones: its extrapolation, and the whole on little models."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "full_size.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("full_size", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_missing_rows_follow_the_line_of_those_measured(script):
    """Row y takes 3 + 0.5 y seconds, the first one 2 more for the prefill."""
    rows = [3 + 0.5 * y + 2 * (y == 0) for y in range(10)]
    assert script.whole_image(rows, count=10) == (sum(rows), False)
    seconds, fitted = script.whole_image(rows[:4], count=10)
    assert fitted
    assert seconds == pytest.approx(sum(rows))
    assert script.whole_image(rows[:1], count=3) == (15.0, True)


@pytest.mark.slow
def test_little_models_go_through_the_same_code():
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--dtype", "float32", "--small"]
    done = subprocess.run(
        [*command, "--seconds", "15"], capture_output=True, text=True, check=True, timeout=300
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["model"] for one in found] == ["janus_pro", "lumina_mgpt", "emu3"]
    assert [one["ssd_steps"] for one in found] == [18, 31, 59]
    assert [one["ar_steps"] for one in found] == [36, 42, 110]
    assert all(one["speedup"] > 0 for one in found)
