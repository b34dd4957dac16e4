"""Compares `image.released` with recorded runs of the released speculative runner.

`runner(folder, name)` is a file of runs; a group of RUNNER_GROUPS yields (what, difference, tolerance).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from recorded import GOLDEN, Case, Network, Recorded, difference, mismatch, network

from cspd_jax.check import UserError
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.diffusion.schedule import respace
from cspd_jax.image import released
from cspd_jax.image.options import Options
from cspd_jax.image.order import guidance_scale
from cspd_jax.image.pixels import unpatchify
from cspd_jax.image.released import RunnerOptions
from cspd_jax.image.rounds import Draft
from cspd_jax.keys import row_keys


class Runner(Recorded):
    """Recorded runs of the speculative runner. The target's checkpoint has the name of the file with
    "target" for "runner", unless a run has a `target_model`."""

    @property
    def runs(self) -> list[str]:
        return [run for run in self.under("") if f"{run}/call_model" in self.arrays.files]

    def blocks(self, run: str) -> list[str]:
        """Prefixes of the verifications, in order; with num_iter > L some are of nothing."""
        numbers = sorted(int(name) for name in self.under(f"{run}/verify") if name.isdigit())
        return [at for n in numbers if len(self[(at := f"{run}/verify{n}/") + "index"])]

    def target(self, run: str) -> Network:
        named = f"{run}/target_model"
        recorded = bytes(self[named]).decode() if named in self.arrays.files else None
        return network(self.folder, recorded or self.name.replace("runner", "target"))

    def draft(self, run: str) -> Network:
        name, target = bytes(self[f"{run}/draft_model"]).decode(), self.target(run)
        return target if name == "self" else network(self.folder, name, target)

    def respacing(self, run: str) -> str:
        """A spec that keeps exactly the recorded timesteps."""
        kept = self[f"{run}/timestep_map"]
        every = ",".join("1" if t in kept else "0" for t in range(1000))
        specs = (f"ddim{len(kept)}", f"{len(kept)}", self.target(run).config.respacing, every)
        return next(spec for spec in specs if _keeps(spec, kept))


def _keeps(spec: str, kept: np.ndarray) -> bool:
    try:
        return np.array_equal(respace(spec), kept)
    except UserError:
        return False


@functools.cache
def runner(folder: Path = GOLDEN, name: str = "cspd_runner") -> Runner:
    return Runner(folder, name)


def runner_names(folder: Path) -> list[str]:
    """The files in a folder that record runs of the speculative runner."""
    found = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            if any(key.endswith("/call_model") for key in arrays.files):
                found.append(path.stem)
    return found


def run_settings(r: Runner, run: str) -> tuple[Options, RunnerOptions]:
    """What `released.sample` is to be called with."""
    num_iter, gamma, prefill, cfg, constant, temperature, inner = (
        round(float(s), 6) for s in r[f"{run}/settings"]
    )
    options = Options(
        num_iter=int(num_iter),
        respacing=r.respacing(run),
        guided=cfg != 1.0,
        cfg=cfg,
        cfg_schedule="constant" if constant else "linear",
        temperature=temperature,
        final_noise=False,
    )
    return options, RunnerOptions(int(gamma), prefill, inner)


def calls_of(steps: tuple[released.ScheduledStep, ...], cfg: float, cfg_schedule: str) -> list[tuple]:
    """All calls in order: model (0 target, 1 draft), known tokens, predicted tokens, guidance scale."""
    scales = np.asarray(guidance_scale(tuple(step.group for step in steps), cfg, cfg_schedule))
    found = []
    for step, scale in zip(steps, scales):
        found.append((int(step.drafted), step.group.start, step.group.size, scale))
        if step.block:
            found.append((0, *step.block, scale))
    return found


def runner_calls(r: Runner, run: str) -> Iterator[Case]:
    options, runner = run_settings(r, run)
    length = r.target(run).config.seq_len
    order = r[f"{run}/orders"][..., ::-1]  # MAR masks from the front
    steps = released.schedule(length, options.num_iter, runner)
    models, known, sizes, scales = zip(*calls_of(steps, options.cfg, options.cfg_schedule))
    masks = np.ones((len(known), *order.shape), np.float32)
    for mask, count in zip(masks, known):
        np.put_along_axis(mask, order[:, :count], 0, axis=1)
    something = r[f"{run}/call_npred"] > 0  # with num_iter > L some calls are for nothing
    recorded = {key: r[f"{run}/call_{key}"][something] for key in ("model", "mask", "npred", "cfg")}
    yield f"{run}/models", mismatch(models, recorded["model"]), 0.0
    yield f"{run}/masks", mismatch(masks, recorded["mask"]), 0.0
    yield f"{run}/predicted", mismatch(np.array(sizes) * len(order), recorded["npred"]), 0.0
    yield f"{run}/guidance", mismatch(scales, recorded["cfg"]), 1e-6


def recorded_ends(r: Runner, at: str, rows: int) -> tuple[released.ChainEnd, released.ChainEnd]:
    """The recorded ends of target and draft, as a batch of one with `rows` tokens: [1, rows, d]."""

    def end(side):
        mean, std, log_std = (r[f"{at}{side}_{k}"] for k in ("mean", "std", "logstd_sum"))
        mean, log_std = (np.pad(a, ((0, rows - len(a)), (0, 0)))[None] for a in (mean, log_std))
        std = np.pad(std, ((0, rows - len(std)), (0, 0)), constant_values=1)[None]
        return released.ChainEnd(Gaussian(mean, 2 * np.log(std)), log_std)

    return end("target"), end("draft")


@functools.partial(jax.jit, static_argnames="max_tries")
def _judged(p, q, real, inner, u, normals, uniforms, max_tries):
    """The test and the proposals on given ends and numbers; log ratio, log F and log alpha as well."""
    ratio = released.log_acceptance_ratio(p, q, inner)
    accepted = real & (jnp.log(u) < ratio)
    draw = lambda k: (normals[k], uniforms[k])
    found = released.propose(p, q, real, accepted, draw, max_resamples=max_tries, together=True)
    alpha = released.log_take(p, q, p.last.mean + jnp.exp(0.5 * p.last.log_var) * normals)
    out = jnp.where(accepted[..., None], q.last.mean, found.value)
    return ratio, released.log_path_factor(p, q), alpha, accepted, found.tries, out


def acceptance(r: Runner, at: str, inner: float, max_tries: int = 100) -> Iterator[Case]:
    """The test and the proposals alone, on recorded ends and numbers, under the prefix `at`."""
    theirs = {key: r[at + key] for key in ("ratio", "fixed_term", "uniform", "accepted", "out")}
    count, dim = theirs["out"].shape
    rows = -(-count // 32) * 32  # fewer shapes to compile
    tries = len(r[at + "resample_normal"]) if at + "resample_normal" in r.arrays.files else 0
    normals, uniforms = np.zeros((max_tries, 1, rows, dim)), np.zeros((max_tries, 1, rows))
    if tries:
        normals[:tries, 0, :count], uniforms[:tries, 0, :count] = (
            r[at + "resample_normal"],
            r[at + "resample_uniform"],
        )
    u = np.pad(theirs["uniform"], (0, rows - count))[None]
    ends, real = recorded_ends(r, at, rows), np.arange(rows)[None] < count
    ratio, factor, alpha, accepted, spent, out = jax.tree.map(
        np.asarray, _judged(*ends, real, inner, u, *map(np.float32, (normals, uniforms)), max_tries)
    )
    ratio, factor, accepted, out = (a[0, :count] for a in (ratio, factor, accepted, out))
    # The reference divides products of float32 numbers, which lose their digits where they are subnormal.
    products = np.prod(r[at + "target_std"].astype(float), axis=1)
    usual = np.minimum(products, theirs["ratio"] * products) > np.finfo(np.float32).tiny
    log_theirs = np.log(theirs["ratio"][usual])
    yield at + "ratio", difference(ratio[usual], log_theirs), 1e-4
    yield at + "factor", difference(factor, np.log(theirs["fixed_term"])), 1e-4
    yield at + "accepted", float((accepted != theirs["accepted"]).sum()), 0.0
    yield at + "tries", abs(int(spent) - tries), 0.0
    yield at + "out", difference(out, theirs["out"]), 1e-5
    if at + "resample_alpha" in r.arrays.files:
        yield at + "alpha", difference(np.exp(alpha[:tries, 0, :count]), r[at + "resample_alpha"]), 5e-4


def runner_acceptance(r: Runner, run: str) -> Iterator[Case]:
    inner = float(r[f"{run}/settings"][6])
    for at in r.blocks(run):
        yield from acceptance(r, at, inner)


def runner_units(r: Runner) -> Iterator[Case]:
    for case in r.under("unit/"):
        yield from acceptance(r, f"unit/{case}/", float(r[f"unit/{case}/inner"]))


def run_draws(r: Runner, run: str, max_tries: int) -> released.RecordedDraws:
    """The recorded uniforms and normals by position; zero where nothing was drawn."""
    images, length, dim = r[f"{run}/noise"].shape
    test = np.zeros((images, length), np.float32)
    normals = np.zeros((max_tries, images, length, dim), np.float32)
    uniforms = np.zeros((max_tries, images, length), np.float32)
    for at in r.blocks(run):
        row, position = r[at + "index"].T
        test[row, position] = r[at + "uniform"]
        if at + "resample_normal" in r.arrays.files:
            tries = len(r[at + "resample_normal"])
            normals[:tries, row, position] = r[at + "resample_normal"]
            uniforms[:tries, row, position] = r[at + "resample_uniform"]
    return released.RecordedDraws(test, normals, uniforms)


def runner_generation(r: Runner, run: str) -> Iterator[Case]:
    target, draft = r.target(run), r.draft(run)
    options, runner_options = run_settings(r, run)
    labels = r[f"{run}/labels"]
    inner, first = np.moveaxis(r[f"{run}/inter_noise"], 2, 0), r[f"{run}/noise"]
    keys = row_keys(jax.random.key(0), len(labels))
    found = released.sample(
        target.model,
        target.params,
        keys,
        labels,
        options,
        runner=released.Runner(runner_options, Draft(draft.model, draft.params)),
        recorded=released.Recorded(
            order=r[f"{run}/orders"][..., ::-1],
            noise=np.concatenate([inner, first[None]]),
            draws=run_draws(r, run, runner_options.max_resamples),
        ),
    )
    accepted, zeros = np.zeros(first.shape[:2], bool), 0
    for at in r.blocks(run):
        accepted[tuple(r[at + "index"].T)] = r[at + "accepted"]
        zeros += int((~np.any(r[at + "out"], axis=1)).sum())
    made = found.counts
    calls = [int(np.sum(r[f"{run}/call_model"][r[f"{run}/call_npred"] > 0] == model)) for model in (0, 1)]
    yield f"{run}/accepted", float(((np.asarray(found.marks) > 0) != accepted).sum()), 0.0
    yield f"{run}/zeros", abs(int(made.target.truncated.sum()) - zeros), 0.0
    yield f"{run}/total", mismatch([part.backbone.sequential for part in made[1:]], calls), 0.0
    # Timestep 999 amplifies rounding: ten times the reference's own float32 error.
    latents, exact = r[f"{run}/latents"], r[f"{run}/latents_f64"]
    floor = difference(latents, exact)
    bound = 10 * floor if r[f"{run}/timestep_map"][-1] == 999 else max(2e-4, 5 * floor)
    yield f"{run}/tokens", difference(found.tokens, r[f"{run}/tokens"]), bound
    ours = unpatchify(np.asarray(found.tokens), target.config.patch_size).transpose(0, 3, 1, 2)
    yield f"{run}/latents", difference(ours, latents), bound


def _every_run(check):
    return lambda r: (case for run in r.runs for case in check(r, run))


RUNNER_GROUPS = {
    "calls": _every_run(runner_calls),
    "acceptance in the runs": _every_run(runner_acceptance),
    "acceptance alone": runner_units,
    "speculative generations": _every_run(runner_generation),
}
