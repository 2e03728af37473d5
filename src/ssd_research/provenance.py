"""Where a result comes from: versions, device and commit, for `meta.json` and weight files."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ssd_research import __version__

_PACKAGES = ("torch", "transformers", "lightning", "datasets", "numpy")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package and the libraries that compute results."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["ssd_research"] = __version__
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def device_name(device: str) -> str:
    """Return the GPU's name for cuda, else the processor's architecture and thread count."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads"


def git_sha() -> str | None:
    """Return the commit of the source tree, with `+` if it has changes, or None outside git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode:
            return None
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
