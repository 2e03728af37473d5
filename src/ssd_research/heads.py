"""Draft heads: position-wise networks that predict the backbone's state some rows or columns ahead.

`h_hat(y+d, x) = f([h_pre(y, x); e(y, x)])` (paper section 3.3), where `h_pre(y, x)` is the state
that predicts the code at (y, x) and `e(y, x)` embeds that code. Heads know nothing of logits.

Other heads read and predict other representations (paper Table 19): `h_post`, the state after the
final norm, or `e` alone. Whatever it is, `f` reads it at (y, x) and predicts it at (y+d, x).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ssd_research.backbones.base import Backbone

Axis = Literal["horizontal", "vertical"]
WEIGHTS, PROVENANCE = "heads.safetensors", "heads.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INITIALISATIONS = ("linear", "identity", "torch")
PAPERS = {"input": "h_pre+e", "target": "h_pre"}  # of heads that do not say otherwise
INPUTS = {"h_pre": ("h_pre+e", "h_pre"), "h_post": ("h_post+e", "h_post"), "e": ("e",)}  # by target
KINDS = {"spatial": "spatial draft heads", "eagle": "an EAGLE drafter"}  # of `heads=`
NEEDED = {
    "spatial": ("horizontal", "vertical"),
    "eagle": ("heads", "kv_heads", "intermediate_size"),
}


def check_initialisation(initialisation: str) -> None:
    """Raise ValueError for an initialisation that does not exist."""
    if initialisation not in INITIALISATIONS:
        raise ValueError(
            f"train.initialisation must be one of {', '.join(INITIALISATIONS)}, "
            f"not {initialisation!r}"
        )


def check_representation(input: Any, target: Any, *, where: str = "") -> None:
    """Raise ValueError unless heads that predict `target` read it too: the pairs of Table 19.

    `where` begins the message.
    """
    if (input, target) not in ((one, key) for key in INPUTS for one in INPUTS[key]):
        accepted = "; ".join(f"{key} from {' or '.join(INPUTS[key])}" for key in INPUTS)
        raise ValueError(
            f"{where}heads.target={target} from heads.input={input}; accepted, as heads predict "
            f"what they read: {accepted}"
        )


class SpatialDraftHead(nn.Module):
    """One draft head: `u = W0 [h; e]`, `h_hat = u + SwiGLU(RMSNorm(u))`, no biases.

    W0 is 2d -> d and SwiGLU is d -> 2d -> d, which is the one shape of this formula with the
    134.2 M parameters of paper Table 6 at d = 4096. The paper does not give the initialisation;
    `linear` starts SwiGLU at zero, so that the block is first the linear map W0; `identity` also
    starts W0 as [I 0], so that h_hat = h; `torch` leaves PyTorch's defaults.
    A head that reads only one of h and e has a W0 of d -> d; `parts` says how many it reads.
    """

    def __init__(self, hidden_size: int, *, parts: int = 2, initialisation: str = "linear") -> None:
        super().__init__()
        check_initialisation(initialisation)
        d = hidden_size
        self.project = nn.Linear(parts * d, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.gate = nn.Linear(d, 2 * d, bias=False)
        self.up = nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        if initialisation != "torch":
            nn.init.zeros_(self.down.weight)
        if initialisation == "identity":
            nn.init.eye_(self.project.weight)

    def forward(self, *parts: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Return h_hat at this head's offset from the states h and the code embeddings e."""
        u = self.project(torch.cat(parts, dim=-1))
        z = self.norm(u)
        return u + self.down(F.silu(self.gate(z)) * self.up(z))


class DraftHeads(nn.Module):
    """The draft heads of one backbone: horizontal offsets 1..k_h and vertical offsets 1..k_v.

    All read `input` and predict `target`, a pair that `check_representation` accepts.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        horizontal: int = 5,
        vertical: int = 3,
        input: str = PAPERS["input"],
        target: str = PAPERS["target"],
        initialisation: str = "linear",
    ) -> None:
        super().__init__()
        check_representation(input, target)
        self.hidden_size, self.horizontal, self.vertical = hidden_size, horizontal, vertical
        self.input, self.target = input, target
        self.heads = nn.ModuleDict(
            {
                f"{axis}_{offset}": SpatialDraftHead(
                    hidden_size, parts=len(input.split("+")), initialisation=initialisation
                )
                for axis, offset in self.offsets()
            }
        )

    @property
    def representation(self) -> dict[str, str]:
        """What the heads read and predict, by the names of the options."""
        return {"input": self.input, "target": self.target}

    @property
    def state_kind(self) -> str:
        """Which of the backbone's states belong to the heads: h_post, or else h_pre."""
        return "h_post" if self.target == "h_post" else "h_pre"

    def offsets(self) -> Iterator[tuple[Axis, int]]:
        """Yield (axis, offset) of every head, horizontal first."""
        yield from (("horizontal", k) for k in range(1, self.horizontal + 1))
        yield from (("vertical", d) for d in range(1, self.vertical + 1))

    def head(self, axis: Axis, offset: int) -> SpatialDraftHead:
        """Return the head that looks `offset` columns (horizontal) or rows (vertical) ahead."""
        return self.heads[f"{axis}_{offset}"]

    def predict(
        self, axis: Axis, offset: int, h: Float[Tensor, "*n d"], e: Float[Tensor, "*n d"]
    ) -> Float[Tensor, "*n d"]:
        """Return the prediction at one offset from `own_states` h; heads of e alone leave h out."""
        return self.head(axis, offset)(*(e if part == "e" else h for part in self.input.split("+")))

    def own_states(self, backbone: Backbone, h_pre: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Return the states that belong to the heads, of those before the final norm."""
        return backbone.normalise(h_pre) if self.state_kind == "h_post" else h_pre

    def require(self, *, horizontal: int = 0, vertical: int = 0, kind: str = "spatial") -> None:
        """Raise ValueError unless heads reach `horizontal` columns and `vertical` rows ahead.

        A decoder that drafts with another `kind` (of `KINDS`) is refused too.
        """
        require_kind("spatial", kind)
        wanted = {"horizontal": horizontal, "vertical": vertical}
        _require(wanted, {"horizontal": self.horizontal, "vertical": self.vertical})

    def save(self, folder: Path, provenance: Mapping, *, dtype: str = "float32") -> None:
        """Write heads.safetensors (stored as `dtype`) and heads.json into `folder`, atomically.

        `provenance` must name the `backbone` and its `fingerprint`; sizes, input and target are
        added.
        """
        sizes = {
            "hidden_size": self.hidden_size,
            "horizontal": self.horizontal,
            "vertical": self.vertical,
            **self.representation,
        }
        write_heads(folder, self.heads.state_dict(), {**provenance, **sizes}, dtype=dtype)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        backbone: Backbone,
        *,
        horizontal: int | None = None,
        vertical: int | None = None,
    ) -> "DraftHeads":
        """Load heads onto `backbone`'s device and dtype; None loads every offset of an axis.

        Heads that do not say what they read and predict are the paper's.
        Raises ValueError where the file is missing or broken, was trained for another backbone or
        width, or reaches less far than asked.
        """
        with open_heads(folder, backbone, kind="spatial") as (record, file):
            k_h = record["horizontal"] if horizontal is None else horizontal
            k_v = record["vertical"] if vertical is None else vertical
            _require({"horizontal": k_h, "vertical": k_v}, record)
            kind = {key: record.get(key, PAPERS[key]) for key in PAPERS}
            check_representation(**kind, where=f"draft heads {folder}: ")
            with torch.device("meta"):
                heads = cls(record["hidden_size"], horizontal=k_h, vertical=k_v, **kind)
            tensors = {name: file.get_tensor(name) for name in heads.heads.state_dict()}
        heads.heads.load_state_dict(tensors, assign=True)
        return heads.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


def require_kind(found: str, wanted: str, *, where: str = "heads.path") -> None:
    """Raise ValueError where a decoder drafts with one of `KINDS` and `where` holds another."""
    if found != wanted:
        raise ValueError(
            f"{where} holds {KINDS.get(found, found)}, but this decoder drafts with "
            f"{KINDS[wanted]}: train with heads={wanted}, then set heads.path to that run"
        )


def write_heads(
    folder: Path, weights: Mapping[str, Tensor], provenance: Mapping[str, Any], *, dtype: str
) -> None:
    """Write heads.safetensors (stored as `dtype`) and heads.json into `folder`, atomically."""
    tensors = {
        name: tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
        for name, tensor in weights.items()
    }
    text = json.dumps({**provenance, "dtype": dtype}, indent=2)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{WEIGHTS}.part"
    save_file(tensors, part, metadata={"provenance": text})
    part.replace(folder / WEIGHTS)
    part = folder / f"{PROVENANCE}.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / PROVENANCE)


@contextmanager
def open_heads(
    folder: Path | str, backbone: Backbone, *, kind: str
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open what `write_heads` wrote: its provenance, and the open safetensors file.

    Raises ValueError where the file is missing or broken, holds another kind of heads, or was
    trained for another backbone or width.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"no draft heads at {path}: set heads.path to the heads folder of a train run"
        )
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("provenance", "{}"))
            require_kind(record.get("kind", "spatial"), kind, where=f"heads.path={folder}")
            _check(record, backbone, path, needed=NEEDED[kind])
            yield record, file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read draft heads {path} (truncated?): {error}") from error


def _check(
    record: Mapping[str, Any], backbone: Backbone, path: Path, *, needed: tuple[str, ...]
) -> None:
    missing = {"backbone", "fingerprint", "hidden_size", *needed} - set(record)
    if missing:
        raise ValueError(f"draft heads {path} carry no provenance ({', '.join(sorted(missing))})")
    if record["hidden_size"] != backbone.hidden_size:
        raise ValueError(
            f"draft heads {path} have width {record['hidden_size']} (backbone "
            f"{record['backbone']}), but {backbone.name} has width {backbone.hidden_size}"
        )
    if record["fingerprint"] != backbone.fingerprint:
        raise ValueError(
            f"draft heads {path} were trained for backbone {record['backbone']} "
            f"({record['fingerprint']}), not for {backbone.name} ({backbone.fingerprint})"
        )


def _require(wanted: Mapping, trained: Mapping) -> None:
    for axis, unit in (("horizontal", "k_h"), ("vertical", "v")):
        if wanted[axis] > trained[axis]:
            raise ValueError(
                f"decoder.{unit}={wanted[axis]} needs {axis} draft heads up to +{wanted[axis]}, "
                f"but only +1..+{trained[axis]} were trained"
            )
