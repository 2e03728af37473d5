"""Draft heads: the shape behind Table 6, the formula, and files that refuse to be misused."""

import json

import pytest
import torch
from safetensors.torch import safe_open
from torch.nn import functional as F

from analytic import AnalyticBackbone
from ssd_research.heads import DraftHeads, SpatialDraftHead

PROVENANCE = {"backbone": "analytic", "fingerprint": "analytic-4x5", "training": {"lr": 1e-4}}


@pytest.fixture
def heads() -> DraftHeads:
    torch.manual_seed(0)
    return DraftHeads(8, horizontal=3, vertical=2, initialisation="torch")


def test_a_head_at_width_4096_has_the_papers_parameters():
    with torch.device("meta"):
        head = SpatialDraftHead(4096)
    assert sum(p.numel() for p in head.parameters()) == 134_221_824
    assert f"{134_221_824 / 1e6:.1f}" == "134.2"  # paper Table 6


def test_forward_is_the_papers_formula():
    torch.manual_seed(0)
    head = SpatialDraftHead(8, initialisation="torch").double()
    h, e = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    u = torch.cat([h, e], -1) @ head.project.weight.T
    z = u / (u.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * head.norm.weight
    swiglu = (F.silu(z @ head.gate.weight.T) * (z @ head.up.weight.T)) @ head.down.weight.T
    torch.testing.assert_close(head(h, e), u + swiglu)


def test_initialisations():
    h, e = torch.randn(2, 4, 8)
    linear = SpatialDraftHead(8)
    torch.testing.assert_close(linear(h, e), linear.project(torch.cat([h, e], -1)))
    torch.testing.assert_close(SpatialDraftHead(8, initialisation="identity")(h, e), h)
    with pytest.raises(ValueError, match=r"train\.initialisation .*linear, identity, torch"):
        SpatialDraftHead(8, initialisation="zeros")


def test_predict_uses_the_head_of_that_axis_and_offset(heads: DraftHeads):
    h, e = torch.randn(2, 4, 8)
    torch.testing.assert_close(heads.predict("vertical", 2, h, e), heads.heads["vertical_2"](h, e))
    want = heads.head("horizontal", 2)(h, e)
    torch.testing.assert_close(heads.predict("horizontal", 2, h, e), want)
    assert list(heads.offsets()) == [
        ("horizontal", 1),
        ("horizontal", 2),
        ("horizontal", 3),
        ("vertical", 1),
        ("vertical", 2),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(heads: DraftHeads, tmp_path, dtype: str):
    heads.save(tmp_path, PROVENANCE, dtype=dtype)
    loaded = DraftHeads.load(tmp_path, AnalyticBackbone())
    for name, tensor in heads.state_dict().items():
        stored = tensor.to(getattr(torch, dtype)).float()
        torch.testing.assert_close(loaded.state_dict()[name], stored, rtol=0, atol=0)
    assert not any(p.requires_grad for p in loaded.parameters())
    record = json.loads((tmp_path / "heads.json").read_text())
    assert record["dtype"] == dtype
    assert record["training"] == {"lr": 1e-4}
    with safe_open(tmp_path / "heads.safetensors", "pt") as file:
        assert json.loads(file.metadata()["provenance"]) == record
    assert {p.name for p in tmp_path.iterdir()} == {"heads.json", "heads.safetensors"}


def test_load_only_the_heads_a_decoder_uses(heads: DraftHeads, tmp_path):
    heads.save(tmp_path, PROVENANCE)
    loaded = DraftHeads.load(tmp_path, AnalyticBackbone(), horizontal=1, vertical=2)
    assert [*loaded.heads] == ["horizontal_1", "vertical_1", "vertical_2"]


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"fingerprint": "other"}, r"trained for backbone analytic \(analytic-4x5\), not .*other"),
        ({"hidden_size": 16}, r"have width 8 .* has width 16"),
    ],
)
def test_load_refuses_another_backbone(heads: DraftHeads, tmp_path, backbone: dict, message: str):
    heads.save(tmp_path, PROVENANCE)
    with pytest.raises(ValueError, match=message):
        DraftHeads.load(tmp_path, AnalyticBackbone(**backbone))


def test_load_says_what_is_wrong_with_the_file(heads: DraftHeads, tmp_path):
    backbone = AnalyticBackbone()
    with pytest.raises(ValueError, match=r"no draft heads at .*nowhere"):
        DraftHeads.load(tmp_path / "nowhere", backbone)
    with pytest.raises(ValueError, match=r"no draft heads at .*heads\.safetensors"):
        DraftHeads.load(tmp_path, backbone)
    heads.save(tmp_path, PROVENANCE)
    path = tmp_path / "heads.safetensors"
    whole = path.read_bytes()
    for length in (len(whole) - 10, 100, 4, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cannot read draft heads .*truncated"):
            DraftHeads.load(tmp_path, backbone)


def test_require_names_the_option(heads: DraftHeads):
    heads.require(horizontal=3, vertical=2)
    with pytest.raises(ValueError, match=r"decoder\.v=3 needs .* only \+1\.\.\+2 were trained"):
        heads.require(vertical=3)
    with pytest.raises(ValueError, match=r"decoder\.k_h=5 needs"):
        heads.require(horizontal=5)
