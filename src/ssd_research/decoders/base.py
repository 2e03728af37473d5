"""What every decoder is: a dataclass of hyper-parameters with one method."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.noise import KeyedNoise, Noise
from ssd_research.eagle import Drafter
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling


def require_whole(name: str, value: object, *, least: int) -> None:
    """Raise ValueError unless `decoder.<name>` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"decoder.{name} must be a whole number of at least {least}, not {value}")


@dataclass(frozen=True)
class Decoder(ABC):
    """A decoding algorithm; `needs_heads` says whether it drafts with trained heads."""

    name: str
    needs_heads: ClassVar[bool] = False

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the output law equals autoregressive sampling from p."""

    def decode(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        seed: int,
        sample_keys: Sequence[int],
        heads: Drafter | None = None,
    ) -> Generation:
        """Decode one image per prompt.

        `sample_keys` names each image's noise; images with the same key, seed and prompt are the
        same whatever else is in the batch. Raises ValueError if heads are missing.
        """
        if len(prompts) != len(sample_keys):
            raise ValueError(f"{len(prompts)} prompts need as many keys, not {len(sample_keys)}")
        self.check(backbone.grid)
        if heads is not None:
            heads.require(**self.reach(backbone.grid))
        noise = KeyedNoise(seed, sample_keys)
        return self.decode_with(backbone, prompts, sampling=sampling, noise=noise, heads=heads)

    def check(self, grid: TokenGrid) -> None:  # noqa: B027 (most decoders take any grid)
        """Raise ValueError for a setting that a backbone's grid has no use for."""

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return the hyper-parameters in force on a grid, which with the method decide a result."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    def parameters(self) -> dict[str, Any]:
        """Return the hyper-parameters that were set to something else than their defaults."""
        own = [field for field in fields(self) if field.name != "name"]
        values = {field.name: getattr(self, field.name) for field in own}
        defaults = {
            field.name: field.default if field.default_factory is MISSING else values[field.name]
            for field in own
        }
        return {key: value for key, value in values.items() if value != defaults[key]}

    @property
    def title(self) -> str:
        """The name in capitals and what was set, as in `SSD r=2`."""
        shown = ", ".join(f"{key}={value}" for key, value in self.parameters().items())
        return f"{self.name.upper()} {shown}".strip()

    def title_with(self, settings: Mapping[str, Any]) -> str:
        """Return the title and what `settings`, those in force, make of end-of-row tokens."""
        end_of_row = settings.get("end_of_row")
        if end_of_row is None or "end_of_row" in self.parameters():
            return self.title
        return f"{self.title} end_of_row={end_of_row}"

    def reach(self, grid: TokenGrid) -> dict[str, Any]:
        """Return how many columns (horizontal) and rows (vertical) ahead the decoder drafts.

        A decoder that drafts with another kind of heads than spatial ones returns that `kind`.
        """
        return {"horizontal": 0, "vertical": 0}

    @abstractmethod
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: Any,
    ) -> Generation:
        """Decode with a given source of noise.

        `heads` are of the kind and reach that `reach` asks for, and None where there are none.
        """
