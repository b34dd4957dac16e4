"""The one exception that means: the caller's input is wrong; and checks of numbers that raise it."""

from __future__ import annotations

import contextlib
import math
import numbers
import reprlib
from collections.abc import Iterator
from typing import Any

LARGEST = 3e38  # that a float32 holds, in round numbers
_LONGEST = 2000
_SHOWN = 80


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line exits with 2.

    Sentences quote names and values from files, which may be megabytes long or steer a terminal; therefore
    every sentence is made `one_line`.
    """

    def __init__(self, sentence: object = ""):
        super().__init__(one_line(str(sentence)))


def one_line(text: str) -> str:
    """What a terminal can be given: `printable`, and the middle of an enormous text cut."""
    if len(text) > _LONGEST:
        head, tail = _LONGEST * 2 // 3, _LONGEST // 4
        text = f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[-tail:]}"
    return printable(text)


def printable(text: str) -> str:
    """The text with what would steer a terminal, line ends too, escaped as in Python's strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Puts the name of a file before the sentence of a UserError within the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def shown(value: Any) -> str:
    """A value from a file as a sentence quotes it: like repr, but short, whatever its length and depth."""
    try:
        return _QUOTE.repr(value)[:_SHOWN]
    except ValueError:  # a whole number of thousands of digits, which Python does not write
        return f"{type(value).__name__} of too many digits"
    except RuntimeError:  # an array that has been deleted
        return f"a {type(value).__name__} that is no longer there"


_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SHOWN
_QUOTE.maxlevel = 3


def is_finite(value: Any) -> bool:
    """Whether it is a real number, and one that a float can hold."""
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """UserError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UserError(f"{name} is {shown(value)}; it must be a whole number")
    value = int(value)
    if value < least:
        raise UserError(f"{name} is {shown(value)}; it must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"{name} is {shown(value)}; it must be at most {most}")


def check_range(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float = -LARGEST,
    most: float = LARGEST,
) -> None:
    """UserError unless `value` is a number within the bounds that are given, and that a float32 holds."""
    if shape := getattr(value, "shape", ()):
        raise UserError(f"{name} has shape {shape}; it must be one number")
    if not is_finite(value):
        raise UserError(f"{name} is {shown(value)}; it must be a finite number")
    value = float(value)
    if above is not None and value <= above:
        raise UserError(f"{name} is {value}; it must be above {above:g}")
    if value < least:
        raise UserError(f"{name} is {value}; it must be at least {least:g}")
    if value > most:
        raise UserError(f"{name} is {value}; it must be at most {most:g}")


class OutOfMemory(UserError):
    """The device has too little memory for what was asked."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA reports that the device has too little memory."""
    told = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return told or isinstance(error, OutOfMemory)
