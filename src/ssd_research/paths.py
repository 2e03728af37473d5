"""Where shipped files lie: beside `src/` in a clone, inside the package in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CLONE = _PACKAGE.parents[1]


def conf_dir() -> Path:
    """Return the absolute path of the Hydra configuration, the clone's before the packaged one.

    Raises:
        FileNotFoundError: Neither holds a `config.yaml`.
    """
    for root in (_CLONE, _PACKAGE):
        if (root / "conf" / "config.yaml").is_file():
            return root / "conf"
    raise FileNotFoundError(f"no conf/config.yaml in {_CLONE} or {_PACKAGE}; reinstall the package")


def resolve_path(path: str | Path) -> Path:
    """Return the absolute path of an existing file or folder, shipped ones included.

    A relative path is looked for in the working directory, then in the clone, then in the
    package, so that `checkpoints/tiny` works from anywhere.

    Raises:
        FileNotFoundError: It is in none of them.
    """
    roots = (Path.cwd(), _CLONE, _PACKAGE)
    for root in roots:
        candidate = root / Path(path).expanduser()
        if candidate.exists():
            return candidate.resolve()
    raise FileNotFoundError(f"{path} is in none of {', '.join(map(str, roots))}")
