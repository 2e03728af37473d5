"""GenEval: detect, judge and score a folder of images in the official layout.

Detections are stored before anything is scored: a resumed run repeats none of them, and every
verdict can be traced to what the judge saw.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig
from PIL import Image

from ssd_research.evaluations.images import image_root, refuse_short_run, write_rows
from ssd_research.metrics import geneval
from ssd_research.metrics.geneval import Detection, Rules, Verdict
from ssd_research.metrics.geneval_folder import Sample, read_samples
from ssd_research.metrics.judges import Detector
from ssd_research.runs import open_run, run_id, write_atomic

log = logging.getLogger(__name__)


def run(cfg: DictConfig, images: str) -> Path:
    """Detect, judge and score a folder of images under GenEval's rules (`eval=shapes_geneval`)."""
    root = image_root(images)
    samples = read_samples(root)
    refuse_short_run(root, len(samples))
    detector: Detector = hydra.utils.instantiate(cfg.eval.detector)
    rules = Rules(**cfg.eval.rules)
    stage = open_run(cfg, "evaluate", _identity(cfg, samples, detector, rules))
    if stage.done:
        return stage.folder
    found = detect(samples, detector, root=root, store=stage.folder / "detections.jsonl")
    verdicts = [geneval.judge(s.metadata, found[s.path], rules=rules) for s in samples]
    write_per_image(samples, verdicts, found, path=stage.folder / "per_image.parquet")
    expected = 6 * cfg.eval.per_kind * (1 + max(s.image_index for s in samples))
    scores = {
        "benchmark": cfg.eval.name,
        "version": geneval.VERSION,
        "judge": f"{detector.name} {detector.version}",
        "rules": asdict(rules),
        "images": str(root),
        "n_expected": expected,
        "n_scored": len(samples),
        "coverage": len(samples) / expected,
        "higher_is_better": True,
        **score(samples, verdicts, bootstrap=cfg.evaluate.bootstrap, seed=cfg.seed),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    _say(scores)
    return stage.finish({"n_scored": len(samples), "overall": scores["overall"]})


def _identity(
    cfg: DictConfig, samples: Sequence[Sample], detector: Detector, rules: Rules
) -> dict[str, Any]:
    """Return what can change the scores: the images themselves, the judge, the rules, the draws."""
    return {
        "images": run_id({s.path: [s.sha256, s.metadata] for s in samples}),
        "judge": [detector.name, detector.version],
        "rules": asdict(rules),
        "metric": ["geneval", geneval.VERSION],
        "benchmark": [cfg.eval.name, cfg.eval.per_kind],
        "bootstrap": [cfg.evaluate.bootstrap, cfg.seed],
    }


def detect(
    samples: Sequence[Sample], detector: Detector, *, root: Path, store: Path
) -> dict[str, list[Detection]]:
    """Return the detections of every sample by path, adding those that `store` lacks to it."""
    found = dict(_stored(store, samples))
    if found:
        log.info("%d of %d images have stored detections", len(found), len(samples))
    # A line that an interruption cut short must not be continued: keep whole lines only.
    write_atomic(store, "".join(_line(s, found[s.path]) for s in samples if s.path in found))
    with store.open("a", encoding="utf-8") as file:
        for sample in samples:
            if sample.path not in found:
                with Image.open(root / sample.path) as image:
                    found[sample.path] = detector.detect(np.asarray(image.convert("RGB")))
                file.write(_line(sample, found[sample.path]))
                file.flush()
    return found


def _line(sample: Sample, detections: Sequence[Detection]) -> str:
    record = {"path": sample.path, "sha256": sample.sha256}
    return json.dumps({**record, "detections": [asdict(d) for d in detections]}) + "\n"


def _stored(store: Path, samples: Sequence[Sample]) -> Iterator[tuple[str, list[Detection]]]:
    """Yield the stored detections of those samples whose file is still the same."""
    wanted = {s.path: s.sha256 for s in samples}
    for line in store.read_text(encoding="utf-8").splitlines() if store.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if wanted.get(record["path"]) == record["sha256"]:
            rows = [{**d, "box": tuple(d["box"])} for d in record["detections"]]
            yield record["path"], [Detection(**row) for row in rows]


def score(
    samples: Sequence[Sample], verdicts: Sequence[Verdict], *, bootstrap: int, seed: int
) -> dict[str, Any]:
    """Return GenEval's scores; prompts with the same metadata count as one, as officially."""
    return geneval.aggregate(
        [v.correct for v in verdicts],
        [s.metadata["tag"] for s in samples],
        [json.dumps(s.metadata, sort_keys=True) for s in samples],
        samples=bootstrap,
        seed=seed,
    )


def write_per_image(
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    found: Mapping[str, Sequence[Detection]],
    *,
    path: Path,
) -> None:
    """Write one row per image: the official scorer's columns and the two indices."""
    rows = [
        {
            "prompt_index": s.prompt_index,
            "image_index": s.image_index,
            "filename": s.path,
            "tag": s.metadata["tag"],
            "prompt": s.metadata["prompt"],
            "correct": v.correct,
            "reason": v.reason,
            "metadata": json.dumps(s.metadata),
            "details": json.dumps([asdict(d) for d in found[s.path]]),
        }
        for s, v in zip(samples, verdicts, strict=True)
    ]
    write_rows(rows, path=path)


def _say(scores: Mapping[str, Any]) -> None:
    """Log the scores in one line, and say what keeps them from being the benchmark's."""
    tasks = ", ".join(f"{name} {task['score']:.2f}" for name, task in scores["tasks"].items())
    overall = scores["overall"]
    log.info(
        "%s: overall %s (%s)",
        scores["benchmark"],
        "-" if overall is None else f"{overall:.3f}",
        tasks,
    )
    if scores["coverage"] != 1:
        log.warning("%(n_scored)d images scored, the benchmark has %(n_expected)d", scores)
