"""Lossless decoders are lossless: their exact law is that of autoregressive sampling.

Every decoder's real code runs once for every way that its random choices can fall, on models whose
conditional laws are arbitrary tables (`enumeration.py`, `table_model.py`). The mistakes that the
field has made, and a few more, are made here on purpose, and each changes the law.
"""

import functools
import re

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import enumeration
import exactness_table
from enumeration import Laws, exact_laws, total_variation
from ssd_research.decoders import eagle, jacobi, multi_token
from ssd_research.decoders.accept import Rejection, residual
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.chain import Chain, Verdict
from ssd_research.decoders.jacobi import SpeculativeJacobi
from ssd_research.decoders.lantern import Lantern
from ssd_research.decoders.multi_token import MultiTokenStrict
from ssd_research.decoders.parallel_jacobi import ParallelJacobi
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.decoders.spatial_exact import SpatialJacobi
from ssd_research.decoders.tree_chain import TreeChain
from ssd_research.decoders.zipar import ZipAR
from ssd_research.grid import TokenGrid
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling
from table_model import TableBackbone, TableDrafter, TableHeads, ar_law

EXACT, WRONG = 1e-12, 1e-6
PROMPTS = ("1", "2 3")  # of different lengths, and one as long as the unconditional one

ROW, SQUARE, ENDS = TokenGrid(1, 4), TokenGrid(2, 2), TokenGrid(2, 2, end_of_row=True)
COLUMN = TokenGrid(3, 1, end_of_row=True)
PLAIN, GUIDED = Sampling(1.0), Sampling(2.0)
WARM_TOP_K = Sampling(1.5, temperature=0.7, top_k=2)
WARM_TOP_P = Sampling(1.5, temperature=0.7, top_p=0.85)
TOP_P = Sampling(1.0, top_p=0.85)
MODELS = {
    "guidance, three of four codes": (TokenGrid(1, 3), 4, Sampling(2.0, top_k=3)),
    "rows end, T, top-k": (ENDS, 3, WARM_TOP_K),
    "T, top-p": (ROW, 3, WARM_TOP_P),
}
MORE_MODELS = {
    "one row": (ROW, 3, PLAIN),
    "square": (SQUARE, 3, GUIDED),
    "rows end": (ENDS, 3, GUIDED),
    "each code ends a row": (COLUMN, 3, GUIDED),
    "five codes": (TokenGrid(1, 3), 5, WARM_TOP_P),
}
LARGE_MODELS = {
    "wide, rows end, top-k": (TokenGrid(2, 3, end_of_row=True), 3, Sampling(1.0, top_k=2)),
    "tall, T, top-k": (TokenGrid(3, 2), 3, WARM_TOP_K),
}

TREE = [[0], [1], [0, 0], [0, 1], [1, 0]]
DECODERS = {
    "ar": Autoregressive(),
    "mtp_strict": MultiTokenStrict(),
    "mtp_strict, one": MultiTokenStrict(k_h=1),
    "mtp_strict, two": MultiTokenStrict(k_h=2),
    "sjd, L < N": SpeculativeJacobi(window=2),
    "sjd, L = 3": SpeculativeJacobi(window=3),
    "sjd, L > N": SpeculativeJacobi(window=6),
    "sjd, horizontal": SpeculativeJacobi(init="horizontal"),
    "sjd, vertical": SpeculativeJacobi(init="vertical"),
    "sjd, uniform q": SpeculativeJacobi(window=3, init_q="uniform"),
    "sjd, by row": SpeculativeJacobi(by_row=True),
    "mc_sjd, L < N": SpeculativeJacobi(window=3, coupling="maximal"),
    "mc_sjd, L > N": SpeculativeJacobi(window=6, coupling="maximal"),
    "mc_sjd, horizontal": SpeculativeJacobi(coupling="maximal", init="horizontal"),
    "mc_sjd, uniform q": SpeculativeJacobi(coupling="maximal", init_q="uniform"),
    "mc_sjd, gumbel": SpeculativeJacobi(window=3, coupling="gumbel"),
    "mc_sjd, gumbel, vertical": SpeculativeJacobi(coupling="gumbel", init="vertical"),
    "lantern strict, heads": Lantern(accept="strict"),
    "lantern strict, eagle chain": Lantern(accept="strict", drafter="eagle", depth=2),
    "lantern strict, siblings": Lantern(accept="strict", drafter="eagle", tree=[3]),
    "lantern strict, tree": Lantern(accept="strict", drafter="eagle", tree=TREE),
    "ssd strict": SpatiallySpeculative(accept="strict"),
    "ssd strict, v = 2": SpatiallySpeculative(accept="strict", v=2, k_h=1),
    "ssd_exact": SpatialJacobi(),
    "ssd_exact, v = 2": SpatialJacobi(v=2, k_h=1),
    "ssd_exact, window": SpatialJacobi(v=2, window=3),
}
ENDED = {
    "ar, own_pass": Autoregressive("own_pass"),
    "ar, folded": Autoregressive("folded"),
}


def laws(
    decoder: Decoder, grid: TokenGrid, codes: int, sampling: Sampling, prompts=PROMPTS
) -> Laws:
    """Return the exact laws of a decoder on the table model of a grid."""
    backbone = TableBackbone(grid, codes)
    heads = None
    if decoder.needs_heads:
        kind = decoder.reach(grid).get("kind")
        heads = TableDrafter(backbone) if kind == "eagle" else TableHeads(backbone)
    return exact_laws(decoder, backbone, prompts, sampling=sampling, heads=heads)


@functools.cache
def expected(grid: TokenGrid, codes: int, sampling: Sampling, prompt: str) -> np.ndarray:
    """Return the autoregressive law of a prompt on the table model of a grid."""
    return ar_law(TableBackbone(grid, codes), prompt, sampling).numpy()


def distance(decoder: Decoder, grid: TokenGrid, codes: int, sampling: Sampling) -> float:
    """Return the largest total variation from the autoregressive law over the prompts."""
    found = laws(decoder, grid, codes, sampling).probability
    return max(
        total_variation(law, expected(grid, codes, sampling, prompt))
        for prompt, law in zip(PROMPTS, found, strict=True)
    )


def cases(models, names=tuple(DECODERS)):
    return [
        pytest.param(name, model, id=f"{name}-{model}")
        for name in names
        for model, (_, codes, _) in models.items()
        if codes == 3 or "gumbel" not in name  # shared Gumbel variables are enumerated for three
    ]


SPATIAL = [name for name in DECODERS if name.startswith("ssd")]
# What has few enough paths on six codes.
SHORT = [
    *("ar", "mtp_strict, one", "mtp_strict, two"),
    *("sjd, L < N", "sjd, L = 3", "sjd, uniform q", "mc_sjd, L < N", "mc_sjd, gumbel"),
    *(name for name in DECODERS if name.startswith("lantern strict, ") and "heads" not in name),
]


@pytest.mark.parametrize(("name", "model"), [*cases(MODELS), *cases(LARGE_MODELS, SPATIAL)])
def test_the_law_is_that_of_autoregressive_sampling(name, model):
    assert DECODERS[name].lossless
    assert distance(DECODERS[name], *(MODELS | LARGE_MODELS)[model]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [*cases(MORE_MODELS), *cases(LARGE_MODELS, SHORT)])
def test_the_law_is_that_of_autoregressive_sampling_on_more_models(name, model):
    assert distance(DECODERS[name], *(MORE_MODELS | LARGE_MODELS)[model]) < EXACT


@pytest.mark.parametrize("grid", [ENDS, COLUMN])
@pytest.mark.parametrize("name", ENDED)
def test_both_ways_to_end_rows_are_exact(name, grid):
    assert distance(ENDED[name], grid, 3, GUIDED) < EXACT


@pytest.mark.parametrize(
    "decoder",
    [
        ZipAR(window=2, final_commit=False),
        ParallelJacobi(context=2, init="random"),
        Lantern(accept="lantern", k=0, delta=0.5),
        Lantern(accept="lantern_pp", k=2, lam=1),
        SpeculativeJacobi(group=1),
    ],
    ids=lambda decoder: decoder.title,
)
def test_lossy_decoders_are_exact_at_their_limits(decoder):
    """Complete rows, no relaxation, groups of one: the reductions of the lossy methods."""
    assert distance(decoder, ENDS, 3, WARM_TOP_K) < EXACT


def test_two_prompts_in_one_batch_have_the_laws_they_have_alone():
    decoder = SpeculativeJacobi(window=3, coupling="maximal")
    together = laws(decoder, ENDS, 3, GUIDED).probability
    assert total_variation(*together) > 0.1
    for prompt, law in zip(PROMPTS, together, strict=True):
        assert total_variation(law, expected(ENDS, 3, GUIDED, prompt)) < EXACT
        alone = laws(decoder, ENDS, 3, GUIDED, prompts=[prompt]).probability[0]
        assert total_variation(law, alone) < EXACT


@pytest.mark.parametrize("choice", sorted(p.stem for p in (conf_dir() / "decoder").glob("*.yaml")))
def test_every_lossless_decoder_of_the_configuration_is_proved(choice):
    def kind(decoder):
        return (type(decoder), *(getattr(decoder, key, None) for key in ("coupling", "accept")))

    with initialize_config_dir(str(conf_dir()), version_base=None):
        settings = compose("config", [f"decoder={choice}"]).decoder
    decoder = instantiate(settings, _convert_="all")
    assert not decoder.lossless or kind(decoder) in map(kind, DECODERS.values())


def test_the_page_of_distances_names_every_decoder():
    page = exactness_table.PATH.read_text(encoding="utf-8")
    named = re.findall(r"^\| (\w.*?) \| loss", page, re.MULTILINE)
    assert named == list(exactness_table.DECODERS)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("1D-MTP", "ZipAR window=1") else pytest.param(name, marks=pytest.mark.slow)
        for name in exactness_table.DECODERS
    ],
)
def test_the_page_of_distances_is_of_this_code(name):
    row = exactness_table.row(name, exactness_table.DECODERS[name])
    assert f"| {' | '.join(row)} |" in exactness_table.PATH.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ mutants
BRANCH = enumeration.Branches.categorical
TEST, FORWARD, CARRIED = Chain.test, Chain.forward, jacobi.carried
GUESS, DRAFT_LAW = jacobi.Guesses.draft, multi_token.draft_law
SIBLINGS, CHOOSE = eagle.EagleDrafting._sample, TreeChain._choose


def kept_keeps_old_q(patch):
    """A draft that was redrawn as itself keeps the law of its first drawing (decoders.md 4.4)."""
    last = {}

    def test(chain, rule, **options):
        verdict = TEST(chain, rule, **options)
        kept = verdict.tokens[:, :-1] == options["drafts"]
        last["law"] = torch.where(kept[..., None], options["q"], options["p"][:, :-1])
        return verdict

    def carried(p, there, **options):
        p = torch.cat([last["law"], p[:, -1:]], 1) if there.any() else p
        return CARRIED(p, there, **options)

    patch.setattr(Chain, "test", test)
    patch.setattr(jacobi, "carried", carried)


def rejected_is_drawn_from_p(patch):
    patch.setattr(Rejection, "correction", lambda rule, p, q, draft: p)


def one_commit_per_step(patch, *, old_q):
    """As in a batch that advances by its slowest image: what more was decided is tested again."""
    last = {}

    def test(chain, rule, **options):
        full = TEST(chain, rule, **options)
        first = torch.zeros_like(full.fresh)
        first[:, 0] = full.committed[:, 0]
        kept = full.kept & old_q
        last["full"] = full
        last["law"] = torch.where(kept[..., None], options["q"], options["p"][:, :-1])
        return Verdict(torch.zeros_like(full.kept), full.tokens, first)

    def redraft(chain, verdict, beyond, *, p, number, coupling):
        places, full = chain.places(p.shape[1]), last["full"]
        draw = chain.noise.at(places, number)
        fresh = draw.categorical(p, purpose="draft", needed=beyond & ~full.committed)
        chain.write(places, torch.where(full.committed, full.tokens, fresh), beyond)

    def carried(p, there, **options):
        p = torch.cat([last["law"], p[:, -1:]], 1) if there.any() else p
        return CARRIED(p, there, **options)

    patch.setattr(Chain, "test", test)
    patch.setattr(jacobi, "redraft", redraft)
    patch.setattr(jacobi, "carried", carried)


def slowest_image_commits(patch):
    one_commit_per_step(patch, old_q=True)


def residual_filtered_again(patch, sampling):
    def correction(rule, p, q, draft):
        return sampling.distribution(residual(p, q).log())

    patch.setattr(Rejection, "correction", correction)


def residual_has_temperature_again(patch):
    residual_filtered_again(patch, Sampling(1.0, temperature=WARM_TOP_K.temperature))


def residual_has_top_p_again(patch):
    residual_filtered_again(patch, TOP_P)


def residual_shares_the_gumbel_noise(patch):
    def categorical(draw, p, *, purpose, needed=None):
        if purpose == "residual":
            draw, purpose = enumeration.Branches(draw.noise, draw.positions, 0), "gumbel"
        return BRANCH(draw, p, purpose=purpose, needed=needed)

    patch.setattr(enumeration.Branches, "categorical", categorical)


def copies_have_uniform_q(patch):
    def draft(guesses, chain, positions, new):
        q = GUESS(guesses, chain, positions, new)
        return torch.full_like(q, 1 / q.shape[-1])

    patch.setattr(jacobi.Guesses, "draft", draft)


def p_of_the_position_before(patch):
    def forward(chain, drafts, positions):
        p = FORWARD(chain, drafts, positions)
        return torch.cat([p[:, :1], p[:, :-1]], 1)

    patch.setattr(Chain, "forward", forward)


def q_without_guidance(patch):
    """Drafts are drawn from the guided law and tested against the conditional one."""
    last = {}

    def draft_law(state, heads, axis, **where):
        guided = DRAFT_LAW(state, heads, axis, **where)
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                state,
                "distribution_of",
                lambda h: state.sampling.distribution(state.backbone.logits(h.chunk(2)[0], 1)),
            )
            last["q"] = DRAFT_LAW(state, heads, axis, **where)
        return guided

    def test(chain, rule, **options):
        return TEST(chain, rule, **{**options, "q": last["q"]})

    patch.setattr(multi_token, "draft_law", draft_law)
    patch.setattr(Chain, "test", test)


def argmax_scored_by_q(patch):
    def categorical(draw, p, *, purpose, needed=None):
        drawn = BRANCH(draw, p, purpose=purpose, needed=needed)
        return p.argmax(-1) if purpose == "draft" else drawn

    patch.setattr(enumeration.Branches, "categorical", categorical)


def argmax_scored_by_one(patch):
    """No mistake: given what it is chosen from, a draft by argmax is certain."""
    argmax_scored_by_q(patch)

    def test(chain, rule, **options):
        certain = torch.nn.functional.one_hot(options["drafts"], options["q"].shape[-1])
        return TEST(chain, rule, **{**options, "q": certain.to(options["q"])})

    patch.setattr(Chain, "test", test)


def siblings_scored_by_whole_q(patch):
    """As if the elder siblings' codes had not been taken out of q."""

    def sample(work, made, left, above, *, level, number):
        whole = left / left.sum(-1, keepdim=True)
        SIBLINGS(work, made, left, above, level=level, number=number)
        for node, path in enumerate(work.tree.paths, 1):
            if len(path) == level:
                made.q[:, node - 1] = whole[:, above.index(work.tree.parent(node))]

    patch.setattr(eagle.EagleDrafting, "_sample", sample)


def siblings_all_tested_against_p(patch):
    def choose(work, rule, node, walking, *, law, drafts, number):
        return CHOOSE(work, rule, node, walking, law=law, drafts=drafts, number=number)[0], law

    patch.setattr(TreeChain, "_choose", choose)


def accepted_keys_stay_in_scratch(patch):
    patch.setattr("ssd_research.backbones.state.DecodingState.keep", lambda *_: None)


def newest_code_is_not_fed(patch):
    """The correction's key stays that of the rejected draft."""

    def forward(chain, drafts, positions):
        state = chain.state
        feed = state.forward

        def without(codes, fed, **options):
            fed = fed.clone()
            fed[:, 0] = fed[:, 0].where(chain.committed == 1, -1)
            feed(codes, fed, **options)

        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(state, "forward", without)
            return FORWARD(chain, drafts, positions)

    patch.setattr(Chain, "forward", forward)


SJD, MAXIMAL = DECODERS["sjd, L = 3"], DECODERS["mc_sjd, L < N"]
GUMBEL, COPIES = DECODERS["mc_sjd, gumbel"], DECODERS["sjd, horizontal"]
STRICT, TREES = DECODERS["mtp_strict, two"], DECODERS["lantern strict, tree"]
MUTANTS = [
    (kept_keeps_old_q, MAXIMAL, ROW, PLAIN),
    (kept_keeps_old_q, DECODERS["ssd_exact, v = 2"], TokenGrid(3, 2), WARM_TOP_K),
    (rejected_is_drawn_from_p, SJD, ROW, PLAIN),
    (rejected_is_drawn_from_p, MAXIMAL, ROW, PLAIN),
    (rejected_is_drawn_from_p, STRICT, ROW, PLAIN),
    (rejected_is_drawn_from_p, TREES, SQUARE, WARM_TOP_P),
    (rejected_is_drawn_from_p, DECODERS["ssd strict"], SQUARE, GUIDED),
    (slowest_image_commits, SJD, ROW, PLAIN),
    (residual_has_temperature_again, SJD, SQUARE, WARM_TOP_K),
    (residual_has_temperature_again, STRICT, ROW, PLAIN),
    (residual_has_top_p_again, SJD, ROW, TOP_P),
    (residual_has_top_p_again, MAXIMAL, ROW, TOP_P),
    (residual_shares_the_gumbel_noise, GUMBEL, ROW, PLAIN),
    (copies_have_uniform_q, COPIES, ROW, PLAIN),
    (p_of_the_position_before, SJD, ROW, PLAIN),
    (p_of_the_position_before, STRICT, ROW, PLAIN),
    (q_without_guidance, STRICT, ROW, GUIDED),
    (argmax_scored_by_q, STRICT, ROW, PLAIN),
    (siblings_scored_by_whole_q, TREES, SQUARE, WARM_TOP_P),
    (siblings_all_tested_against_p, TREES, SQUARE, WARM_TOP_P),
    (accepted_keys_stay_in_scratch, TREES, SQUARE, WARM_TOP_P),
    (newest_code_is_not_fed, STRICT, ROW, PLAIN),
]


@pytest.mark.parametrize(
    ("mutant", "decoder", "grid", "sampling"),
    [pytest.param(*one, id=f"{one[0].__name__}-{one[1].title}") for one in MUTANTS],
)
def test_mutants_have_another_law(monkeypatch, mutant, decoder, grid, sampling):
    mutant(monkeypatch)
    assert distance(decoder, grid, 3, sampling) > WRONG


@pytest.mark.parametrize("grid", [ROW, ENDS])
@pytest.mark.parametrize(
    ("variant", "decoder"),
    [
        (functools.partial(one_commit_per_step, old_q=False), SJD),
        (argmax_scored_by_one, STRICT),
        (argmax_scored_by_one, DECODERS["lantern strict, eagle chain"]),
    ],
    ids=["slowest image commits, q is p", "argmax of heads", "argmax of eagle"],
)
def test_what_makes_these_mutants_right_is_exact(monkeypatch, variant, decoder, grid):
    variant(monkeypatch)
    assert distance(decoder, grid, 3, WARM_TOP_P) < EXACT
