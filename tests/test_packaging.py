"""What a stranger meets first: the package, the Makefile and the README tell the truth."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import ssd_research
from ssd_research.grid import TokenGrid
from ssd_research.paths import conf_dir, resolve_path

ROOT = Path(__file__).resolve().parents[1]


def _text_files(*folders: str) -> list[Path]:
    suffixes = {".py", ".yaml", ".txt", ".csv", ".json", ".jsonl", ".html", ".md"}
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return [*files, ROOT / "Makefile"]


def test_conf_dir_is_the_clones():
    assert conf_dir() == ROOT / "conf"
    assert (conf_dir() / "config.yaml").is_file()


def test_conf_dir_falls_back_to_the_package(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").touch()
    monkeypatch.setattr("ssd_research.paths._CLONE", tmp_path / "absent")
    monkeypatch.setattr("ssd_research.paths._PACKAGE", tmp_path)
    assert conf_dir() == tmp_path / "conf"


def test_conf_dir_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr("ssd_research.paths._CLONE", tmp_path)
    monkeypatch.setattr("ssd_research.paths._PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        conf_dir()


def test_resolve_path_prefers_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_path("conf/model") == ROOT / "conf" / "model"
    (tmp_path / "conf" / "model").mkdir(parents=True)
    assert resolve_path("conf/model") == tmp_path / "conf" / "model"
    assert resolve_path(tmp_path / "conf") == tmp_path / "conf"


def test_resolve_path_names_what_is_missing():
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        resolve_path("no/such/folder")


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert ssd_research.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in citation
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target():
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"^  make (\S+)", shown, re.MULTILINE))
    assert listed == {
        "help",
        "demo",
        "results",
        "exactness",
        "decoders",
        "reproduce-%",
        "test",
        "test-all",
        "lint",
        "types",
        "format",
        "clean",
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_names_the_fix_for_an_unsuitable_python(tmp_path):
    command = ["make", "test", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "error: no-such-python is not Python 3.11, 3.12 or 3.13" in done.stderr


def test_nothing_depends_on_a_folder_outside_the_project():
    outside = "shared" + "/"
    offenders = [p for p in _text_files("src", "conf") if outside in p.read_text()]
    assert offenders == []


def test_readme_tree_names_every_module():
    tree = re.search(r"<!-- tree:begin -->(.*?)<!-- tree:end -->", _readme(), re.DOTALL)
    named = re.findall(r"^ *(\w+\.py) ", tree.group(1), re.MULTILINE)
    package = (ROOT / "src" / "ssd_research").rglob("*.py")
    assert sorted(named) == sorted(p.name for p in package if p.name != "__init__.py")


def test_readme_starts_with_the_two_commands():
    commands = re.findall(r"^(make [\w-]+)", _readme(), re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


def _readme() -> str:
    return (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_wheel_finds_its_configuration_without_the_clone(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=ROOT, check=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    code = (
        "from ssd_research.paths import conf_dir, resolve_path\n"
        "print(conf_dir(), resolve_path('checkpoints/tiny'), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(site)}
    found = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    package = site / "ssd_research"
    assert found == [str(package / "conf"), str(package / "checkpoints" / "tiny")]
    packaged = {p.relative_to(package) for p in (package / "conf").rglob("*.yaml")}
    assert packaged == {p.relative_to(ROOT) for p in (ROOT / "conf").rglob("*.yaml")}


def test_readme_matrix_names_every_decoder_and_its_law():
    """The matrix is text; this keeps its names, laws and defaults those of the code."""
    text = re.search(r"<!-- matrix:begin -->(.*?)<!-- matrix:end -->", _readme(), re.DOTALL)
    rows = [line.split(" | ") for line in text.group(1).strip().splitlines()[2:]]
    named = {row[0].strip("| `"): row for row in rows}
    assert sorted(named) == sorted(p.stem for p in (ROOT / "conf" / "decoder").glob("*.yaml"))
    models = ("tiny", "janus_pro", "lumina_mgpt", "emu3")
    for name, row in named.items():
        for model, shown in zip(models, row[4:], strict=True):
            with initialize_config_dir(str(conf_dir()), version_base=None):
                cfg = compose("config", [f"model={model}", f"decoder={name}"])
            decoder = instantiate(cfg.decoder, _convert_="all")
            assert row[2].startswith("lossless" if decoder.lossless else "lossy"), name
            settings = {**vars(decoder), **decoder.settings(TokenGrid(90, 90))}
            for key, value in re.findall(r"(\w+)=(\d+)", shown):
                key = "b" if key == "r" else key
                assert settings[key] == int(value), (name, model, key)
