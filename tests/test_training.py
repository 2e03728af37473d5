"""Training of draft heads: what is paired with what, in which order, and on which recipe."""

import csv
import itertools
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from analytic import AnalyticBackbone, distilled
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.training.data import (
    Batch,
    ShardedBatches,
    dropped_conditions,
    read_distilled,
    split_by_prompt,
    take_share,
)
from ssd_research.training.losses import masked_mean, smooth_l1, sources, targets
from ssd_research.training.module import HeadTraining, Recipe
from ssd_research.training.persistence import MetricsFile

GRID = TokenGrid(4, 5)
OFFSETS = [("horizontal", 1), ("horizontal", 3), ("vertical", 1), ("vertical", 3)]


def batch(images: int = 3) -> Batch:
    codes = torch.arange(GRID.size).expand(images, -1)
    return Batch(["a ring"] * images, [str(i) for i in range(images)], codes)


# ------------------------------------------------------------------------------ alignment and loss
@pytest.mark.parametrize(("axis", "offset"), OFFSETS)
def test_pairs_stay_inside_the_grid(axis: str, offset: int):
    place = torch.arange(GRID.size)[None]
    dy, dx = (offset, 0) if axis == "vertical" else (0, offset)
    expected = [(y * 5 + x, (y + dy) * 5 + x + dx) for y in range(4 - dy) for x in range(5 - dx)]
    pairs = zip(
        sources(place, GRID, axis, offset)[0].tolist(),
        targets(place, GRID, axis, offset)[0].tolist(),
        strict=True,
    )
    assert list(pairs) == expected


def exact_heads(*, horizontal: int = 2, vertical: int = 2, wrong: int = 0) -> DraftHeads:
    """Return linear heads that move the analytic state by their own offset (plus `wrong`)."""
    heads = DraftHeads(8, horizontal=horizontal, vertical=vertical)
    for axis, offset in heads.offsets():
        weight = torch.eye(8, 16)
        weight[3] = 0
        weight[0 if axis == "vertical" else 1, 4] = offset + wrong  # component 4 of h is 1
        heads.head(axis, offset).project.weight.data = weight
    return heads


class StaticStates(AnalyticBackbone):
    """The analytic backbone without the component that depends on the last code."""

    def hidden_states(self, *args: object, **kwargs: object) -> torch.Tensor:
        h = super().hidden_states(*args, **kwargs)
        h[..., 3] = 0
        return h


def test_exact_heads_have_no_loss_and_shifted_heads_do():
    backbone = StaticStates()
    right = HeadTraining(exact_heads(), backbone, Recipe(10))
    wrong = HeadTraining(exact_heads(wrong=1), backbone, Recipe(10))
    h, e = right.teacher(batch(), None)
    for axis, offset in right.heads.offsets():
        assert right.loss(axis, offset, h, e).item() == 0
        # one component of 8 is off by 1, where Smooth-L1 is 0.5
        assert wrong.loss(axis, offset, h, e).item() == pytest.approx(0.5 / 8)
        loss, agreements = right.judge(axis, offset, h=h, e=e, choices=(batch().codes,))
        assert (loss.item(), agreements[0].item()) == (0, 1)
        _, agreements = wrong.judge(axis, offset, h=h, e=e, choices=(batch().codes,))
        assert agreements[0].item() < 0.15  # the last code stands for every place after it


def test_a_state_goes_with_the_code_that_it_predicts():
    module = HeadTraining(DraftHeads(8, horizontal=1, vertical=1), AnalyticBackbone(), Recipe(10))
    h, e = module.teacher(batch(), torch.tensor([True, False, False]))
    assert e[0, :, 0].tolist() == list(range(20))  # the code at i ...
    assert h[0, :, 3].tolist() == list(range(-1, 19))  # ... which the state at i has not seen
    assert h[:, :, 2].unique(dim=1).flatten().tolist() == [1, 0, 0]


def test_losses_are_the_stated_formulae():
    h_hat, h = torch.tensor([[0.2, 3.0]]), torch.zeros(1, 2)
    assert smooth_l1(h_hat, h).item() == pytest.approx((0.5 * 0.04 + 2.5) / 2)
    assert smooth_l1(h_hat, h, beta=0.1).item() == pytest.approx((0.15 + 2.95) / 2)
    values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    assert masked_mean(values, mask).item() == 1.5
    assert masked_mean(values).item() == 4
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0


def test_recomputed_activations_give_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        heads = DraftHeads(8, horizontal=2, vertical=1, initialisation="torch")
        recipe = Recipe(10, recompute_activations=recompute)
        module = HeadTraining(heads, AnalyticBackbone(), recipe)
        module.log = module.log_dict = lambda *args, **kwargs: None
        module.training_step(batch(), 0).backward()
        gradients.append([p.grad.clone() for p in heads.parameters()])
    torch.testing.assert_close(*gradients)


def test_heads_must_fit_the_grid():
    with pytest.raises(ValueError, match=r"heads\.horizontal=5 must be below the grid's 5"):
        HeadTraining(DraftHeads(8, horizontal=5, vertical=1), AnalyticBackbone(), Recipe(10))


# ---------------------------------------------------------------------------------------- recipe
def test_learning_rate_warms_up_and_ends_at_its_minimum():
    cosine = Recipe(351)
    assert cosine.lr_at(0) == pytest.approx(1e-4 / 20)
    assert cosine.lr_at(9) == pytest.approx(5e-5)
    assert cosine.lr_at(19) == pytest.approx(1e-4)
    assert cosine.lr_at(350) == pytest.approx(1e-5)
    assert cosine.lr_at(400) == pytest.approx(1e-5)
    middle = (19 + 350) // 2
    assert cosine.lr_at(middle) == pytest.approx(5.5e-5, rel=0.02)
    linear = Recipe(351, lr_schedule="linear")
    assert linear.lr_at(100) == pytest.approx(1e-4 - 9e-5 * 81 / 331)
    falling = [cosine.lr_at(s) for s in range(19, 351)]
    assert falling == sorted(falling, reverse=True)
    assert Recipe(2).lr_at(1) == pytest.approx(1e-5)
    assert Recipe(3, warmup_steps=0).lr_at(0) == 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_schedule": "step"}, "accepted: cosine, linear"),
        ({"condition_drop": 2.0}, "condition_drop"),
        ({"beta": 0.0}, "beta"),
        ({"steps": 0}, "epochs"),
    ],
)
def test_recipe_names_the_wrong_option(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Recipe(**{"steps": 10, **options})


def test_condition_drop_is_a_tenth_and_depends_on_the_image_alone():
    keys = [str(2**63 + i) for i in range(20_000)]
    drop = dropped_conditions(keys, seed=0, epoch=0, share=0.1)
    assert drop.float().mean().item() == pytest.approx(0.1, abs=0.01)
    parts = [keys[i : i + 7] for i in range(0, 70, 7)]
    drops = [dropped_conditions(part, seed=0, epoch=0, share=0.1) for part in parts]
    assert torch.equal(torch.cat(drops), drop[:70])
    assert not torch.equal(drop, dropped_conditions(keys, seed=0, epoch=1, share=0.1))
    assert not torch.equal(drop, dropped_conditions(keys, seed=1, epoch=0, share=0.1))
    assert not dropped_conditions(keys[:50], seed=0, epoch=0, share=0.0).any()


# ------------------------------------------------------------------------------------------ data
def order(rank: int, world: int, *, batch_size: int, accumulate: int = 1, step: int = 0) -> list:
    return list(
        ShardedBatches(
            50,
            batch_size=batch_size,
            accumulate=accumulate,
            rank=rank,
            world_size=world,
            seed=3,
            step=lambda: step,
        )
    )


def test_two_processes_share_the_batches_of_one():
    one = order(0, 1, batch_size=8)
    two = [a + b for a, b in zip(order(0, 2, batch_size=4), order(1, 2, batch_size=4), strict=True)]
    micro = order(0, 1, batch_size=2, accumulate=4)
    assert one == two
    assert one == [[i for m in micro[k : k + 4] for i in m] for k in range(0, 24, 4)]
    assert len(one) == 6
    assert len({i for b in one for i in b}) == 48


def test_batches_continue_where_a_run_stopped():
    every = order(0, 1, batch_size=8) + order(0, 1, batch_size=8, step=6)
    assert order(0, 1, batch_size=8, step=4) == every[4:6]
    assert order(0, 1, batch_size=8, step=9) == every[9:]
    assert every[:6] != every[6:]
    micro = order(0, 1, batch_size=4, accumulate=2)
    assert order(0, 1, batch_size=4, accumulate=2, step=5) == micro[10:]


def test_split_is_by_prompt_and_stable():
    ids = [f"p{i // 2}" for i in range(100)]
    kept, held_out = split_by_prompt(ids, val_size=3)
    assert len(held_out) == 6
    assert not {ids[i] for i in kept} & {ids[i] for i in held_out}
    assert {ids[i] for i in held_out} == {
        ids[::-1][i] for i in split_by_prompt(ids[::-1], val_size=3)[1]
    }
    assert len(split_by_prompt(ids, val_size=64)[1]) == 10
    assert split_by_prompt(ids[:8], val_size=64)[1] == []


def test_distilled_data_must_be_finished_and_of_this_backbone(tmp_path: Path):
    backbone = AnalyticBackbone()
    good = distilled(tmp_path / "good", images=6, size=20, codes=20)
    images = read_distilled(good, backbone)
    assert images["sample_key"] == [str(2**63 + i) for i in range(6)]
    with pytest.raises(ValueError, match=r"train\.data=.*nowhere does not exist"):
        read_distilled(tmp_path / "nowhere", backbone)
    with pytest.raises(ValueError, match=r"needs 4x5 = 20 codes for analytic; found lengths .16"):
        read_distilled(distilled(tmp_path / "grid", images=6, size=16, codes=20), backbone)
    with pytest.raises(ValueError, match=r"lie outside 0\.\.19"):
        read_distilled(distilled(tmp_path / "codes", images=6, size=20, codes=99), backbone)
    (good / "manifest.json").write_text('{"backbone": {"name": "emu3", "fingerprint": "ab"}}')
    with pytest.raises(ValueError, match=r"distilled from emu3 \(ab\), not from analytic"):
        read_distilled(good, backbone)
    (good / "DONE").unlink()
    with pytest.raises(ValueError, match="good is not finished"):
        read_distilled(good, backbone)


def test_a_smaller_share_of_the_images_is_part_of_a_larger_one():
    images = Dataset.from_dict({"sample_key": [str(n) for n in range(40)]})
    keys = [
        take_share(images, share, seed=3)["sample_key"][:] for share in (1 / 12, 0.25, 0.5, 1.0)
    ]
    assert [len(found) for found in keys] == [3, 10, 20, 40]
    for small, large in itertools.pairwise(keys):
        assert set(small) < set(large)
    assert keys[2] == sorted(keys[2], key=int)
    assert take_share(images, 0.5, seed=4)["sample_key"][:] != keys[2]
    assert len(take_share(images, 1e-9, seed=3)) == 1


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), True])
def test_a_share_is_a_fraction(share):
    with pytest.raises(ValueError, match=r"train\.share=.* must be above 0 and at most 1"):
        take_share(Dataset.from_dict({"sample_key": ["1"]}), share, seed=0)


def test_metrics_file_continues_from_a_step(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv")
    for step in range(4):
        file.log_metrics({"loss": step / 2}, step)
    file.log_metrics({"val": 0.1}, 3)
    file.save()
    file = MetricsFile(tmp_path / "metrics.csv", first_step=2)
    file.log_metrics({"loss": 9.0}, 2)
    file.finalize("success")
    with (tmp_path / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(r["step"], r["loss"]) for r in rows] == [("0", "0"), ("1", "0.5"), ("2", "9")]
