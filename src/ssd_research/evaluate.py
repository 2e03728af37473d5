"""Stage `evaluate`: score the images of finished generate runs under one benchmark.

The benchmark is `eval=<name>`; its configuration names the function that runs it.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from ssd_research.runs import stage_main


def run(cfg: DictConfig) -> Path:
    """Score `evaluate.images`, or every finished generate run of this model and name.

    An evaluation whose configuration says `takes_images: false` runs once and finds what it needs.
    Returns the folder of the last evaluation.

    Raises:
        ValueError: if there are no images, or they are unfinished, of another benchmark, or odd.
        FileNotFoundError: if an image, a prompt or a metadata file is missing.
    """
    evaluation = hydra.utils.get_method(cfg.eval.run)
    if not cfg.eval.get("takes_images", True):
        if cfg.evaluate.images is not None:
            raise ValueError(
                f"evaluate.images does nothing with eval={cfg.eval.name}: leave it out"
            )
        return evaluation(cfg)
    return [evaluation(cfg, images) for images in targets(cfg)][-1]


def targets(cfg: DictConfig) -> list[str]:
    """Return what `evaluate.images` names, or every finished generate run; ValueError if none."""
    if cfg.evaluate.images is not None:
        return [str(cfg.evaluate.images)]
    root = Path(str(cfg.output_dir)).expanduser() / "generate" / cfg.model.name / str(cfg.name)
    finished = sorted(str(done.parent.resolve()) for done in root.glob("*/DONE"))
    if not finished:
        raise ValueError(
            f"evaluate.images is null and {root} holds no finished generate run; "
            "generate first, or pass evaluate.images=<run folder>"
        )
    return finished


def main() -> None:
    """Command line: `python -m ssd_research.evaluate evaluate.images=<generate run>`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
