"""`report.json`: what was asked for, what it cost, and what it equals in law."""

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
from cspd_jax.image.speculation import Ahead
from cspd_jax.models import ImageModel
from cspd_jax.reports.charts import acceptance_maps, bars, stacked

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
    compared: Comparison | None = None,
    **more,
) -> dict[str, Any]:
    """The content of `report.json`. labels: one turn of them, taken `per_label` times. `compared`:
    to the plain sampler. `more` is added."""
    request, settings = info.request, info.request.settings
    lossless, why = judgement(info)
    return {
        "method": info.method,
        "criterion": request.criterion,
        "draft": request.draft and identity(request.draft),
        "denoise": "plain" if settings.speculation is None else "speculative",
        "lossless": lossless,
        "why": why,
        "target": identity(model),
        "images": info.images,
        "tokens": info.tokens,
        "seconds": round(timing.seconds, 3),
        "seconds_per_image": round(timing.seconds / info.images, 5),
        "compile_seconds": round(timing.compile_seconds, 3),
        "load_seconds": round(timing.load_seconds, 3),
        "acceptance": info.verified and info.verified.acceptance,
        "rounds": info.rounds,
        "tokens_per_round": info.tokens / info.images / info.rounds,
        "truncated": truncated(info),
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


def judgement(info: Info) -> tuple[bool, str]:
    """Whether the law of the images is the target's own, and why."""
    ahead, criterion = info.request.ahead, info.request.criterion
    if criterion == "official":
        return False, (
            "the released runner judges drafts in the context before their block, keeps what follows a"
            " rejection, and widens its test: its images do not have the target's law"
        )
    if isinstance(ahead, Ahead) and ahead.joint:
        return False, "all drafts were verified in one context that shows them, which is not each token's own"
    if criterion == "paper" and ahead.inner_temperature != 1:
        return False, f"the test is widened by the inner temperature {ahead.inner_temperature:g}"
    if criterion == "paper" and ahead.sigma:
        return (
            False,
            "the ratio of Eq. 5 has the factor Sigma, with which tokens do not have the target's law",
        )
    if truncated(info):
        return False, (
            f"{truncated(info)} draws from a residual were given up, at the limit of tries or because a"
            " density was not a number, and replaced by draws from the target"
        )
    if criterion == "paper":
        return True, (
            "with Sigma = 1 and inner temperature 1, every token's last step is a maximal coupling of target"
            " and draft, after chains that have each their own law: that of the plain sampler with noise in"
            " the last step"
        )
    if criterion == "path":
        return True, (
            "every token is an accepted draft or a draw from the residual of whole denoising paths, in its"
            " own context, which together have the law of the plain sampler with noise in the last step"
        )
    if info.chains is None:
        return (
            True,
            "the plain sampler is the reference itself: every token is drawn from the target's own law",
        )
    return True, (
        "every denoising step is an accepted draft or a draw from the residual, which together have the"
        " target's own law"
    )


def truncated(info: Info) -> int:
    """Draws from a residual that were given up."""
    return sum(part.truncated for part in (info.chains, info.verified) if part)


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
    """Calls one after the other while an image was made: those of its batch."""
    batches = -(-info.images // info.batch)
    return {name: calls / batches for name, calls in info.sequential._asdict().items()}


def identity(model: ImageModel) -> dict[str, Any]:
    return {"name": model.name, "source_sha256": model.metadata.get("source_sha256")}


def _plan(info: Info) -> dict[str, Any]:
    """All that a replay needs besides the models, the labels and the seed."""
    request, settings = info.request, info.request.settings
    ahead = None if request.ahead is None else dataclasses.asdict(request.ahead)
    speculation = settings.speculation
    return {
        "batch": info.batch,
        "encoder_sizes": settings.encoder_sizes,
        "gamma": ahead and ahead["gamma"],
        "ahead": ahead,
        "M": list(speculation.windows) if speculation else None,
        "K": speculation.proposals if speculation else None,
        "gains": request.gains,
        "measured_seconds": request.measured,
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
    return [float(c / s) if s else None for s, c in zip(info.chains.starts, info.chains.committed)]


# The pictures that go with a generation, by file name.


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
    """What a title adds for images that do not have the target's law."""
    return "" if judgement(info)[0] else " (lossy)"


def run_chart(info: Info) -> Image.Image:
    """Accepted run length against the denoising step; the first steps are on the left."""
    lengths = run_lengths(info)[::-1]
    names = [str(step) for step in reversed(range(len(lengths)))]
    title = "denoising steps committed by a head call that begins at step t"
    return bars(lengths, title, "step t (the last is 0)", names)


def acceptance_chart(info: Info) -> Image.Image:
    """Share of accepted drafts by AR step, and by distance from the context they were drafted in."""
    tested, accepted = info.verified.tested, info.verified.accepted
    steps = [str(i) for i in range(len(tested))]
    distances = [str(i + 1) for i in range(tested.shape[1])]
    title = f"acceptance by AR step{lossy(info)}"
    charts = [bars(rates(accepted.sum(1), tested.sum(1)), title, "AR step", steps)]
    if len(distances) > 1:
        title = "acceptance by distance: which of the groups drafted ahead it was"
        charts.append(bars(rates(accepted.sum(0), tested.sum(0)), title, "distance", distances))
    return stacked(charts)
