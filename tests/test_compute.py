"""Compute and memory: counts against what attention saw, Table 12 from the published sizes."""

import json
from functools import cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    JanusForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from conftest import make_heads
from published_janus import full_size_config
from ssd_research import evaluate, generate, paper
from ssd_research.backbones.dimensions import Dimensions
from ssd_research.backbones.emu3 import BEGIN_OF_IMAGE, BOS, END_OF_ROW, IMAGE_TOKEN, Emu3Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.lumina import NO_VQ, LuminaBackbone, LuminaTokens
from ssd_research.backbones.tiny import tiny_tokenizer
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.jacobi import SpeculativeJacobi
from ssd_research.decoders.lantern import Lantern
from ssd_research.decoders.multi_token import MultiToken, MultiTokenStrict
from ssd_research.decoders.parallel_jacobi import ParallelJacobi
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.decoders.spatial_exact import SpatialJacobi
from ssd_research.decoders.zipar import ZipAR
from ssd_research.eagle import EagleDrafter
from ssd_research.evaluations.compute import OLDER
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads, SpatialDraftHead
from ssd_research.image_rows import SCHEMA, rows_of
from ssd_research.metrics import compute
from ssd_research.metrics.compute import HeadSizes
from ssd_research.paths import conf_dir
from ssd_research.prompts import Prompt
from ssd_research.sampling import Sampling
from ssd_research.workload import Task
from uncached import KEYS, PROMPTS, Shaped, backbone_on, shaped

TREE = [2, 2, 1]
DECODERS = {
    "ar": Autoregressive(),
    "ssd": SpatiallySpeculative(v=2, b=1, i=1, k_h=2),
    "ssd_strict": SpatiallySpeculative(v=2, k_h=3, accept="strict"),
    "ssd_exact": SpatialJacobi(v=2, k_h=3),
    "mtp": MultiToken(k_h=3),
    "mtp_strict": MultiTokenStrict(k_h=3),
    "sjd": SpeculativeJacobi(window=6),
    "zipar": ZipAR(window=2),
    "pjd": ParallelJacobi(context=2, window=4),
    "eagle_chain": Lantern(drafter="eagle", accept="strict", depth=3),
    "eagle_tree": Lantern(drafter="eagle", accept="strict", tree=TREE),
}


# -------------------------------------------------------------- what is counted, by brute force


@cache
def drafter_of(grid: str, name: str) -> DraftHeads | EagleDrafter | None:
    backbone, decoder = backbone_on(grid), DECODERS[name]
    if not decoder.needs_heads:
        return None
    if not name.startswith("eagle"):
        return make_heads(backbone, horizontal=4, vertical=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        drafter = EagleDrafter.like(backbone, initialisation="identity")
    return drafter.to(torch.float64).eval().requires_grad_(False)


def decode(grid: str, name: str, *, images=(0, 1), sampling=None):
    return DECODERS[name].decode(
        backbone_on(grid),
        [PROMPTS[n] for n in images],
        sampling=sampling or Sampling(3.0),
        seed=5,
        sample_keys=[KEYS[n] for n in images],
        heads=drafter_of(grid, name),
    )


class Watched:
    """What attention saw: the pairs of each image, from the masks of every forward."""

    def __init__(self, backbone, lengths: list[int], batch: int, monkeypatch) -> None:
        self.pairs, self.tokens, self.prefilled = [0] * batch, [0] * batch, 0
        plain = backbone.run

        def run(embeds, raster):
            for stream in range(len(embeds)):
                self.look(raster, stream, lengths[stream], stream % batch)
            self.prefilled = True
            return plain(embeds, raster)

        monkeypatch.setattr(backbone, "run", run, raising=False)

    def look(self, raster, stream: int, length: int, image: int) -> None:
        for query, slot in enumerate(raster.slots[stream].tolist()):
            if slot == raster.kv.capacity - 1 or (not self.prefilled and query >= length):
                continue
            self.tokens[image] += 1
            if raster.mask is None:
                self.pairs[image] += raster.length
            else:
                mask = raster.mask[stream if len(raster.mask) > 1 else 0, 0, query]
                self.pairs[image] += int(mask.sum())


@pytest.mark.parametrize(("grid", "guidance"), [("square", 1.0), ("ends", 3.0)])
@pytest.mark.parametrize("name", DECODERS)
def test_pairs_are_those_that_attention_saw(name, grid, guidance, monkeypatch):
    """Two prompts of different lengths, so that passes are ragged, in one batch."""
    backbone, sampling = backbone_on(grid), Sampling(guidance)
    ids = [backbone.prompt_ids(text) for text in PROMPTS]
    if guidance != 1:
        ids += [backbone.unconditional_ids(one) for one in ids]
    lengths = [len(one) for one in ids]
    assert lengths[0] != lengths[1]
    watched = Watched(backbone, lengths, 2, monkeypatch)
    made = decode(grid, name, sampling=sampling)
    work = made.work
    assert work.attended == watched.pairs
    assert work.streams == len(ids) // 2
    assert work.prompt_tokens == [sum(lengths[n::2]) for n in range(2)]
    fed = [work.streams * made.tokens[n] + work.prompt_tokens[n] for n in range(2)]
    assert fed == watched.tokens


@pytest.mark.parametrize("name", DECODERS)
def test_an_image_s_work_does_not_depend_on_its_batch(name):
    together = decode("ends", name).work
    for n in range(2):
        alone = decode("ends", name, images=(n,)).work
        assert alone.attended == [together.attended[n]]
        assert alone.prompt_tokens == [together.prompt_tokens[n]]
        assert alone.eagle_attended == [together.eagle_attended[n]]
        assert {k: v[0] for k, v in alone.head_tokens.items()} == {
            k: v[n] for k, v in together.head_tokens.items()
        }


@pytest.mark.parametrize("grid", ["square", "ends"])
@pytest.mark.parametrize("name", ["ssd", "ssd_strict", "ssd_exact", "mtp", "mtp_strict"])
def test_head_tokens_are_what_heads_read(name, grid):
    """One image: what a head is called on is then all its own."""
    heads, read = drafter_of(grid, name), {"horizontal": 0, "vertical": 0}

    def note(axis, module, given):
        read[axis] += given[0].shape[:-1].numel()

    hooks = [
        module.register_forward_pre_hook(partial(note, key.split("_")[0]))
        for key, module in heads.heads.items()
    ]
    work = decode(grid, name, images=(0,)).work
    for hook in hooks:
        hook.remove()
    counted = {axis: work.streams * n for axis, (n,) in work.head_tokens.items()}
    assert {"horizontal": 0, "vertical": 0} | counted == read
    assert read["horizontal"] > 0
    assert (read["vertical"] > 0) == name.startswith("ssd")


@pytest.mark.parametrize("grid", ["square", "ends"])
@pytest.mark.parametrize("name", ["eagle_chain", "eagle_tree"])
def test_an_eagle_drafter_is_counted_too(name, grid):
    """Of drafts beyond the image, which are made but never asked for, nothing is counted."""
    drafter, tokens, pairs = drafter_of(grid, name), 0, 0

    def look(module, given):
        nonlocal tokens, pairs
        places, raster = given[2], given[3]
        for stream in range(len(places)):
            for query, place in enumerate(places[stream].tolist()):
                slot = int(raster.slots[stream, query])
                if place < backbone_on(grid).grid.size and slot != raster.kv.capacity - 1:
                    tokens += 1
                    pairs += int(raster.mask[stream if len(raster.mask) > 1 else 0, 0, query].sum())

    hook = drafter.register_forward_pre_hook(look)
    work = decode(grid, name, images=(0,)).work
    hook.remove()
    assert work.streams * work.head_tokens["eagle"][0] == tokens
    assert work.eagle_attended == [pairs]


# ------------------------------------------------------------------------ Table 12, measured here


class Hollow(Shaped):
    """The real engine on a real grid, in which the transformer does nothing."""

    length = 0

    def prompt_ids(self, text):
        return [1] * self.length

    def unconditional_ids(self, ids):
        return list(ids)

    def check_prompts(self, prompts):
        """Take any prompt."""

    def run(self, embeds, raster):
        """Return no states."""
        return torch.zeros_like(embeds)


# Grid, mean prompt length that Table 12's AR column implies, and SSD's operating point.
PAPERS = {
    "janus_pro": (TokenGrid(24, 24), 98, {"v": 1, "b": 2, "i": 0}),
    "lumina_mgpt": (TokenGrid(48, 48, end_of_row=True), 78, {"v": 2, "b": 5, "i": 4}),
    "emu3": (TokenGrid(90, 90, end_of_row=True), 75, {"v": 1, "b": 5, "i": 0}),
}


@cache
def counted(model: str, method: str) -> dict:
    """Return the row of images.parquet of one image."""
    grid, length, budget = PAPERS[model]
    plain = shaped(grid, dtype=torch.float32, hidden_size=16, layers=1, codebook_size=2)
    plain.__class__, Hollow.length = Hollow, length
    decoder = Autoregressive() if method == "ar" else SpatiallySpeculative(**budget)
    heads = make_heads(plain, horizontal=5, vertical=budget["v"])
    made = decoder.decode(
        plain, ["x"], sampling=Sampling(3.0), seed=0, sample_keys=[0], heads=heads
    )
    task = Task(0, Prompt("a", "x"), 0)
    return rows_of([task], made, seed=0)[0]


@cache
def published(model: str) -> JanusBackbone | LuminaBackbone | Emu3Backbone:
    """Return an adapter at its published size, every weight on the meta device, in bfloat16."""
    words, named = tiny_tokenizer(["a"]), {"name": model, "defaults": Sampling(3.0)}
    if model == "janus_pro":
        with torch.device("meta"):
            janus = JanusForConditionalGeneration(full_size_config("7B")).bfloat16()
        return JanusBackbone(janus, words, **named)
    if model == "lumina_mgpt":
        config = ChameleonConfig(vocab_size=65536, vocabulary_map={"<image>": 3}, vq_config=NO_VQ)
        with torch.device("meta"):
            chameleon = ChameleonForConditionalGeneration(config).bfloat16()
        tokens = LuminaTokens(0, 1, (100, 101, 102), 103, tuple(range(4, 4 + 8192)))
        size = {"image_size": (768, 768), "image_decoder": None}
        return LuminaBackbone(chameleon, words, tokens, **size, **named)
    with torch.device("meta"):
        emu3 = Emu3ForConditionalGeneration(Emu3Config(vocabulary_map={})).bfloat16()
    return Emu3Backbone(
        emu3.model.text_model,
        emu3.lm_head,
        emu3.model.vqmodel,
        emu3_tokenizer(),
        grid=PAPERS[model][0],
        **named,
    )


def emu3_tokenizer() -> PreTrainedTokenizerFast:
    special = [BOS, BEGIN_OF_IMAGE, IMAGE_TOKEN, END_OF_ROW, "<unk>"]
    names = [*special, *(f"<|visual token {n:06d}|>" for n in range(32768))]
    core = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@cache
def head_sizes(model: str) -> HeadSizes:
    with torch.device("meta"):
        heads = DraftHeads(4096, horizontal=5, vertical=PAPERS[model][2]["v"]).bfloat16()
    return HeadSizes.of(heads)


def printed(model: str, method: str) -> dict:
    rows = [r for r in paper.table(12) if (r["model"], r["method"]) == (model, method)]
    return rows[0]


QUICK = [("janus_pro", "ar"), ("janus_pro", "ssd"), ("lumina_mgpt", "ssd")]
COLUMNS = [
    pytest.param(model, method, marks=[] if (model, method) in QUICK else pytest.mark.slow)
    for model in PAPERS
    for method in ("ar", "ssd")
]


@pytest.mark.parametrize(("model", "method"), COLUMNS)
def test_table_12(model, method):
    """Every figure of compute to 2 %, but one.

    What is left: of Janus's SSD 1.1 % of the backbone and 1.7 % of attention above what is printed,
    which is one row of 24 tokens less; of Lumina's 1.0 % of attention above; of Emu3's 0.6 % of
    both below. Lumina's vertical heads are half of what is printed: the paper counts both heads for
    each of 47 rows, though a block of two rows is drafted from one row.
    """
    heads = head_sizes(model) if method == "ssd" else HeadSizes()
    found = compute.per_image(published(model).dimensions, heads, counted(model, method))
    for key, value in printed(model, method).items():
        if key.endswith("_tflops") and value is not None:
            twice = 2 if (model, key) == ("lumina_mgpt", "vertical_heads_tflops") else 1
            # Janus's 0.0123 of horizontal heads is printed as 0.012.
            assert twice * found[key] == pytest.approx(value, rel=0.02, abs=0.0005), key
    if method == "ar":
        assert found["horizontal_heads_tflops"] == found["vertical_heads_tflops"] == 0


@pytest.mark.parametrize(
    ("model", "layers", "head", "codes", "kv"),
    [
        ("janus_pro", 6.071e9, 83.9e6, 83.9e6, 0.66),
        ("lumina_mgpt", 6.476e9, 268.4e6, 33.6e6, 2.55),
        ("emu3", 6.979e9, 756.2e6, 134.2e6, 2.17),
    ],
)
def test_published_dimensions(model, layers, head, codes, kv):
    """Sizes of the language models without embeddings; keys and values in GB as bfloat16."""
    sizes = published(model).dimensions
    assert sizes.layer_parameters == pytest.approx(layers, rel=1e-3)
    assert sizes.head_parameters == pytest.approx(head, rel=1e-3)
    assert sizes.code_head_parameters == pytest.approx(codes, rel=2e-3)
    assert (sizes.attention_width, sizes.number_bytes) == (4096, 2)
    assert sizes.image_tokens == PAPERS[model][0].slots
    row = {"prompt_tokens": 2 * PAPERS[model][1], "streams": 2}
    assert compute.kv_bytes(sizes, row) / 1e9 == pytest.approx(kv, abs=0.005)
    heads = head_sizes(model).weight_bytes / 1e9
    assert heads == pytest.approx(printed(model, "ssd")["heads_gb"], abs=0.005)


def test_weights_in_memory():
    """Janus-Pro's whole checkpoint is 14.82 GB; code embeddings made once are 0.13 GB more.

    Of Lumina and Emu3 only the head's rows of codes are kept, and nothing counts twice.
    """
    assert published("janus_pro").dimensions.weight_bytes / 1e9 == pytest.approx(14.95, abs=0.01)
    rows = {"lumina_mgpt": (65536, 8192), "emu3": (184622, 32768)}
    for model, (words, codes) in rows.items():
        sizes = published(model).dimensions
        known = 2 * (sizes.layer_parameters + 4096 * (words + codes + 1))
        beside = published(model).image_decoder if model == "emu3" else None
        known += 2 * sum(p.numel() for p in beside.parameters()) if beside else 0
        assert sizes.weight_bytes == pytest.approx(known, rel=1e-4)


def test_a_loaded_backbone_reports_its_own_sizes(random_backbone, random_heads):
    sizes = random_backbone.dimensions
    layers = random_backbone.decoder.layers
    assert sizes.layers == len(layers) == 2
    assert sizes.layer_parameters == sum(p.numel() for p in layers.parameters())
    kv = random_backbone.new_cache(1, 10)
    held = sum(buffer.nbytes for buffer in (*kv.keys, *kv.values))
    row = {"prompt_tokens": 10 - 2 * sizes.image_tokens, "streams": 2}
    assert compute.kv_bytes(sizes, row) == held
    heads = HeadSizes.of(random_heads)
    assert heads.parameters == sum(p.numel() for p in SpatialDraftHead(32).parameters())
    assert heads.weight_bytes == 8 * 8 * heads.parameters
    drafter = HeadSizes.of(EagleDrafter.like(random_backbone))
    assert (drafter.attention_width, HeadSizes.of(None)) == (32, HeadSizes())


def test_flops_by_hand():
    sizes = Dimensions(3, 100, 10, 5, 4, 2, image_tokens=9, number_bytes=2, weight_bytes=400)
    row = dict.fromkeys(compute.COUNTED, 0) | {"streams": 2, "tokens": 7, "prompt_tokens": 6}
    row |= {"attended": 50, "head_tokens_horizontal": 2, "head_tokens_eagle": 3}
    row |= {"eagle_attended": 11}
    found = compute.flops(sizes, HeadSizes(20, 40, attention_width=8), row)
    assert found == {
        "backbone": 2 * (100 * (14 + 6) + 10 * 14),
        "attention": 4 * 3 * 4 * 50,
        "horizontal_heads": 2 * 2 * 20 * 2,
        "vertical_heads": 0,
        "eagle": 2 * 2 * 20 * 3 + 4 * 8 * 11,
    }
    assert compute.kv_bytes(sizes, row) == 2 * 3 * 2 * 2 * (6 + 18)


# ------------------------------------------------------------------------------------- the stage


@pytest.fixture
def configure(random_checkpoint, tmp_path):
    def make(*options):
        own = [f"model.backbone.path={random_checkpoint}", f"output_dir={tmp_path}", "runtime=cpu"]
        prompts = "prompts=[a red circle, two blue squares left of a green star]"
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", [*own, "runtime.dtype=float64", prompts, *options])

    return make


@pytest.fixture
def made(configure, tmp_path, random_backbone, random_heads):
    provenance = {"backbone": "tiny", "fingerprint": random_backbone.fingerprint}
    random_heads.save(tmp_path / "heads", provenance)
    options = ["decoder=ssd", "decoder.v=2", "decoder.i=1", f"heads.path={tmp_path / 'heads'}"]
    return generate.run(configure(*options, "images_per_prompt=2"))


def test_the_stage(configure, made):
    folder = evaluate.run(configure("eval=compute", f"evaluate.images={made}"))
    scores = json.loads((folder / "scores.json").read_text())
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert len(rows) == scores["n_scored"] == scores["n_expected"] == 4
    assert rows[0]["total_tflops"] < rows[2]["total_tflops"]  # a longer prompt
    mean = sum(row["total_tflops"] for row in rows) / 4
    assert scores["total_tflops"] == pytest.approx(mean)
    low, high = scores["total_tflops_ci95"]
    assert low <= mean <= high
    assert (scores["peak_gb"], scores["activations_kv_gb"]) == (None, None)
    parts = [scores[f"{part}_tflops"] for part in compute.PARTS]
    assert sum(parts) == pytest.approx(mean)
    assert scores["heads_gb"] > 0
    labels = [row["part"] for row in scores["table"]["rows"]]
    assert labels[2:] == ["Draft heads, horizontal", "Draft heads, vertical", "All; peak memory"]
    again = evaluate.run(configure("eval=compute", f"evaluate.images={made}"))
    assert again == folder


def test_a_measured_peak(configure, made):
    """As a run on a GPU stores it, of batches of several images."""
    table = pq.read_table(made / "images.parquet").to_pylist()
    peaks = [{**row, "peak_memory_bytes": n * 10**9} for n, row in enumerate(table, 1)]
    pq.write_table(pa.Table.from_pylist(peaks, SCHEMA), made / "images.parquet")
    folder = evaluate.run(configure("eval=compute", f"evaluate.images={made}"))
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["peak_gb"] == 4
    assert scores["activations_kv_gb"] == pytest.approx(4 - scores["weights_gb"])


def drop(table: Path, *names: str) -> None:
    pq.write_table(pq.read_table(table).drop_columns(list(names)), table)


def test_older_runs_are_refused_in_one_line(configure, made):
    table, cfg = made / "images.parquet", configure("eval=compute", f"evaluate.images={made}")
    whole, meta = table.read_bytes(), (made / "meta.json").read_text()
    drop(table, "attended", "streams")
    with pytest.raises(ValueError, match=rf"images.parquet lacks streams, attended{OLDER}"):
        evaluate.run(cfg)
    table.write_bytes(whole)
    facts = json.loads(meta)
    del facts["sizes"]
    (made / "meta.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=rf"lacks the backbone's sizes{OLDER}"):
        evaluate.run(cfg)


def test_older_runs_are_still_reused(configure, made, tmp_path):
    """Their images are the same; a run that was killed half-way goes on."""
    drop(made / "images.parquet", "attended")
    options = ["decoder=ssd", "decoder.v=2", "decoder.i=1", f"heads.path={tmp_path / 'heads'}"]
    assert generate.run(configure(*options, "images_per_prompt=2")) == made


def test_broken_and_foreign_runs(configure, made, tmp_path):
    cfg = configure("eval=compute", f"evaluate.images={made}")
    table = made / "images.parquet"
    rows = pq.read_table(table)
    for content, message in (
        (b"", "is not the table of a generate run"),
        (table.read_bytes()[:100], "is not the table of a generate run"),
    ):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            evaluate.run(cfg)
    pq.write_table(rows.slice(0, 3), table)
    with pytest.raises(ValueError, match=r"images.parquet lists 3 of 4 images"):
        evaluate.run(cfg)
    pq.write_table(rows.slice(0, 0), table)
    with pytest.raises(ValueError, match=r"images.parquet lists no images"):
        evaluate.run(cfg)
    for bare in (tmp_path / "bare", made / "bare"):
        bare.mkdir()
        with pytest.raises(ValueError, match="bare is not a finished generate run"):
            evaluate.run(configure("eval=compute", f"evaluate.images={bare}"))
