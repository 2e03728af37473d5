"""The pixels of an image file as judges see them: 8-bit RGB, or one line that says why not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn what Pillow raises inside into one line about the image called `name`.

    Raises:
        ValueError: if the file is no image, or is spoilt, cut short, or too large to be taken for
            one.
    """
    try:
        yield
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not a readable image") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} is damaged or cut short ({error})") from error


def read_rgb(file: Path, name: str, *, upright: bool = False) -> UInt8[np.ndarray, "h w 3"]:
    """Return the pixels of a file, called `name` in errors; transparency is left out.

    With `upright` the image is turned as its EXIF data say.

    Raises:
        ValueError: if the file cannot be decoded, or has more than 8 bits a channel.
    """
    with decoding(name), Image.open(file) as image:
        mode = image.mode
        turned = ImageOps.exif_transpose(image) if upright else image
        pixels = np.array(turned.convert("RGB"))
    refuse_deep(mode, name)
    return pixels


def refuse_deep(mode: str, name: str) -> None:
    """Raise ValueError if images of Pillow's `mode` have more than 8 bits a channel: it clips them.

    Greyscale with 16 or 32 bits is meant, mode I or F; of coloured PNGs Pillow takes the high byte.
    """
    if mode[0] in "IF":
        raise ValueError(f"{name} has more than 8 bits a channel; save it as 8-bit RGB")
