"""Fits the noise-corrected drafter to the model's own chains.

A few images are generated in a few AR steps, so that contexts of every fullness occur,
and what the head predicted along each chain is kept. The gains of step t are the
least-squares coefficients of the change of x_0-hat on the deviation x_{t-1} - mean and
on f times it, over all tokens and coordinates.

Gains depend on the respacing, the guidance and the temperature, so each combination has
its own file in the checkpoint folder (`cspd-jax calibrate` writes them); without one
they are fitted in the call. Gains change how many head calls speculation takes and
nothing else: foreign gains are slower, never wrong.
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

FOLDER = "gains"  # within a checkpoint folder
CHAINS = 512  # that are run, roughly: enough for two gains per step
_SEED = 0  # always the same key: the same model has the same gains
_AR_STEPS = 8
_SPARE = 1.25  # x_0-hat is drafted within the range of the tokens seen, and some more
_FITTED: weakref.WeakKeyDictionary[ImageModel, dict[str, NoiseCorrected]] = (
    weakref.WeakKeyDictionary()
)


def calibrated(model: ImageModel, draft: ImageModel | None, recipe: Recipe) -> Recipe:
    """Returns the recipe with the drafters that were fitted to the model and to the
    draft model; as it is where nothing is speculated along the chains."""
    if recipe.chain is None:
        return recipe
    own = drafter_for(model, recipe)
    small = own if draft is None else drafter_for(draft, recipe)
    return dataclasses.replace(recipe, drafter=own, draft_drafter=small)


def drafter_for(model: ImageModel, recipe: Recipe) -> NoiseCorrected:
    """Returns the drafter for this recipe: read where it lies beside the checkpoint,
    else fitted, once."""
    path = file_of(model, recipe)
    if path is not None and path.exists():
        return read(path)
    fitted = _FITTED.setdefault(model, {})
    name = file_name(recipe)
    if name not in fitted:
        fitted[name] = measure(model, recipe)
    return fitted[name]


def measure(model: ImageModel, recipe: Recipe) -> NoiseCorrected:
    """Fits the drafter on images of the model's first classes; UserError where they are
    not finite.

    Of the recipe only what the gains depend on is used: respacing, guidance and
    temperature.
    """
    network = model.network
    length = network.seq_len
    images = max(1, CHAINS // length)
    order = recipe.order if isinstance(recipe.order, Raster) else Random()
    groups = order.groups(length, min(_AR_STEPS, length))
    # The first token of many.
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
    """Fits the drafter on images."""
    bound = bind(batch)
    length = batch.network.seq_len
    ((segment, groups),) = sampler.plan_segments(length, batch.recipe)
    step = functools.partial(sampler.ar_step, bound, segment, draw=record_chains)
    state, seen = jax.lax.scan(
        step, sampler.empty_state(bound), sampler.group_arrays(groups, bound)
    )
    limit = _SPARE * jnp.max(jnp.abs(state.tokens[:, :length]))
    *by_step, used = seen
    x0, v, deviation = (jnp.moveaxis(a, 1, 0) for a in by_step)  # [S, T, B, G, d]
    return fit(x0, v, deviation, used, limit)


def record_chains(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Runs plain chains of tokens [B, G]: x_0 [B, G, d]; by step [T, B, G, d] x_0-hat,
    v, x_{t-1} - mean; and which are used."""
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
    """Fits the gains to chains: x0, v, deviation [T, ..., d] by step, `used` broadcasts
    to their [...]."""
    steps = x0.shape[0]
    dim = x0.shape[-1]
    used = jnp.broadcast_to(used, x0.shape[1:-1]).reshape(-1, 1).astype(x0.dtype)
    x0, v, deviation = (a.reshape(steps, -1, dim) for a in (x0, v, deviation))
    x0 = jnp.clip(x0, -limit, limit)
    typical = jnp.sum(used * v, axis=1) / jnp.sum(used)
    # Entry t: from x_{t+1} to x_t.
    change = jnp.concatenate([jnp.zeros_like(x0[:1]), x0[:-1] - x0[1:]])
    by_f = (v + 1) / 2 * deviation

    def moment(a, b):
        return jnp.sum(used * a * b, axis=(1, 2))

    aa = moment(deviation, deviation)
    ab = moment(deviation, by_f)
    bb = moment(by_f, by_f)
    ac = moment(deviation, change)
    bc = moment(by_f, change)
    bb = bb + 1e-4 * aa  # v may be the same everywhere: then all goes to the plain gain
    determinant = aa * bb - ab**2
    solvable = determinant > 1e-12 * aa * bb
    safe = jnp.where(solvable, determinant, 1.0)
    gain = jnp.where(solvable, (bb * ac - ab * bc) / safe, 0.0)
    gain_f = jnp.where(solvable, (aa * bc - ab * ac) / safe, 0.0)
    start = jnp.sum(used * x0[-1], axis=0) / jnp.sum(used)
    # A step whose sums are too large goes without a gain; what else is not finite is
    # refused (`measure`).
    gain, gain_f = (
        jnp.nan_to_num(a.at[0].set(0.0), nan=0.0, posinf=0.0, neginf=0.0)
        for a in (gain, gain_f)
    )
    return NoiseCorrected(start, typical, gain, gain_f, limit)


def file_name(recipe: Recipe) -> str:
    """Returns the name of the file that has the gains for this recipe."""
    guidance = (
        f"-cfg{float(np.mean(recipe.cfg)):g}-{recipe.cfg_schedule}"
        if recipe.guided
        else ""
    )
    steps = recipe.respacing.replace(",", "_")
    return f"{steps}{guidance}-t{float(recipe.temperature):g}.npz"


def file_of(model: ImageModel, recipe: Recipe) -> Path | None:
    """Returns where the gains for this recipe lie beside the checkpoint; None without a
    checkpoint."""
    return model.folder / FOLDER / file_name(recipe) if model.folder else None


def write(path: Path, drafter: NoiseCorrected) -> None:
    """Writes the drafter beside the checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, **drafter._asdict())


def read(path: Path) -> NoiseCorrected:
    """Reads the drafter in a file."""
    with np.load(path) as stored:
        return NoiseCorrected(
            **{name: jnp.asarray(stored[name]) for name in NoiseCorrected._fields}
        )
