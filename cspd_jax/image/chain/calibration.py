"""Calibrates the noise-corrected drafter on the model's own chains.

A few images are generated in a few AR steps, so that contexts of every fullness occur, and what the head
predicted along each chain is kept. The gains of step t are the least-squares coefficients of the change of
x_0-hat on the deviation x_{t-1} - mean and on f times it, over all tokens and coordinates.

Gains depend on the respacing, the guidance and the temperature, so each combination has its own file: in the
checkpoint folder, or in the user's cache, where it is put when it was made here. Gains change how many head
calls speculation takes and nothing else: stale or foreign gains are slower, never wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils import files
from cspd_jax._utils.zip_files import read_arrays
from cspd_jax.diffusion.chain import predict
from cspd_jax.diffusion.gaussian import coefficients, predicted_x0, transition_from_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.chain.drafters import NoiseCorrected
from cspd_jax.image.order import Raster
from cspd_jax.image.prompts import unbound
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.sampler import SamplerSettings
from cspd_jax.keys import chain_noise, row_keys
from cspd_jax.weights.models import ImageModel

Array = jax.Array

FOLDER = "gains"  # within a checkpoint folder
CHAINS = 512  # roughly so many are run: enough for two gains per step
_SEED = 0  # always the same key: the same model has the same gains
_AR_STEPS = 8
_CONTEXTS = 64
_MOST_CONTEXTS = 2**12  # and as many numbers in each, where the model does not say how many
_SPARE = 1.25  # x_0-hat is drafted within the range of the tokens seen, and some more


class Calibration(NamedTuple):
    """What is fitted to a model.

    drafter: of its denoising chains.
    contexts: float32 [H, N, D] some of the z that the chains had (H = 2 with guidance, the unconditional ones
        last), for measurements of speed.
    """

    drafter: NoiseCorrected
    contexts: Array


def calibrate(
    model: TokenModel,
    params: Any,
    keys: Array,
    labels: Array,
    *,
    settings: SamplerSettings,
    cfg: Array | float = 1.0,
    temperature: Array | float = 1.0,
) -> Calibration:
    """keys, labels: [B], for B images of calibration; settings: those of the generations to come.

    Of `settings` only what the gains depend on is used: respacing and guidance.
    """
    few = min(_AR_STEPS, model.seq_len)
    settings = dataclasses.replace(settings, num_iter=few, prefix_buckets=1, chain=None)
    if not isinstance(settings.reveal, Raster):
        settings = dataclasses.replace(settings, reveal=None)
    if settings.apart:  # the first token of many
        settings = dataclasses.replace(settings, cfg_schedule="linear")
    return _calibrate(model, params, keys, labels, cfg, temperature, settings=settings)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def _calibrate(model, params, keys, labels, cfg, temperature, *, settings: SamplerSettings) -> Calibration:
    batch = sampler.start(model, params, keys, labels, settings)
    (segment,) = sampler.plan_segments(model.seq_len, settings)
    shape = {"bucket": segment.bucket, "width": segment.width}

    def step(state, group):
        z, positions, cache = sampler.group_context(model, params, batch, state, group.first, **shape)
        scale = group.scale if settings.guided else None
        x, *seen = record_chains(model, params, batch, z, positions, scale, temperature, settings)
        x = sampler.finished(model, x)
        state = sampler.PlainState(sampler.write_group(state.tokens, x, group.first), cache)
        return state, (z, seen, jnp.arange(segment.width) < group.size)

    state = sampler.empty_state(model, params, batch, (segment,))
    state, (z, (x0, v, deviation), used) = jax.lax.scan(
        step, state, sampler.group_arrays(segment, cfg, settings)
    )
    limit = _SPARE * jnp.max(jnp.abs(state.tokens[:, : model.seq_len]))
    rows = used[:, None, :]  # [S, 1, G] for [S, T, B, G, d]
    x0, v, deviation = (jnp.moveaxis(a, 1, 0) for a in (x0, v, deviation))
    drafter = fit(x0, v, deviation, rows, limit)
    return Calibration(drafter, some_contexts(z, segment, keys.shape[0]))


def some_contexts(z: Array, segment: sampler.Segment, images: int) -> Array:
    """z [S, B', G, D] of all groups -> [H, N, D], evenly from all tokens."""
    steps, halves, width, dim = z.shape
    real = np.array([[i < g.size for i in range(width)] for g in segment.groups])
    s, b, i = np.nonzero(np.broadcast_to(real[:, None], (steps, images, width)))
    chosen = np.linspace(0, len(s) - 1, min(_CONTEXTS, len(s))).astype(int)
    z = z.reshape(steps, halves // images, images, width, dim).astype(jnp.float32)
    return z[s[chosen], :, b[chosen], i[chosen]].swapaxes(0, 1)


def record_chains(model, params, batch, z, positions, scale, temperature, settings: SamplerSettings):
    """Plain chains of tokens [B, G]: x_0 [B, G, d], and by step [T, B, G, d] x_0-hat, v, x_{t-1} - mean."""
    schedule = sampling_schedule(settings.respacing)
    noise = chain_noise(batch.keys, positions, schedule.num_steps, model.token_dim)
    shape = noise.shape[1:]
    noise = noise.reshape(noise.shape[0], -1, model.token_dim)
    z = z.reshape(-1, z.shape[-1])
    gain = jnp.full(schedule.num_steps, temperature, noise.dtype)
    if not settings.final_noise:
        gain = gain.at[0].set(0.0)

    def step(x, inputs):
        time, c, eps, g = inputs
        e, v = predict(model, params, x, model.modulate(params, time[None], z), scale)
        x0 = predicted_x0(c, x, e)
        p = transition_from_x0(c, x, x0, v)
        deviation = g * jnp.exp(0.5 * p.log_var) * eps
        return p.mean + deviation, (x0, v, deviation)

    inputs = (batch.time, coefficients(schedule), noise[:-1], gain)
    x, seen = jax.lax.scan(step, noise[-1], inputs, reverse=True)
    return x.reshape(shape), *(a.reshape(-1, *shape) for a in seen)


def fit(x0: Array, v: Array, deviation: Array, used: Array, limit: Array) -> NoiseCorrected:
    """Least squares over chains: x0, v, deviation [T, ..., d] by step, `used` broadcasts to their [...]."""
    steps, dim = x0.shape[0], x0.shape[-1]
    used = jnp.broadcast_to(used, x0.shape[1:-1]).reshape(-1, 1).astype(x0.dtype)
    x0, v, deviation = (a.reshape(steps, -1, dim) for a in (x0, v, deviation))
    x0 = jnp.clip(x0, -limit, limit)
    typical = jnp.sum(used * v, axis=1) / jnp.sum(used)
    change = jnp.concatenate([jnp.zeros_like(x0[:1]), x0[:-1] - x0[1:]])  # entry t: from x_{t+1} to x_t
    by_f = (v + 1) / 2 * deviation

    def moment(a, b):
        return jnp.sum(used * a * b, axis=(1, 2))

    aa, ab, bb = moment(deviation, deviation), moment(deviation, by_f), moment(by_f, by_f)
    ac, bc = moment(deviation, change), moment(by_f, change)
    bb = bb + 1e-4 * aa  # v may be the same everywhere: then all goes to the plain gain
    determinant = aa * bb - ab**2
    solvable = determinant > 1e-12 * aa * bb
    safe = jnp.where(solvable, determinant, 1.0)
    gain = jnp.where(solvable, (bb * ac - ab * bc) / safe, 0.0)
    gain_f = jnp.where(solvable, (aa * bc - ab * ac) / safe, 0.0)
    start = jnp.sum(used * x0[-1], axis=0) / jnp.sum(used)
    found = NoiseCorrected(start, typical, gain.at[0].set(0.0), gain_f.at[0].set(0.0), limit)
    return jax.tree.map(lambda a: jnp.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0), found)


class Found(NamedTuple):
    """A calibration that exists.

    calibration: itself.
    source: where it is from, a file or "calibrated".
    """

    calibration: Calibration
    source: str


def find(model: ImageModel, settings: SamplerSettings, cfg: float, temperature: float) -> Found | None:
    """The stored calibration for these settings, if there is one."""
    name = file_name(settings, cfg, temperature)
    if path := _in_checkpoint(model, name):
        try:
            calibration = read(path, model, settings)
        except UserError as error:
            raise UserError(f"{error}; remove the file, and it is made anew") from None
        if calibration:
            return Found(calibration, str(path))
    path = _in_cache(model, name)
    try:
        calibration = read(path, model, settings)
    except UserError as error:
        files.report_remade(error)
        return None
    return Found(calibration, str(path)) if calibration else None


def get(model: ImageModel, settings: SamplerSettings, cfg: float, temperature: float) -> Found:
    """The stored calibration, or one made now and put into the user's cache."""
    found = find(model, settings, cfg, temperature)
    if found is None and jax.process_count() > 1:
        raise UserError(
            f"{model.name} has no calibrated drafter for these settings, and several processes cannot make"
            " one; run cspd-jax calibrate first"
        )
    if found is None:
        found = Found(measure(model, settings, cfg, temperature), "calibrated")
        if not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found.calibration)):
            raise UserError(
                "the chains that the drafter is fitted to came out as NaN or infinity: the model diverged;"
                " try a lower temperature or cfg, or steps ddim100"
            )
        with contextlib.suppress(OSError):  # then it is made again next time
            write(_in_cache(model, file_name(settings, cfg, temperature)), found.calibration)
    return found


def measure(model: ImageModel, settings: SamplerSettings, cfg: float, temperature: float) -> Calibration:
    """Calibrates on images of the model's first classes."""
    images = max(1, CHAINS // model.config.seq_len)
    keys = row_keys(jax.random.key(_SEED), images)
    labels = jnp.arange(images, dtype=jnp.int32) % model.config.num_classes
    return calibrate(
        model.network, model.params, keys, labels, settings=settings, cfg=cfg, temperature=temperature
    )


def file_name(settings: SamplerSettings, cfg: float, temperature: float) -> str:
    guidance = f"-cfg{cfg:g}-{settings.cfg_schedule}" if settings.guided else ""
    return f"{settings.respacing.replace(',', '_')}{guidance}-t{temperature:g}.npz"


def write(path: Path, calibration: Calibration) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_arrays(path, **calibration.drafter._asdict(), contexts=calibration.contexts)


def read(path: Path, model: ImageModel, settings: SamplerSettings) -> Calibration | None:
    """The calibration in a file; None if there is no file. UserError if it is not one for this model."""
    steps, dim = sampling_schedule(settings.respacing).num_steps, model.config.token_dim
    contexts = (1 + settings.guided, None, getattr(model.config, "context_width", None))  # sizes or any
    shapes: dict[str, tuple[int | None, ...]] = {
        "x0": (dim,),
        "v": (steps, dim),
        "gain": (steps,),
        "gain_f": (steps,),
        "limit": (),
    }
    shapes["contexts"] = contexts
    if not path.exists():
        return None
    most = {name: 4 * math.prod(_MOST_CONTEXTS if n is None else n for n in shapes[name]) for name in shapes}
    arrays = read_arrays(path, most)
    for name, array in arrays.items():
        fits = array.ndim == len(shapes[name]) and all(
            have == want or want is None for have, want in zip(array.shape, shapes[name])
        )
        if not fits or not array.size or array.dtype != np.float32 or not np.isfinite(array).all():
            raise UserError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}, which is not finite float32 of the"
                " model's sizes"
            )
    found = {name: jnp.asarray(array) for name, array in arrays.items()}
    return Calibration(contexts=found.pop("contexts"), drafter=NoiseCorrected(**found))


def digest(model: ImageModel) -> str:
    """Tells models apart: by the sizes, the dtype and a few numbers of every parameter; prompts aside."""
    model = unbound(model)
    dtype = jnp.dtype(getattr(model.network, "dtype", jnp.float32)).name
    return files.fingerprint(model.config, model.params, dtype, leading=64)[:20]


def _in_checkpoint(model: ImageModel, name: str) -> Path | None:
    return model.folder / FOLDER / name if model.folder else None


def _in_cache(model: ImageModel, name: str) -> Path:
    return files.cache_folder() / FOLDER / digest(model) / name
