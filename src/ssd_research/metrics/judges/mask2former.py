"""Mask2Former (Cheng et al., 2022) on COCO as GenEval's detector, through transformers.

GenEval used mmdetection's Swin-S checkpoint. This one has the same architecture and recipe but
weights of its own, so results carry its name. The image is prepared and the output read as
mmdetection does: transformers' `post_process_instance_segmentation` would shrink every mask to
384x384 and grow it again by its nearest neighbours, which moves boxes and scores.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn.functional import interpolate, pad

from ssd_research.metrics.geneval import Detection
from ssd_research.metrics.geneval_words import OBJECTS
from ssd_research.metrics.judges import pretrained

KEY = "eval.detector.path"
MOST_INSTANCES = 100
DIVISOR = 32  # sides that the backbone and the pixel decoder can halve five times
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Mask2FormerDetector:
    """Detects COCO's classes with a `Mask2FormerForUniversalSegmentation` checkpoint.

    The shorter side of an image becomes `shortest_edge` unless the longer one would exceed
    `longest_edge`. Detections with a score above `floor` are returned, with their masks.

    Raises ValueError for a dtype, floor or checkpoint that does not fit, and for an image in which
    the model computes no finite numbers.
    """

    path: str
    revision: str | None = None
    name: str = "hf-m2f-swin-s"
    floor: float = 0.05
    shortest_edge: int = 800
    longest_edge: int = 1333
    device: str = "auto"
    dtype: str = "float32"
    version: str = field(init=False)
    labels: ClassVar[Collection[str]] = OBJECTS
    colours: ClassVar[Collection[str]] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise ValueError(f"eval.detector.floor={self.floor} must be in [0, 1)")
        weights = pretrained.version(self.path, self.revision, key=KEY)
        settings = f"{self.shortest_edge}/{self.longest_edge} {self.dtype}"
        object.__setattr__(self, "version", f"{weights} {settings}")

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Return the objects of a picture with their masks, most confident first."""
        model = self._model
        pixels = self._prepare(image)
        resized = (pixels.shape[2], pixels.shape[3])
        down, right = (-side % DIVISOR for side in resized)
        pixels = pad(pixels, (0, right, 0, down)).to(model.device, model.dtype)
        with torch.inference_mode():
            seen = model(pixel_values=pixels)
            logits = seen.class_queries_logits[0].float(), seen.masks_queries_logits[0].float()
            pretrained.refuse_overflow(*logits, key=KEY, model=self.path, dtype=self.dtype)
            found = instances(
                *logits,
                resized=resized,
                original=(image.shape[0], image.shape[1]),
                floor=self.floor,
            )
        return [Detection(OBJECTS[i.label], i.score, i.box, mask=i.mask) for i in found]

    def _prepare(self, image: UInt8[np.ndarray, "h w 3"]) -> Float[Tensor, "1 3 H W"]:
        """Return the normalised image at the detector's size, its aspect ratio kept."""
        # size_divisor=0: the processor would stretch the sides to multiples; mmdetection pads.
        size = {"shortest_edge": self.shortest_edge, "longest_edge": self.longest_edge}
        return self._processor(
            image, size=size, size_divisor=0, input_data_format="channels_last", return_tensors="pt"
        )["pixel_values"]

    @cached_property
    def _processor(self) -> Any:
        from transformers import Mask2FormerImageProcessor

        # Not the checkpoint's own settings: a preprocessor_config.json may name other sizes.
        return Mask2FormerImageProcessor(
            do_resize=True,
            do_rescale=True,
            rescale_factor=1 / 255,
            do_normalize=True,
            image_mean=list(MEAN),
            image_std=list(STD),
        )

    @cached_property
    def _model(self) -> Any:
        from transformers import Mask2FormerForUniversalSegmentation

        model = pretrained.weights(
            Mask2FormerForUniversalSegmentation,
            self.path,
            key=KEY,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            may_lack=("criterion.",),  # the training loss
        )
        check_classes(model.config.id2label, path=self.path)
        return model


def check_classes(names: Mapping[int, str], *, path: str) -> None:
    """Raise ValueError unless a checkpoint's classes are COCO's 80 in COCO's order.

    Classes of the same name must stand at the same index; other names are GenEval's own.
    """
    if len(names) != len(OBJECTS):
        raise ValueError(
            f"{KEY}={path} knows {len(names)} classes; GenEval needs an instance segmentation "
            f"checkpoint of COCO's {len(OBJECTS)}"
        )
    for index, name in names.items():
        if name in OBJECTS and OBJECTS.index(name) != index:
            raise ValueError(
                f"{KEY}={path}: class {index} is {name}, which COCO has at {OBJECTS.index(name)}"
            )


class Instance(NamedTuple):
    """One detected instance: class index, score, box with x2 and y2 exclusive, and mask."""

    label: int
    score: float
    box: tuple[float, float, float, float]
    mask: Bool[np.ndarray, "h w"]


def instances(
    class_logits: Float[Tensor, "Q C"],
    mask_logits: Float[Tensor, "Q h w"],
    *,
    resized: Size,
    original: Size,
    floor: float,
) -> list[Instance]:
    """Return the instances of one image from the model's queries, most confident first.

    The last class is "no object". The `MOST_INSTANCES` likeliest pairs of query and class count,
    with score = p(class) * mean of the mask's probability inside the mask, the mask being where its
    logit is positive at the image's own resolution. A query may stand for several classes.
    """
    probability = class_logits.softmax(-1)[:, :-1]
    classes = probability.shape[1]
    top = probability.flatten().topk(min(MOST_INSTANCES, probability.numel()))
    masks, sharpness = full_size_masks(mask_logits, resized=resized, original=original)
    query = top.indices // classes
    score = top.values * sharpness[query]
    kept = (score > floor).nonzero().flatten()
    kept = kept[score[kept].argsort(descending=True, stable=True)]
    found = []
    for q, label, s in zip(
        query[kept].tolist(),
        (top.indices % classes)[kept].tolist(),
        score[kept].tolist(),
        strict=True,
    ):
        mask = masks[q].cpu().numpy()
        found.append(Instance(label, s, box_of(mask), mask))
    return found


def full_size_masks(
    logits: Float[Tensor, "Q h w"], *, resized: Size, original: Size
) -> tuple[Bool[Tensor, "Q H W"], Float[Tensor, "Q"]]:
    """Return every query's mask at the image's resolution and its mean probability (0 if empty).

    The logits cover the padded input, `resized` rounded up to multiples of 32; they are brought to
    its size, cut to `resized`, and brought to `original`, bilinearly each time.
    """
    padded = [side + -side % DIVISOR for side in resized]
    grown = _bilinear(logits, padded)[:, : resized[0], : resized[1]]
    grown = _bilinear(grown, original)
    masks = grown > 0
    inside = (grown.sigmoid() * masks).flatten(1).sum(1)
    return masks, inside / masks.flatten(1).sum(1).clamp(min=1)


def _bilinear(maps: Float[Tensor, "Q h w"], size: Sequence[int]) -> Float[Tensor, "Q H W"]:
    return interpolate(maps[None], size=tuple(size), mode="bilinear", align_corners=False)[0]


def box_of(mask: Bool[np.ndarray, "h w"]) -> tuple[float, float, float, float]:
    """Return the tight box (x1, y1, x2, y2) of a mask that is not empty, x2 and y2 exclusive."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
