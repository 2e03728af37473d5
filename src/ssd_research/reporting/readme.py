"""The generated parts of README.md, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

from pathlib import Path

from ssd_research.paths import resolve_path
from ssd_research.runs import write_atomic


def between_markers(text: str, name: str, content: str) -> str:
    """Return `text` with what is between the markers of `name` replaced by `content`.

    Raises:
        ValueError: if a marker is missing.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"README.md has no lines {begin} and {end} to put the {name} between")
    return f"{head}{begin}\n{content}{end}{tail}"


def publish(name: str, content: str, *, file: str, whole: str) -> Path:
    """Put `content` and a link into README.md and the `whole` text into `results/<file>`.

    Raises:
        FileNotFoundError: if there is no README.md here or in the clone.
        ValueError: if it lacks a marker.
    """
    readme = resolve_path("README.md")
    place = f"results/{file}"
    link = f"Details in [{place}]({place}).\n"
    text = between_markers(readme.read_text(encoding="utf-8"), name, f"{content}\n{link}")
    (readme.parent / "results").mkdir(exist_ok=True)
    write_atomic(readme.parent / place, whole)
    write_atomic(readme, text)
    return readme
