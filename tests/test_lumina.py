"""Lumina-mGPT from a checkpoint in the published format, against references of its own."""

import json
import re
import shutil
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from conftest import both_streams, make_heads
from published_lumina import (
    CODES,
    HEADS,
    TamingVQGAN,
    lumina_config,
    random_vqgan,
    write_lumina,
    write_tokenizer,
    write_vqgan,
)
from ssd_research.backbones.lumina import LuminaBackbone, LuminaTokens, code_ids
from ssd_research.backbones.vqgan import VQGANDecoder, build_network
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads, SpatialDraftHead
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling

PROMPTS = ["a cat", "two red boats on a lake at dawn", "snow"]
KEYS = [11, 22, 33]
ROWS, COLS = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("lumina") / "checkpoint"
    write_lumina(place)
    return place


def load(folder, *, dtype=torch.float32, image_size=(16 * ROWS, 16 * COLS), **options):
    options = {"image_decoder": str(folder), **options}
    return LuminaBackbone.load(
        str(folder), name="lumina_mgpt", guidance=4.0, image_size=image_size, dtype=dtype, **options
    )


@pytest.fixture(scope="module")
def backbone(folder):
    return load(folder)


@pytest.fixture(scope="module")
def exact(folder):
    return load(folder, dtype=torch.float64)


def random_codes(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CODES, (batch, ROWS * COLS), generator=generator)


def plain_model(folder):
    """Load transformers' own model, the norms spread over the heads by hand."""
    config = json.loads((folder / "config.json").read_text())
    model = ChameleonForConditionalGeneration(ChameleonConfig(**config))
    weights = {}
    for shard in folder.glob("*.safetensors"):
        weights |= load_file(shard)
    for name in [name for name in weights if "q_norm" in name or "k_norm" in name]:
        assert weights[name].shape == (1, 8)
        weights[name] = torch.stack([weights[name][0]] * HEADS)
    report = model.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys
    assert all(name.startswith("model.vqmodel.") for name in report.missing_keys)
    return model.eval()


def test_loads_the_published_layout(folder, backbone):
    assert (backbone.grid, backbone.image_size) == (TokenGrid(4, 6, end_of_row=True), (64, 96))
    assert (backbone.codebook_size, backbone.hidden_size) == (CODES, 32)
    want = plain_model(folder)
    for mine, plain in zip(backbone.decoder.layers, want.model.layers, strict=True):
        for name, weight in plain.state_dict().items():
            assert torch.equal(mine.state_dict()[name], weight), name
    assert sum(p.numel() for p in backbone.decoder.vqmodel.parameters()) < 100_000
    ids = list(code_ids(want.config.vocabulary_map))
    assert ids != sorted(ids)
    names = {i: name for name, i in want.config.vocabulary_map.items()}
    assert names[ids[17]] == "IMGIMGBHZ"
    assert names[ids[40]] == "IMGIMGEAZ"
    assert torch.equal(backbone.code_embeddings, want.model.embed_tokens.weight[ids])
    assert torch.equal(backbone.image_head.weight, want.lm_head.weight[ids])


def test_norms_may_be_expanded_or_a_row_per_shard(tmp_path, folder, backbone):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    plain = plain_model(folder)
    weights = {name: w for name, w in plain.state_dict().items() if "model.vqmodel." not in name}
    weights["model.vqmodel.quantize.embedding.weight"] = torch.zeros(3, 3)  # is left out
    for shard in copy.glob("model*"):
        shard.unlink()
    for rows in (1, 2, 4):
        for name in [name for name in weights if "_norm" in name and "self_attn" in name]:
            weights[name] = torch.arange(rows * 8.0).reshape(rows, 8)
        whole = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(whole, copy / "model.safetensors")
        loaded = load(copy)
        norm = loaded.decoder.layers[0].self_attn.k_norm.weight
        assert norm[:, 0].tolist() == [8 * (head * rows // HEADS) for head in range(HEADS)]
    assert loaded.fingerprint != backbone.fingerprint


def test_prompts_are_the_official_ones(folder, backbone):
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Generate an image of 96x64 according to the following prompt:\na cat"
    frame = ["<reserved08706>", "<racm3:break>", "<reserved08802>", "<reserved08803>"]
    want = [words.token_to_id("<s>"), *words.encode(text, add_special_tokens=False).ids]
    want += [words.token_to_id(token) for token in frame]
    ids = backbone.prompt_ids("a cat")
    assert ids == want
    assert backbone.unconditional_ids(ids) == want[-3:]
    assert backbone.end_of_row_id == words.token_to_id("<reserved08799>")


@torch.no_grad()
def greedy(model, prompt, unconditional, *, guidance, codes, end_of_row):
    """Argmax decoding: two whole sequences, recomputed for every code, rows ended by force."""

    def last_logits(ids):
        return model.lm_head(model.model(torch.tensor([ids]), use_cache=False)[0][0, -1])

    cond, uncond, image = list(prompt), list(unconditional), []
    for n in range(ROWS * COLS):
        u = last_logits(uncond)
        logits = u + guidance * (last_logits(cond) - u)
        image.append(max(range(CODES), key=lambda code: float(logits[codes[code]])))
        tail = [codes[image[-1]]] + [end_of_row] * ((n + 1) % COLS == 0)
        cond, uncond = cond + tail, uncond + tail
    return image


def test_greedy_decoding_equals_the_plain_model(folder, backbone):
    """Prompts of three lengths in one batch, each against sequences of its own, without a cache."""
    made = Autoregressive().decode(
        backbone, PROMPTS, sampling=Sampling(4.0, top_k=1), seed=0, sample_keys=KEYS
    )
    model = plain_model(folder)
    names = model.config.vocabulary_map
    letters = dict(zip("0123456789", "ABCDEFGHIJ", strict=True))
    spelt = ["".join(letters[digit] for digit in str(code)) for code in range(CODES)]
    for text, codes in zip(PROMPTS, made.codes.tolist(), strict=True):
        want = greedy(
            model,
            backbone.prompt_ids(text),
            [names[t] for t in ("<racm3:break>", "<reserved08802>", "<reserved08803>")],
            guidance=4.0,
            codes=[names[f"IMGIMG{word}Z"] for word in spelt],
            end_of_row=names["<reserved08799>"],
        )
        assert codes == want
        assert len(set(codes)) > 4
    assert made.nfe == [ROWS * (COLS + 1)] * 3


@pytest.mark.parametrize("scale", [1, 3])
def test_row_blocks_with_wrong_drafts_equal_single_tokens(backbone, scale):
    """Feeds whole rows of wrong codes, corrects them in two rounds, and compares every state."""
    codes, size, block = random_codes(3), ROWS * COLS, scale * COLS
    state = backbone.start(PROMPTS, sampling=backbone.defaults)
    for start in range(0, size, block):
        span = range(start, min(start + block, size))
        for wrong in (random_codes(3, seed=1), random_codes(3, seed=2), codes):
            state.forward(wrong[:, span.start : span.stop], span, phase="verify")
    single = backbone.start(PROMPTS, sampling=backbone.defaults)
    for n in range(size):
        single.forward(codes[:, n : n + 1], range(n, n + 1), phase="commit")
    torch.testing.assert_close(state.h_pre, single.h_pre, atol=1e-4, rtol=0)
    want = both_streams(backbone, PROMPTS, codes)
    torch.testing.assert_close(state.h_pre, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("decoder", [Autoregressive(), SpatiallySpeculative(v=2, b=2, i=1)])
def test_images_do_not_depend_on_their_batch(exact, decoder):
    heads = make_heads(exact, vertical=2) if decoder.needs_heads else None
    options = {"sampling": Sampling(4.0, top_k=20), "seed": 5, "heads": heads}
    together = decoder.decode(exact, PROMPTS, sample_keys=KEYS, **options)
    for n, (text, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        alone = decoder.decode(exact, [text], sample_keys=[key], **options)
        assert torch.equal(together.codes[n], alone.codes[0])


def test_pixels_equal_an_independent_vqgan(backbone):
    codes, vqgan = random_codes(3), random_vqgan()
    with torch.no_grad():
        want = vqgan(codes.reshape(3, ROWS, COLS))
    assert want.shape == (3, 64, 96, 3)
    assert float(want.std()) > 0.1
    torch.testing.assert_close(backbone.decode_pixels(codes), want, atol=1e-4, rtol=0)
    images = backbone.decode_images(codes)
    assert images.shape == (3, 64, 96, 3)
    near = abs(images - ((want.clamp(-1, 1) + 1) * 127.5).numpy())
    assert near.max() < 0.6


def test_image_decoders_of_every_layout_are_the_same(tmp_path, folder, backbone):
    ckpt = folder / "tokenizer" / "vqgan.ckpt"
    vqgan = random_vqgan()
    write_vqgan(tmp_path / "hf" / "model.safetensors", vqgan)
    torch.save(vqgan.state_dict(), tmp_path / "bare.ckpt")
    for place in (ckpt, ckpt.parent, tmp_path / "hf", tmp_path / "bare.ckpt"):
        found = load(folder, image_decoder=str(place)).image_decoder_fingerprint
        assert found == backbone.image_decoder_fingerprint


def test_a_hub_repository_is_asked_for_its_image_decoder_alone(monkeypatch, folder, backbone):
    asked = []

    def download(repository, *, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(folder)

    monkeypatch.setattr("ssd_research.backbones.checkpoint.snapshot_download", download)
    loaded = load(folder, image_decoder="GAIR/Anole-7b-v0.1")
    assert asked == []
    assert loaded.image_decoder_fingerprint == backbone.image_decoder_fingerprint
    assert asked == [("GAIR/Anole-7b-v0.1", ["tokenizer/vqgan.ckpt"])]


def test_codes_need_no_image_decoder(folder):
    """Distillation and training name none, and only pixels ask for it."""
    bare = load(folder, image_decoder=None)
    assert bare.hidden_states(PROMPTS[:1], random_codes(1)).shape == (1, ROWS * COLS, 32)
    for ask in (
        lambda: bare.decode_images(random_codes(1)),
        lambda: bare.image_decoder_fingerprint,
    ):
        with pytest.raises(ValueError, match=r"image_decoder=null, .* set it to GAIR/Anole"):
            ask()


def test_missing_diffusers_names_the_extra(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ValueError, match=r"image_decoder=.*pip install 'ssd_research\[lumina\]'"):
        load(folder).decode_images(random_codes(1))


def spoil(change):
    """Return what writes a VQGAN checkpoint whose weights `change` has altered in place."""

    def write(file):
        weights = random_vqgan().state_dict()
        change(weights)
        torch.save({"state_dict": weights}, file)

    return write


def truncate(file):
    write_vqgan(file, random_vqgan())
    file.write_bytes(file.read_bytes()[:100_000])


BROKEN_VQGANS = {
    "codes": (
        lambda file: write_vqgan(file, random_vqgan(codes=CODES + 1)),
        "has 49 codes, but lumina_mgpt has 48",
    ),
    "levels": (
        lambda file: write_vqgan(file, random_vqgan(multipliers=(1, 2, 4))),
        "has 4 pixels a code, but lumina_mgpt has 16",
    ),
    "hole": (spoil(lambda w: w.pop("decoder.norm_out.bias")), "lacks 1 weights, the first .*norm"),
    "no codebook": (spoil(lambda w: w.pop("quantize.embedding.weight")), "lacks quantize.embed"),
    "unknown": (
        spoil(lambda w: w.update({"decoder.up.0.attn.0.q.bias": torch.zeros(3)})),
        r"has 1 unknown weights, the first decoder\.up\.0\.attn\.0\.q\.bias",
    ),
    "shape": (
        spoil(lambda w: w.update({"decoder.conv_out.bias": torch.zeros(4)})),
        "has another shape: .*conv_out.bias",
    ),
    "width": (
        spoil(lambda w: w.update({"decoder.up.0.block.0.conv1.weight": torch.zeros(5, 32, 3, 3)})),
        "divisible",
    ),
    "truncated": (truncate, "no readable file of tensors"),
    "empty": (lambda file: file.write_bytes(b""), "no readable file of tensors"),
    "text": (lambda file: file.write_text("not found"), "no readable file of tensors"),
    "code": (lambda file: torch.save({"state_dict": nn.Linear(2, 2)}, file), "no readable file"),
    "numbers": (lambda file: torch.save({"state_dict": {"step": 3}}, file), "named tensors"),
}


@pytest.mark.parametrize(("write", "words"), BROKEN_VQGANS.values(), ids=BROKEN_VQGANS)
def test_a_wrong_image_decoder_is_one_clear_line(tmp_path, folder, write, words):
    file = tmp_path / "vqgan.ckpt"
    write(file)
    with pytest.raises(ValueError, match=words) as caught:
        load(folder, image_decoder=str(file)).decode_images(random_codes(1))
    message = str(caught.value)
    assert message.startswith(f"model.backbone.image_decoder={file}: vqgan.ckpt ")
    assert "\n" not in message


@pytest.mark.parametrize("place", ["nowhere", "empty", "GAIR/Anole-7b-v0.1"])
def test_an_absent_image_decoder_is_named(tmp_path, folder, place):
    (tmp_path / "empty").mkdir()
    path = place if "/" in place else str(tmp_path / place)
    bare = load(folder, image_decoder=path)
    with pytest.raises(FileNotFoundError, match=f"model.backbone.image_decoder={path}"):
        bare.decode_images(random_codes(1))


@pytest.mark.parametrize("size", [[768], [768, 760], [0, 64], [-64, 64], [64, 64, 64]])
def test_sizes_must_fit_the_patches(tmp_path, size):
    with pytest.raises(ValueError, match=r"model\.backbone\.image_size=\[.*multiple of 32"):
        load(tmp_path, image_size=size)


def altered_map(change):
    """Return a file writer that alters vocabulary_map in config.json."""

    def write(folder):
        config = json.loads((folder / "config.json").read_text())
        change(config["vocabulary_map"])
        (folder / "config.json").write_text(json.dumps(config))

    return write


def without_config_key(key):
    def write(folder):
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return write


def other_family(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "emu3"}))


def cut_shard(folder):
    whole = (folder / "model-00001-of-00002.safetensors").read_bytes()
    (folder / "model-00001-of-00002.safetensors").write_bytes(whole[: len(whole) // 2])


def smaller_embedding(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))


BROKEN_CHECKPOINTS = {
    "family": (other_family, "holds a emu3 model, not a chameleon one"),
    "shard": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "lacks the shard model-00002-of-00002.safetensors",
    ),
    "truncated": (cut_shard, "broken weights in model-00001-of-00002.safetensors"),
    "width": (smaller_embedding, "has the shape .*but config.json asks for"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer.json"),
    "no map": (without_config_key("vocabulary_map"), "vocabulary_map names 0 codes"),
    "twice": (
        altered_map(lambda names: names.update({"IMGIMGABZ": 300})),
        "names the code 1 twice, the second time IMGIMGABZ",
    ),
    "hole": (altered_map(lambda names: names.pop("IMGIMGCZ")), "47 codes, but not the code 2"),
    "letter": (
        altered_map(lambda names: names.update({"IMGIMGKZ": 300})),
        "IMGIMGKZ, which names no code",
    ),
    "same id": (
        altered_map(lambda names: names.update({"IMGIMGCZ": names["IMGIMGDZ"]})),
        "several codes the same id",
    ),
    "other tokenizer": (
        altered_map(lambda names: names.update({"<reserved08799>": 5})),
        "<reserved08799> is 311 in the tokenizer but 5",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BROKEN_CHECKPOINTS.values(), ids=BROKEN_CHECKPOINTS)
def test_a_wrong_checkpoint_is_one_clear_line(tmp_path, folder, spoil, words):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        load(copy)
    assert str(caught.value).startswith(f"model.backbone.path={copy}")
    assert "\n" not in str(caught.value)


def test_the_tokenizer_may_be_another_checkpoints(tmp_path, folder, backbone):
    bare, words = tmp_path / "bare", tmp_path / "words"
    write_lumina(bare, tokenizer=False)
    words.mkdir()
    write_tokenizer(words, CODES)
    loaded = load(bare, tokenizer=str(folder))
    assert loaded.prompt_ids("a cat") == backbone.prompt_ids("a cat")
    with pytest.raises(FileNotFoundError, match=r"model\.backbone\.tokenizer=.* does not exist"):
        load(bare, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the tokenizer has no <reserved08840>"):
        load(folder, image_size=(64, 1280))


def test_the_configuration_loads_it(folder):
    overrides = [
        "model=lumina_mgpt",
        "trainer=ddp",
        f"model.backbone.path={folder}",
        f"model.backbone.image_decoder={folder}",
        "model.backbone.image_size=[64,96]",
    ]
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    loaded = instantiate(cfg.model.backbone, device="cpu", dtype=torch.float32)
    assert loaded.defaults == Sampling(4.0, temperature=1.0, top_k=2000)
    assert loaded.decode_images(random_codes(1)).shape == (1, 64, 96, 3)
    assert cfg.distill.limit == 20_000
    assert dict(cfg.model.ssd) == {"v": 2, "b": 5, "i": 4}
    assert (cfg.train.batch_size, cfg.train.epochs, cfg.trainer.devices) == (32, 3, 4)
    assert (cfg.train.lr, cfg.train.min_lr) == (1e-4, 1e-5)


@pytest.fixture(scope="module")
def published(backbone):
    """Return the 7B model at 768x768 pixels, every weight on the meta device."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 65536}
    config = ChameleonConfig(**(lumina_config(layers=32, codes=8192) | sizes))
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration(config).bfloat16()
    ids = range(4, 8196)
    tokens = LuminaTokens(0, 8710, (8197, 8828, 8828), 8803, tuple(ids))
    return model, LuminaBackbone(
        model,
        backbone.tokenizer,
        tokens,
        image_size=(768, 768),
        image_decoder=None,
        name="lumina_mgpt",
        defaults=Sampling(4.0),
    )


def test_published_sizes(published):
    """7.014 B weights, 512 KiB of keys and values per token and stream, heads of 134.2 M."""
    model, big = published
    names = [(name, p.numel()) for name, p in model.named_parameters()]
    assert sum(n for name, n in names if "vqmodel" not in name) == pytest.approx(7.014e9, abs=1e6)
    assert (big.grid, big.grid.slots, big.codebook_size) == (TokenGrid(48, 48, True), 2352, 8192)
    prompt = 85  # tokens before the first code
    kv = big.new_cache(2, big.grid.slots + prompt)
    size = sum(buffer.nbytes for buffer in (*kv.keys, *kv.values))
    assert size == 2 * (2352 + prompt) * 512 * 2**10
    assert size / 2**30 == pytest.approx(2.38, abs=0.005)
    with torch.device("meta"):
        head = SpatialDraftHead(big.hidden_size)
    assert sum(p.numel() for p in head.parameters()) == pytest.approx(134.2e6, abs=1e5)


def test_published_size_of_the_image_decoder():
    with torch.device("meta"):
        vqgan = TamingVQGAN(codes=8192, base=128, blocks=2, latent=256, embed=256)
    network = build_network(vqgan.state_dict())
    count = {
        name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()
    }
    assert count["decoder"] + count["post_quant_conv"] == pytest.approx(39.3e6, abs=2e5)
    assert count["quantize"] == 8192 * 256
    assert count["encoder"] == count["quant_conv"] == 0


def test_images_are_decoded_on_the_device_in_float32(exact):
    exact.decode_images(random_codes(1))
    assert isinstance(exact.image_decoder, VQGANDecoder)
    assert {p.dtype for p in exact.image_decoder.parameters()} == {torch.float32}


STEPS = {(1, 0, 0): 68, (1, 5, 0): 303, (2, 5, 4): 280, (2, 5, 1): 211, (3, 5, 1): 179}
QUICK = [(1, 0, 0), (2, 5, 4)]  # the cheapest and the model's own


@pytest.mark.parametrize(
    "budget", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in STEPS]
)
def test_engine_nfe_on_the_published_grid(tmp_path, budget):
    """The paper's step counts (Tables 4 and 7) at 48x48 codes."""
    (v, b, i), nfe = budget, STEPS[budget]
    write_lumina(tmp_path, layers=1)
    wide = load(tmp_path, image_size=(768, 768))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        heads = DraftHeads(32, vertical=v, initialisation="torch").eval().requires_grad_(False)
    made = SpatiallySpeculative(v=v, b=b, i=i).decode(
        wide, ["a cat"], sampling=wide.defaults, seed=0, sample_keys=[0], heads=heads
    )
    assert made.nfe == [nfe]
    assert made.codes.shape == (1, 48 * 48)
    assert re.fullmatch("[0-9a-f]{16}", wide.fingerprint)
