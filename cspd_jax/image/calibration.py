"""Fits the noise-corrected drafter to the model's own chains.

The calibration generates a few images in a few AR steps, so that contexts with few and
with many known tokens occur. It records the head's predictions along each chain. A
regression over all tokens and coordinates gives the gains of step t: the least-squares
coefficients with which the deviation x_{t-1} - mean, and f times this deviation,
explain the change of x_0-hat.

Gains depend on the respacing, the guidance and the temperature. So each combination has
a file of its own in the checkpoint folder, which `cspd-jax calibrate` writes. Without a
file the gains are fitted when images are prepared. If each image has a guidance scale
of its own, the gains are fitted to the mean scale, for all images. Gains only change
the number of head calls that speculation takes. Gains of another model make it slower,
never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.files import write_arrays
from cspd_jax.check import UserError
from cspd_jax.diffusion.chain import predict
from cspd_jax.diffusion.gaussian import predicted_x0, transition_from_x0
from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel, bind
from cspd_jax.image.chain_drafters import NoiseCorrected
from cspd_jax.image.order import Random, Raster
from cspd_jax.image.recipe import Batch, Recipe
from cspd_jax.keys import row_keys, seed_key
from cspd_jax.models import ImageModel

Array = jax.Array

FOLDER = "gains"  # the folder of the gains within a checkpoint folder
CHAINS = 512  # about as many chains are run, which is enough for two gains per step
_SEED = 0  # the seed is always the same, so that a model always gets the same gains
_AR_STEPS = 8
_SPARE = 1.25  # the limit of x_0-hat, as a multiple of the largest generated value
_FITTED: weakref.WeakKeyDictionary[ImageModel, dict[str, NoiseCorrected]] = (
    weakref.WeakKeyDictionary()
)


def drafter_for(model: ImageModel, recipe: Recipe) -> NoiseCorrected:
    """Returns the model's drafter for this recipe. It is read from the checkpoint
    folder if its file exists. If not, it is fitted once and then kept in memory."""
    path = file_of(model, recipe)
    if path is not None and path.exists():
        return read(path)
    fitted = _FITTED.setdefault(model, {})
    name = file_name(recipe)
    if name not in fitted:
        fitted[name] = measure(model, recipe)
    return fitted[name]


def measure(model: ImageModel, recipe: Recipe) -> NoiseCorrected:
    """Fits the drafter on images of the model's first classes. Raises a UserError if
    the result is not finite.

    The function takes from the recipe the respacing, the guidance, the temperature and
    the final noise, and whether the order is raster. File names hold the first three.
    """
    network = model.network
    length = network.seq_len
    images = max(1, CHAINS // length)
    order = recipe.order if isinstance(recipe.order, Raster) else Random()
    groups = order.groups(length, min(_AR_STEPS, length))
    # A first token that the two halves draw apart would need a segment of its own. The
    # fit uses many tokens and can do without this guidance.
    schedule = "linear" if recipe.separate_first else recipe.cfg_schedule
    few = dataclasses.replace(
        recipe,
        order=order,
        groups=groups,
        respacings=(recipe.respacing,) * len(groups),
        prefixes=(length,),
        chain=None,
        cfg=np.full(images, np.mean(recipe.cfg)),
        cfg_schedule=schedule,
        known=None,
    )
    keys = row_keys(seed_key(_SEED), images)
    labels = jnp.arange(images, dtype=jnp.int32) % model.config.num_classes
    found = calibrate(Batch(network, None, model.params, keys, labels, few))
    if not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found)):
        raise UserError(
            "the chains that the drafter is fitted to came out as NaN or infinity: the"
            " model diverged; try a lower temperature or cfg, or respacing ddim100"
        )
    return found


@jax.jit
def calibrate(batch: Batch) -> NoiseCorrected:
    """Generates the images of a batch, and fits the drafter to their chains."""
    bound = bind(batch)
    length = batch.network.seq_len
    ((segment, groups),) = sampler.plan_segments(length, batch.recipe)
    step = functools.partial(sampler.ar_step, bound, segment, draw=record_chains)
    start, _ = sampler.begin(bound)
    state, seen = jax.lax.scan(step, start, sampler.group_arrays(groups, bound))
    limit = _SPARE * jnp.max(jnp.abs(state.tokens[:, :length]))
    *by_step, used = seen
    x0, v, deviation = (jnp.moveaxis(a, 1, 0) for a in by_step)  # [S, T, B, G, d]
    return fit(x0, v, deviation, used, limit)


def record_chains(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Runs the plain chains of tokens [B, G]. Returns x_0 [B, G, d], and a record of
    the chains: x_0-hat, v and x_{t-1} - mean for each step, each [T, B, G, d], and the
    mask `used`."""
    noise = bound.chain_noise(positions)
    chains = sampler.group_chains(bound, z, scale)
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

    x, seen = jax.lax.scan(
        step, noise[-1], (chains.time, chains.c, noise[:-1], gain), reverse=True
    )
    return x.reshape(shape), (*(a.reshape(-1, *shape) for a in seen), used)


def fit(
    x0: Array, v: Array, deviation: Array, used: Array, limit: Array
) -> NoiseCorrected:
    """Fits the gains to recorded chains.

    x0, v, deviation: [T, ..., d] x_0-hat, v and x_{t-1} - mean at each step.
    used: a mask of the chains that count, which broadcasts to their shape [...].
    limit: the largest absolute value of x_0-hat.
    """
    steps = x0.shape[0]
    dim = x0.shape[-1]
    used = jnp.broadcast_to(used, x0.shape[1:-1]).reshape(-1, 1).astype(x0.dtype)
    x0, v, deviation = (a.reshape(steps, -1, dim) for a in (x0, v, deviation))
    x0 = jnp.clip(x0, -limit, limit)
    typical = jnp.sum(used * v, axis=1) / jnp.sum(used)
    # Entry t is the change of x_0-hat from x_{t+1} to x_t.
    change = jnp.concatenate([jnp.zeros_like(x0[:1]), x0[:-1] - x0[1:]])
    by_f = (v + 1) / 2 * deviation

    def moment(a, b):
        return jnp.sum(used * a * b, axis=(1, 2))

    aa = moment(deviation, deviation)
    ab = moment(deviation, by_f)
    bb = moment(by_f, by_f)
    ac = moment(deviation, change)
    bc = moment(by_f, change)
    # If v is the same everywhere, this makes `gain` explain the whole change.
    bb = bb + 1e-4 * aa
    determinant = aa * bb - ab**2
    solvable = determinant > 1e-12 * aa * bb
    safe = jnp.where(solvable, determinant, 1.0)
    gain = jnp.where(solvable, (bb * ac - ab * bc) / safe, 0.0)
    gain_f = jnp.where(solvable, (aa * bc - ab * ac) / safe, 0.0)
    start = jnp.sum(used * x0[-1], axis=0) / jnp.sum(used)
    # A step whose sums are too large has no gain. `measure` refuses other numbers that
    # are not finite.
    gain, gain_f = (
        jnp.nan_to_num(a.at[0].set(0.0), nan=0.0, posinf=0.0, neginf=0.0)
        for a in (gain, gain_f)
    )
    return NoiseCorrected(start, typical, gain, gain_f, limit)


def file_name(recipe: Recipe) -> str:
    """Returns the name of the file with the gains for this recipe, for example
    "100-cfg3-linear-t1.npz"."""
    guidance = (
        f"-cfg{float(np.mean(recipe.cfg)):g}-{recipe.cfg_schedule}"
        if recipe.guided
        else ""
    )
    steps = recipe.respacing.replace(",", "_")
    return f"{steps}{guidance}-t{float(recipe.temperature):g}.npz"


def file_of(model: ImageModel, recipe: Recipe) -> Path | None:
    """Returns the path of the file with the gains for this recipe, in the checkpoint
    folder. It is None for a model without a folder."""
    return model.folder / FOLDER / file_name(recipe) if model.folder else None


def write(path: Path, drafter: NoiseCorrected) -> None:
    """Writes the drafter to a file, and makes the file's folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, **drafter._asdict())


def read(path: Path) -> NoiseCorrected:
    """Reads a drafter from a file."""
    with np.load(path) as stored:
        return NoiseCorrected(
            **{name: jnp.asarray(stored[name]) for name in NoiseCorrected._fields}
        )
