"""GenEval: detect, judge and score a folder of images in the official layout.

Detections are stored before anything is scored: a resumed run repeats none of them, other rules
need no detector, and every verdict can be traced to what the judge saw.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from ssd_research.evaluations.images import (
    allows_missing,
    image_root,
    refuse_short_run,
    run_of,
    write_rows,
)
from ssd_research.metrics import geneval
from ssd_research.metrics.detections import Record, stored
from ssd_research.metrics.geneval import Detection, Rules, Verdict, counted
from ssd_research.metrics.geneval_coverage import Coverage, cover
from ssd_research.metrics.geneval_folder import Sample, read_samples
from ssd_research.metrics.geneval_metadata import check_metadata
from ssd_research.metrics.judges import ColourClassifier, Detector
from ssd_research.metrics.judges.geneval import GenEvalJudge
from ssd_research.metrics.judges.recorded_detections import RecordedDetector
from ssd_research.metrics.pixels import read_rgb
from ssd_research.prompts import Prompt, list_digest, load_prompts
from ssd_research.prompts.sources import GENERATED, find_path
from ssd_research.runs import open_run, run_id, whole_number, write_atomic
from ssd_research.workload import progress

log = logging.getLogger(__name__)

STORE = "detections.jsonl"


def run(cfg: DictConfig, images: str) -> Path:
    """Detect, judge and score a folder of images (`eval=geneval`, `eval=shapes_geneval`)."""
    root, allowed, per_prompt = image_root(images), allows_missing(cfg), None
    if cfg.eval.images_per_prompt is not None:
        per_prompt = whole_number(cfg, "eval.images_per_prompt", minimum=1)
    bootstrap = whole_number(cfg, "evaluate.bootstrap", minimum=1)
    prompts = benchmark(cfg)
    judge = load_judge(cfg)
    judge.refuse_unknown(prompts)
    samples = read_samples(root)
    coverage = cover(samples, prompts, images_per_prompt=per_prompt)
    if not allowed:
        coverage.require_whole(root)
        refuse_short_run(root, len(samples))
    stage = open_run(cfg, "evaluate", _identity(cfg, root, samples, judge, prompts))
    if stage.done:
        return stage.folder
    found = detect(samples, judge, root=root, store=stage.folder / STORE)
    verdicts = [geneval.judge(s.metadata, found[s.path], rules=judge.rules) for s in samples]
    rows = per_image(samples, verdicts, found, coverage=coverage, rules=judge.rules)
    write_rows(rows, path=stage.folder / "per_image.parquet")
    scores = {
        "benchmark": cfg.eval.name,
        "version": geneval.VERSION,
        **describe(judge),
        "images": str(root),
        "n_expected": coverage.expected,
        "n_scored": len(samples),
        "coverage": len(samples) / coverage.expected,
        "missing": list(coverage.missing),
        "higher_is_better": True,
        "bootstrap": bootstrap,
        "seed": cfg.seed,
        **score(samples, verdicts, bootstrap=bootstrap, seed=cfg.seed),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    _say(scores)
    return stage.finish({"n_scored": len(samples), "overall": scores["overall"]})


def benchmark(cfg: DictConfig) -> list[Prompt]:
    """Return the benchmark's prompts with their metadata.

    Raises:
        ValueError: if `eval.prompts` is not a file in the format of GenEval's metadata, or a line
            of it asks for nothing that the rules can decide.
    """
    source = cfg.eval.prompts
    hint = f"eval={cfg.eval.name} needs prompts=<GenEval's evaluation_metadata.jsonl>"
    if source not in GENERATED and not (isinstance(source, str) and find_path(source)):
        raise ValueError(f"{hint}; prompts={source} is no file")
    prompts = load_prompts(source, {"per_kind": cfg.eval.get("per_kind")})
    bare = [p.text for p in prompts if not {"tag", "include"} <= set(p.metadata or {})]
    if bare:
        raise ValueError(
            f"{hint}; {len(bare)} prompts of {source} have no keys tag and include, "
            f"the first {bare[0]!r}"
        )
    for prompt in prompts:
        try:
            check_metadata(prompt.metadata or {})
        except ValueError as error:
            raise ValueError(f"{source}, prompt {prompt.id} ({prompt.text!r}): {error}") from error
    return prompts


def load_judge(cfg: DictConfig) -> GenEvalJudge:
    """Return the detector, colour classifier and rules; no model is loaded before it is used.

    With `eval.detections` the file stands for both models.

    Raises:
        ValueError: if one of the three is not what it should be.
    """
    rules = load_rules(cfg)
    if cfg.eval.detections is not None:
        return GenEvalJudge(RecordedDetector(str(cfg.eval.detections)), None, rules)
    detector = hydra.utils.instantiate(cfg.eval.detector)
    colours = hydra.utils.instantiate(cfg.eval.colours)
    if not isinstance(detector, Detector):
        raise ValueError(f"eval.detector: {detector} lacks what a detector must have")
    if colours is not None and not isinstance(colours, ColourClassifier):
        raise ValueError(f"eval.colours: {colours} lacks what a colour classifier must have")
    return GenEvalJudge(detector, colours, rules)


def load_rules(cfg: DictConfig) -> Rules:
    """Return `eval.rules`; ValueError for options that are not GenEval's or no numbers."""
    kinds: dict[str, type] = {f.name: type(f.default) for f in fields(Rules)}
    given = cfg.eval.rules if isinstance(cfg.eval.rules, DictConfig) else {str(cfg.eval.rules): 0}
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"eval.rules: {name} is not known; accepted: {', '.join(kinds)}")
        if isinstance(value, bool) or not isinstance(value, int | kinds[name]):
            number = "whole number" if kinds[name] is int else "number"
            raise ValueError(f"eval.rules.{name}={value} must be a {number}")
    return Rules(**{name: kinds[name](value) for name, value in given.items()})


def _identity(
    cfg: DictConfig,
    root: Path,
    samples: Sequence[Sample],
    judge: GenEvalJudge,
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    """Return what can change the scores: the images themselves, the judge, the rules, the draws."""
    return {
        "images": run_id({s.path: [s.sha256, s.metadata] for s in samples}),
        "of": run_of(root),
        "judge": judge.label,
        "rules": asdict(judge.rules),
        "metric": ["geneval", geneval.VERSION],
        "benchmark": [cfg.eval.name, list_digest(prompts), cfg.eval.images_per_prompt],
        "bootstrap": [cfg.evaluate.bootstrap, cfg.seed],
    }


def detect(
    samples: Sequence[Sample], judge: GenEvalJudge, *, root: Path, store: Path
) -> dict[str, list[Detection]]:
    """Return the detections of every sample by path, adding those that `store` lacks to it.

    What other runs beside this one stored of the same images and judge is taken over from them.

    Raises:
        ValueError: if `eval.detections` lacks an image.
    """
    known = _known(samples, judge, store)
    todo = [s for s in samples if s.path not in known]
    if todo and judge.recorded is not None:
        raise ValueError(
            f"eval.detections={judge.recorded} does not say all that is asked of {len(todo)} "
            f"of {len(samples)} images, the first {todo[0].path}; it must have an image's path and "
            "sha256"
        )
    if known:
        log.info("%d of %d images have stored detections", len(known), len(samples))
    # A line that an interruption cut short must not be continued: keep whole lines only.
    write_atomic(store, "".join(known[s.path].line() for s in samples if s.path in known))
    judge.warm_up([s.metadata for s in todo])
    bar = progress("evaluate", total=len(samples), done=len(known))
    with store.open("a", encoding="utf-8") as file, bar:
        for sample in todo:
            picture = read_rgb(root / sample.path, sample.path, upright=True)
            record = judge.look(picture, sample)
            known[sample.path] = record
            file.write(record.line())
            file.flush()
            bar.update()
    return {s.path: list(known[s.path].detections) for s in samples}


def _known(samples: Sequence[Sample], judge: GenEvalJudge, store: Path) -> dict[str, Record]:
    """Return the stored records of samples by path, this run's own before those of others."""
    others = sorted(set(store.parent.parent.glob(f"*/{STORE}")) - {store})
    known: dict[str, Record] = {}
    for sample, record in stored(
        [store, *filter(None, [judge.recorded]), *others],
        samples,
        judge=judge.label,
        floor=judge.detector.floor,
    ):
        if sample.path not in known and judge.settled(sample.metadata, record.detections):
            known[sample.path] = record
    return known


def describe(judge: GenEvalJudge) -> dict[str, Any]:
    """Return what scores say of the judge."""
    colours = judge.colours
    return {
        "judge": judge.label,
        "detector": judge.detector.name,
        "detector_version": judge.detector.version,
        "colours": colours and colours.name,
        "colours_version": colours and colours.version,
        "rules": asdict(judge.rules),
    }


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


def per_image(
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    found: Mapping[str, Sequence[Detection]],
    *,
    coverage: Coverage,
    rules: Rules,
) -> list[dict[str, Any]]:
    """Return one row per image: the official scorer's columns, the indices and the prompt's id.

    `details` has, as officially, the boxes and scores of all that counted, by class.
    """
    return [
        {
            "prompt_index": s.prompt_index,
            "image_index": s.image_index,
            "prompt_id": coverage.prompt_ids[s.prompt_index],
            "filename": s.path,
            "tag": s.metadata["tag"],
            "prompt": s.metadata["prompt"],
            "correct": v.correct,
            "reason": v.reason,
            "metadata": json.dumps(s.metadata),
            "details": json.dumps(
                {
                    label: [[*d.box, d.score] for d in group]
                    for label, group in counted(s.metadata, found[s.path], rules=rules).items()
                }
            ),
        }
        for s, v in zip(samples, verdicts, strict=True)
    ]


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
        log.warning("only %(n_scored)d of %(n_expected)d images of the benchmark scored", scores)
