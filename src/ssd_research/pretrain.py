"""Stage: make the tiny backbone from nothing, its VQ model first, then its language model.

`python -m ssd_research.pretrain model=tiny` leaves a checkpoint in Hugging Face layout, the record
of how it was made, and sample sheets. Both phases resume from their last Lightning checkpoint.
"""

import json
from pathlib import Path

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import GenerationConfig, JanusForConditionalGeneration, PreTrainedTokenizerFast

from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import tiny_config, tiny_tokenizer
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.runs import Run, open_run, resolve_device, stage_main, use_threads, write_atomic
from ssd_research.sampling import Sampling
from ssd_research.shapes.captions import vocabulary
from ssd_research.training.persistence import (
    AtomicCheckpoints,
    LastCheckpoint,
    MetricsFile,
    fit,
    step_of,
)
from ssd_research.training.pretraining import (
    Curriculum,
    LanguageTraining,
    SceneBatches,
    VQTraining,
)

PROMPTS = (
    "a photo of a red circle",
    "a photo of a blue star and a green square",
    "a photo of three rings",
    "a photo of a purple cross above a yellow triangle",
    "a large pink square left of a small black circle",
    "a photo of four blue triangles",
)


def run(cfg: DictConfig) -> Path:
    """Run both phases of `cfg.model.pretrain`; `checkpoint/` in the folder is the backbone."""
    if "pretrain" not in cfg.model:
        raise ValueError(f"model={cfg.model.name} is published, not made here: use model=tiny")
    recipe = OmegaConf.to_container(cfg.model.pretrain, resolve=True)
    use_threads(cfg)
    run = open_run(cfg, "pretrain", {"recipe": recipe, "seed": cfg.seed})
    if run.done:
        return run.folder
    L.seed_everything(cfg.seed)
    tokenizer = tiny_tokenizer(vocabulary())
    model = JanusForConditionalGeneration(tiny_config(tokenizer, **cfg.model.pretrain.size))
    figures = _train_vq(cfg, run, model)
    figures |= _train_language_model(cfg, run, model, tokenizer)
    _save(cfg, run, model, tokenizer, figures)
    return run.finish({"validation": figures})


def _batches(
    cfg: DictConfig, *, steps: int, batch_size: int, seed: int, **curriculum: float
) -> SceneBatches:
    return SceneBatches(
        curriculum=Curriculum(dict(cfg.model.pretrain.kinds), **curriculum),
        batch_size=batch_size,
        steps=steps,
        canvas=cfg.model.pretrain.size.image_size,
        seed=seed,
    )


def _fit(
    cfg: DictConfig,
    run: Run,
    module: L.LightningModule,
    *,
    phase: str,
    steps: int,
    train: SceneBatches,
) -> dict[str, float]:
    """Train `module` for `steps` batches, resuming where an earlier command stopped."""
    folder = run.folder / phase
    options = cfg.model.pretrain[phase]
    last = folder / "last.ckpt"
    resume = last if last.exists() else None
    device = resolve_device(cfg.runtime.device)
    optimizers = 2 if phase == "lm" else 1
    every = cfg.model.pretrain.checkpoint_every * optimizers
    first_step = step_of(resume) // optimizers
    # Lightning draws a batch before any hook runs, so the data must know where to go on by now.
    train.first_step = first_step
    metrics = MetricsFile(folder / "metrics.csv", first_step=first_step)
    trainer = L.Trainer(
        max_steps=steps * optimizers,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=cfg.model.pretrain.precision,
        callbacks=[LastCheckpoint(last, every=every)],
        logger=metrics,
        plugins=[AtomicCheckpoints()],
        log_every_n_steps=20,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    held_out = _batches(cfg, steps=2, batch_size=64, seed=cfg.seed + 10**6, easy=0.0, full=0.0)
    loaders = [
        DataLoader(scenes, batch_size=None, collate_fn=tuple) for scenes in (train, held_out)
    ]
    fit(trainer, module, *loaders, ckpt_path=resume)
    trainer.validate(module, loaders[1], verbose=False)
    return {k: float(v) for k, v in trainer.callback_metrics.items() if "val" in k}


def _train_vq(cfg: DictConfig, run: Run, model: JanusForConditionalGeneration) -> dict[str, float]:
    """Train the VQ model, or load it if this run has finished that phase."""
    vq, done, options = model.model.vqmodel, run.folder / "vq.safetensors", cfg.model.pretrain.vq
    figures_file = run.folder / "vq.json"
    if not done.exists():
        vq.train()
        module = VQTraining(vq, steps=options.steps, lr=options.lr)
        train = _batches(
            cfg,
            steps=options.steps,
            batch_size=options.batch_size,
            seed=cfg.seed + 1,
            easy=0.0,
            full=0.0,
        )
        figures = _fit(cfg, run, module, phase="vq", steps=options.steps, train=train)
        write_atomic(figures_file, json.dumps(figures))
        save_file(vq.state_dict(), done.with_suffix(".tmp"))
        done.with_suffix(".tmp").replace(done)
    vq.load_state_dict(load_file(done))
    vq.eval().requires_grad_(False)
    return json.loads(figures_file.read_text())


def _train_language_model(
    cfg: DictConfig,
    run: Run,
    model: JanusForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, float]:
    options = cfg.model.pretrain.lm
    module = LanguageTraining(
        model,
        tokenizer,
        steps=options.steps,
        muon_lr=options.muon_lr,
        adam_lr=options.adam_lr,
        condition_drop=options.condition_drop,
        decay=options.decay,
        seed=cfg.seed,
    )
    train = _batches(
        cfg,
        steps=options.steps,
        batch_size=options.batch_size,
        seed=cfg.seed + 2,
        **cfg.model.pretrain.curriculum,
    )
    return _fit(cfg, run, module, phase="lm", steps=options.steps, train=train)


def _save(
    cfg: DictConfig,
    run: Run,
    model: JanusForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    figures: dict[str, float],
) -> None:
    """Write the checkpoint in Hugging Face layout, its record and a sample sheet."""
    folder = run.folder / "checkpoint"
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        guidance_scale=cfg.model.backbone.guidance,
        generation_kwargs={"boi_token_id": tokenizer.convert_tokens_to_ids(tokenizer.boi_token)},
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {
        "made_by": "python -m ssd_research.pretrain model=" + cfg.model.name,
        "recipe": OmegaConf.to_container(cfg.model.pretrain, resolve=True),
        "seed": cfg.seed,
        "validation": figures,
    }
    write_atomic(folder / "record.json", json.dumps(record, indent=2) + "\n")
    backbone = instantiate(cfg.model.backbone, path=str(folder))
    sample_sheet(backbone, run.folder / "samples.png", seed=cfg.seed)


def sample_sheet(backbone: JanusBackbone, path: Path, *, seed: int, per_prompt: int = 8) -> None:
    """Decode `per_prompt` images of each fixed prompt and save them as rows of one picture."""
    sampling: Sampling = backbone.defaults
    rows = []
    for n, prompt in enumerate(PROMPTS):
        keys = [1000 * n + k for k in range(per_prompt)]
        made = Autoregressive().decode(
            backbone, [prompt] * per_prompt, sampling=sampling, seed=seed, sample_keys=keys
        )
        rows.append(backbone.decode_images(made.codes))
    height, width = backbone.image_size
    sheet = Image.new("RGB", (per_prompt * width, len(PROMPTS) * height))
    for y, row in enumerate(rows):
        for x, pixels in enumerate(row):
            sheet.paste(Image.fromarray(pixels), (x * width, y * height))
    sheet.resize((3 * sheet.width, 3 * sheet.height), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Command line: `python -m ssd_research.pretrain model=tiny`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
