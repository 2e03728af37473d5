"""Fixtures shared by the tests: a small random backbone of the real transformers classes."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling


def make_backbone(
    *, dtype: torch.dtype = torch.float64, guidance: float = 3.0, **size: int
) -> JanusBackbone:
    """Return a random Janus backbone; 6x6 codes, width 32 and 32 codes unless told otherwise."""
    model, tokenizer = random_model(**size)
    return JanusBackbone(
        model.to(dtype), tokenizer, name="random", defaults=Sampling(guidance=guidance)
    )


def make_heads(backbone: JanusBackbone, *, horizontal: int = 5, vertical: int = 3) -> DraftHeads:
    """Return untrained draft heads for a backbone, in its dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        heads = DraftHeads(
            backbone.hidden_size, horizontal=horizontal, vertical=vertical, initialisation="torch"
        )
    return heads.to(backbone.dtype).eval().requires_grad_(False)


def both_streams(backbone: Backbone, prompts: Sequence[str], codes: Tensor) -> Tensor:
    """Return teacher-forced states [2B, N, D], the conditional rows before the unconditional."""
    drop = torch.arange(2 * len(prompts)) >= len(prompts)
    return backbone.hidden_states([*prompts] * 2, codes.repeat(2, 1), unconditional=drop)


@pytest.fixture(scope="session")
def random_backbone() -> JanusBackbone:
    """Return the shared float64 random backbone."""
    return make_backbone()


@pytest.fixture(scope="session")
def random_heads(random_backbone: JanusBackbone) -> DraftHeads:
    """Return untrained draft heads of the shared random backbone."""
    return make_heads(random_backbone)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the random model in Hugging Face layout and return its folder."""
    folder = tmp_path_factory.mktemp("random_checkpoint")
    model, tokenizer = random_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
