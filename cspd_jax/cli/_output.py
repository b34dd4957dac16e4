"""What commands print: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def result(values: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object, or one line per value for people."""
    if as_json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        if isinstance(value, Mapping):
            value = " ".join(f"{k}={v}" for k, v in value.items())
        if value not in (None, ""):
            print(f"{key + ':':<15} {f'{value:,}' if key == 'params' else value}")
