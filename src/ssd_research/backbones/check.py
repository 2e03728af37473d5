"""Command: load a model, decode one image, and check what only real weights can settle.

It belongs to the backbones but is a stage in form, which is why it may import what runs stages.
"""

import io
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ssd_research.backbones import emu3_official
from ssd_research.backbones.base import Backbone
from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.backbones.pass_checks import (
    HALF,
    HALF_NOTE,
    Witness,
    companion,
    sample_rows,
)
from ssd_research.backbones.weight_checks import (
    TEXTS,
    Check,
    cache,
    code_neighbours,
    code_order,
    codebook_norms,
    parts,
    prompt_tokens,
    round_trip,
    tokenizers_agree,
)
from ssd_research.runs import (
    find_run,
    load_backbone,
    numeric_identity,
    open_run,
    resolve_sampling,
    stage_main,
    whole_number,
    write_atomic,
)
from ssd_research.sampling import Sampling

VERDICTS = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "reported"}


@dataclass(frozen=True)
class Subject:
    """What is checked, and how: the first `rows` rows of one image of `prompt`."""

    backbone: Backbone
    sampling: Sampling
    prompt: str
    rows: int
    seed: int
    other: PreTrainedTokenizerBase | None

    def decode(self) -> tuple[Witness, Check, dict[str, Any]]:
        """Sample the image code by code; return it, its cache's size and what it cost."""
        state = self.backbone.start([self.prompt], sampling=self.sampling)
        count = self.rows * self.backbone.grid.cols
        started = time.perf_counter()
        with tqdm(total=count, desc="check", unit="code", disable=None) as bar:
            sample_rows(state, self.rows, seed=self.seed, tick=bar.update)
        seconds = time.perf_counter() - started
        cost = {
            "codes": count,
            "seconds": seconds,
            "ms_per_code": 1000 * seconds / count,
            "peak_memory_bytes": peak_memory(self.backbone),
        }
        return Witness.of(state, self.prompt, self.rows), cache(self.backbone, state.kv), cost

    def checks(self, witness: Witness) -> list[Check]:
        """Return every finding that needs the sampled image or the tokenizer."""
        backbone = self.backbone
        found = [
            prompt_tokens(backbone, self.prompt),
            round_trip(backbone, self.prompt),
            code_order(backbone),
            codebook_norms(backbone),
            code_neighbours(backbone),
            witness.blocks(),
            witness.batch(),
            witness.teacher_forced(),
        ]
        if self.other is not None:
            texts = (self.prompt, *TEXTS)
            found.insert(2, tokenizers_agree(backbone.tokenizer, self.other, texts))
        return found


def run(cfg: DictConfig) -> Path:
    """Check `cfg.model`, write `check.json` and `image.png`, and return their folder.

    Raises ValueError for an option out of range and, at the end, for checks that failed.
    """
    subject = load_subject(cfg)
    identity = {
        **numeric_identity(subject.backbone),
        "sampling": asdict(subject.sampling),
        **{key: cfg.check[key] for key in ("prompt", "rows", "tokenizer")},
        "seed": subject.seed,
    }
    # Whatever was found before, a check looks again.
    (find_run(cfg, "check", identity).folder / "DONE").unlink(missing_ok=True)
    stage = open_run(cfg, "check", identity)
    facts, checks = inspect(subject, stage.folder)
    verdicts = [asdict(check) for check in checks]
    text = json.dumps({**facts, "checks": verdicts}, indent=2, ensure_ascii=False)
    write_atomic(stage.folder / "check.json", text + "\n")
    stage.finish({"passed": all(check.passed is not False for check in checks)})
    say(subject, facts, checks, stage.folder)
    failed = [check.name for check in checks if check.passed is False]
    if failed:
        raise ValueError(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
    return stage.folder


def load_subject(cfg: DictConfig) -> Subject:
    """Load the model that is checked; ValueError for an option out of range."""
    seed, rows = whole_number(cfg, "seed"), cfg.check.rows
    if rows is not None:
        whole_number(cfg, "check.rows", minimum=1)
    other = None if cfg.check.tokenizer is None else other_tokenizer(cfg)
    backbone = load_backbone(cfg)
    if rows is not None and rows > backbone.grid.rows:
        raise ValueError(f"check.rows={rows}, but {backbone.name} has {backbone.grid.rows} rows")
    prompt = str(cfg.check.prompt)
    backbone.check_prompts([prompt, companion(prompt)])
    sampling = resolve_sampling(cfg, backbone)
    return Subject(backbone, sampling, prompt, rows or backbone.grid.rows, seed, other)


def other_tokenizer(cfg: DictConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `check.tokenizer` names, Emu3's official kind included."""
    checkpoint = Checkpoint.find(
        cfg.check.tokenizer, model=cfg.model.name, key="check.tokenizer", files=("*token*",)
    )
    if (checkpoint.folder / emu3_official.RANKS).is_file():
        return emu3_official.load_tokenizer(checkpoint)
    return checkpoint.tokenizer()


def inspect(subject: Subject, folder: Path) -> tuple[dict[str, Any], list[Check]]:
    """Decode the image, write it, run every check, and return the facts and the findings."""
    backbone = subject.backbone
    sizes = parts(backbone)
    witness, kv, cost = subject.decode()
    checks = [kv, *subject.checks(witness)]
    picture = draw(witness)
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    write_atomic(folder / "image.png", buffer.getvalue())
    checks.append(image_check(backbone, picture, witness.rows))
    facts = {
        "model": backbone.name,
        "backbone": backbone.fingerprint,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "prompt": subject.prompt,
        "rows": subject.rows,
        "parts": {name: {"parameters": n, "bytes": size} for name, (n, size) in sizes.items()},
        "decoding": cost,
    }
    return facts, checks


def draw(witness: Witness) -> np.ndarray:
    """Return the picture [h, w, 3] of the rows that were sampled.

    The rows below repeat the last one on their way through the image decoder and are cut off.
    """
    backbone, rows = witness.backbone, witness.rows
    grid = backbone.grid
    codes = witness.codes.unflatten(1, (grid.rows, grid.cols)).clone()
    codes[:, rows:] = codes[:, rows - 1 : rows]
    picture = backbone.decode_images(codes.flatten(1))[0]
    return picture[: backbone.image_size[0] * rows // grid.rows]


def image_check(backbone: Backbone, picture: np.ndarray, rows: int) -> Check:
    """Check the picture's size and that it shows more than one colour."""
    height, width = backbone.image_size
    wanted = (height * rows // backbone.grid.rows, width, 3)
    colours = len(np.unique(picture.reshape(-1, 3), axis=0))
    found = f"{picture.shape[1]}x{picture.shape[0]} pixels, {colours} colours"
    return Check("image", picture.shape == wanted and colours > 1, found, {"colours": colours})


def peak_memory(backbone: Backbone) -> int | None:
    """Return the most bytes that were allocated on the GPU, or None elsewhere."""
    if backbone.device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(backbone.device)


def say(subject: Subject, facts: dict[str, Any], checks: list[Check], folder: Path) -> None:
    """Print what is loaded, what decoding cost, and one line per check."""
    console = Console()
    console.print(parts_table(facts, f"{facts['dtype']} on {subject.backbone.device}"))
    cost = facts["decoding"]
    spent = f"{cost['codes']} codes in {cost['seconds']:.1f} s ({cost['ms_per_code']:.1f} ms each)"
    peak = cost["peak_memory_bytes"]
    console.print(spent if peak is None else f"{spent}, peak {peak / 2**30:.2f} GiB of GPU memory")
    table = Table("check", "verdict", "found", title="checks", title_justify="left")
    for check in checks:
        table.add_row(check.name, VERDICTS[check.passed], escape(check.found))
    console.print(table)
    if subject.backbone.dtype in HALF:
        console.print(HALF_NOTE)
    for name in ("image.png", "check.json"):
        console.print(str(folder / name), soft_wrap=True, highlight=False)


def parts_table(facts: dict[str, Any], place: str) -> Table:
    """Return the table of what is loaded."""
    table = Table("part", title=f"{facts['model']}: {place}", title_justify="left")
    for column in ("parameters", "GB"):
        table.add_column(column, justify="right")
    rows = facts["parts"]
    total = {key: sum(part[key] for part in rows.values()) for key in ("parameters", "bytes")}
    for name, part in {**rows, "all": total}.items():
        table.add_row(name, f"{part['parameters']:,}", f"{part['bytes'] / 1e9:.3f}")
    return table


def main() -> None:
    """Command line: `python -m ssd_research.backbones.check model=janus_pro`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
