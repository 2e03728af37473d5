"""Emu3 in both published layouts, against transformers' own model and generation."""

import base64
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    Emu3VQVAE,
    PreTrainedTokenizerBase,
)

from conftest import both_streams, make_heads
from published_emu3 import FOLDER, QWEN_SPLIT, write_emu3
from ssd_research.backbones import emu3_official
from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.backbones.emu3 import NEGATIVE, POSITIVE, Emu3Backbone
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.heads import SpatialDraftHead
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "two blue stars left of a large pink ring, best quality", "naïve 3 🙂"]
SIZE, GRID = (48, 64), TokenGrid(6, 8, end_of_row=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, Path]:
    """Both layouts of the same weights."""
    root = tmp_path_factory.mktemp("emu3")
    for layout in ("hf", "official"):
        write_emu3(root / layout, layout=layout)
    return {layout: root / layout for layout in ("hf", "official")}


def load(folder: Path, **options) -> Emu3Backbone:
    """Load either layout as the configuration does."""
    vision = folder / FOLDER
    given = {"image_decoder": str(vision)} if vision.is_dir() else {}
    given |= {"name": "emu3", "guidance": 3.0, "image_size": SIZE} | options
    return Emu3Backbone.load(str(folder), **given)


@pytest.fixture(scope="module")
def single(published) -> Emu3Backbone:
    return load(published["hf"])


@pytest.fixture(scope="module")
def double(published) -> Emu3Backbone:
    return load(published["hf"], dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(published) -> Emu3ForConditionalGeneration:
    """The same checkpoint in transformers' hands alone."""
    return Emu3ForConditionalGeneration.from_pretrained(published["hf"]).eval()


def random_codes(backbone, batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(backbone.codebook_size, (batch, backbone.grid.size), generator=generator)


class Greedy:
    """Noise that always draws the likeliest code."""

    def at(self, positions, round):
        return self

    def categorical(self, p, *, purpose, needed=None):
        return p.argmax(-1)


def decode(backbone, decoder, prompts=PROMPTS, keys=(1, 2, 3), **options):
    return decoder.decode(
        backbone, prompts, sampling=backbone.defaults, seed=5, sample_keys=keys, **options
    )


# ----------------------------------------------------------------------- the published checkpoints


def test_the_layouts_hold_the_same_model(published):
    """Fingerprints, prompts, codes and pixels agree; so do files of today's key names."""
    models = [load(published["hf"]), load(published["official"])]
    assert len({m.fingerprint for m in models}) == 1
    assert len({m.image_decoder_fingerprint for m in models}) == 1
    assert [m.prompt_ids(PROMPTS[0]) for m in models] == [models[0].prompt_ids(PROMPTS[0])] * 2
    codes = [decode(m, Autoregressive(), PROMPTS[:2], (1, 2)).codes for m in models]
    assert torch.equal(*codes)
    assert (models[0].decode_images(codes[0]) == models[1].decode_images(codes[0])).all()


def test_todays_key_names_load_as_well(published, single, plain, tmp_path):
    shutil.copytree(published["hf"], tmp_path, dirs_exist_ok=True)
    for shard in tmp_path.glob("model*"):
        shard.unlink()
    plain.save_pretrained(tmp_path)
    assert load(tmp_path).fingerprint == single.fingerprint


def test_the_files_have_the_published_names(published):
    """Names taken from the published indexes' and the official classes', not from the writer."""
    index = {
        k: json.loads((f / "model.safetensors.index.json").read_text())["weight_map"]
        for k, f in published.items()
    }
    assert {"text_model.model.embed_tokens.weight", "text_model.lm_head.weight"} <= set(index["hf"])
    assert "vqmodel.decoder.middle_block.attn_norm.norm_layer.weight" in index["hf"]
    assert {
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
    } <= set(index["official"])
    vision = load_file(published["official"] / FOLDER / "model.safetensors")
    shapes = {name: tuple(vision[name].shape) for name in vision}
    assert shapes["decoder.mid.attn_1.q.weight"] == (64, 64, 1, 1)
    assert shapes["decoder.mid.attn_1.norm.norm_layer.weight"] == (64,)
    assert shapes["decoder.up.3.attn.1.proj_out.weight"] == (64, 64, 1, 1)
    assert shapes["decoder.up.3.attn.0.norm.conv_y.weight"] == (64, 4, 1, 1)
    assert shapes["encoder.down.3.attn.0.norm.weight"] == (64,)
    assert shapes["encoder.down.0.downsample.conv.weight"] == (32, 32, 3, 3)
    assert shapes["decoder.up.2.block.0.nin_shortcut.weight"] == (32, 64, 1, 1)
    assert shapes["decoder.time_res_stack.0.norm1.running_mean"] == (4,)


def test_the_configuration_loads_it(published):
    cfg = OmegaConf.load(Path(__file__).parents[1] / "conf" / "model" / "emu3.yaml").backbone
    cfg.path, cfg.image_size = str(published["hf"]), [48, 64]
    backbone = instantiate(cfg, device="cpu", dtype=torch.float32)
    assert (backbone.name, backbone.grid, backbone.image_size) == ("emu3", GRID, SIZE)
    assert backbone.defaults == Sampling(guidance=3.0, temperature=1.0, top_k=2048)
    assert not backbone.decoder.training


def test_parts_of_another_checkpoint_can_be_named(published, single):
    official = published["official"]
    mixed = load(published["hf"], tokenizer=str(official), image_decoder=str(official / FOLDER))
    assert mixed.prompt_ids("a (red) circle") == load(official).prompt_ids("a (red) circle")
    assert mixed.image_decoder_fingerprint == single.image_decoder_fingerprint


# ------------------------------------------------------------------------------------- the prompts


@pytest.mark.parametrize("layout", ["hf", "official"])
def test_prompts_are_the_official_ones(published, layout):
    backbone = load(published[layout])
    words = backbone.tokenizer

    def text(ids):
        return words.decode(ids, clean_up_tokenization_spaces=False)

    ends = "<|image start|>6*8<|image token|>"
    ids = backbone.prompt_ids(PROMPTS[1])
    assert text(ids) == f"<|extra_203|>{PROMPTS[1]} masterpiece, film grained, best quality.{ends}"
    negative = text(backbone.unconditional_ids(ids))
    assert negative.startswith("<|extra_203|>lowres, bad anatomy, bad hands, text, error, missing")
    assert negative.endswith(f"jpeg artifacts, signature, watermark, username, blurry.{ends}")


def test_prompts_equal_the_processor_of_transformers(published, single):
    words = Checkpoint(published["hf"], "").tokenizer()
    processor = Emu3Processor(Emu3ImageProcessor(), words)
    for ours, text in (
        (single.prompt_ids(PROMPTS[2]), PROMPTS[2] + POSITIVE),
        (single.unconditional_ids([]), NEGATIVE),
    ):
        want = processor(
            text=text, return_for_image_generation=True, ratio="4:3", image_area=48 * 64
        )
        assert ours == want["input_ids"][0]
        assert want["image_sizes"][0] == [GRID.rows, GRID.cols]


def test_the_official_tokenizer_is_that_of_tiktoken(published):
    tiktoken = pytest.importorskip("tiktoken")
    folder = published["official"]
    words = emu3_official.load_tokenizer(Checkpoint(folder, ""))
    lines = (folder / "emu3.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    names = words.get_added_vocab()
    reference = tiktoken.Encoding(
        "emu3", pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens=names
    )
    for text in (*PROMPTS, NEGATIVE, "It'S (90*90)\r\n\n  x\t", "<|extra_203|>日本語 12345 ̃ñ"):
        ids = words(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text, allowed_special="all")
        assert words.decode(ids, clean_up_tokenization_spaces=False) == text
    composed, apart = words("é")["input_ids"], words("e\u0301")["input_ids"]
    assert composed == apart  # the official tokenizer normalises to NFC


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory) -> PreTrainedTokenizerBase:
    """The official tokenizer at its published size, with made-up words."""
    folder = tmp_path_factory.mktemp("vocabulary")
    letters = itertools.product(range(256), repeat=2)
    more = itertools.product(range(97, 123), range(97, 123), range(97, 123), range(97, 103))
    tokens = [bytes([n]) for n in range(256)] + [bytes(pair) for pair in letters]
    tokens += [bytes(four) for four in itertools.islice(more, 151_643 - len(tokens))]
    lines = [f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate(tokens)]
    (folder / "emu3.tiktoken").write_text("".join(lines))
    visual = [f"<|visual token {n:06d}|>" for n in range(32_768)]
    vision = ["<|image token|>", "<|image start|>", "<|image end|>", *visual]
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision))
    return emu3_official.load_tokenizer(Checkpoint(folder, ""))


def test_the_official_tokenizer_has_the_published_ids(large_vocabulary):
    ids = large_vocabulary.get_vocab()
    assert len(ids) == 184_622
    words = ("endoftext", "im_start", "im_end", "extra_0", "extra_200", "extra_203", "extra_204")
    found = [ids[f"<|{word}|>"] for word in words]
    assert found == [151_643, 151_644, 151_645, 151_646, 151_846, 151_849, 151_850]
    words = ("image token", "image start", "image end", "visual token 000000")
    assert [ids[f"<|{word}|>"] for word in words] == [151_851, 151_852, 151_853, 151_854]
    assert ids["<|visual token 032767|>"] == 184_621


# ------------------------------------------------------------------------------------- the engine


def generate(plain, backbone, prompt):
    """Return the codes that transformers' greedy generation makes of one prompt."""
    grid, rows = backbone.grid, backbone.grid.cols + 1
    ids = torch.tensor([backbone.prompt_ids(prompt)])
    names = backbone.tokenizer.get_vocab()
    visual = [names[f"<|visual token {n:06d}|>"] for n in range(48)]

    def allowed(_, tokens):
        made = len(tokens) - ids.shape[1]
        return [names["<|extra_200|>"]] if made % rows == rows - 1 else visual

    out = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        negative_prompt_ids=torch.tensor([backbone.unconditional_ids([])]),
        prefix_allowed_tokens_fn=allowed,
        guidance_scale=3.0,
        do_sample=False,
        max_new_tokens=grid.slots,
    )
    made = out[0, ids.shape[1] :].view(grid.rows, rows)
    assert (made[:, -1] == names["<|extra_200|>"]).all()
    return (made[:, :-1] - visual[0]).flatten()


@pytest.mark.parametrize("end_of_row", ["own_pass", "folded"])
def test_greedy_images_equal_transformers_generate(single, plain, end_of_row):
    """Prompts of three lengths in one batch against one by one, token by token."""
    assert len({len(single.prompt_ids(text)) for text in PROMPTS}) == 3
    decoder = Autoregressive(end_of_row=end_of_row)
    made = decoder.decode_with(single, PROMPTS, sampling=single.defaults, noise=Greedy())
    for n, text in enumerate(PROMPTS):
        assert torch.equal(made.codes[n], generate(plain, single, text))
    assert made.codes.unique().numel() > 10
    assert made.nfe == [GRID.slots if end_of_row == "own_pass" else GRID.size] * 3


def raw_states(plain, ids, codes, backbone):
    """Run transformers' model on one sequence of ids, end-of-row tokens written out."""
    names = backbone.tokenizer.get_vocab()
    image = codes.view(GRID.rows, GRID.cols) + names["<|visual token 000000|>"]
    ends = torch.full((GRID.rows, 1), names["<|extra_200|>"])
    sequence = torch.cat([torch.tensor(ids), torch.cat([image, ends], 1).flatten()])
    stack, states = plain.model.text_model, []
    hook = stack.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        stack(sequence[None], use_cache=False)
    hook.remove()
    before = [
        len(ids) + y * (GRID.cols + 1) + x - 1 for y in range(GRID.rows) for x in range(GRID.cols)
    ]
    return states[0][0, before]


def test_teacher_forced_states_equal_the_plain_model(single, plain):
    codes = random_codes(single, 3)
    states = both_streams(single, PROMPTS, codes)
    for n, text in enumerate([*PROMPTS, *PROMPTS]):
        ids = single.prompt_ids(text) if n < 3 else single.unconditional_ids([])
        want = raw_states(plain, ids, codes[n % 3], single)
        torch.testing.assert_close(states[n], want, atol=1e-4, rtol=0)


def test_rows_with_wrong_drafts_equal_the_plain_model(single, plain):
    """Feeds each row (then two, then bits of rows) wrong, overwrites it, compares every state."""
    codes, wrong = random_codes(single, 3), random_codes(single, 3, seed=1)
    state = single.start(PROMPTS, sampling=single.defaults)
    start = 0
    for length in (8, 8, 16, 5, 3, 7):
        span = range(start, start + length)
        for source in (wrong, codes):
            state.forward(source[:, span.start : span.stop], span, phase="verify")
        start = span.stop
    torch.testing.assert_close(state.h_pre, both_streams(single, PROMPTS, codes), atol=1e-4, rtol=0)
    for n, text in enumerate(PROMPTS):
        want = raw_states(plain, single.prompt_ids(text), codes[n], single)
        torch.testing.assert_close(state.h_pre[n], want, atol=1e-4, rtol=0)


def test_a_batch_makes_what_its_prompts_make_alone(double):
    heads = make_heads(double)
    for decoder, extra in (
        (Autoregressive(), {}),
        (SpatiallySpeculative(v=3, b=2, i=1), {"heads": heads}),
    ):
        together = decode(double, decoder, **extra)
        for n, text in enumerate(PROMPTS):
            alone = decode(double, decoder, [text], (n + 1,), **extra)
            assert torch.equal(together.codes[n : n + 1], alone.codes)


def test_pixels_equal_the_image_decoder_of_transformers(single, plain):
    codes = random_codes(single, 2)
    names = single.tokenizer.get_vocab()
    image = codes.view(2, GRID.rows, GRID.cols) + names["<|visual token 000000|>"]
    ends = torch.full((2, GRID.rows, 1), names["<|extra_200|>"])
    closing = torch.zeros(2, 3, dtype=torch.long)
    tokens = torch.cat([torch.cat([image, ends], 2).flatten(1), closing], 1)
    want = plain.decode_image_tokens(image_tokens=tokens, height=GRID.rows, width=GRID.cols)
    torch.testing.assert_close(
        single.decode_pixels(codes).permute(0, 3, 1, 2), want, atol=1e-4, rtol=0
    )
    images = single.decode_images(codes)
    assert images.shape == (2, *SIZE, 3)
    assert images.std() > 1


def test_an_image_decoder_that_makes_another_size_is_caught(published):
    backbone = load(published["hf"])
    backbone.image_decoder.decode = lambda codes: torch.zeros(len(codes), 4, 3, *SIZE)
    with pytest.raises(ValueError, match=r"made \(4, 3, 48, 64\) of 6x8 codes, not \(3, 48, 64\)"):
        backbone.decode_images(random_codes(backbone, 1))


# ----------------------------------------------------------------------------------- the full size


def test_full_size_shapes(large_vocabulary):
    """What the published models weigh (paper Table 6) and hold per image, without any weights."""
    official = {"ch": 256, "ch_mult": [1, 2, 2, 4], "z_channels": 4, "num_res_blocks": 2}
    config = Emu3Config(vocabulary_map={})
    with torch.device("meta"):
        model = Emu3ForConditionalGeneration(config).to(torch.bfloat16)
        separate = Emu3VQVAE(emu3_official.vision_config(official))
        head = SpatialDraftHead(config.text_config.hidden_size)
    stack, vision = model.model.text_model, model.model.vqmodel
    assert size(stack) + size(model.lm_head) == pytest.approx(8.492e9, rel=1e-4)
    assert size(vision) == size(separate) == pytest.approx(270.7e6, rel=1e-3)
    assert size(head) == pytest.approx(134.2e6, rel=1e-3)
    backbone = Emu3Backbone(
        stack,
        model.lm_head,
        vision,
        large_vocabulary,
        grid=TokenGrid(90, 90, end_of_row=True),
        name="emu3",
        defaults=Sampling(3.0),
    )
    assert (backbone.hidden_size, backbone.codebook_size) == (4096, 32_768)
    assert backbone.image_size == (720, 720)
    assert backbone.code_embeddings.shape == backbone.image_head.weight.shape == (32_768, 4096)
    kv = backbone.new_cache(2, backbone.grid.slots + 80)
    held = sum(buffer.nbytes for buffer in (*kv.keys, *kv.values))
    assert held / 2**30 == pytest.approx(2.02, abs=0.005)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Emu3Backbone:
    """One narrow layer at the real 90x90 grid."""
    folder = tmp_path_factory.mktemp("narrow")
    write_emu3(folder, layers=1, hidden_size=16, heads=4, positions=9216)
    return load(folder, image_size=(720, 720))


@pytest.mark.parametrize(
    ("budget", "nfe"),
    [
        ((1, 0, 0), 126),
        pytest.param((3, 6, 1), 365, marks=pytest.mark.slow),
        pytest.param((2, 6, 1), 440, marks=pytest.mark.slow),
        pytest.param((1, 5, 0), 571, marks=pytest.mark.slow),
    ],
)
def test_steps_on_the_real_grid(narrow, budget, nfe):
    """Paper Tables 4 and 7; every row pass forwards the end-of-row token too."""
    v, b, i = budget
    decoder = SpatiallySpeculative(v=v, b=b, i=i)
    made = decode(narrow, decoder, PROMPTS[:1], (1,), heads=make_heads(narrow))
    assert made.nfe == [nfe]
    blocks = [min(v, 90 - y) for y in range(1, 90, v)]
    passes = sum(m * (b + 1) + (m - 1) * i for m in blocks)
    assert made.tokens == [2 * 89 + 91 * passes]


# ------------------------------------------------------------------------------- what can be wrong


@pytest.fixture
def copy(published, tmp_path):
    """Return a function that copies a layout where it can be broken."""

    def copied(layout: str) -> Path:
        return Path(shutil.copytree(published[layout], tmp_path / layout))

    return copied


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("image_size", [(720,), (0, 8), (48, 60), (-8, 64), (8, 8, 8)])
def test_a_wrong_image_size_is_named(published, image_size):
    with pytest.raises(ValueError, match=r"image_size must be \[height, width\], multiples of 8"):
        load(published["hf"], image_size=image_size)


def test_an_image_beyond_the_models_positions_is_refused(published):
    with pytest.raises(ValueError, match=r"\[160, 200\] takes 520 tokens, .* has 512 positions"):
        load(published["hf"], image_size=(160, 200))


@pytest.mark.parametrize("layout", ["hf", "official"])
def test_another_family_is_refused(copy, layout):
    folder = copy(layout)
    edit(folder / "config.json", model_type="llama")
    with pytest.raises(ValueError, match=r"path=.*holds a llama model, not a emu3 one"):
        load(folder)


def test_another_image_decoder_is_refused(published):
    with pytest.raises(ValueError, match=r"image_decoder=.*holds a emu3 model, not a Emu3VisionVQ"):
        load(published["hf"], image_decoder=str(published["hf"]))
    with pytest.raises(ValueError, match=r"set model\.backbone\.image_decoder to BAAI/Emu3-Vision"):
        load(published["official"], image_decoder=None)


@pytest.mark.parametrize("layout", ["hf", "official"])
def test_missing_and_broken_weights_are_named(copy, layout):
    folder = copy(layout)
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"broken weights in {shards[1].name}"):
        load(folder)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks the shard {shards[1].name}"):
        load(folder)


def test_a_missing_weight_of_the_image_decoder_is_named(copy):
    folder = copy("official")
    file = folder / FOLDER / "model.safetensors"
    tensors = load_file(file)
    del tensors["decoder.mid.attn_1.q.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    wanted = r"image_decoder=.*lacks 1 weights, the first decoder\.middle_block\.attn_1\.q_proj"
    with pytest.raises(ValueError, match=wanted):
        load(folder)


def test_a_codebook_of_another_size_is_refused(copy):
    folder = copy("official")
    edit(folder / FOLDER / "config.json", codebook_size=50)
    with pytest.raises(ValueError, match=r"quantize\.embedding\.weight has the shape \[48, 4\]"):
        load(folder)
    other = folder.parent / "other"
    write_emu3(other, layout="official", codebook_size=40)
    with pytest.raises(ValueError, match="has 48 visual tokens, but the image decoder 40 codes"):
        load(folder, image_decoder=str(other / FOLDER))


def test_a_missing_or_foreign_tokenizer_is_named(copy, published, tmp_path):
    folder = copy("hf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"path=.*holds no tokenizer\.json"):
        load(folder)
    assert load(folder, tokenizer=str(published["hf"])).grid == GRID
    official = copy("official")
    (official / "emu3_vision_tokens.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"path=.*holds no emu3_vision_tokens\.txt"):
        load(official)
    with pytest.raises(FileNotFoundError, match=r"model\.backbone\.tokenizer=.*does not exist"):
        load(folder, tokenizer=str(tmp_path / "no" / "where" / "else"))


def test_broken_ranks_are_named(copy):
    folder = copy("official")
    file = folder / "emu3.tiktoken"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]))  # every special token moves down by one
    with pytest.raises(ValueError, match=r"path=.*<\|extra_203\|> has the id \d+ in the tokenizer"):
        load(folder)
    file.write_text("!!!! 0\n")
    with pytest.raises(ValueError, match=r"path=.*emu3\.tiktoken is broken"):
        load(folder)


@pytest.mark.parametrize("token", ["<|extra_200|>", "<|visual token 000047|>"])
def test_a_vocabulary_map_that_disagrees_is_refused(copy, token):
    folder = copy("hf")
    ids = json.loads((folder / "config.json").read_text())["vocabulary_map"]
    edit(folder / "config.json", vocabulary_map=ids | {token: 7})
    words = token.replace("|", r"\|")
    with pytest.raises(
        ValueError, match=rf"{words} has the id \d+ in the tokenizer and 7 in config"
    ):
        load(folder)


def test_visual_tokens_with_gaps_are_refused(copy):
    folder = copy("official")
    file = folder / "emu3_vision_tokens.txt"
    file.write_text(file.read_text().replace("<|visual token 000003|>\n", ""))
    with pytest.raises(ValueError, match=r"not numbered 0, 1, .*: it has 47, the last one 47"):
        load(folder)
