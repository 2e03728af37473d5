"""Every option of every configuration group composes, resolves and points at code that exists."""

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from ssd_research.paths import conf_dir


def _options(group: str) -> list[str]:
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))


MODELS = _options("model")
GROUPS = sorted(p.name for p in conf_dir().iterdir() if p.is_dir() and p.name != "model")
CHOICES = [f"{group}={option}" for group in GROUPS for option in _options(group)]


def _compose(*overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def _targets(node: object) -> Iterator[str]:
    """Yield every `_target_` below a plain container."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for child in node.values():
            yield from _targets(child)
    elif isinstance(node, list):
        for child in node:
            yield from _targets(child)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_option_composes_with_every_model(model: str, choice: str):
    config = OmegaConf.to_container(
        _compose(f"model={model}", choice), resolve=True, throw_on_missing=True
    )
    assert config["model"]["name"] == model
    assert config["decoder"]["name"]


@pytest.mark.parametrize(
    "choice", [f"model={m}" for m in MODELS] + [c for c in CHOICES if c.startswith("decoder=")]
)
def test_targets_exist(choice: str):
    config = OmegaConf.to_container(_compose(choice), resolve=True)
    targets = list(_targets(config))
    assert targets
    assert all(callable(get_method(target)) for target in targets)


def test_defaults_are_the_tiny_model_on_this_machine():
    config = _compose()
    assert (config.model.name, config.decoder.name, config.trainer.devices) == ("tiny", "ar", 1)
    assert config.prompts == config.model.prompts == "shapes"


def test_prompts_can_be_a_list_on_the_command_line():
    config = _compose('prompts=["a red circle above a blue square"]')
    assert list(config.prompts) == ["a red circle above a blue square"]


def test_janus_pro_trains_as_in_the_paper():
    """Paper Table 6: 60,000 prompts, batch 128 on each of 4 GPUs, 3 epochs, guidance 5."""
    config = _compose("model=janus_pro", "trainer=ddp")
    assert config.distill.limit == 60_000
    assert (config.model.training.batch_size, config.model.training.epochs) == (128, 3)
    assert (config.trainer.devices, config.trainer.strategy) == (4, "ddp")
    assert config.model.backbone.guidance == 5.0


def test_unknown_option_is_refused():
    with pytest.raises(Exception, match="no_such_model"):
        _compose("model=no_such_model")
