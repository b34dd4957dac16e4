"""The one exception that means: the caller's input is wrong; and checks of numbers that raise it."""

from __future__ import annotations

import math
import numbers
from typing import Any


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line exits with 2."""


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """UserError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UserError(f"{name} is {value!r}; it must be a whole number")
    value = int(value)
    if value < least:
        raise UserError(f"{name} is {value}; it must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"{name} is {value}; it must be at most {most}")


def check_range(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """UserError unless `value` is a finite number within the bounds that are given."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}; it must be a finite number")
    value = float(value)
    if above is not None and value <= above:
        raise UserError(f"{name} is {value}; it must be above {above:g}")
    if least is not None and value < least:
        raise UserError(f"{name} is {value}; it must be at least {least:g}")
    if most is not None and value > most:
        raise UserError(f"{name} is {value}; it must be at most {most:g}")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether XLA reports that the device has too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error)
