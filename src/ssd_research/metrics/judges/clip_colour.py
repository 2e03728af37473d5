"""CLIP ViT-L/14 (Radford et al., 2021) as GenEval's colour classifier, through transformers.

Zero-shot over ten colours, as GenEval does: three templates with the colour and the class, their
embeddings averaged, and the object cut out of the image with all around it made grey.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from ssd_research.metrics.geneval import Detection
from ssd_research.metrics.geneval_words import COLOURS
from ssd_research.metrics.judges import pretrained

KEY = "eval.colours.path"
TEMPLATES = (
    "a photo of a {colour} {label}",
    "a photo of a {colour}-colored {label}",
    "a photo of a {colour} object",
)
BACKGROUND = 0x99  # of each channel: the grey #999
MEAN = (0.48145466, 0.4578275, 0.40821073)  # OpenAI's
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ClipColours:
    """Names an object's colour with a `CLIPModel` checkpoint.

    OpenAI's weights were trained with QuickGELU and quietly lose accuracy with plain GELU, so the
    checkpoint's configuration must name `activation`; set it to `gelu` for weights that need it.

    Raises ValueError for a checkpoint or dtype that does not fit, and for an image in which the
    model computes no finite numbers.
    """

    path: str
    revision: str | None = None
    name: str = "clip-vit-l-14"
    activation: str = "quick_gelu"
    device: str = "auto"
    dtype: str = "float32"
    version: str = field(init=False)
    colours: ClassVar[Collection[str]] = COLOURS

    def __post_init__(self) -> None:
        weights = pretrained.version(self.path, self.revision, key=KEY)
        object.__setattr__(self, "version", f"{weights} {self.dtype}")

    def classify(
        self, image: UInt8[np.ndarray, "h w 3"], objects: Sequence[Detection]
    ) -> list[str]:
        """Return the colour of each object, all of one label."""
        if not objects:
            return []
        pixels = torch.stack([self._transform(cut_out(image, d)) for d in objects])
        model = self._model
        with torch.inference_mode():
            seen = model.get_image_features(pixels.to(model.device, model.dtype)).pooler_output
            likeness = normalize(seen.float(), dim=-1) @ self._colours(objects[0].label).T
        pretrained.refuse_overflow(likeness, key=KEY, model=self.path, dtype=self.dtype)
        return [COLOURS[index] for index in likeness.argmax(-1).tolist()]

    def _colours(self, label: str) -> Float[Tensor, "colours D"]:
        """Return each colour's embedding for a class: the mean over the templates, of norm 1."""
        if label not in self._known:
            texts = [t.format(colour=c, label=label) for c in COLOURS for t in TEMPLATES]
            tokens = self._tokenizer(texts, padding=True, return_tensors="pt")
            model = self._model
            with torch.inference_mode():
                read = model.get_text_features(**tokens.to(model.device)).pooler_output
            each = normalize(read.float(), dim=-1).unflatten(0, (len(COLOURS), len(TEMPLATES)))
            self._known[label] = normalize(each.mean(1), dim=-1)
        return self._known[label]

    @cached_property
    def _known(self) -> dict[str, Tensor]:
        """The embeddings of the colours by class, filled as classes come up."""
        return {}

    @cached_property
    def _transform(self) -> Any:
        from torchvision import transforms

        side = self._model.config.vision_config.image_size
        return transforms.Compose(
            [
                transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
                transforms.CenterCrop(side),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import CLIPTokenizer

        with pretrained.loading(self.path, key=KEY):
            return CLIPTokenizer.from_pretrained(
                pretrained.place(self.path), revision=self.revision
            )

    @cached_property
    def _model(self) -> Any:
        from transformers import CLIPModel

        model = pretrained.weights(
            CLIPModel,
            self.path,
            key=KEY,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
        )
        for part in (model.config.text_config, model.config.vision_config):
            if part.hidden_act != self.activation:
                raise ValueError(
                    f"{KEY}={self.path} computes with {part.hidden_act}, but OpenAI's CLIP was "
                    f"trained with quick_gelu; mend hidden_act in its config.json, or set "
                    f"eval.colours.activation={part.hidden_act} for weights trained with it"
                )
        return model


def cut_out(image: UInt8[np.ndarray, "h w 3"], found: Detection) -> Image.Image:
    """Return the part of an image in a detection's box, grey outside its mask if it has one."""
    if found.mask is not None:
        image = np.where(found.mask[..., None], image, np.uint8(BACKGROUND))
    return Image.fromarray(image).crop(found.box)  # black beyond the image, as officially
