"""The `Backbone` interface: a frozen autoregressive image-token model that speaks codes.

Vocabulary ids, prompt templates, end-of-row tokens, the streams of guidance and the KV cache stay
inside. Streams are ordered conditional rows first, then unconditional rows.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ssd_research.backbones.attention import NAME, RasterKV, RasterPass
from ssd_research.backbones.dimensions import Dimensions, held_bytes
from ssd_research.backbones.state import DecodingState
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling


def fingerprint(*modules: nn.Module) -> str:
    """Return 16 hex digits of the modules' weights.

    A strided sample of each tensor, rounded to 8 bits of mantissa, is hashed: 8B weights take a
    second, and loading them as float32, float64 or bfloat16 does not matter.
    """
    digest = hashlib.sha256()
    for name, p in (pair for module in modules for pair in module.named_parameters()):
        flat = p.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 512)].to(torch.bfloat16).float().cpu().numpy()
        digest.update(f"{name}{tuple(p.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def parameters(module: nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(p.numel() for p in module.parameters())


def guided(logits: Float[Tensor, "S L K"], guidance: float) -> Float[Tensor, "B L K"]:
    """Return l_u + guidance (l_c - l_u) in float32 or float64; at guidance 1 the logits alone."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if guidance == 1:
        return logits
    cond, uncond = logits.chunk(2)
    return uncond + guidance * (cond - uncond)


def nearest(codebook: Float[Tensor, "K C"], count: int) -> Int[Tensor, "K n"]:
    """Return the `count` codes nearest to each code but itself, nearest first, in squared L2.

    Of codes at the same distance the lower number comes first. Only some rows of the K x K
    distances are held at a time: 64 MB of them.
    """
    vectors = codebook.detach().double()
    squares, codes = vectors.square().sum(-1), torch.arange(len(vectors), device=vectors.device)
    table = torch.empty(len(vectors), count, dtype=torch.int32, device=vectors.device)
    for rows in codes.split(max(1, 2**23 // len(vectors))):
        distance = squares[rows, None] + squares - 2 * vectors[rows] @ vectors.T
        distance[rows - rows[0], rows] = torch.inf
        table[rows] = distance.sort(dim=-1, stable=True).indices[:, :count].int()
    return table


class Backbone(ABC):
    """What a decoder may ask of a model; adapters fill in the pieces below `# adapter`.

    Attributes: `name`; `grid`; `hidden_size` D; `codebook_size` K; `image_size` (height, width) in
    pixels; `defaults`, the model's own `Sampling`; `fingerprint`, which ties heads to weights.
    """

    name: str
    grid: TokenGrid
    hidden_size: int
    codebook_size: int
    image_size: tuple[int, int]
    defaults: Sampling

    def __init__(self, decoder: nn.Module) -> None:
        """Take over the transformer stack: evaluation mode, raster attention, states kept."""
        self.decoder = decoder.eval().requires_grad_(False)
        self.decoder.set_attn_implementation(NAME)
        self._pre_norm: list[Tensor] = []
        decoder.norm.register_forward_pre_hook(lambda _, args: self._pre_norm.append(args[0]))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.decoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type."""
        return next(self.decoder.parameters()).dtype

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hex digits of all that draft heads were trained against."""
        layers, norm = self.decoder.layers, self.decoder.norm
        return fingerprint(layers, norm, self.image_head, *self.code_embedders)

    @cached_property
    def prompt_fingerprint(self) -> str:
        """Return 16 hex digits of how a prompt becomes tokens: template, size, tokenizer."""
        ids = self.prompt_ids("A (red) circle, 20 cm; don't")
        text = f"{ids} {self.unconditional_ids(ids)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def image_decoder_fingerprint(self) -> str:
        """Return 16 hex digits of the weights that turn codes into pixels."""
        return fingerprint(self.image_decoder)

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[str], *, sampling: Sampling, scratch: int = 0
    ) -> DecodingState:
        """Prefill the prompts and return the state of B = len(prompts) images under way.

        Guidance 1 needs no unconditional stream, so S = B there and S = 2B elsewhere. `scratch` is
        how many slots a decoder needs beside those of the image.
        Raises ValueError for a prompt that the tokenizer cannot express.
        """
        self.check_prompts(prompts)
        ids = [self.prompt_ids(text) for text in prompts]
        if sampling.guidance != 1:
            ids += [self.unconditional_ids(one) for one in ids]
        return DecodingState.prefill(
            self, ids, batch=len(prompts), sampling=sampling, scratch=scratch
        )

    def new_cache(self, streams: int, capacity: int) -> RasterKV:
        """Allocate the KV buffers of `streams` sequences of at most `capacity` tokens."""
        config = self.decoder.config
        return RasterKV(
            config.num_hidden_layers,
            streams=streams,
            heads=config.num_key_value_heads,
            capacity=capacity,
            width=self._head_width,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def _head_width(self) -> int:
        """The width of one attention head."""
        config = self.decoder.config
        given = getattr(config, "head_dim", None)
        return given or config.hidden_size // config.num_attention_heads

    @property
    def dimensions(self) -> Dimensions:
        """What compute and memory follow from."""
        config, head = self.decoder.config, parameters(self.image_head)
        tensors = [t for m in self.held_modules for t in (*m.parameters(), *m.buffers())]
        return Dimensions(
            layers=config.num_hidden_layers,
            layer_parameters=parameters(self.decoder.layers),
            head_parameters=head + self.left_out_head_parameters,
            code_head_parameters=head,
            attention_width=config.num_attention_heads * self._head_width,
            kv_width=config.num_key_value_heads * self._head_width,
            image_tokens=self.grid.slots,
            number_bytes=self.dtype.itemsize,
            weight_bytes=held_bytes([*tensors, self.code_embeddings]),
        )

    def run(
        self, embeds: Float[Tensor, "S L D"], raster: RasterPass | None
    ) -> Float[Tensor, "S L D"]:
        """Run the transformer stack once and return its states before the final norm."""
        places = (
            raster.places if raster else torch.arange(embeds.shape[1], device=embeds.device)[None]
        )
        self._pre_norm.clear()
        self.decoder(inputs_embeds=embeds, position_ids=places, use_cache=False, raster=raster)
        return self._pre_norm.pop()

    def logits(self, h_pre: Float[Tensor, "S L D"], guidance: float) -> Float[Tensor, "B L K"]:
        """Return l_u + guidance (l_c - l_u) over the codes; without guidance the plain logits.

        `h_pre` holds the states of both streams (S = 2B), or of one (S = B) at guidance 1.
        """
        return guided(self.image_head(self.normalise(h_pre)), guidance)

    def normalise(self, h_pre: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Return h_post, the states after the final norm."""
        # `forward` directly: a call would run the hook that records h_pre.
        return self.decoder.norm.forward(h_pre)

    def logits_of(
        self, predicted: Float[Tensor, "S L D"], target: str, guidance: float
    ) -> Float[Tensor, "B L K"]:
        """Return guided logits of a prediction of `target`: h_pre, h_post or e (paper Table 19).

        h_post is behind the norm already. How the paper reads a predicted embedding it does not
        say; it is regressed on embeddings of codes, so here it stands for the nearest: the logits
        are -|e_hat - e_k|^2 / 2 but for what is the same for all codes, e_hat e_k - |e_k|^2 / 2.
        As these are linear in e_hat, they are guided as embeddings would be; of heads that read
        nothing but e both streams agree, and guidance changes nothing.
        """
        if target == "h_pre":
            return self.logits(predicted, guidance)
        if target == "h_post":
            return guided(self.image_head(predicted), guidance)
        kind = torch.promote_types(predicted.dtype, torch.float32)
        table = self.code_embeddings.to(kind)
        squares = table.square().sum(-1)
        return guided(F.linear(predicted.to(kind), table, -squares / 2), guidance)

    @torch.no_grad()
    def hidden_states(
        self,
        prompts: Sequence[str],
        codes: Int[Tensor, "B N"],
        *,
        unconditional: Bool[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return teacher-forced pre-norm states; [:, i] is the state that predicts position i.

        Rows marked `unconditional` see the unconditional prompt in place of their own. One plain
        causal pass without cache or padding: each image follows its own prompt directly.
        """
        self.check_prompts(prompts)
        ids = [self.prompt_ids(text) for text in prompts]
        if unconditional is not None:
            ids = [
                self.unconditional_ids(one) if drop else one
                for one, drop in zip(ids, unconditional.tolist(), strict=True)
            ]
        text, lengths = self.pad_right(ids)
        slots = torch.arange(self.grid.slots, device=self.device)
        image = self.embed_tokens(codes.to(self.device)[:, self.grid.position(slots)], slots)
        width = text.shape[1] + image.shape[1]
        embeds = torch.zeros(
            len(ids), width, self.hidden_size, dtype=self.dtype, device=self.device
        )
        embeds[:, : text.shape[1]] = text
        place = lengths[:, None] + slots
        embeds.scatter_(1, place[..., None].expand_as(image), image)
        states = self.run(embeds, None)
        # What predicts a code is the output of the token before it, an end-of-row token included.
        before = self.grid.slot(torch.arange(self.grid.size, device=self.device)) - 1
        source = lengths[:, None] + before
        return states.gather(1, source[..., None].expand(-1, -1, self.hidden_size))

    def pad_right(
        self, ids: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "S P D"], Int[Tensor, " S"]]:
        """Embed prompts of different lengths, junk at the right, and return their lengths."""
        lengths = torch.tensor([len(one) for one in ids], device=self.device)
        padded = torch.zeros(len(ids), int(lengths.max()), dtype=torch.long, device=self.device)
        for row, one in zip(padded, ids, strict=True):
            row[: len(one)] = torch.tensor(one)
        return self.decoder.get_input_embeddings()(padded), lengths

    def embed_tokens(
        self, codes: Int[Tensor, "B L"], slots: Int[Tensor, "*S L"]
    ) -> Float[Tensor, "B L D"]:
        """Embed the tokens of image `slots`: the codes, or at a row's end its forced token."""
        embedded = self.embed(codes)
        if not self.grid.end_of_row:
            return embedded
        ends = self.grid.ends_row(slots)[..., None]
        return torch.where(ends, self.end_of_row_embedding(), embedded)

    def decode_images(self, codes: Int[Tensor, "B N"]) -> UInt8[np.ndarray, "B h w 3"]:
        """Turn codes into 8-bit RGB images, at most a megapixel at a time.

        The cache of the decoding that made the codes is gone by then: nothing refers to it.
        """
        height, width = self.image_size
        chunk = max(1, 2**20 // (height * width))
        with torch.inference_mode():
            parts = [self.decode_pixels(part.to(self.device)) for part in codes.split(chunk)]
        scaled = (torch.cat(parts).float().clamp(-1, 1) + 1) * 127.5
        return scaled.round().to(torch.uint8).cpu().numpy()

    def embed(self, codes: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """Return the input embeddings of codes."""
        return F.embedding(codes, self.code_embeddings)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise ValueError naming a prompt that is too long for the model's positions."""
        most = self.decoder.config.max_position_embeddings - self.grid.slots
        for text in prompts:
            length = len(self.prompt_ids(text))
            if length > most:
                raise ValueError(
                    f"prompt {text[:40]!r}... has {length} tokens; "
                    f"{self.name} takes at most {most} before an image"
                )

    def nearest_codes(self, count: int) -> Int[Tensor, "K n"]:
        """Return the `count` codes nearest to each code in the codebook, as `nearest` orders them.

        The table is kept, since it takes a while at tens of thousands of codes.
        """
        kept = getattr(self, "_nearest", None)
        if kept is None or kept.shape[1] != count:
            self._nearest = kept = nearest(self.codebook, count)
        return kept

    # adapter
    code_embeddings: Float[Tensor, "K D"]
    code_embedders: tuple[nn.Module, ...]
    image_head: nn.Module
    image_decoder: nn.Module
    tokenizer: PreTrainedTokenizerBase
    left_out_head_parameters: int = 0  # of the model's own head, for words that are no codes

    @property
    def held_modules(self) -> list[nn.Module]:
        """All modules whose weights are in memory while images are made."""
        return [self.decoder, self.image_head, *self.code_embedders, self.image_decoder]

    def end_of_row_embedding(self) -> Float[Tensor, "1 1 D"]:
        """Return the embedding of the forced end-of-row token, where the grid has one."""
        raise NotImplementedError(f"{self.name} has no end-of-row token")

    @property
    def codebook(self) -> Float[Tensor, "K C"]:
        """The vectors of all codes, from the image decoder's one embedding table.

        Raises ValueError where it has none, or several, or one of another size.
        """
        tables = [m.weight for m in self.image_decoder.modules() if isinstance(m, nn.Embedding)]
        if len(tables) != 1 or len(tables[0]) != self.codebook_size:
            raise ValueError(
                f"{self.name}: its image decoder holds no one table of {self.codebook_size} codes, "
                "in which codes could be compared"
            )
        return tables[0]

    @abstractmethod
    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens before the first code, template and start tokens included."""

    @abstractmethod
    def unconditional_ids(self, ids: list[int]) -> list[int]:
        """Return the unconditional prompt that goes with the prompt `ids`."""

    @abstractmethod
    def decode_pixels(self, codes: Int[Tensor, "B N"]) -> Float[Tensor, "B h w 3"]:
        """Return images in about [-1, 1]."""
