"""The backbone and its raster KV against independent references on real transformers classes."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import JanusForConditionalGeneration

from conftest import both_streams, make_backbone
from ssd_research.backbones.janus import JanusBackbone, conditional_ids, unconditional_ids
from ssd_research.backbones.tiny import random_model
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a photo of three blue stars", "a ring and a cross", "four triangles"]


def random_codes(backbone, batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(backbone.codebook_size, (batch, backbone.grid.size), generator=generator)


def unpadded_reference(text, codes, *, drop):
    """Run the untouched transformers model on one sequence and return its pre-norm states."""
    model, tokenizer = random_model()
    model = model.double().eval()
    ids = conditional_ids(tokenizer)(text)
    ids = unconditional_ids(tokenizer, ids) if drop else ids
    words = model.get_input_embeddings()(torch.tensor([ids]))
    image = model.prepare_embeddings_for_image_generation(codes[None, :-1])
    stack = model.model.language_model
    states = []
    stack.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    stack(inputs_embeds=torch.cat([words, image], 1), use_cache=False)
    return states[0][0, len(ids) - 1 :]


@pytest.mark.parametrize("drop", [False, True])
def test_teacher_forced_states_equal_the_plain_model(random_backbone, drop):
    codes = random_codes(random_backbone, len(PROMPTS))
    flags = torch.full((len(PROMPTS),), drop)
    states = random_backbone.hidden_states(PROMPTS, codes, unconditional=flags)
    for n, text in enumerate(PROMPTS):
        want = unpadded_reference(text, codes[n], drop=drop)
        torch.testing.assert_close(states[n], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_with_wrong_drafts_equal_a_teacher_forced_pass(dtype):
    """Feeds wrong blocks of several sizes, overwrites them, and compares every state."""
    backbone = make_backbone(dtype=dtype)
    codes, wrong = random_codes(backbone, 4), random_codes(backbone, 4, seed=1)
    state = backbone.start(PROMPTS, sampling=backbone.defaults)
    start = 0
    for length in (1, 5, 6, 2, 12, 9):
        span = range(start, start + length)
        for source in (wrong, codes):
            state.forward(source[:, span.start : span.stop], span, phase="verify")
        start = span.stop
    want = both_streams(backbone, PROMPTS, codes)
    limit = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(state.h_pre, want, atol=limit, rtol=0)
    assert state.meter.nfe == 1 + 12
    assert state.meter.tokens == 2 * 35


@pytest.mark.parametrize("prompts", [PROMPTS[:2], ["a red circle", "a green cross"]])
def test_stale_slots_are_never_seen(random_backbone, prompts):
    """Soils every slot beyond the first six codes, stream by stream, whatever their lengths."""
    codes, seen = random_codes(random_backbone, 2), []
    for soiled in (False, True):
        state = random_backbone.start(prompts, sampling=random_backbone.defaults)
        assert (state.shared_length is None) == (prompts == PROMPTS[:2])
        for layer in (*state.kv.keys, *state.kv.values) if soiled else ():
            for stream, length in enumerate(state.lengths.tolist()):
                with torch.inference_mode():
                    layer[stream, :, length + 6 :] = 1e6
        state.forward(codes[:, :6], range(6), phase="verify")
        seen.append(state.h_pre[:, :7])
    torch.testing.assert_close(seen[1], seen[0], atol=1e-12, rtol=0)


def test_positions_of_each_image_equal_ranges(random_backbone):
    """Two images advance at different positions of their own, as ragged decoders need."""
    codes = random_codes(random_backbone, 2)
    want = both_streams(random_backbone, PROMPTS[:2], codes)
    state = random_backbone.start(PROMPTS[:2], sampling=random_backbone.defaults)
    for first in range(0, 32, 4):
        lag = torch.tensor([[first], [max(first - 2, 0)]])
        positions = lag + torch.arange(4)
        state.forward(codes.gather(1, positions), positions, phase="verify")
    torch.testing.assert_close(state.h_pre[0, :33], want[0, :33], atol=1e-10, rtol=0)
    torch.testing.assert_close(state.h_pre[3, :31], want[3, :31], atol=1e-10, rtol=0)


def test_hidden_slots_are_not_seen(random_backbone):
    codes, other = random_codes(random_backbone, 1), random_codes(random_backbone, 1, seed=3)
    sampling = random_backbone.defaults
    seen = []
    for junk in (codes, other):
        state = random_backbone.start(PROMPTS[:1], sampling=sampling)
        state.forward(junk[:, :4], range(4), phase="verify")
        hidden = torch.zeros(2, state.kv.capacity, dtype=torch.bool)
        hidden[:, int(state.lengths[0]) : int(state.lengths[0]) + 4] = True
        positions = torch.tensor([[4, 5]])
        state.forward(codes[:, 4:6], positions, phase="verify", hidden=hidden)
        seen.append(state.h_pre[:, 5:7])
    torch.testing.assert_close(seen[0], seen[1], atol=1e-12, rtol=0)


def test_hidden_slots_with_a_range_are_refused(random_backbone):
    state = random_backbone.start(PROMPTS[:1], sampling=random_backbone.defaults)
    hidden = torch.zeros(2, state.kv.capacity, dtype=torch.bool)
    with pytest.raises(ValueError, match="hidden slots need a tensor"):
        state.forward(random_codes(random_backbone, 1)[:, :2], range(2), phase="x", hidden=hidden)


def test_end_of_row_tokens_are_folded_in(random_backbone):
    """A grid with end-of-row tokens puts them after each row's last code, in the same pass."""

    class Folded(JanusBackbone):
        def end_of_row_embedding(self):
            return self.code_embeddings[:1, None] * 0 + 7

    model, tokenizer = random_model()
    backbone = Folded(model.double(), tokenizer, name="folded", defaults=Sampling(guidance=2.0))
    backbone.grid = TokenGrid(6, 6, end_of_row=True)
    codes = random_codes(backbone, 1)
    embeds, predicts = backbone.image_tokens(codes[:, 4:14], range(4, 14))
    assert embeds.shape[1] == 12
    assert predicts.tolist() == [0, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert (embeds[0, 2] == 7).all()
    assert (embeds[0, 9] == 7).all()
    torch.testing.assert_close(embeds[:, 3:9], backbone.embed(codes[:, 6:12]))
    state = backbone.start(PROMPTS[:1], sampling=backbone.defaults)
    state.forward(codes[:, :9], range(9), phase="verify")
    state.forward(codes[:, 9:], range(9, 36), phase="verify")
    want = both_streams(backbone, PROMPTS[:1], codes)
    torch.testing.assert_close(state.h_pre, want, atol=1e-10, rtol=0)
    assert state.meter.tokens == backbone.grid.slots


def test_greedy_images_equal_transformers_generate():
    """Argmax decoding with guidance, token by token, against transformers' own image generation."""
    model, tokenizer = random_model()
    model = model.eval()
    prompts = ["a red circle", "a blue ring"]
    boi = tokenizer.convert_tokens_to_ids(tokenizer.boi_token)
    ids = torch.tensor([conditional_ids(tokenizer)(text) for text in prompts])
    config = model.generation_config
    config.generation_kwargs = {"boi_token_id": boi}
    config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_mode="image",
        do_sample=False,
        guidance_scale=3.0,
    )
    backbone = JanusBackbone(model, tokenizer, name="random", defaults=Sampling(guidance=3.0))
    state = backbone.start(prompts, sampling=backbone.defaults)
    codes = []
    for n in range(backbone.grid.size):
        codes.append(state.distribution(range(n, n + 1)).argmax(-1))
        state.forward(codes[-1], range(n, n + 1), phase="commit")
    assert torch.equal(torch.cat(codes, 1), want)


def test_fingerprint_follows_weights_not_dtype(random_backbone):
    assert random_backbone.fingerprint == make_backbone(dtype=torch.float32).fingerprint
    assert random_backbone.fingerprint != make_backbone(seed=1).fingerprint


def test_unknown_words_are_named(random_backbone):
    with pytest.raises(ValueError, match=r"does not know 'zebra'.*circle"):
        random_backbone.start(["a red zebra"], sampling=random_backbone.defaults)


def test_loading_names_what_is_wrong(tmp_path, random_checkpoint):
    options = {"name": "tiny", "guidance": 3.0}
    with pytest.raises(FileNotFoundError, match=r"model\.backbone\.path=.*no config\.json"):
        JanusBackbone.load(str(tmp_path), **options)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        JanusBackbone.load(str(tmp_path / "nowhere" / "deep"), **options)
    loaded = JanusBackbone.load(random_checkpoint, **options)
    assert loaded.grid == TokenGrid(6, 6)
    assert loaded.image_size == (24, 24)
    images = loaded.decode_images(random_codes(loaded, 2))
    assert images.shape == (2, 24, 24, 3)


def test_a_checkpoint_of_another_family_or_with_holes_is_refused(tmp_path, random_checkpoint):
    options = {"name": "tiny", "guidance": 3.0}
    copies = {name: tmp_path / name for name in ("family", "hole", "cut")}
    for copy in copies.values():
        shutil.copytree(random_checkpoint, copy)
    config = json.loads((copies["family"] / "config.json").read_text())
    (copies["family"] / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="holds a llama model, not a janus one"):
        JanusBackbone.load(str(copies["family"]), **options)
    weights = load_file(copies["hole"] / "model.safetensors")
    del weights["model.generation_head.vision_head.weight"]
    save_file(weights, copies["hole"] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights, the first .*vision_head"):
        JanusBackbone.load(str(copies["hole"]), **options)
    whole = (copies["cut"] / "model.safetensors").read_bytes()
    (copies["cut"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="broken weights"):
        JanusBackbone.load(str(copies["cut"]), **options)


def test_other_models_keep_their_own_attention(random_backbone, random_checkpoint):
    """A plain model beside a backbone still masks its padding, which raster attention ignores."""
    plain = JanusForConditionalGeneration.from_pretrained(random_checkpoint, dtype=torch.float64)
    ids = torch.tensor([random_backbone.prompt_ids(PROMPTS[0])])
    positions, left = torch.arange(ids.shape[1])[None], (3, 0)
    with torch.no_grad():
        stack = plain.model.language_model.eval()
        want = stack(ids, use_cache=False).last_hidden_state
        got = stack(
            F.pad(ids, left, value=1),
            attention_mask=F.pad(torch.ones_like(ids), left),
            position_ids=F.pad(positions, left),
            use_cache=False,
        ).last_hidden_state
    torch.testing.assert_close(got[:, 3:], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guidance": -1.0}, "sampling.guidance"),
        ({"guidance": 1.0, "temperature": 0.0}, "sampling.temperature"),
        ({"guidance": 1.0, "top_k": 0}, "sampling.top_k"),
        ({"guidance": 1.0, "top_p": 1.5}, "sampling.top_p"),
    ],
)
def test_bad_sampling_names_the_option(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options)


def test_filters_keep_the_likeliest():
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]], dtype=torch.float64)
    top2 = Sampling(guidance=1.0, top_k=2).distribution(logits)[0, 0]
    torch.testing.assert_close(top2[:2], logits[0, 0, :2].softmax(-1))
    assert (top2[2:] == 0).all()
    full = logits.softmax(-1)[0, 0]
    nucleus = Sampling(guidance=1.0, top_p=float(full[0]) + 0.01).distribution(logits)[0, 0]
    torch.testing.assert_close(nucleus[:2], full[:2] / full[:2].sum())
    cold = Sampling(guidance=1.0, temperature=0.5).distribution(logits)[0, 0]
    torch.testing.assert_close(cold, (2 * logits[0, 0]).softmax(-1))
