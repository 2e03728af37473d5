"""The images a stage has to decode, in an order and under noise keys that no batch size changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

from ssd_research.decoders.noise import sample_key
from ssd_research.prompts import Prompt

Item = TypeVar("Item")


@dataclass(frozen=True)
class Task:
    """One image to decode: number `image_index` of prompt number `prompt_index`."""

    prompt_index: int
    prompt: Prompt
    image_index: int

    @property
    def place(self) -> tuple[int, int]:
        """Return (prompt_index, image_index), which names the task within its run."""
        return self.prompt_index, self.image_index

    @property
    def key(self) -> int:
        """Return the key of this image's noise."""
        return sample_key(self.prompt.id, self.image_index)


def tasks(prompts: Sequence[Prompt], images_per_prompt: int) -> list[Task]:
    """Return the tasks of all images, prompt by prompt."""
    return [Task(i, p, n) for i, p in enumerate(prompts) for n in range(images_per_prompt)]


def batches(todo: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield consecutive groups of at most `size` items."""
    for start in range(0, len(todo), size):
        yield todo[start : start + size]


def progress(label: str, *, total: int, done: int) -> tqdm:
    """Return a progress bar of images on stderr, silent where that is no terminal."""
    return tqdm(total=total, initial=done, desc=label, unit="image", disable=None)
