"""Bad input on the real command line: one clear line on stderr, a status, nothing left behind."""

import os
import subprocess
import sys

import pytest

GENERATE = ["generate", "model=tiny", "decoder=ssd", 'prompts=["a red circle"]']
CASES = {
    "unknown model": (["generate", "model=nope"], "model=nope is not known; accepted:"),
    "unknown decoder": (["generate", "decoder=nope"], "decoder=nope is not known; accepted:"),
    "unknown option": ([*GENERATE, "decoder.rr=2"], "unknown option decoder.rr"),
    "r with b": ([*GENERATE, "decoder.r=2", "decoder.b=2"], "give either r"),
    "half a round": ([*GENERATE, "decoder.b=2.5"], "decoder.b must be a whole number"),
    "v beyond heads": ([*GENERATE, "decoder.v=4", "decoder.i=1"], "only +1..+3 were trained"),
    "unknown word": (["generate", "prompts=['a red zebra']"], "does not know 'zebra'"),
    "missing prompts": (["generate", "prompts=nowhere.txt"], "nowhere.txt"),
    "empty prompts": (["generate", "prompts=EMPTY"], "empty.txt"),
    "malformed prompts": (["generate", "prompts=BROKEN"], "line 2"),
    "unwritable": ([*GENERATE, "output_dir=/proc/nope"], "output_dir=/proc/nope cannot be written"),
    "other heads": (
        [*GENERATE, "model.backbone.path=RANDOM"],
        "width 192 (backbone tiny), but tiny has width 32",
    ),
    "not a checkpoint": ([*GENERATE, "model.backbone.path=conf"], "no config.json"),
    "no data": (["train", "model=tiny", "name=nothing"], "no finished distill run"),
    "no images": (["evaluate", "model=tiny", "name=nothing"], "no finished generate run"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words"), CASES.values(), ids=CASES)
def test_bad_input_is_one_clear_line(tmp_path, random_checkpoint, command, words):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": \n')
    places = {"EMPTY": tmp_path / "empty.txt", "BROKEN": tmp_path / "broken.jsonl"}
    places["RANDOM"] = random_checkpoint
    for name, place in places.items():
        command = [part.replace(name, str(place)) for part in command]
    stage, *options = command
    if not any(option.startswith("output_dir=") for option in options):
        options.append(f"output_dir={tmp_path / 'outputs'}")
    found = subprocess.run(
        [sys.executable, "-m", f"ssd_research.{stage}", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert found.returncode != 0
    assert len(errors) == 1, found.stderr
    assert words in errors[0]
    assert "Traceback" not in found.stderr
    assert not list((tmp_path / "outputs").rglob("DONE"))
