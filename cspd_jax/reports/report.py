"""`report.json`: what was asked for, what it cost, and what it equals in law."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._version import __version__
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.generation import Info
from cspd_jax.models import ImageModel

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


class Timing(NamedTuple):
    """Wall-clock seconds. seconds: of the generation alone, `compile_seconds` aside. load: reading the
    model. compile: tracing and compiling (or reading the compilation cache)."""

    seconds: float
    load_seconds: float
    compile_seconds: float


def make_report(
    info: Info,
    model: ImageModel,
    timing: Timing,
    *,
    labels: list[int],
    per_label: int,
    seed: int,
    **more,
) -> dict[str, Any]:
    """The content of `report.json`. labels: one turn of them, taken `per_label` times. `more` is added."""
    settings = info.request.settings
    lossless, why = judgement(info)
    return {
        "method": info.method,
        "criterion": None,
        "draft": None,
        "denoise": "plain" if settings.speculation is None else "speculative",
        "lossless": lossless,
        "why": why,
        "target": {"name": model.name, "source_sha256": model.metadata.get("source_sha256")},
        "images": info.images,
        "tokens": info.tokens,
        "seconds": round(timing.seconds, 3),
        "seconds_per_image": round(timing.seconds / info.images, 5),
        "compile_seconds": round(timing.compile_seconds, 3),
        "load_seconds": round(timing.load_seconds, 3),
        "acceptance": None,
        "rounds": info.rounds,
        "tokens_per_round": info.tokens / info.images / info.rounds,
        "truncated": info.chains.truncated if info.chains else 0,
        "sequential": info.sequential._asdict(),
        "total": info.total._asdict(),
        "per_row": _per_row(info),
        "chains": _chains(info),
        "compared_to_plain": None,
        "reference": reference(info, model),
        "plan": {
            "batch": info.batch,
            "encoder_sizes": settings.encoder_sizes,
            "gamma": None,
            "M": list(settings.speculation.windows) if settings.speculation else None,
            "K": settings.speculation.proposals if settings.speculation else None,
            "gains": info.request.gains,
            "measured_seconds": info.request.measured,
        },
        "labels": labels,
        "per_label": per_label,
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(model.config),
        "seed": seed,
        **more,
    }


def judgement(info: Info) -> tuple[bool, str]:
    """Whether the law of the images is the target's own, and why."""
    if info.chains is None:
        return (
            True,
            "the plain sampler is the reference itself: every token is drawn from the target's own law",
        )
    if info.chains.truncated:
        return False, (
            f"{info.chains.truncated} draws from a residual were given up at the limit of trips, and replaced"
            " by draws from the target"
        )
    return True, (
        "every denoising step is an accepted draft or a draw from the residual, which together have the"
        " target's own law"
    )


def reference(info: Info, model: ImageModel) -> dict[str, Any]:
    """The plain sampler that the run equals in law."""
    settings = info.request.settings
    return {
        "method": "plain",
        "final_noise": settings.final_noise,
        "dtype": jnp.dtype(model.model.dtype).name,
        "respacing": settings.respacing,
        "T": sampling_schedule(settings.respacing).num_steps,
        "num_iter": settings.num_iter,
        "cfg": info.request.cfg,
        "cfg_schedule": settings.cfg_schedule,
        "temperature": info.request.temperature,
    }


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"cspd_jax": __version__, "python": platform.python_version(), **found}


def device() -> dict[str, Any]:
    first = jax.devices()[0]
    return {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count()}


def _per_row(info: Info) -> dict[str, float]:
    """Calls one after the other that one image took part in."""
    batches = -(-info.images // info.batch)
    return {name: calls / batches for name, calls in info.sequential._asdict().items()}


def _chains(info: Info) -> dict[str, Any] | None:
    """Speculation along the denoising chains: calls per token, and accepted runs by denoising step."""
    if info.chains is None:
        return None
    chains = info.chains
    return {
        "steps": len(chains.starts),
        "head_calls_per_token": chains.calls_per_token,
        "head_calls_of_slowest": chains.slowest,
        "acceptance": chains.accepted / max(1, chains.tested),
        "run_length_by_step": run_lengths(info),
        "calls_by_step": chains.starts.tolist(),
        "resampler_trips": chains.trips,
    }


def run_lengths(info: Info) -> list[float | None]:
    """Mean number of steps committed by the head calls that began at each step; None where none began."""
    return [float(c / s) if s else None for s, c in zip(info.chains.starts, info.chains.committed)]
