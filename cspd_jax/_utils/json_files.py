"""Reads JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cspd_jax.check import UserError


def read_json(path: str | os.PathLike) -> Any:
    """Returns the value in a file; UserError if it is not there or is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error})") from None


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the object in a file, as `read_json` does."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value
