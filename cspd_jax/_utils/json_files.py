"""Reads JSON that others wrote: of bounded size, depth and number of values, without NaN and infinity."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from cspd_jax._utils import limits
from cspd_jax.errors import UserError


def read_json(path: str | os.PathLike, most_bytes: int = limits.JSON_BYTES) -> Any:
    """The value in a file; UserError if it is not there, is not JSON or is beyond the bounds."""
    if (size := limits.file_size(path)) > most_bytes:
        raise UserError(f"{path} has {size} bytes; such a file has at most {most_bytes}")
    try:
        return parse(Path(path).read_bytes())
    except UnicodeDecodeError:
        raise UserError(f"{path} is not readable JSON (it must be in UTF-8, and is not)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error})") from None


def read_object(path: str | os.PathLike, most_bytes: int = limits.JSON_BYTES) -> dict[str, Any]:
    """The object in a file, like `read_json`."""
    value = read_json(path, most_bytes)
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def parse(content: bytes) -> Any:
    """The value; ValueError or RecursionError if it is not JSON or is beyond the bounds."""
    # A byte or two of JSON can become an object of 60 bytes, so values are counted before they are made.
    if sum(map(content.count, (b",", b"[", b"{"))) > limits.JSON_VALUES:
        raise ValueError(f"more than {limits.JSON_VALUES} values")
    value = json.loads(content.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite)
    level = [value]
    for _ in range(limits.JSON_DEPTH):
        inner = (v for v in level if isinstance(v, dict | list))
        level = [v for outer in inner for v in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {limits.JSON_DEPTH} deep")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
