"""The backbone and its raster KV against independent references on real transformers classes."""

import pytest
import torch
import torch.nn.functional as F
from transformers import JanusForConditionalGeneration

from conftest import both_streams, make_backbone
from ssd_research.backbones.janus import JanusBackbone, conditional_ids, unconditional_ids
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders.autoregressive import Autoregressive
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
    assert state.meter.nfe == [1 + 12] * 4
    assert state.meter.tokens == [2 * 35] * 4


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


def test_what_is_not_visible_changes_nothing(random_backbone):
    codes, other = random_codes(random_backbone, 1), random_codes(random_backbone, 1, seed=3)
    seen = []
    for junk in (codes, other):
        state = random_backbone.start(PROMPTS[:1], sampling=random_backbone.defaults)
        state.forward(junk[:, :4], range(4), phase="verify")
        visible = torch.arange(state.slots) <= torch.tensor([[[4], [5]]])
        visible[..., :4] = False
        positions = torch.tensor([[4, 5]])
        state.forward(codes[:, 4:6], positions, phase="verify", visible=visible)
        seen.append(state.h_pre[:, 5:7])
    torch.testing.assert_close(seen[0], seen[1], atol=1e-12, rtol=0)


class Folded(JanusBackbone):
    """Janus's classes on a grid whose rows end with a token."""

    def end_of_row_embedding(self):
        return self.code_embeddings[:1, None] * 0 + 7


@pytest.fixture(scope="module")
def folded():
    model, tokenizer = random_model()
    backbone = Folded(model.double(), tokenizer, name="folded", defaults=Sampling(guidance=2.0))
    backbone.grid = TokenGrid(6, 6, end_of_row=True)
    return backbone


def test_end_of_row_tokens_are_folded_in(folded):
    """A grid with end-of-row tokens puts them after each row's last code, in the same pass."""
    codes = random_codes(folded, 1)
    slots = torch.arange(4, 16)
    embeds = folded.embed_tokens(codes[:, folded.grid.position(slots)], slots)
    assert (embeds[0, 2] == 7).all()
    assert (embeds[0, 9] == 7).all()
    torch.testing.assert_close(embeds[:, 3:9], folded.embed(codes[:, 6:12]))
    state = folded.start(PROMPTS[:1], sampling=folded.defaults)
    state.forward(codes[:, :9], range(9), phase="verify")
    state.forward(codes[:, 9:], range(9, 36), phase="verify")
    want = both_streams(folded, PROMPTS[:1], codes)
    torch.testing.assert_close(state.h_pre, want, atol=1e-10, rtol=0)
    assert state.meter.tokens == [folded.grid.slots]


def test_images_of_their_own_pace_on_a_grid_with_end_of_row_tokens(folded):
    """Windows cross row ends at different moments, and one image has less to feed."""
    codes = random_codes(folded, 2)
    want = both_streams(folded, PROMPTS[:2], codes)
    state = folded.start(PROMPTS[:2], sampling=folded.defaults)
    for first in range(0, 36, 4):
        positions = torch.arange(first, first + 4).expand(2, -1).clone()
        positions[1] -= 3
        positions[1, 2:][positions[1, 2:] > 30] = -1
        positions[positions < 0] = -1
        fed = codes.gather(1, positions.clamp_min(0))
        state.forward(fed, positions, phase="verify")
    torch.testing.assert_close(state.h_pre[[0, 2]], want[[0, 2]], atol=1e-10, rtol=0)
    torch.testing.assert_close(state.h_pre[[1, 3], :31], want[[1, 3], :31], atol=1e-10, rtol=0)
    assert state.meter.tokens[0] == folded.grid.slots
    assert state.meter.tokens[1] < folded.grid.slots
    assert state.meter.nfe == [1 + 9] * 2


def test_an_image_with_nothing_to_feed_takes_no_part(random_backbone):
    codes = random_codes(random_backbone, 2)
    state = random_backbone.start(PROMPTS[:2], sampling=random_backbone.defaults)
    state.forward(codes[:, :3], torch.tensor([[0, 1, 2], [-1, -1, -1]]), phase="verify")
    assert state.meter.nfe == [2, 1]
    assert state.meter.tokens == [3, 0]
    assert state.meter.passes == 2
    state.forward(codes[:, :3], range(3), phase="verify")
    want = both_streams(random_backbone, PROMPTS[:2], codes)
    torch.testing.assert_close(state.h_pre[:, :4], want[:, :4], atol=1e-10, rtol=0)


def test_a_tree_in_scratch_slots_equals_its_paths(random_backbone):
    """Two candidates for one position, each with a child; the accepted path is moved in place."""
    backbone, codes = random_backbone, random_codes(random_backbone, 2)
    other = (codes + 1) % backbone.codebook_size
    state = backbone.start(PROMPTS[:2], sampling=backbone.defaults, scratch=4)
    state.forward(codes[:, :5], range(5), phase="commit")
    first = backbone.grid.slots
    fed = torch.stack([codes[:, 5], other[:, 5], codes[:, 6], other[:, 6]], 1)
    places = torch.tensor([[5, 5, 6, 6]]).expand(2, -1)
    slots = torch.arange(first, first + 4).expand(2, -1)
    visible = torch.zeros(2, 4, state.slots, dtype=torch.bool)
    visible[..., :5] = True
    for node, ancestors in enumerate([[0], [1], [0, 2], [1, 3]]):
        visible[:, node, [first + one for one in ancestors]] = True
    h = state.feed(fed, slots, phase="verify", visible=visible, places=places)
    right = both_streams(backbone, PROMPTS[:2], codes)
    mixed = codes.clone()
    mixed[:, 5:7] = other[:, 5:7]
    wrong = both_streams(backbone, PROMPTS[:2], mixed)
    for node, want in enumerate([right[:, 6], wrong[:, 6], right[:, 7], wrong[:, 7]]):
        torch.testing.assert_close(h[:, node], want, atol=1e-10, rtol=0)
    state.keep(slots[:, [1, 3]], torch.tensor([[5, 6]]).expand(2, -1))
    state.forward(mixed[:, 7:8], range(7, 8), phase="commit")
    torch.testing.assert_close(state.h_pre[:, 8], wrong[:, 8], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("end_of_row", "nfe"), [(None, 42), ("own_pass", 42), ("folded", 36)])
def test_autoregressive_counts_end_of_row_forwards_as_the_paper_or_folds_them(
    folded, end_of_row, nfe
):
    options = {"sampling": folded.defaults, "seed": 0, "sample_keys": [1, 2]}
    made = Autoregressive(end_of_row=end_of_row).decode(folded, PROMPTS[:2], **options)
    assert made.nfe == [nfe] * 2
    other = Autoregressive(end_of_row="folded").decode(folded, PROMPTS[:2], **options)
    assert torch.equal(made.codes, other.codes)


def test_an_end_of_row_setting_that_does_nothing_is_refused(random_backbone):
    with pytest.raises(ValueError, match=r"decoder\.end_of_row=folded does nothing here"):
        Autoregressive(end_of_row="folded").decode(
            random_backbone, PROMPTS[:1], sampling=Sampling(1.0), seed=0, sample_keys=[0]
        )
    with pytest.raises(ValueError, match="not one of own_pass, folded, null"):
        Autoregressive(end_of_row="never")


def test_fingerprint_follows_weights_not_dtype(random_backbone):
    assert random_backbone.fingerprint == make_backbone(dtype=torch.float32).fingerprint
    assert random_backbone.fingerprint != make_backbone(seed=1).fingerprint


def test_unknown_words_are_named(random_backbone):
    with pytest.raises(ValueError, match=r"does not know 'zebra'.*circle"):
        random_backbone.start(["a red zebra"], sampling=random_backbone.defaults)


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
