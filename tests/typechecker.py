"""The checker that pytest's jaxtyping hook puts on every function and dataclass of the package."""

from collections.abc import Callable
from typing import Any, Self

from beartype import BeartypeConf, BeartypeHintOverrides, beartype

# An int may stand where a float is asked; Self cannot be checked from outside its class.
_beartype = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=BeartypeHintOverrides({Self: Any}))
)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check every call of a function; what a Protocol describes is taken as it comes."""
    hints = function.__annotations__
    function.__annotations__ = {
        name: Any if getattr(hint, "_is_protocol", False) else hint for name, hint in hints.items()
    }
    return _beartype(function)
