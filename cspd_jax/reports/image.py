"""`report.json` of a generation: what was asked for, what it cost, which plain sampler it equals in
distribution. And the charts that go with it, by file name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from PIL import Image

from cspd_jax import __version__
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.comparison import Comparison, summary
from cspd_jax.image.info import Info
from cspd_jax.image.lossy.shortcuts import fewer_steps
from cspd_jax.reports.charts import acceptance_maps, bars, stacked
from cspd_jax.weights.models import ImageModel

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


class Timing(NamedTuple):
    """Wall-clock seconds. seconds: of the generation alone, `compile_seconds` aside. load: reading the
    model. compile: tracing and compiling (or reading the compilation cache)."""

    seconds: float
    load_seconds: float
    compile_seconds: float


def make_report(
    info: Info,
    timing: Timing,
    *,
    labels: list[int],
    per_label: int,
    seed: int,
    compared: Comparison | None = None,
    **more,
) -> dict[str, Any]:
    """The content of `report.json`. labels: one turn of them, taken `per_label` times. `compared`:
    to the plain sampler. `more` is added."""
    model, method, exactness = info.plan.model, info.plan.method, info.exactness
    draft = method.draft_model
    return {
        "method": method.name,
        "criterion": method.criterion_name,
        "draft": None if draft is None else identity(draft),
        "denoise": "plain" if info.plan.options.chain is None else "speculative",
        "lossless": exactness.lossless,
        "why": exactness.why,
        "fewer_steps": _fewer_steps(info, model),
        "target": identity(model),
        "images": info.images,
        "tokens": info.tokens,
        "seconds": round(timing.seconds, 3),
        "seconds_per_image": round(timing.seconds / info.images, 5),
        "compile_seconds": round(timing.compile_seconds, 3),
        "load_seconds": round(timing.load_seconds, 3),
        "acceptance": info.verified and info.verified.acceptance,
        "rounds": info.rounds,
        "tokens_per_round": info.tokens / info.images / info.rounds if info.rounds else None,
        "truncated": info.truncated,
        "sequential": info.sequential._asdict(),
        "total": info.total._asdict(),
        "per_row": _per_row(info),
        "verified": _verified(info),
        "chains": _chains(info),
        "compared_to_plain": compared and summary(compared),
        "reference": reference(info, model),
        "plan": _plan(info),
        "labels": labels,
        "per_label": per_label,
        "versions": versions(),
        "device": device(),
        "config": dataclasses.asdict(model.config),
        "seed": seed,
        **more,
    }


def _fewer_steps(info: Info, model: ImageModel) -> str | None:
    """A line where the plain sampler of `reference` takes fewer steps than the model could."""
    options = info.plan.options
    own = getattr(model.config, "respacing", options.respacing)
    num_iter = options.num_iter or model.network.seq_len
    return fewer_steps(model.network.seq_len, num_iter, str(options.respacing), str(own))


def reference(info: Info, model: ImageModel) -> dict[str, Any]:
    """The plain sampler that the run equals in distribution."""
    options = info.plan.options
    steps = sampling_schedule(str(options.respacing)).num_steps
    told = info.plan.report()
    names = ("final_noise", "respacing", "num_iter", "cfg", "cfg_schedule", "temperature")
    known = {"known": told["known"]} if "known" in told else {}  # tokens that each image began with
    return {
        "method": "plain",
        "dtype": jnp.dtype(getattr(model.network, "dtype", jnp.float32)).name,
        "denoising_steps": steps,
        "T": steps,
        "order": getattr(options.order, "name", "random"),  # a checkerboard is compared with it
        **{name: told[name] for name in names},
        **known,
    }


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"cspd_jax": __version__, "python": platform.python_version(), **found}


def device() -> dict[str, Any]:
    first = jax.devices()[0]
    return {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count()}


def _per_row(info: Info) -> dict[str, float]:
    """Calls one after the other while an image was made: those of its batch."""
    batches = -(-info.images // info.batch)
    return {name: calls / batches for name, calls in info.sequential._asdict().items()}


def identity(model: ImageModel) -> dict[str, Any]:
    return {"name": model.name, "source_sha256": model.metadata.get("source_sha256")}


def _plan(info: Info) -> dict[str, Any]:
    """All that a replay needs besides the models, the labels and the seed.

    token_speculation and draft_lengths also have their first names: ahead, M.
    """
    plan, chain, told = info.plan, info.plan.options.chain, info.plan.report()
    options = plan.method.describe()
    lengths = list(chain.draft_lengths) if chain else None
    return {
        "batch": plan.batch,
        "encoder_sizes": told["prefix_buckets"],
        "gamma": options and options["gamma"],
        "token_speculation": options,
        "ahead": options,
        "draft_lengths": lengths,
        "drafter": chain and chain.drafter,
        "M": lengths,
        "gains": plan.drafter_source,
        "measured_seconds": plan.measured_seconds,
        "anneal": told["anneal"],
        "reveal": told["reveal"],
    }


def _verified(info: Info) -> dict[str, Any] | None:
    """Speculation over AR steps: acceptance by AR step, by distance, and by position over the images."""
    if info.verified is None:
        return None
    found = info.verified
    return {
        "tested": int(found.tested.sum()),
        "accepted": int(found.accepted.sum()),
        "acceptance_by_step": rates(found.accepted.sum(1), found.tested.sum(1)),
        "acceptance_by_distance": rates(found.accepted.sum(0), found.tested.sum(0)),
        "acceptance_by_position": rates(info.accepted.sum(0), info.tested.sum(0)),
        "resampling_trips": found.trips,
        "zeros": found.zeros,
    }


def rates(accepted, tested) -> list[float | None]:
    return [float(a / t) if t else None for a, t in zip(accepted, tested)]


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
    chains = info.chains
    assert chains is not None
    return [float(c / s) if s else None for s, c in zip(chains.starts, chains.committed)]


def pages(info: Info, captions: Sequence[str]) -> dict[str, Image.Image]:
    """Charts of what was accepted, for the methods that draft something."""
    found = {}
    if info.chains is not None:
        found["runs.png"] = run_chart(info)
    if info.verified is not None:
        found["accepted.png"] = acceptance_maps(info.tested, info.accepted, captions, lossy(info))
        found["acceptance.png"] = acceptance_chart(info)
    return found


def lossy(info: Info) -> str:
    """What a title adds for images that do not have the target's distribution."""
    return "" if info.exactness.lossless else " (lossy)"


def run_chart(info: Info) -> Image.Image:
    """Accepted run length against the denoising step; the first steps are on the left."""
    lengths = run_lengths(info)[::-1]
    names = [str(step) for step in reversed(range(len(lengths)))]
    title = "denoising steps committed by a head call that begins at step t"
    return bars(lengths, title, "step t (the last is 0)", names)


def acceptance_chart(info: Info) -> Image.Image:
    """Share of accepted drafts by AR step, and by distance from the context they were drafted in."""
    assert info.verified is not None
    tested, accepted = info.verified.tested, info.verified.accepted
    steps = [str(i) for i in range(len(tested))]
    distances = [str(i + 1) for i in range(tested.shape[1])]
    title = f"acceptance by AR step{lossy(info)}"
    charts = [bars(rates(accepted.sum(1), tested.sum(1)), title, "AR step", steps)]
    if len(distances) > 1:
        title = "acceptance by distance: which of the groups drafted ahead it was"
        charts.append(bars(rates(accepted.sum(0), tested.sum(0)), title, "distance", distances))
    return stacked(charts)
