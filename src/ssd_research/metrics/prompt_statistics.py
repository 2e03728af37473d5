"""What sets of prompts are like, and what a benchmark shares with the training prompts (Table 17).

The paper gives neither its word lists nor its definitions. Those here reproduce its figures where
that is possible: `prompt_words.yaml` says which, list by list.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import yaml

VERSION = 1
WORDS = "prompt_words.yaml"
NGRAM = 5


@dataclass(frozen=True)
class WordLists:
    """The words and phrases that a prompt is searched for, in lower case."""

    numbers: tuple[str, ...]
    colours: tuple[str, ...]
    spatial: tuple[str, ...]
    style: tuple[str, ...]

    @classmethod
    def of(cls, lists: Mapping[str, Any]) -> "WordLists":
        """Build from a mapping; ValueError names a list that is missing, unknown, empty or odd."""
        names = ("numbers", "colours", "spatial", "style")
        odd = sorted(set(names) ^ set(lists)) or [n for n in names if not _is_list(lists[n])]
        if odd:
            raise ValueError(
                f"eval.words needs the lists {', '.join(names)} of one or more texts; see {odd[0]}"
            )
        return cls(**{name: tuple(word.lower() for word in lists[name]) for name in names})

    @cached_property
    def counting(self) -> re.Pattern[str]:
        """A number, and one word that ends in s: "three clocks", not "three traffic lights"."""
        return re.compile(rf"\b(?:{_any(self.numbers)}|\d+)\s+\w+s\b")

    @cached_property
    def binding(self) -> re.Pattern[str]:
        """A colour word that a further word follows: "a red bench", not "a bench is red."."""
        return re.compile(rf"\b(?:{_any(self.colours)})\s+\w+")

    @cached_property
    def relation(self) -> re.Pattern[str]:
        """A phrase that places one thing by another."""
        return re.compile(rf"\b(?:{_any(self.spatial)})\b")

    @cached_property
    def modifier(self) -> re.Pattern[str]:
        """A phrase that asks for a style or quality instead of a content."""
        return re.compile(rf"\b(?:{_any(self.style)})\b")


def _is_list(words: Any) -> bool:
    """Say whether `words` are texts, one or more; an empty one would be found everywhere."""
    return (
        isinstance(words, list)
        and bool(words)
        and all(isinstance(word, str) and word.strip() for word in words)
    )


def _any(phrases: Iterable[str]) -> str:
    """Return an alternation that tries longer phrases first and takes any white space."""
    longest_first = sorted(phrases, key=len, reverse=True)
    return "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in longest_first)


def shipped_words() -> dict[str, WordLists]:
    """Return the word lists that come with the package, by name: `default` and `wide`."""
    text = resources.files(__package__).joinpath(WORDS).read_text(encoding="utf-8")
    return parse_words(text)


def parse_words(text: str) -> dict[str, WordLists]:
    """Return the word lists of a YAML text, by name; ValueError where it holds something else."""
    try:
        content = yaml.safe_load(text)
        if not content:
            raise TypeError("it is empty")
        return {str(name): WordLists.of(lists) for name, lists in content.items()}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(
            f"eval.words must be a YAML mapping of names to word lists: {error}"
        ) from error


def describe(prompts: Sequence[str], words: WordLists) -> dict[str, Any]:
    """Return length and the share of prompts with each property, counts beside percentages.

    Raises:
        ValueError: if there is no prompt.
    """
    if not prompts:
        raise ValueError("there are no prompts to describe")
    texts = [prompt.lower() for prompt in prompts]
    found: dict[str, Any] = {
        "prompts": len(texts),
        "median_words": statistics.median(len(text.split()) for text in texts),
        "word_types": len(set().union(*map(types, texts))),
    }
    searches = {
        "style_modifiers": words.modifier,
        "spatial_relations": words.relation,
        "color_binding": words.binding,
        "counting": words.counting,
    }
    for name, pattern in searches.items():
        count = sum(bool(pattern.search(text)) for text in texts)
        found |= {name: count, f"{name}_percent": 100 * count / len(texts)}
    return found


def overlap(prompts: Sequence[str], training: Iterable[str]) -> dict[str, Any]:
    """Return what a benchmark shares with the training prompts.

    Exact prompts (without case and spacing), word types that training lacks, and distinct 5-grams
    of words that it has, the latter two in percent of the benchmark's own.
    """
    ours = {_plain(prompt) for prompt in prompts}
    vocabulary = set().union(*(types(text) for text in ours))
    grams = set().union(*(set(ngrams(text)) for text in ours))
    same: set[str] = set()
    seen_types: set[str] = set()
    seen_grams: set[tuple[str, ...]] = set()
    count = 0
    for count, prompt in enumerate(training, 1):  # noqa: B007
        text = _plain(prompt)
        same |= {text} & ours
        seen_types |= types(text) & vocabulary
        seen_grams |= grams.intersection(ngrams(text))
    unseen = len(vocabulary) - len(seen_types)
    return {
        "training_prompts": count,
        "exact_prompt_overlap": sum(_plain(prompt) in same for prompt in prompts),
        "word_types_unseen": unseen,
        "word_types_unseen_percent": 100 * unseen / len(vocabulary) if vocabulary else None,
        "shared_5grams": len(seen_grams),
        "shared_5grams_percent": 100 * len(seen_grams) / len(grams) if grams else None,
    }


def types(text: str) -> set[str]:
    """Return the distinct words of a text: runs of letters and apostrophes, in lower case."""
    return set(re.findall(r"[a-z']+", text.lower()))


def ngrams(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the 5-grams of a text's words."""
    words = re.findall(r"[a-z']+", text.lower())
    yield from zip(*(words[n:] for n in range(NGRAM)), strict=False)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
