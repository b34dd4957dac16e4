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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils import files, limits
from cspd_jax.diffusion.chain import predict
from cspd_jax.diffusion.gaussian import predicted_x0, transition_from_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.chain.drafters import NoiseCorrected
from cspd_jax.image.options import Options
from cspd_jax.image.order import Group, Raster
from cspd_jax.image.prompts import unbound
from cspd_jax.image.protocol import TokenModel
from cspd_jax.keys import row_keys, seed_key
from cspd_jax.weights.models import ImageModel

Array = jax.Array

FOLDER = "gains"  # within a checkpoint folder
CHAINS = 512  # roughly so many are run: enough for two gains per step
_SEED = 0  # always the same key: the same model has the same gains
_AR_STEPS = 8
_CONTEXTS = 64
_LARGEST = 1e4  # of the gains, which are about 1
_SPARE = 1.25  # x_0-hat is drafted within the range of the tokens seen, and some more


class Calibration(NamedTuple):
    """What is fitted to a model.

    drafter: of its denoising chains.
    contexts: float32 [H, N, D] some of the z that the chains had (H = 2 with guidance, the unconditional ones
        last), for measurements of speed.
    """

    drafter: NoiseCorrected
    contexts: Array


def calibrate(network: TokenModel, params: Any, keys: Array, labels: Array, options: Options) -> Calibration:
    """keys, labels: [B], for B images of calibration; options: those of the generations to come.

    Of the options only what the gains depend on is used: respacing, guidance and temperature.
    """
    options = dataclasses.replace(
        options,
        num_iter=min(_AR_STEPS, network.seq_len),
        prefix_buckets=1,
        denoise="plain",
        order=options.order if isinstance(options.order, Raster) else None,
        cfg_schedule="linear" if options.separate_first else options.cfg_schedule,  # the first token of many
    )
    return _calibrate(network, params, keys, labels, options)


@functools.partial(jax.jit, static_argnames=("network",))
def _calibrate(network: TokenModel, params: Any, keys: Array, labels: Array, options: Options) -> Calibration:
    bound = sampler.bind(network, params, keys, labels, options)
    ((segment, groups),) = sampler.plan_segments(network.seq_len, options)
    step = functools.partial(sampler.ar_step, bound, segment, draw=record_chains)
    state = sampler.empty_state(bound)
    state, (z, seen) = jax.lax.scan(step, state, sampler.group_arrays(groups, options))
    limit = _SPARE * jnp.max(jnp.abs(state.tokens[:, : network.seq_len]))
    used = jnp.array([[i < g.size for i in range(segment.width)] for g in groups])
    x0, v, deviation = (jnp.moveaxis(a, 1, 0) for a in seen)
    drafter = fit(x0, v, deviation, used[:, None, :], limit)  # [S, 1, G] for [S, T, B, G, d]
    return Calibration(drafter, some_contexts(z, groups, len(keys)))


def some_contexts(z: Array, groups: tuple[Group, ...], images: int) -> Array:
    """z [S, B', G, D] of all groups -> [H, N, D], evenly from all tokens."""
    steps, halves, width, dim = z.shape
    real = np.array([[i < g.size for i in range(width)] for g in groups])
    s, b, i = np.nonzero(np.broadcast_to(real[:, None], (steps, images, width)))
    chosen = np.linspace(0, len(s) - 1, min(_CONTEXTS, len(s))).astype(int)
    z = z.reshape(steps, halves // images, images, width, dim).astype(jnp.float32)
    return z[s[chosen], :, b[chosen], i[chosen]].swapaxes(0, 1)


def record_chains(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, tuple[Array, tuple[Array, ...]]]:
    """Plain chains of tokens [B, G]: x_0 [B, G, d]; kept are z, and by step [T, B, G, d] x_0-hat, v and
    x_{t-1} - mean."""
    noise = bound.chain_noise(positions)
    chains = bound.chains(z.reshape(-1, z.shape[-1]), sampler.by_row(scale, positions.shape[1]))
    shape = (*positions.shape, noise.shape[-1])
    gain = jnp.full(chains.steps, chains.temperature, noise.dtype)
    if not chains.final_noise:
        gain = gain.at[0].set(0.0)

    def step(x, inputs):
        time, c, eps, g = inputs
        modulations = bound.network.modulate(bound.params, time[None], chains.z)
        e, v = predict(bound.network, bound.params, x, modulations, chains.scale)
        x0 = predicted_x0(c, x, e)
        p = transition_from_x0(c, x, x0, v)
        deviation = g * jnp.exp(0.5 * p.log_var) * eps
        return p.mean + deviation, (x0, v, deviation)

    x, seen = jax.lax.scan(step, noise[-1], (chains.time, chains.c, noise[:-1], gain), reverse=True)
    return x.reshape(shape), (z, tuple(a.reshape(-1, *shape) for a in seen))


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
    # A step whose sums are too large goes without a gain; what else is not finite is refused (`measure`).
    gain, gain_f = (jnp.nan_to_num(a.at[0].set(0.0), nan=0.0, posinf=0.0, neginf=0.0) for a in (gain, gain_f))
    return NoiseCorrected(start, typical, gain, gain_f, limit)


class Found(NamedTuple):
    """A calibration that exists.

    calibration: itself.
    source: where it is from, a file or "calibrated".
    """

    calibration: Calibration
    source: str


def find(model: ImageModel, options: Options) -> Found | None:
    """The stored calibration for these options, if there is one."""
    name = file_name(options)
    if path := _in_checkpoint(model, name):
        try:
            calibration = read(path, model, options)
        except UserError as error:
            raise UserError(f"{error}; remove the file, and it is made anew") from None
        if calibration:
            return Found(calibration, str(path))
    path = _in_cache(model, name)
    try:
        calibration = read(path, model, options)
    except UserError as error:
        files.report_remade(error)
        return None
    return Found(calibration, str(path)) if calibration else None


def get(model: ImageModel, options: Options) -> Found:
    """The stored calibration, or one made now and put into the user's cache."""
    found = find(model, options)
    if found is None and jax.process_count() > 1:
        raise UserError(
            f"{model.name} has no calibrated drafter for these settings, and several processes cannot make"
            " one; run cspd-jax calibrate first"
        )
    if found is None:
        found = Found(measure(model, options), "calibrated")
        with contextlib.suppress(OSError):  # then it is made again next time
            write(_in_cache(model, file_name(options)), found.calibration)
    return found


def measure(model: ImageModel, options: Options) -> Calibration:
    """Calibrates on images of the model's first classes; UserError where they are not finite."""
    images = max(1, CHAINS // model.config.seq_len)
    keys = row_keys(seed_key(_SEED), images)
    labels = jnp.arange(images, dtype=jnp.int32) % model.config.num_classes
    options = dataclasses.replace(options, chain_drafter=None, draft_drafter=None, known=None)
    found = calibrate(model.network, model.params, keys, labels, options)
    if not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found)):
        raise UserError(
            "the chains that the drafter is fitted to came out as NaN or infinity: the model diverged; try a"
            " lower temperature or cfg, or steps ddim100"
        )
    return found


def file_name(options: Options) -> str:
    guidance = f"-cfg{options.cfg:g}-{options.cfg_schedule}" if options.guided else ""
    return f"{str(options.respacing).replace(',', '_')}{guidance}-t{options.temperature:g}.npz"


def write(path: Path, calibration: Calibration) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_arrays(path, **calibration.drafter._asdict(), contexts=calibration.contexts)


def read(path: Path, model: ImageModel, options: Options) -> Calibration | None:
    """The calibration in a file; None if there is no file. UserError if it is not one for this model."""
    steps, dim = sampling_schedule(str(options.respacing)).num_steps, model.config.token_dim
    contexts = (1 + bool(options.guided), None, getattr(model.config, "context_width", None))  # sizes or any
    shapes: dict[str, tuple[int | None, ...]] = {
        "x0": (dim,),
        "v": (steps, dim),
        "gain": (steps,),
        "gain_f": (steps,),
        "limit": (),
    }
    shapes["contexts"] = contexts
    if not limits.is_there(path):
        return None
    arrays = files.read_arrays(path, shapes)
    for name, array in arrays.items():
        fits = array.ndim == len(shapes[name]) and all(
            have == want or want is None for have, want in zip(array.shape, shapes[name])
        )
        if not fits or not array.size or array.dtype != np.float32 or not np.isfinite(array).all():
            raise UserError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}, which is not finite float32 of the"
                " model's sizes"
            )
        if name in ("gain", "gain_f") and (largest := float(np.abs(array).max())) > _LARGEST:
            raise UserError(f"{path}: {name} goes up to {largest:.3g}, which no fit gives")
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
