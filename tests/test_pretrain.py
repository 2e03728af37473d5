"""Making a backbone from nothing: the curriculum, the data, and a small run broken and resumed."""

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from ssd_research import pretrain
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.paths import conf_dir
from ssd_research.training import pretraining
from ssd_research.training.pretraining import Curriculum, SceneBatches, linear_warmup_hold_decay

SMALL = [
    "model=tiny",
    "runtime=cpu",
    "model.pretrain.size={image_size: 32, hidden_size: 32, layers: 1, heads: 2, codebook_size: 16}",
    "model.pretrain.vq={steps: 4, batch_size: 2, lr: 1.0e-3, validate_every: 4}",
    "model.pretrain.lm.steps=6",
    "model.pretrain.lm.batch_size=2",
    "model.pretrain.lm.validate_every=6",
    "model.pretrain.checkpoint_every=2",
    "model.pretrain.precision=32-true",
]


def config(folder):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides=[*SMALL, f"output_dir={folder}"])


def test_curriculum_moves_from_named_and_flat_to_the_full_world():
    curriculum = Curriculum({"colors": 1.0}, easy=0.2, full=0.6, named=0.4, flat=0.1)
    assert curriculum.shares(0.0) == (1, 1)
    assert curriculum.shares(0.2) == (1, 1)
    assert curriculum.shares(0.4) == pytest.approx((0.7, 0.55))
    assert curriculum.shares(0.9) == (0.4, 0.1)
    assert Curriculum({"colors": 1.0}, easy=0.0, full=0.0).shares(0.0) == (0.4, 0.1)


def test_learning_rate_rises_holds_and_falls():
    at = [linear_warmup_hold_decay(s, steps=100, warmup=10, decay=0.5) for s in (0, 9, 40, 75, 100)]
    assert at == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0])


def test_scenes_are_a_function_of_seed_and_step():
    options = {"batch_size": 3, "steps": 5, "canvas": 32}
    scenes = SceneBatches(curriculum=Curriculum({"dense": 1.0}), seed=1, **options)
    every = list(scenes)
    scenes.first_step = 3
    for (images, captions), (want, texts) in zip(scenes, every[3:], strict=True):
        assert torch.equal(images, want)
        assert captions == texts
    other = SceneBatches(curriculum=Curriculum({"dense": 1.0}), seed=2, **options)
    assert other.batch(0)[1] != every[0][1]


def test_a_broken_run_resumes_to_the_same_backbone(tmp_path, monkeypatch):
    straight = pretrain.run(config(tmp_path / "straight"))
    seen: list[str] = []
    step = pretraining.LanguageTraining.training_step

    def broken(self, batch, index):
        if self.global_step // 2 == 5:
            raise RuntimeError("power cut")
        return step(self, batch, index)

    def noted(self, batch, index):
        seen.extend(batch[1])
        return step(self, batch, index)

    monkeypatch.setattr(pretraining.LanguageTraining, "training_step", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        pretrain.run(config(tmp_path / "broken"))
    monkeypatch.setattr(pretraining.LanguageTraining, "training_step", noted)
    resumed = pretrain.run(config(tmp_path / "broken"))
    assert len(seen) == 4  # two batches of two: steps 4 and 5
    want = load_file(straight / "checkpoint" / "model.safetensors")
    made = load_file(resumed / "checkpoint" / "model.safetensors")
    assert all(torch.equal(made[name], want[name]) for name in want)
    backbone = JanusBackbone.load(str(resumed / "checkpoint"), name="tiny", guidance=3.0)
    assert backbone.grid.size == 64
    assert (resumed / "samples.png").is_file()


def test_a_published_model_is_not_made_here(tmp_path):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = compose("config", overrides=["model=janus_pro", f"output_dir={tmp_path}"])
    with pytest.raises(ValueError, match="published, not made here"):
        pretrain.run(cfg)
