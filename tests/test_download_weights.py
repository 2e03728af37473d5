"""The download script with a stand-in for `hf`, which records its arguments; no network."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from ssd_research.paths import conf_dir

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "download_weights.sh"
MODELS = ("janus_pro", "janus_pro_1b", "lumina_mgpt", "emu3")
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$HF_LOG"
exit "${HF_STATUS:-0}"
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@pytest.fixture
def project(tmp_path):
    """Copy the script into a project of its own, with the fake command on the path."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    tools = tmp_path / "tools"
    tools.mkdir()
    write_hf(tools / "hf")
    return root


def write_hf(file: Path, content: str = FAKE) -> None:
    file.write_text(content)
    file.chmod(0o755)


def call(project: Path, *arguments: str, answer: str = "", path: str | None = None, **more: str):
    tools, log = project.parent / "tools", project.parent / "log"
    if path is None:
        path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        [shutil.which("bash"), str(project / "scripts" / SCRIPT.name), *arguments],
        input=answer,
        capture_output=True,
        text=True,
        cwd=project.parent,
        env={"PATH": path, "HF_LOG": str(log), **more},
    )
    return done, log.read_text().splitlines() if log.exists() else []


def test_without_a_model_it_lists_what_there_is(project):
    done, fetched = call(project)
    assert done.returncode == 2
    assert "usage: scripts/download_weights.sh [--yes] MODEL DIR" in done.stderr
    assert all(f"\n{model}\n" in done.stderr for model in MODELS)
    assert fetched == []
    assert call(project, "--help")[0].returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope", "w"], f"MODEL=nope is not known; accepted: {' '.join(MODELS)}"),
        (["janus_pro"], "give MODEL and DIR: scripts/download_weights.sh janus_pro DIR"),
        (["janus_pro", "a", "b"], "give MODEL and DIR"),
        (["--force", "janus_pro", "w"], "unknown option --force; accepted: --yes, --help"),
        (["--yes", "janus_pro", "/proc/nope/w"], "DIR=/proc/nope/w cannot be made"),
    ],
)
def test_a_wrong_command_is_one_line(project, arguments, words):
    done, fetched = call(project, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert fetched == []


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("janus_pro", ["deepseek-community/Janus-Pro-7B: about 14.8 GB", "DeepSeek Model License"]),
        ("janus_pro_1b", ["Janus-Pro-1B: about 4.2 GB", "MIT"]),
        ("lumina_mgpt", ["14.0 GB", "GAIR/Anole-7b-v0.1: about 0.3 GB", "non-commercial"]),
        ("emu3", ["BAAI/Emu3-Gen-hf: about 35.1 GB", "Apache-2.0"]),
    ],
)
@pytest.mark.parametrize("answer", ["", "n\n", "\n", "yep\n"])
def test_sizes_and_licences_come_before_anything_is_fetched(project, model, named, answer):
    done, fetched = call(project, model, "weights", answer=answer)
    assert done.returncode == 1
    assert all(words in done.stdout for words in named)
    assert "nothing was fetched" in done.stdout
    assert fetched == []
    assert not (project.parent / "weights").exists()


@pytest.mark.parametrize(("options", "answer"), [(["--yes"], ""), ([], "y\n")])
def test_it_fetches_and_ends_with_the_options_to_pass(project, options, answer):
    done, fetched = call(project, *options, "lumina_mgpt", "my weights", answer=answer)
    folder = project.parent / "my weights"
    assert done.returncode == 0, done.stderr
    assert fetched == [
        "download Alpha-VLLM/Lumina-mGPT-7B-768 --include *.json --include *.jinja "
        f"--include *.safetensors --local-dir {folder}/Lumina-mGPT-7B-768",
        "download GAIR/Anole-7b-v0.1 --include tokenizer/vqgan.ckpt "
        f"--local-dir {folder}/Anole-7b-v0.1",
    ]
    last = done.stdout.splitlines()[-1]
    assert last == (
        "  python -m ssd_research.backbones.check model=lumina_mgpt "
        f"'model.backbone.path={folder}/Lumina-mGPT-7B-768' "
        f"'model.backbone.image_decoder={folder}/Anole-7b-v0.1'"
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_options_are_those_of_the_model(project, model):
    done, fetched = call(project, "-y", model, "weights")
    options = done.stdout.splitlines()[-1].split()[3:]
    assert options[0] == f"model={model}"
    overrides = [option.strip("'") for option in options]
    with initialize_config_dir(str(conf_dir()), version_base=None):
        config = compose("config", overrides)
        published = compose("config", [f"model={model}"]).model.backbone
    assert config.model.backbone.path.startswith(str(project.parent / "weights"))
    assert published.path in fetched[0]
    if "image_decoder" in published and published.image_decoder:
        assert published.image_decoder in fetched[1]


def test_a_failed_download_says_how_to_go_on(project):
    done, fetched = call(project, "--yes", "lumina_mgpt", "weights", HF_STATUS="1")
    assert done.returncode == 2
    assert len(fetched) == 1
    assert "error: Alpha-VLLM/Lumina-mGPT-7B-768 did not arrive whole" in done.stderr
    assert "the same command goes on where it stopped" in done.stderr
    assert "model.backbone.path" not in done.stdout


def test_the_project_s_own_hf_comes_first(project):
    (project / ".venv" / "bin").mkdir(parents=True)
    write_hf(project / ".venv" / "bin" / "hf", FAKE.replace("$*", "own $*"))
    done, fetched = call(project, "--yes", "janus_pro", "weights")
    assert done.returncode == 0
    assert fetched[0].startswith("own download deepseek-community/Janus-Pro-7B ")


def test_without_hf_it_says_how_to_get_it(project, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("dirname", "cat", "mkdir"):
        (bare / tool).symlink_to(shutil.which(tool))
    done, fetched = call(project, "--yes", "janus_pro", "weights", path=str(bare))
    assert done.returncode == 2
    assert done.stderr == (
        "error: the command hf is missing; make it with: pip install huggingface_hub\n"
    )
    assert fetched == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_is_content():
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)
