"""The report of a run as JSON: its settings, its cost, and whether it is exact. The
report has the same form for all families of models."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cspd_jax import __version__
from cspd_jax._utils.compilation import has_device_loops
from cspd_jax.info import Info


def make_report(
    model: Any, info: Info, options: Mapping[str, object], **more: object
) -> dict[str, object]:
    """Returns the content of `report.json`.

    options: the options of the run, as JSON.
    more: further entries that the family of models reports.
    """
    return {
        "target": identity(model),
        "exact": info.exact,
        "why": info.why,
        "rows": len(info.made),
        "tokens": int(np.sum(info.made)),
        "seconds": info.seconds,
        "rounds": float(np.mean(info.rounds)),
        "tested": int(np.sum(info.tested)),
        "accepted": int(np.sum(info.accepted)),
        "acceptance": info.acceptance,
        "acceptance_by_distance": [
            float(accepted / tested) if tested else None
            for accepted, tested in zip(
                np.sum(info.accepted, 0), np.sum(info.tested, 0)
            )
        ],
        "truncated": int(np.sum(info.truncated)),
        "calls": {
            name: {kind: int(count) for kind, count in of._asdict().items()}
            for name, of in info.calls.items()
        },
        "options": options,
        **more,
        "versions": versions(),
        "device": device(),
    }


def beside(infos: Mapping[str, Info]) -> dict[str, Any]:
    """Compares the first way with the last one, which is the reference: how many times
    faster it is, and how many times fewer calls it makes one after the other, of the
    target for texts and of all networks for images. All infos must have their
    seconds."""
    (name, own), *_, (_, reference) = infos.items()
    of_target = "target" in own.calls
    calls = [
        of.calls["target"].sequential if of_target else of.sequential
        for of in (own, reference)
    ]
    return {
        "way": name,
        "seconds": {way: info.seconds for way, info in infos.items()},
        "faster": (reference.seconds or 0.0) / (own.seconds or 1.0),
        "fewer_sequential_calls": float(calls[1] / calls[0]),
        "calls_of": "the target" if of_target else "all networks",
    }


def in_words(beside: Mapping[str, Any]) -> str:
    """Returns the result of `beside` as a phrase."""
    fewer = beside["fewer_sequential_calls"]
    calls = f"{fewer:.1f} times fewer" if fewer >= 1 else f"{1 / fewer:.1f} times more"
    faster = beside["faster"]
    ours, *_, plain = beside["seconds"].values()
    speed = (
        f"{faster:.1f} times faster"
        if faster >= 1
        else f"more arithmetic, {1 / faster:.1f} times slower"
    )
    advice = "" if faster >= 1 else "; README.md says where drafts pay"
    return (
        f"{calls} calls of {beside['calls_of']} one after the other, {speed} here"
        f" ({ours:.2g} s, not {plain:.2g} s){advice}"
    )


def cost(info: Info) -> str:
    """Returns one line with the cost of a run, and whether the run is exact."""
    calls = (
        f"{info.sequential} network calls one after the other in {info.seconds:.2f} s"
    )
    accepted = (
        ""
        if info.acceptance is None
        else f", {info.acceptance:.0%} of the drafts accepted"
    )
    return f"{calls}{accepted}, {'exact' if info.exact else f'lossy: {info.why}'}"


def identity(model: Any) -> dict[str, object]:
    """Returns the name of a model and the SHA-256 of its source."""
    return {"name": model.name, "source_sha256": model.metadata.get("source_sha256")}


def versions() -> dict[str, str]:
    """Returns the versions of this library, of Python and of the main dependencies."""
    found = {
        name: importlib.metadata.version(name)
        for name in ("jax", "jaxlib", "flax", "numpy")
    }
    return {"cspd_jax": __version__, "python": platform.python_version(), **found}


def device() -> dict[str, object]:
    """Returns the kind and the number of the devices, and whether they run loops."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "device_loops": has_device_loops(),
    }
