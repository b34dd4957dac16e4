"""Whether to speculate along the denoising chains, decided by a short measurement on this machine.

Speculation trades sequential calls for arithmetic: it wins where a head call on one row costs nearly as much
as on many (large heads, accelerators, small batches) and loses elsewhere. Both ways have the same law.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax._utils.files import cache_folder
from cspd_jax.coupling import uniform
from cspd_jax.diffusion.chain import sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import calibration, chain_speculation
from cspd_jax.image.calibration import Calibration
from cspd_jax.image.plain import PlainSettings
from cspd_jax.models import ImageModel

_REPEATS = 5
_LONGEST = 20.0  # seconds after which no further repeat is made
_HANDICAP = 1.02  # speculation must win by more than the clock's noise


class Choice(NamedTuple):
    """speculation: None is step by step. seconds: of one group of chains, by way ("plain", "M=8", ...)."""

    speculation: chain_speculation.Speculation | None
    seconds: dict[str, float]


def candidates(steps: int) -> dict[str, chain_speculation.Speculation | None]:
    """The ways tried. Runs are long at the start of the chain and short at its end, so are the windows."""
    long = (32,) * -(-steps // 32)
    windows = {(8,), (16,), (*long, 8)} if steps > 16 else {(min(8, steps),)}
    ways = {name_of(w): chain_speculation.Speculation(w) for w in sorted(windows)}
    return {"plain": None, **ways}


def name_of(windows: tuple[int, ...]) -> str:
    """How windows are written: runs of equal ones as count x size, for example 4x32,8."""
    parts: list[list[int]] = []
    for w in windows:
        if parts and parts[-1][1] == w:
            parts[-1][0] += 1
        else:
            parts.append([1, w])
    return ",".join(f"{n}x{w}" if n > 1 else str(w) for n, w in parts)


def choose(
    model: ImageModel,
    settings: PlainSettings,
    calibration: Calibration,
    rows: int,
    cfg: float,
    temperature: float,
) -> Choice:
    """The fastest way for groups of `rows` chains: measured, or as found when it was measured before."""
    path = _file(model, settings, rows, cfg, temperature)
    steps = sampling_schedule(settings.respacing).num_steps
    ways = candidates(steps)
    seconds = _read(path, ways)
    if seconds is None:
        seconds = measure(model, settings, calibration, rows, cfg, temperature)
        _write(path, seconds)
    fair = {name: s * (_HANDICAP if ways[name] else 1.0) for name, s in seconds.items()}
    return Choice(ways[min(fair, key=fair.get)], seconds)


def measure(
    model: ImageModel,
    settings: PlainSettings,
    calibration: Calibration,
    rows: int,
    cfg: float,
    temperature: float,
    ways: Sequence[str] | None = None,
) -> dict[str, float]:
    """Median seconds of one group of chains of each way (of the `candidates`), the ways taking turns."""
    key = jax.random.key(0)
    steps = sampling_schedule(settings.respacing).num_steps
    random = chain_speculation.Randomness(
        noise=jax.random.normal(jax.random.fold_in(key, 1), (steps + 1, rows, model.config.token_dim)),
        uniforms=uniform(jax.random.fold_in(key, 2), (steps, rows)),
        residual=jax.random.split(jax.random.fold_in(key, 3), rows),
    )
    z = calibration.contexts
    z = z[:, jnp.arange(rows) % z.shape[1]].reshape(-1, z.shape[-1]).astype(model.model.dtype)
    runs = {
        name: functools.partial(
            run_chains, model.model, model.params, z, random, calibration.drafter, cfg, temperature,
            settings=settings, speculation=way,
        )
        for name, way in candidates(steps).items()
        if ways is None or name in ways
    }  # fmt: skip
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while len(seconds["plain"]) < _REPEATS and time.perf_counter() - begin < _LONGEST:
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


@functools.partial(jax.jit, static_argnames=("model", "settings", "speculation"))
def run_chains(
    model,
    params,
    z,
    random: chain_speculation.Randomness,
    drafter,
    cfg,
    temperature,
    *,
    settings,
    speculation,
):
    """The chains of one group, z [R or 2R, D] given: x_0 [R, d], and counts with speculation."""
    schedule = sampling_schedule(settings.respacing)
    time_features = model.embed_time(params, jnp.asarray(schedule.timestep_map))
    c = coefficients(schedule, random.noise.dtype)
    options = {
        "temperature": temperature,
        "scale": cfg if settings.guided else None,
        "final_noise": settings.final_noise,
    }
    if speculation is None:
        return sample_chain(model, params, time_features, z, random.noise, c, **options), None
    found = chain_speculation.speculate_chain(
        model, params, time_features, z, random, c, drafter, speculation=speculation, **options
    )
    return found.x, found.counts


def _file(model: ImageModel, settings: PlainSettings, rows: int, cfg: float, temperature: float) -> Path:
    device = f"{jax.devices()[0].device_kind}-jax{jax.__version__}".replace(" ", "_").replace("/", "_")
    name = calibration.file_name(settings, cfg, temperature).removesuffix(".npz")
    return cache_folder() / "choices" / calibration.digest(model) / f"{name}-rows{rows}-{device}.json"


def _read(path: Path, ways) -> dict[str, float] | None:
    """Earlier measurements; None unless they are of the same ways."""
    try:
        seconds = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(seconds, dict) and seconds.keys() == ways.keys()
    return seconds if known and all(isinstance(s, float) for s in seconds.values()) else None


def _write(path: Path, seconds: dict[str, float]) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with contextlib.suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(seconds), encoding="utf-8")
        partial.replace(path)
