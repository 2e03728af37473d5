"""Feature extractors: what turns pictures into the vectors that FID and the deviation compare.

Every extractor is a torch module with `num_features`, so torchmetrics' FrechetInceptionDistance
takes it as its `feature`; it gets what `prepare` makes of a picture.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

INCEPTION = "inception-2015-12-05.pt"
INCEPTION_URL = (
    "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/" + INCEPTION
)
CLEAN_FID_FOLDER = Path("/tmp")  # where clean-fid itself keeps the file


class FeatureExtractor(Protocol):
    """A network that describes pictures by vectors; name and revision go into every result.

    `revision` is a hash of the weights, `resize` says how `prepare` brings a picture to size.
    """

    name: str
    revision: str
    resize: str
    num_features: int

    def prepare(self, image: UInt8[np.ndarray, "h w 3"]) -> Float[Tensor, "3 s s"]:
        """Return one 8-bit RGB picture as the network takes it."""
        ...

    def __call__(self, images: Float[Tensor, "B 3 s s"]) -> Float[Tensor, "B d"]:
        """Return the features of prepared pictures."""
        ...


def clean_resize(
    image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int]
) -> Float[np.ndarray, "H W 3"]:
    """Return a picture at (height, width) in float, values within 0..255 and not rounded.

    PIL's bicubic filter, which widens with the factor of reduction, channel by channel: the resize
    that clean-fid's authors ask for (Parmar et al., 2022). The aspect ratio is not kept.
    """
    planes = [Image.fromarray(plane) for plane in np.moveaxis(image.astype(np.float32), 2, 0)]
    resized = [p.resize(size[::-1], Image.Resampling.BICUBIC) for p in planes]
    return np.stack([np.asarray(plane) for plane in resized], -1).clip(0, 255)


def center_crop(image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "s s 3"]:
    """Return the largest square in the middle of a picture."""
    height, width, _ = image.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image[top : top + side, left : left + side]


class CleanInception(nn.Module):
    """The Inception network of FID as clean-fid runs it, from its TorchScript file.

    `weights` is the file or its folder; None looks where clean-fid keeps it. torchvision's
    inception_v3 has other weights and does not do. Raises FileNotFoundError, naming where to get
    the file, and ValueError where it is something else.
    """

    name = "clean-fid-inception"
    resize = "clean bicubic 299x299"
    num_features = 2048

    def __init__(self, weights: str | Path | None = None, *, device: str = "cpu") -> None:
        super().__init__()
        file = Path(CLEAN_FID_FOLDER if weights is None else weights).expanduser()
        file = file / INCEPTION if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"FID needs clean-fid's Inception and there is no {file}; fetch {INCEPTION_URL} "
                "and pass eval.extractor.weights=<file>"
            )
        with file.open("rb") as opened:
            self.revision = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
        try:
            network = torch.jit.load(file, map_location=device).eval()
            self.layers = network.layers
        except (RuntimeError, AttributeError) as error:
            raise ValueError(
                f"eval.extractor.weights={file} is not clean-fid's {INCEPTION} (truncated?)"
            ) from error

    def prepare(self, image: UInt8[np.ndarray, "h w 3"]) -> Float[Tensor, "3 299 299"]:
        """Return a picture at 299 x 299, squashed if it is not square, in 0..255."""
        return torch.from_numpy(clean_resize(image, (299, 299))).permute(2, 0, 1)

    @torch.inference_mode()
    def forward(self, images: Float[Tensor, "B 3 299 299"]) -> Float[Tensor, "B 2048"]:
        """Return the 2048 features before the classifier."""
        weight = next(self.layers.parameters())
        pixels = images.to(weight.device, weight.dtype)
        return self.layers((pixels - 128) / 128).reshape(len(images), 2048)
