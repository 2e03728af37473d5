"""LANTERN: its rules by hand, and its decoding against an uncached reference of its own.

The reference keeps lists of codes, runs backbone and drafter from the start for every question, and
walks its trees by recursion; it knows no state, no cache, no masks and no rule objects.
"""

import itertools

import numpy as np
import pytest
import torch

from conftest import both_streams, make_backbone, make_heads
from published_emu3 import write_emu3
from published_lumina import write_lumina
from ssd_research.backbones.base import Backbone, nearest
from ssd_research.backbones.emu3 import Emu3Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.lumina import LuminaBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders import lantern
from ssd_research.decoders.accept import Rejection
from ssd_research.decoders.lantern import Lantern
from ssd_research.decoders.multi_token import MultiTokenStrict
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.decoders.relaxed import Relaxed
from ssd_research.decoders.tree import Tree
from ssd_research.decoders.tree_chain import TreeChain
from ssd_research.eagle import EagleDrafter
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a large pink square left of a small black circle"]
SEED, KEYS = 7, [31, 32]
WARM = Sampling(2.0, temperature=2.0)  # laws flat enough for drafts to be accepted
TREE = [3, 2, 1]
BUSHY = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]]


def make_drafter(backbone) -> EagleDrafter:
    """Return a drafter that mostly repeats the last state, which some codes survive."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter = EagleDrafter.like(backbone, initialisation="identity")
        for p in (p for p in drafter.parameters() if p.ndim == 2):
            p.data += 0.1 * torch.randn_like(p)
    return drafter.to(backbone.dtype).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def small():
    return make_backbone(grid=4)


@pytest.fixture(scope="module")
def heads(small):
    return make_heads(small)


@pytest.fixture(scope="module")
def drafter(small):
    return make_drafter(small)


def decode(backbone, heads, *, sampling=WARM, prompts=PROMPTS, keys=KEYS, **options):
    return Lantern(**options).decode(
        backbone, prompts, sampling=sampling, seed=SEED, sample_keys=keys, heads=heads
    )


# ------------------------------------------------------------------------------------- neighbours
def test_nearest_codes_are_sorted_by_distance_and_leave_the_code_out():
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0], [1.0]])
    assert nearest(line, 4).tolist() == [
        [1, 4, 2, 3],  # codes at the same distance in order of their numbers
        [4, 0, 2, 3],
        [1, 4, 0, 3],
        [2, 1, 4, 0],
        [1, 0, 2, 3],
    ]
    assert nearest(line, 0).shape == (5, 0)


def test_nearest_codes_of_a_large_codebook_come_in_parts():
    codebook = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0))
    table = nearest(codebook, 2)
    distance = torch.cdist(codebook.double(), codebook.double()).fill_diagonal_(torch.inf)
    assert torch.equal(table.long(), distance.topk(2, largest=False).indices)


def test_neighbours_are_those_of_the_vectors_that_the_image_decoder_sees():
    """Janus looks up unit vectors: a code's length, which the table stores, counts for nothing."""
    backbone = make_backbone()
    table = backbone.nearest_codes(5)
    with torch.no_grad():
        backbone.image_decoder.quantize.embedding.weight *= torch.arange(1, 33)[:, None]
    assert torch.equal(nearest(backbone.codebook, 5), table)
    every = torch.arange(32).repeat_interleave(36)[None].view(32, 36)
    seen = backbone.image_decoder.quantize.get_codebook_entry(every)[:, :, 0, 0]
    torch.testing.assert_close(backbone.codebook, seen)


class Bare(JanusBackbone):
    """Janus's classes without what the adapter knows of Janus's codebook."""

    codebook = Backbone.codebook


def test_the_codebook_is_the_image_decoders_one_table():
    model, tokenizer = random_model(grid=4)
    backbone = Bare(model, tokenizer, name="bare", defaults=Sampling(1.0))
    assert backbone.codebook is model.model.vqmodel.quantize.embedding.weight
    backbone.image_decoder = torch.nn.Identity()
    with pytest.raises(ValueError, match="bare: its image decoder holds no one table of 32 codes"):
        backbone.nearest_codes(1)


# ------------------------------------------------------------------------------------------ rules
P = torch.tensor([0.30, 0.20, 0.25, 0.15, 0.10], dtype=torch.float64)[None, None]
Q = torch.tensor([0.05, 0.65, 0.10, 0.10, 0.10], dtype=torch.float64)[None, None]
NEAR = torch.tensor([[1, 2, 3, 4], [4, 3, 0, 2], [1, 3, 0, 4], [2, 4, 1, 0], [1, 3, 2, 0]])


@pytest.mark.parametrize(
    ("k", "bound", "target"),
    [
        (4, {"delta": 0.25}, [0.30, 0.45, 0.25, 0, 0]),  # 4 and 3 fit, 0 would not
        (4, {"delta": 0.24}, [0.30, 0.30, 0.25, 0.15, 0]),  # 3 does not fit
        (4, {"delta": 0.09}, [0.30, 0.20, 0.25, 0.15, 0.10]),
        (4, {"delta": 1.0}, [0, 1, 0, 0, 0]),
        (1, {"delta": 1.0}, [0.30, 0.30, 0.25, 0.15, 0]),
        (0, {"delta": 1.0}, [0.30, 0.20, 0.25, 0.15, 0.10]),
        (4, {"lam": 1.6}, [0.30, 0.30, 0.25, 0.15, 0]),  # 0.6 p(x) = 0.12
        (4, {"lam": 2.3}, [0.30, 0.45, 0.25, 0, 0]),  # 0.26
        (4, {"lam": 1.0}, [0.30, 0.20, 0.25, 0.15, 0.10]),
    ],
)
def test_relaxed_by_hand(k, bound, target):
    rule, draft = Relaxed(NEAR[:, :k], **bound), torch.tensor([[1]])
    relaxed = torch.tensor(target, dtype=torch.float64)
    torch.testing.assert_close(rule.target(P, draft)[0, 0], relaxed)
    assert rule.odds(P, Q, draft).item() == pytest.approx(min(1, target[1] / 0.65))
    want = (relaxed - Q[0, 0]).clamp_min(0)
    torch.testing.assert_close(rule.correction(P, Q, draft)[0, 0], want)
    assert (rule.target(P, draft) - P).clamp_min(0).sum() <= bound.get("delta", 1)


def test_where_the_relaxed_law_is_q_a_correction_is_from_p():
    rule = Relaxed(NEAR, delta=0.25)
    q = rule.target(P, torch.tensor([[1]]))
    assert rule.odds(P, q, torch.tensor([[1]])).item() == 1
    torch.testing.assert_close(rule.correction(P, q, torch.tensor([[1]])), P)


def test_every_draft_has_its_own_neighbours():
    draft = torch.tensor([[0, 1], [3, 4]])
    got = Relaxed(NEAR, delta=0.2).target(P.expand(2, 2, -1), draft)
    for b, n in itertools.product(range(2), range(2)):
        alone = Relaxed(NEAR, delta=0.2).target(P, draft[b, n].view(1, 1))
        torch.testing.assert_close(got[b, n], alone[0, 0])


# ------------------------------------------------------------------------------------------- trees
def test_trees_by_levels_and_by_paths():
    tree = Tree.of([2, 1])
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0))
    assert Tree.of([[1, 0], [0], [0, 0], [1]]) == tree
    assert (len(tree), tree.depth) == (4, 2)
    assert tree.children.tolist() == [[1, 2], [3, 0], [4, 0], [0, 0], [0, 0]]
    assert tree.ranks.tolist() == [0, 0, 1, 0, 1]
    assert tree.family.tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [True, False, True, False],
        [False, True, False, True],
    ]
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], r"decoder\.tree=\[\] is neither"),
        ([2, 0], r"neither the children of a node at each level"),
        ([[0], 1], "neither"),
        ([[]], "neither"),
        ([True], "neither"),
        ([[0], [0, 0, 0]], r"lacks the path \[0, 0\], but has the path \[0, 0, 0\]"),
        ([[0], [2]], r"lacks the path \[1\], but has the path \[2\]"),
        ([[-1]], r"has the path \[-1\]"),
    ],
)
def test_a_wrong_tree_is_explained(tree, message):
    with pytest.raises(ValueError, match=message):
        Lantern(drafter="eagle", tree=tree)


# ----------------------------------------------------------------------------- uncached reference
def law(backbone, sampling, h):
    """Return the guided, filtered law of states [S, L, D] as an array [L, K] of one image."""
    logits = backbone.image_head(backbone.decoder.norm.forward(h))
    if sampling.guidance != 1:
        cond, uncond = logits.chunk(2)
        logits = uncond + sampling.guidance * (cond - uncond)
    logits = logits[0] / sampling.temperature
    if sampling.top_k is not None:
        least = logits.sort(-1, descending=True).values[:, sampling.top_k - 1, None]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1).numpy()


class Reference:
    """One image, decoded from the papers' text."""

    def __init__(self, backbone, drafter, *, tree, sampling, prompt, key, relax):
        self.backbone, self.drafter, self.sampling = backbone, drafter, sampling
        self.paths, self.prompt, self.relax = {tuple(p) for p in tree}, prompt, relax
        self.noise, self.size = KeyedNoise(SEED, [key]), backbone.grid.size
        self.codes, self.steps, self.accepted, self.drafted = [], 0, 0, 0

    def states(self, codes):
        """Return the states [S, len(codes) + 1, D] that predict each code and the next."""
        junk = torch.full((self.size,), 3)
        junk[: len(codes)] = torch.tensor(codes, dtype=torch.long)
        streams = 1 if self.sampling.guidance == 1 else 2
        return both_streams(self.backbone, [self.prompt], junk[None])[:streams, : len(codes) + 1]

    def uniform(self, position, rank, number, purpose):
        """Draft `rank` of a position has the noise of the position `rank` images further on."""
        where = torch.tensor([[position + rank * self.size]])
        return self.noise.uniform(where, round=number, purpose=purpose).item()

    @staticmethod
    def inverted(mass, u):
        cumulative = np.cumsum(mass)
        return int((cumulative <= u * cumulative[-1]).sum())

    def drafts(self, number):
        """Return {path: (code, q)}, sampled level by level without replacement."""
        h, made = self.states(self.codes)[:, :-1], {}
        for depth in range(1, max(map(len, self.paths)) + 1):
            position = len(self.codes) + depth - 1
            for rank, path in enumerate(sorted(p for p in self.paths if len(p) == depth)):
                above = path[:-1]
                if position >= self.size or (above and above not in made):
                    continue
                q = self.drafted_law(h, [made[path[:n]][0] for n in range(1, depth)])
                for elder in range(path[-1]):
                    if (*above, elder) in made:
                        q[made[*above, elder][0]] = 0
                if q.sum() > 0:
                    u = self.uniform(position, rank, number, "draft")
                    made[path] = self.inverted(q, u), q / q.sum()
        return made

    def drafted_law(self, h, path):
        """Return q after `path`: the drafter goes on from the true states `h` by its own output."""
        codes, after = list(self.codes), None
        for n in range(len(path) + 1):
            e = self.backbone.code_embeddings[torch.tensor(codes)].expand(len(h), -1, -1)
            places = torch.arange(len(codes)).expand(len(h), -1)
            after = self.drafter(h, e, places)[:, -1:]
            if n < len(path):
                codes, h = [*codes, path[n]], torch.cat([h, after], 1)
        return law(self.backbone, self.sampling, after)[0].copy()

    def relaxed(self, p, x):
        """Return p~, one neighbour at a time."""
        k, delta, lam = self.relax
        p, moved = p.copy(), 0.0
        bound = delta if lam is None else (lam - 1) * p[x]
        vectors = self.backbone.codebook.numpy()
        order = np.argsort(((vectors - vectors[x]) ** 2).sum(1), kind="stable")
        for neighbour in [v for v in order if v != x][:k]:
            if moved + p[neighbour] > bound:
                break
            moved, p[neighbour] = moved + p[neighbour], 0.0
        p[x] += moved
        return p

    def step(self):
        """Draft, walk down, and commit the accepted path and one code beyond it."""
        self.steps += 1
        number, n, made, path = self.steps, len(self.codes), self.drafts(self.steps), ()
        self.drafted += len(made)
        while True:
            walked = self.codes + [made[path[:d]][0] for d in range(1, len(path) + 1)]
            if len(walked) == self.size:
                break
            p = law(self.backbone, self.sampling, self.states(walked)[:, -1:])[0]
            level = sorted(one for one in self.paths if len(one) == len(path) + 1)
            for child in (one for one in level if one[:-1] == path and one in made):
                x, q = made[child]
                target = self.relaxed(p, x)
                u = self.uniform(n + len(path), level.index(child), number, "accept")
                if u < target[x] / q[x]:
                    path = child
                    break
                p = np.maximum(target - q, 0)
                p /= p.sum()
            else:
                walked.append(self.inverted(p, self.uniform(n + len(path), 0, number, "residual")))
                break
        self.accepted += len(path)
        self.codes = walked

    def decode(self):
        p = law(self.backbone, self.sampling, self.states([]))[0]
        self.codes = [self.inverted(p, self.uniform(0, 0, 0, "sample"))]
        while len(self.codes) < self.size:
            self.step()
        return self


STRICT = {"accept": "strict"}
LANTERN = {"k": 4, "delta": 0.06}
PLUS_PLUS = {"accept": "lantern_pp", "k": 4, "lam": 1.8}
RELAX = {"strict": (0, 0.0, None), "lantern": (4, 0.06, None), "lantern_pp": (4, 0.0, 1.8)}


def assert_equal_to_the_reference(backbone, drafter, *, tree, sampling=WARM, **options):
    shape = {"depth": len(tree)} if tree == [1] * len(tree) else {"tree": tree}
    made = decode(backbone, drafter, sampling=sampling, drafter="eagle", **shape, **options)
    for n, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        want = Reference(
            backbone,
            drafter,
            tree=Tree.of(tree).paths,
            sampling=sampling,
            prompt=prompt,
            key=key,
            relax=RELAX[options.get("accept", "lantern")],
        ).decode()
        assert made.codes[n].tolist() == want.codes
        assert made.nfe[n] == 1 + want.steps
        assert made.rounds[0]["accepted"][n] == want.accepted
        assert made.rounds[0]["drafted"][n] == want.drafted
    return made


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ([1, 1, 1], STRICT),
        ([1, 1, 1], LANTERN),
        (TREE, STRICT),
        (TREE, PLUS_PLUS),
        (BUSHY, LANTERN),
    ],
    ids=["chain-strict", "chain-lantern", "levels-strict", "levels-plus_plus", "paths-lantern"],
)
def test_eagle_equals_the_uncached_reference(small, drafter, tree, options):
    made = assert_equal_to_the_reference(small, drafter, tree=tree, **options)
    assert sum(made.rounds[0]["accepted"]) > 10
    assert made.rounds[0]["stage"] == ("chain" if tree == [1, 1, 1] else "tree")


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, temperature=2.0), Sampling(2.0, temperature=2.0, top_k=3)]
)
def test_filters_and_one_stream(small, drafter, sampling):
    """With three codes left, the fourth sibling finds none: it is not there."""
    tree = [4, 1]
    made = assert_equal_to_the_reference(small, drafter, tree=tree, sampling=sampling, **LANTERN)
    if sampling.top_k == 3:
        assert made.rounds[0]["drafted"][0] < 8 * (made.nfe[0] - 2)


class LuminaLike(JanusBackbone):
    """Janus's classes with end-of-row tokens and a short unconditional prompt."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.grid = TokenGrid(4, 3, end_of_row=True)

    def end_of_row_embedding(self):
        return self.decoder.get_input_embeddings().weight[-1][None, None]

    def unconditional_ids(self, ids):
        return [ids[0], self.tokenizer.pad_token_id, ids[-1]]


@pytest.fixture(scope="module")
def lumina():
    model, tokenizer = random_model()
    return LuminaLike(model.double(), tokenizer, name="lumina", defaults=Sampling(3.0))


@pytest.mark.parametrize(
    ("tree", "options"), [([1] * 4, STRICT), (TREE, LANTERN), ([2, 1, 1, 1], STRICT)]
)
def test_grids_whose_rows_end_with_a_token(lumina, tree, options):
    """Drafts cross rows of three codes in most steps, some across two of them."""
    made = assert_equal_to_the_reference(lumina, make_drafter(lumina), tree=tree, **options)
    assert sum(made.rounds[0]["accepted"]) > 5


# --------------------------------------------------------------------------------------- reductions
DRAFTERS = {
    "heads": {},
    "chain": {"drafter": "eagle"},
    "tree": {"drafter": "eagle", "tree": TREE},
}


@pytest.fixture(scope="module")
def drafters(drafter, heads):
    return {"heads": heads, "chain": drafter, "tree": drafter}


@pytest.fixture(scope="module")
def strict_ones(small, drafters):
    return {k: decode(small, drafters[k], accept="strict", **DRAFTERS[k]) for k in DRAFTERS}


@pytest.mark.parametrize(
    "relax", [{"k": 10, "delta": 0}, {"k": 0}, {"accept": "lantern_pp", "lam": 1}]
)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_without_relaxation_lantern_is_strict(small, drafters, strict_ones, kind, relax):
    strict = strict_ones[kind]
    other = decode(small, drafters[kind], **relax, **DRAFTERS[kind])
    assert torch.equal(strict.codes, other.codes)
    assert (strict.nfe, strict.rounds) == (other.nfe, other.rounds)
    assert Lantern(**relax, **DRAFTERS[kind]).lossless


@pytest.mark.parametrize("kind", DRAFTERS)
def test_relaxation_saves_steps(small, drafters, strict_ones, kind):
    loose = decode(small, drafters[kind], k=10, delta=0.3, **DRAFTERS[kind])
    assert sum(loose.nfe) < sum(strict_ones[kind].nfe)


@pytest.mark.parametrize("end_of_row", [False, True])
def test_strict_with_heads_is_mtp_strict(small, lumina, end_of_row):
    backbone = lumina if end_of_row else small
    heads = make_heads(backbone, horizontal=2 if end_of_row else 5)
    mine = decode(backbone, heads, accept="strict")
    other = MultiTokenStrict().decode(
        backbone, PROMPTS, sampling=WARM, seed=SEED, sample_keys=KEYS, heads=heads
    )
    assert torch.equal(mine.codes, other.codes)
    assert (mine.nfe, mine.tokens, mine.rounds) == (other.nfe, other.tokens, other.rounds)


@pytest.mark.parametrize("options", [STRICT, LANTERN], ids=["strict", "lantern"])
def test_a_tree_of_one_path_is_a_chain(small, drafter, options):
    chain = decode(small, drafter, drafter="eagle", depth=4, **options)
    tree = decode(small, drafter, drafter="eagle", tree=[1] * 4, **options)
    assert torch.equal(chain.codes, tree.codes)
    assert (chain.nfe, chain.tokens) == (tree.nfe, tree.tokens)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("end_of_row", [False, True])
def test_an_image_alone_is_what_it_is_in_a_batch(small, lumina, kind, end_of_row):
    backbone = lumina if end_of_row else small
    heads = make_heads(backbone, horizontal=2 if end_of_row else 5)
    heads = heads if kind == "heads" else make_drafter(backbone)
    options = {**DRAFTERS[kind], **STRICT}
    prompts, keys = [*PROMPTS, "two green rings"], [*KEYS, 33]
    made = decode(backbone, heads, prompts=prompts, keys=keys, **options)
    for n in range(2):
        alone = decode(backbone, heads, prompts=prompts[n : n + 1], keys=keys[n : n + 1], **options)
        assert torch.equal(alone.codes[0], made.codes[n])
        assert (alone.nfe[0], alone.tokens[0]) == (made.nfe[n], made.tokens[n])
    assert len(set(made.nfe)) > 1 or kind == "tree"


def test_a_perfect_drafter_takes_the_fewest_steps(small):
    """p itself as draft law: everything is accepted, and a step commits depth + 1 codes."""
    made = decode_with_q_equal_p(small, depth=4)
    assert made.nfe == [1 + 3] * 2  # 1 code from the prefill, then 15 = 3 x 5
    assert made.rounds[0]["accepted"] == made.rounds[0]["drafted"] == [12, 12]


def decode_with_q_equal_p(backbone, *, depth):
    class Same(Rejection):
        """Where p and q are the same law, no draft is rejected."""

        def odds(self, p, q, draft):
            return super().odds(p, p, draft)

    class Patched(Lantern):
        def rule(self, backbone):
            return Same()

    return Patched(drafter="eagle", depth=depth).decode(
        backbone,
        PROMPTS,
        sampling=WARM,
        seed=SEED,
        sample_keys=KEYS,
        heads=make_drafter(backbone),
    )


# ----------------------------------------------------------------------------------------- mutants
# Those of siblings and of argmax drafts are in test_exactness.py, with the proofs of losslessness.
TARGET, ADOPT, VISIBLE = Relaxed.target, TreeChain.adopt, TreeChain._visible


def next_neighbours(rule, p, draft):
    """Count from the second nearest neighbour on."""
    return TARGET(Relaxed(rule.nearest.roll(-1, 1), rule.delta, rule.lam), p, draft)


def one_neighbour_more(rule, p, draft):
    """Zero k + 1 neighbours whatever the bound, as the published code does on a reject."""
    around = rule.nearest[draft].long()
    return TARGET(rule, p, draft).scatter(-1, around, 0)


def mass_kept_by_the_neighbours(rule, p, draft):
    relaxed = TARGET(rule, p, draft)
    return p.scatter(-1, draft[..., None], relaxed.gather(-1, draft[..., None]))


def states_not_adopted(chain, path, fed):
    before = chain.state.h_pre.clone()
    ADOPT(chain, path, fed)
    chain.state.h_pre.copy_(before)


def keys_not_moved(chain, path, fed):
    before = [kv.clone() for kv in (*chain.state.kv.keys, *chain.state.kv.values)]
    ADOPT(chain, path, fed)
    for kv, old in zip((*chain.state.kv.keys, *chain.state.kv.values), before, strict=True):
        kv.copy_(old)


def ends_of_rows_not_moved(chain, path, fed):
    ADOPT(chain, path, type(fed)(fed.nodes, torch.zeros_like(fed.ends), fed.h))


def everything_in_view(chain, newest, ends, extra):
    seen = VISIBLE(chain, newest, ends, extra)
    seen[:, 1:, chain.state.backbone.grid.slots :] = True
    return seen


@pytest.mark.parametrize(
    "mutant", [next_neighbours, one_neighbour_more, mass_kept_by_the_neighbours]
)
def test_mutants_of_the_rule_fail_by_hand(monkeypatch, mutant):
    monkeypatch.setattr(Relaxed, "target", mutant)
    with pytest.raises(AssertionError):
        test_relaxed_by_hand(2, {"delta": 0.2}, [0.30, 0.30, 0.25, 0.15, 0])


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("adopt", states_not_adopted),
        ("adopt", keys_not_moved),
        ("adopt", ends_of_rows_not_moved),
        ("_visible", everything_in_view),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_mutants_of_the_tree_differ_from_the_reference(lumina, monkeypatch, method, mutant):
    drafter = make_drafter(lumina)
    monkeypatch.setattr(TreeChain, method, mutant)
    with pytest.raises(AssertionError):
        assert_equal_to_the_reference(lumina, drafter, tree=[2, 2, 1, 1], **STRICT)


# ----------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medusa"}, r"decoder\.drafter=medusa is not one of heads, eagle"),
        (
            {"accept": "typical"},
            r"decoder\.accept=typical is not one of strict, lantern, lantern_pp",
        ),
        ({"tree": [2]}, r"decoder\.tree=\[2\] does nothing with decoder\.drafter=heads; .*eagle"),
        ({"drafter": "eagle", "k_h": 3}, r"decoder\.k_h=3 does nothing .*belongs to heads"),
        ({"drafter": "eagle", "tree": [2], "depth": 3}, r"leave decoder\.depth out"),
        ({"accept": "strict", "k": 3}, r"decoder\.k=3 does nothing with decoder\.accept=strict"),
        ({"lam": 3}, r"decoder\.lam=3 does nothing .*belongs to lantern_pp"),
        ({"accept": "lantern_pp", "delta": 0.1}, r"decoder\.delta=0\.1 does nothing"),
        ({"delta": 2}, r"decoder\.delta=2 must be a number from 0 to 1"),
        ({"accept": "lantern_pp", "lam": 0.5}, r"decoder\.lam=0\.5 must be a number from 1"),
        ({"k": -1}, r"decoder\.k must be a whole number of at least 0"),
        ({"k_h": 0}, r"decoder\.k_h must be a whole number of at least 1"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Lantern(**options)


def test_more_neighbours_than_codes_are_refused(small, heads):
    with pytest.raises(ValueError, match=r"decoder\.k=32 must be below the 32 codes of random"):
        decode(small, heads, k=32)


def test_the_wrong_kind_of_heads_is_refused(small, heads, drafter):
    with pytest.raises(ValueError, match=r"holds an EAGLE drafter, .* drafts with spatial draft h"):
        decode(small, drafter)
    with pytest.raises(ValueError, match=r"holds spatial draft heads, .* with an EAGLE drafter: "):
        decode(small, heads, drafter="eagle")
    with pytest.raises(ValueError, match=r"decoder=lantern needs trained heads"):
        decode(small, None)


def test_settings_are_what_is_in_force():
    grid = TokenGrid(6, 6)
    assert Lantern().settings(grid) == {
        "drafter": "heads",
        "k_h": 5,
        "accept": "lantern",
        "k": 1000,
        "delta": 0.1,
    }
    assert Lantern(operating_point={"k": 16, "delta": 0.2}, delta=0.3).relaxation == {
        "k": 16,
        "delta": 0.3,
    }
    assert Lantern(drafter="eagle", accept="lantern_pp", tree=[2]).settings(grid) == {
        "drafter": "eagle",
        "tree": [[0], [1]],
        "accept": "lantern_pp",
        "k": 10,
        "lam": 5.0,
    }
    assert Lantern(drafter="eagle", accept="strict").settings(grid)["depth"] == lantern.CHAIN
    assert not Lantern().lossless


# --------------------------------------------------------------------------------------- backbones
def emu3(folder):
    write_emu3(folder)
    return Emu3Backbone.load(str(folder), name="emu3", guidance=3.0, image_size=(48, 64))


def lumina_mgpt(folder):
    write_lumina(folder)
    return LuminaBackbone.load(
        str(folder),
        name="lumina_mgpt",
        guidance=4.0,
        image_size=(64, 96),
        image_decoder=str(folder),
    )


@pytest.mark.parametrize("load", [emu3, lumina_mgpt])
def test_the_papers_other_backbones_have_neighbours_and_drafters(tmp_path, load):
    """Tiny checkpoints in the published layouts: sizes, codebook and rows' ends are found."""
    backbone = load(tmp_path / "checkpoint")
    distances = torch.cdist(backbone.codebook, backbone.codebook).fill_diagonal_(torch.inf)
    assert torch.equal(backbone.nearest_codes(1)[:, 0].long(), distances.argmin(-1))
    config = backbone.decoder.config
    drafter = make_drafter(backbone)
    assert (drafter.kv_heads, drafter.heads) == (
        config.num_key_value_heads,
        config.num_attention_heads,
    )
    made = decode(backbone, drafter, drafter="eagle", tree=TREE, k=8, delta=0.1)
    assert made.codes.shape == (2, backbone.grid.size)
    assert max(made.nfe) < backbone.grid.size
