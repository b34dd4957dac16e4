"""What commands print: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cspd_jax.errors import printable


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def measured(question: str, fastest: Callable, request: Any):
    """The `Choice` of `fastest` for a request, said as it is made."""
    progress(f"measuring which is faster here: {question}")
    choice = fastest(request)
    progress("; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items()))
    return choice


def result(values: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object, or one line per value for people."""
    if as_json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        if isinstance(value, Mapping):
            value = " ".join(f"{k}={v}" for k, v in value.items())
        if value not in (None, ""):
            shown = f"{value:,}" if key == "params" and isinstance(value, int) else value
            print(printable(f"{key + ':':<15} {shown}"))
