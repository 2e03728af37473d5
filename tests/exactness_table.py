"""How far each decoder is from autoregressive sampling: `make exactness` writes the table.

The total variation between a decoder's exact law and that of autoregressive sampling, over whole
images, on small table models. See enumeration.py and table_model.py.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from enumeration import exact_laws, total_variation
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.jacobi import SpeculativeJacobi
from ssd_research.decoders.lantern import Lantern
from ssd_research.decoders.multi_token import MultiToken, MultiTokenStrict
from ssd_research.decoders.parallel_jacobi import ParallelJacobi
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.decoders.spatial_exact import SpatialJacobi
from ssd_research.decoders.zipar import ZipAR
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from table_model import TableBackbone, TableDrafter, TableHeads, ar_law

PATH = Path(__file__).resolve().parents[1] / "results" / "exactness.md"
SEEDS, CODES, SAMPLING, PROMPT = range(3), 3, Sampling(1.0), "1"
EXACT = 1e-12
TREE = [[0], [1], [0, 0]]
RULES = ("reject", "sample", "argmax")

MODELS = {
    f"{law}{ends}": {
        "grid": TokenGrid(2, 2, end_of_row=bool(ends)),
        "neighbours": law == "neighbours",
        "surprise": 0.25 if law == "neighbours" else 1.0,
    }
    for law in ("arbitrary", "neighbours")
    for ends in ("", ", rows end")
}

DECODERS: dict[str, Decoder] = {
    "AR": Autoregressive(),
    "MTP strict": MultiTokenStrict(),
    "SJD": SpeculativeJacobi(window=3),
    "MC-SJD coupling=maximal": SpeculativeJacobi(window=3, coupling="maximal"),
    "MC-SJD coupling=gumbel": SpeculativeJacobi(window=3, coupling="gumbel"),
    "LANTERN accept=strict": Lantern(accept="strict"),
    "LANTERN accept=strict, EAGLE chain": Lantern(accept="strict", drafter="eagle", depth=3),
    "LANTERN accept=strict, EAGLE tree": Lantern(accept="strict", drafter="eagle", tree=TREE),
    "SSD accept=strict": SpatiallySpeculative(accept="strict"),
    "SSD exact": SpatialJacobi(),
    **{
        f"SSD r={r}, accept={rule}": SpatiallySpeculative(r=r, accept=rule)
        for rule in RULES
        for r in range(5)
    },
    "1D-MTP": MultiToken(),
    "1D-MTP, 2 rounds": MultiToken(rounds=2),
    "GSD group=2": SpeculativeJacobi(window=3, group=2),
    "GSD group=3": SpeculativeJacobi(window=3, group=3),
    "GSD group=3, delta=0.15": SpeculativeJacobi(window=3, group=3, delta=0.15),
    "LANTERN k=2, delta=0.1": Lantern(k=2, delta=0.1),
    "LANTERN k=2, delta=0.3": Lantern(k=2, delta=0.3),
    "LANTERN k=2, delta=0.3, EAGLE tree": Lantern(k=2, delta=0.3, drafter="eagle", tree=TREE),
    "LANTERN++ k=2, lam=2": Lantern(accept="lantern_pp", k=2, lam=2.0),
    "LANTERN++ k=2, lam=5": Lantern(accept="lantern_pp", k=2, lam=5.0),
    "ZipAR window=1": ZipAR(window=1),
    "ZipAR window=2 (a row)": ZipAR(window=2),
    "PJD context=1": ParallelJacobi(context=1),
    "PJD context=1, top_row_first": ParallelJacobi(context=1, commit_reject="top_row_first"),
    "PJD context=2 (a row)": ParallelJacobi(context=2),
}


def backbone(model: str, seed: int) -> TableBackbone:
    """Return one of the table models."""
    options = dict(MODELS[model])
    return TableBackbone(options.pop("grid"), CODES, seed=seed, **options)


@functools.cache
def target(model: str, seed: int) -> np.ndarray:
    """Return the autoregressive law of a model's images."""
    return ar_law(backbone(model, seed), PROMPT, SAMPLING).numpy()


def distance(decoder: Decoder, model: str, seed: int) -> float:
    """Return the total variation between a decoder's law and the autoregressive one."""
    tables, heads = backbone(model, seed), None
    if decoder.needs_heads:
        kind = decoder.reach(tables.grid).get("kind")
        heads = TableDrafter(tables) if kind == "eagle" else TableHeads(tables)
    found = exact_laws(decoder, tables, [PROMPT], sampling=SAMPLING, heads=heads)
    return total_variation(found.probability[0], target(model, seed))


def row(name: str, decoder: Decoder) -> list[str]:
    """Return a row of the table: the mean over the seeds for each model."""
    found = [np.mean([distance(decoder, model, seed) for seed in SEEDS]) for model in MODELS]
    law = "lossless" if decoder.lossless else "lossy"
    return [name, law, *("< 1e-12" if one < EXACT else f"{one:.4f}" for one in found)]


def uniform_row() -> list[str]:
    """Return, for scale, how far images of independent uniform codes are."""
    found = [
        np.mean([total_variation(target(m, s), np.full(CODES**4, CODES**-4.0)) for s in SEEDS])
        for m in MODELS
    ]
    return ["(uniform codes, for scale)", "", *(f"{one:.4f}" for one in found)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    head = ["Decoder", "Output law", *MODELS]
    rule = ["---", "---", *(["---:"] * len(MODELS))]
    return "\n".join("| " + " | ".join(one) + " |" for one in (head, rule, *rows))


def page(console: Console) -> str:
    """Return the page; the rows are shown as they are made."""
    rows = []
    for name, decoder in DECODERS.items():
        rows.append(row(name, decoder))
        console.print(" ".join(rows[-1]))
    return f"""# Distance from autoregressive sampling

Made by `make exactness` (`tests/exactness_table.py`); not edited by hand.

The exact total variation between what a decoder samples and what autoregressive sampling samples,
over whole images: 0 for the same law, 1 for no image in common. Each decoder's own code is run once
for every way in which its random choices can fall, and the probabilities of these ways are added
up. Nothing is estimated; numbers are means over {len(SEEDS)} models of each kind.

{table([*rows, uniform_row()])}

Images have 2 × 2 codes out of {CODES}, guidance 1, no filters. In the *arbitrary* models every
history of codes has a law of its own, uniform on the simplex, and draft heads know nothing of it:
the hardest case. In those of *neighbours* a code depends on the ones to its left and above it, and
a quarter as much on everything else; heads know what neighbours they have, as trained ones do. In
*rows end* a forced token ends each row. LANTERN's codebook lies on a line, codes in order; windows
of SJD and its kin hold 3 codes. Rows of so small an image have two codes: compare the lines of this
table with each other, not with large images.
"""


def main() -> None:
    """Write the page."""
    text = page(Console(file=sys.stderr, width=160))
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
