"""Janus in its published layout: loading, errors, transformers' own images, sizes at full scale."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import JanusForConditionalGeneration

from published_janus import INDEX, SHARDS, byte_level_tokenizer, full_size_config, write_janus
from ssd_research import distill, generate, train
from ssd_research.backbones.janus import JanusBackbone, conditional_ids
from ssd_research.backbones.tiny import tiny_tokenizer
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.grid import TokenGrid
from ssd_research.heads import SpatialDraftHead
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling

TINY = tiny_tokenizer(["a"])
PROMPTS = ["a red circle", "a photo of 3 green stars, above a blue square", "Grüße an die Katze"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_janus(tmp_path_factory.mktemp("published") / "janus")


def load(folder, **options):
    return JanusBackbone.load(str(folder), name="janus_pro", guidance=5.0, **options)


def change(file: Path, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_published_layout_loads_without_what_generation_never_runs(published):
    backbone = load(published)
    assert (backbone.grid, backbone.image_size) == (TokenGrid(4, 4), (16, 16))
    assert (backbone.hidden_size, backbone.codebook_size) == (32, 32)
    stored = json.loads((published / INDEX).read_text())["weight_map"]
    assert "lm_head.weight" in stored
    assert [name for name in stored if "vision_model.encoder.layers.1" in name]
    names = {name for name, _ in backbone.model.named_parameters()}
    assert not [name for name in names if "vision_model.encoder.layers" in name]
    assert not [name for name in names if name.startswith("lm_head")]
    images = backbone.decode_images(torch.zeros(2, 16, dtype=torch.long))
    assert images.shape == (2, 16, 16, 3)


def test_prompts_start_with_bos_whether_or_not_the_tokenizer_adds_it(published):
    """The published `tokenizer.json` need not add bos, and says it is a Llama tokenizer's."""
    tokenizer = load(published).tokenizer
    plain = tokenizer("x")["input_ids"]
    assert plain[0] != tokenizer.bos_token_id
    for text in PROMPTS:
        ids = conditional_ids(tokenizer)(text)
        assert ids.count(tokenizer.bos_token_id) == 1
        template = f"<|User|>: {text}\n\n<|Assistant|>:<begin_of_image>"
        assert tokenizer.decode(ids) == tokenizer.bos_token + template
        assert ids[1:] == byte_level_tokenizer().encode(template, add_special_tokens=False).ids


def test_greedy_images_equal_transformers_generate(published):
    """Our batch of prompts of different lengths against transformers, one prompt at a time."""
    model = JanusForConditionalGeneration.from_pretrained(published).eval()
    backbone = load(published)
    ids = [backbone.prompt_ids(text) for text in PROMPTS]
    assert len({len(one) for one in ids}) == len(PROMPTS)
    want = [
        model.generate(
            torch.tensor([one]),
            attention_mask=torch.ones(1, len(one), dtype=torch.long),
            generation_mode="image",
            do_sample=False,
        )
        for one in ids
    ]
    state = backbone.start(PROMPTS, sampling=backbone.defaults)
    steps = []
    for n in range(backbone.grid.size):
        steps.append(state.distribution(range(n, n + 1)).argmax(-1))
        state.forward(steps[-1], range(n, n + 1), phase="commit")
    codes = torch.cat(steps, 1).clone()
    assert torch.equal(codes, torch.cat(want))
    assert len(codes.unique()) > 4
    pixels = model.decode_image_tokens(codes).detach()
    scaled = ((pixels.clamp(-1, 1) + 1) * 127.5).round()
    assert (torch.tensor(backbone.decode_images(codes)).float() == scaled).all()


def test_codes_of_a_prompt_do_not_depend_on_its_batch(published):
    backbone = load(published, dtype=torch.float64)
    decode = {"sampling": backbone.defaults, "seed": 0}
    together = Autoregressive().decode(backbone, PROMPTS, sample_keys=[1, 2, 3], **decode)
    for n, text in enumerate(PROMPTS):
        alone = Autoregressive().decode(backbone, [text], sample_keys=[n + 1], **decode)
        assert torch.equal(alone.codes[0], together.codes[n])


def test_ar_takes_576_steps_on_the_real_grid(tmp_path):
    backbone = load(write_janus(tmp_path / "grid", grid=24, patch=4, layers=1, positions=1024))
    made = Autoregressive().decode(
        backbone, PROMPTS[:1], sampling=backbone.defaults, seed=0, sample_keys=[0]
    )
    assert made.codes.shape == (1, 576)
    assert made.nfe == [576]


def wrong_family(folder):
    change(folder / "config.json", model_type="llama")


def official_layout(folder):
    """DeepSeek's own repository: another model type and a pickle in place of safetensors."""
    change(folder / "config.json", model_type="multi_modality")
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not read")


def missing_shard(folder):
    (folder / SHARDS[1]).unlink()


def truncated_shard(folder):
    whole = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(whole[: len(whole) // 2])


def hole(folder):
    """The index and a shard agree on leaving one weight out."""
    for shard in SHARDS:
        weights = load_file(folder / shard)
        weights.pop("model.generation_head.vision_head.weight", None)
        save_file(weights, folder / shard, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop("model.generation_head.vision_head.weight")
    (folder / INDEX).write_text(json.dumps(index))


def no_weights(folder):
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()


def other_codebook(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vq_config"]["num_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(config))


def broken_config(folder):
    (folder / "config.json").write_text('{"model_type": "janus"')


def no_config(folder):
    (folder / "config.json").unlink()


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def other_tokenizer(folder):
    """A tokenizer that does not know where an image begins."""
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<begin_of_image>", "<begin_of_film>"))
    change(folder / "tokenizer_config.json", boi_token="<begin_of_film>")


def no_pad(folder):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change(folder / name, pad_token=None)


WRONG = {
    wrong_family: "holds a llama model, not a janus one",
    official_layout: r"DeepSeek's own layout; .*deepseek-community/.*download_weights\.sh janus",
    missing_shard: rf"lacks the shard {SHARDS[1]}",
    truncated_shard: rf"broken weights in {SHARDS[0]}",
    hole: r"lacks 1 weights, the first model\.generation_head\.vision_head\.weight",
    no_weights: r"holds no \*\.safetensors",
    other_codebook: r"has the shape \[32, .*\], but config\.json asks for \[64",
    broken_config: r"config\.json is broken",
    no_config: r"holds no config\.json",
    no_tokenizer: r"holds no tokenizer\.json",
    other_tokenizer: r"<begin_of_image> is \d+ tokens of the tokenizer",
    no_pad: "the tokenizer has no pad token",
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_a_wrong_checkpoint_is_one_clear_line(tmp_path, damage):
    folder = write_janus(tmp_path / "janus")
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=WRONG[damage]) as error:
        load(folder)
    assert f"model.backbone.path={folder}" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_generation_never_runs_may_be_missing(tmp_path):
    folder = write_janus(tmp_path / "janus")
    weights = {name: w for shard in SHARDS for name, w in load_file(folder / shard).items()}
    whole = load(folder).fingerprint
    no_weights(folder)
    unused = ("lm_head", "model.vision_model", "model.aligner")
    kept = {name: w for name, w in weights.items() if not name.startswith(unused)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).fingerprint == whole


def test_a_folder_that_is_not_there_says_what_to_run(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"does not exist; .*download_weights\.sh janus_pro"
    ):
        load(tmp_path / "nowhere" / "deep")


@pytest.fixture(scope="module")
def full_size():
    """Return Janus-Pro-7B without any memory: every tensor is on the meta device."""
    with torch.device("meta"):
        return JanusForConditionalGeneration(full_size_config("7B"))


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_full_size_parameters(full_size):
    """The published file holds 14.8 GB of 2-byte numbers: 7.408 B, text head untied."""
    parts = full_size.model
    assert round(count(full_size) / 1e9, 3) == 7.408
    assert round(count(parts.language_model) / 1e9, 3) == 6.491
    assert round(count(parts.generation_head) / 1e6, 1) == 83.9
    codes = count(parts.generation_aligner) + count(parts.generation_embeddings)
    assert round(codes / 1e6, 1) == 16.9
    assert round(count(parts.vqmodel) / 1e6, 1) == 71.9
    assert round(count(parts.vision_model) / 1e6, 1) == 303.7
    with torch.device("meta"):
        assert round(count(SpatialDraftHead(4096)) / 1e6, 1) == 134.2


def test_full_size_cache(full_size):
    """480 KiB per token and stream in bfloat16; an image and a 36-token prompt: 0.56 GiB."""
    backbone = JanusBackbone(
        full_size.to(torch.bfloat16), TINY, name="janus_pro", defaults=Sampling(5.0)
    )
    assert (backbone.grid, backbone.image_size) == (TokenGrid(24, 24), (384, 384))
    assert (backbone.hidden_size, backbone.codebook_size) == (4096, 16384)
    for capacity, streams, size in ((1, 1, 480 * 2**10), (576, 2, 540 * 2**20)):
        kv = backbone.new_cache(streams, capacity)
        assert sum(layer.nbytes for layer in (*kv.keys, *kv.values)) == size
    kv = backbone.new_cache(2, 36 + 576)
    assert round(sum(layer.nbytes for layer in (*kv.keys, *kv.values)) / 2**30, 2) == 0.56


def test_the_small_size_has_the_same_grid():
    with torch.device("meta"):
        model = JanusForConditionalGeneration(full_size_config("1B"))
    backbone = JanusBackbone(model, TINY, name="janus_pro_1b", defaults=Sampling(5.0))
    assert (backbone.grid, backbone.hidden_size) == (TokenGrid(24, 24), 2048)
    assert round(count(model) / 1e9, 2) == 2.08


def test_every_stage_runs_from_the_published_layout(published, tmp_path):
    own = [
        "model=janus_pro",
        f"model.backbone.path={published}",
        f"output_dir={tmp_path}",
        "runtime=cpu",
        "batch_size=2",
        'prompts=["a cat","two dogs","a house by the sea","3 red boats"]',
    ]

    def configure(*options):
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", [*own, *options])

    distill.run(configure("distill.limit=3", "distill.holdout=1"))
    options = ["train.epochs=1", "train.batch_size=2", "heads.horizontal=2", "heads.vertical=1"]
    heads = train.run(configure(*options)) / "heads"
    for decoder in (["decoder=ar"], ["decoder=ssd", "decoder.r=1", "decoder.k_h=2"]):
        run = generate.run(configure(*decoder, f"heads.path={heads}", "selection.limit=2"))
        pictures = sorted(run.glob("images/*/samples/*.png"))
        assert [Image.open(file).size for file in pictures] == [(16, 16)] * 2
