"""Compares `image.released` with recorded runs of the released speculative runner.

`runner(folder, name)` is a file of runs; a group of RUNNER_GROUPS yields (what,
difference, tolerance).
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from batches import batch_of
from recorded import GOLDEN, Recorded, difference, mismatch, network

from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image import Released, released
from cspd_jax.image.options import Options
from cspd_jax.image.pixels import unpatchify
from cspd_jax.image.recipe import Draft
from cspd_jax.keys import row_keys


class Runner(Recorded):
    """Recorded runs of the speculative runner. The target's checkpoint has the name of
    the file with "target" for "runner", unless a run has a `target_model`."""

    @property
    def runs(self):
        return [
            run for run in self.under("") if f"{run}/call_model" in self.arrays.files
        ]

    def blocks(self, run):
        """Prefixes of the verifications, in order; with num_iter > L some are of
        nothing."""
        numbers = sorted(
            int(name) for name in self.under(f"{run}/verify") if name.isdigit()
        )
        return [at for n in numbers if len(self[(at := f"{run}/verify{n}/") + "index"])]

    def target(self, run):
        named = f"{run}/target_model"
        recorded = bytes(self[named]).decode() if named in self.arrays.files else None
        return network(self.folder, recorded or self.name.replace("runner", "target"))

    def draft(self, run):
        name = bytes(self[f"{run}/draft_model"]).decode()
        target = self.target(run)
        return target if name == "self" else network(self.folder, name, target)

    def respacing(self, run):
        """A spec that keeps exactly the recorded timesteps, in 1000 sections."""
        kept = self[f"{run}/timestep_map"]
        return ",".join("1" if t in kept else "0" for t in range(1000))


@functools.cache
def runner(folder=GOLDEN, name="cspd_runner"):
    return Runner(folder, name)


def runner_names(folder):
    """The files in a folder that record runs of the speculative runner."""
    found = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            if any(key.endswith("/call_model") for key in arrays.files):
                found.append(path.stem)
    return found


def run_settings(r, run):
    """What `released.generate` is to be called with."""
    num_iter, gamma, prefill, cfg, constant, temperature, inner = (
        round(float(s), 6) for s in r[f"{run}/settings"]
    )
    options = Options(
        num_iter=int(num_iter),
        respacing=r.respacing(run),
        cfg=cfg,
        cfg_schedule="constant" if constant else "linear",
        temperature=temperature,
        final_noise=False,
    )
    return options, Released(None, int(gamma), prefill, inner)


def recorded_ends(r, at, rows):
    """The recorded ends of target and draft, as a batch of one with `rows` tokens: [1,
    rows, d]."""

    def end(side):
        mean, log_std, log_var = (
            np.pad(a, ((0, rows - len(a)), (0, 0)))[None]
            for a in (
                r[f"{at}{side}_mean"],
                r[f"{at}{side}_logstd_sum"],
                2 * np.log(r[f"{at}{side}_std"]),
            )
        )
        return released.ChainEnd(Gaussian(mean, log_var), log_std)

    return end("target"), end("draft")


@jax.jit
def _judged(p, q, real, inner, u, normals, uniforms):
    """The test and the proposals on given ends and numbers."""
    accepted = real & (jnp.log(u) < released.log_acceptance_ratio(p, q, inner))
    draw = lambda k: (normals[k], uniforms[k])
    found = released.propose(
        p, q, real, accepted, draw, max_resamples=MAX_TRIES, together=True
    )
    return (
        accepted,
        found.tries,
        jnp.where(accepted[..., None], q.last.mean, found.value),
    )


MAX_TRIES = 100


def runner_units(r):
    """The test and the proposals alone, on recorded ends and numbers."""
    for at in [f"unit/{case}/" for case in r.under("unit/")]:
        count, dim = r[at + "out"].shape
        rows = -(-count // 32) * 32  # fewer shapes to compile
        normals, uniforms = no_proposals(1, rows, dim)
        tries = put_proposals(r, at, normals, uniforms, 0, slice(count))
        u = np.pad(r[at + "uniform"], (0, rows - count))[None]
        real = np.arange(rows)[None] < count
        inner = float(r[at + "inner"])
        judged = _judged(*recorded_ends(r, at, rows), real, inner, u, normals, uniforms)
        accepted, spent, out = map(np.asarray, judged)
        differing = np.sum(accepted[0, :count] != r[at + "accepted"])
        yield at + "accepted", float(differing), 0.0
        yield at + "tries", abs(int(spent) - tries), 0.0
        yield at + "out", difference(out[0, :count], r[at + "out"]), 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedNumbers(released.Numbers):
    """Recorded random numbers by position, for K tries.

    test: [B, L] the uniform numbers of the tests.
    proposal: [K, B, L, d] the normal numbers of the tries.
    proposal_test: [K, B, L] the uniform numbers of the tries.
    """

    test: Any
    proposal: Any
    proposal_test: Any
    together: ClassVar[bool] = True

    def of_test(self, positions):
        return jnp.take_along_axis(self.test, positions, axis=1)

    def of_try(self, positions, dim, number):
        normal = self.proposal[number]
        return (
            jnp.take_along_axis(normal, positions[..., None], axis=1),
            jnp.take_along_axis(self.proposal_test[number], positions, axis=1),
        )


def run_draws(r, run):
    """The recorded uniforms and normals by position, as `RecordedNumbers` has them;
    zero where nothing was drawn."""
    images, length, dim = r[f"{run}/noise"].shape
    test = np.zeros((images, length), np.float32)
    normals, uniforms = no_proposals(images, length, dim)
    for at in r.blocks(run):
        row, position = r[at + "index"].T
        test[row, position] = r[at + "uniform"]
        put_proposals(r, at, normals, uniforms, row, position)
    return test, normals, uniforms


def no_proposals(images, length, dim):
    """Normals and uniforms of all tries, all of them zero."""
    normals = np.zeros((MAX_TRIES, images, length, dim), np.float32)
    return normals, np.zeros(normals.shape[:3], np.float32)


def put_proposals(r, at, normals, uniforms, row, position):
    """Puts the recorded proposals, if any, into their places; returns the tries."""
    if at + "resample_normal" not in r.arrays.files:
        return 0
    tries = len(r[at + "resample_normal"])
    normals[:tries, row, position] = r[at + "resample_normal"]
    uniforms[:tries, row, position] = r[at + "resample_uniform"]
    return tries


def runner_generation(r, run):
    target = r.target(run)
    draft = r.draft(run)
    options, runner_options = run_settings(r, run)
    labels = r[f"{run}/labels"]
    inner = np.moveaxis(r[f"{run}/inter_noise"], 2, 0)
    first = r[f"{run}/noise"]
    keys = row_keys(jax.random.key(0), len(labels))
    batch = batch_of(
        target.model,
        target.params,
        keys,
        labels,
        options,
        Draft(draft.model, draft.params),
        order=jnp.asarray(r[f"{run}/orders"][..., ::-1]),
        noise=np.concatenate([inner, first[None]]),
    )
    draws = RecordedNumbers(keys, *run_draws(r, run))
    found, info = released.generate(batch, runner_options, draws)
    accepted = np.zeros(first.shape[:2], bool)
    zeros = 0
    for at in r.blocks(run):
        accepted[tuple(r[at + "index"].T)] = r[at + "accepted"]
        zeros += int((~np.any(r[at + "out"], axis=1)).sum())
    called = r[f"{run}/call_model"][r[f"{run}/call_npred"] > 0]
    calls = [int(np.sum(called == model)) for model in (0, 1)]
    differing = np.sum((np.asarray(info.trace.marks) > 0) != accepted)
    yield f"{run}/accepted", float(differing), 0.0
    yield f"{run}/zeros", abs(int(info.truncated.sum()) - zeros), 0.0
    ours = [info.calls[name].sequential for name in ("backbone", "draft backbone")]
    yield f"{run}/total", mismatch(ours, calls), 0.0
    # Timestep 999 amplifies rounding: ten times the reference's own float32 error.
    latents = r[f"{run}/latents"]
    exact = r[f"{run}/latents_f64"]
    floor = difference(latents, exact)
    bound = 10 * floor if r[f"{run}/timestep_map"][-1] == 999 else max(2e-4, 5 * floor)
    yield f"{run}/tokens", difference(found, r[f"{run}/tokens"]), bound
    ours = unpatchify(np.asarray(found), target.config.patch_size).transpose(0, 3, 1, 2)
    yield f"{run}/latents", difference(ours, latents), bound


RUNNER_GROUPS = {
    "acceptance alone": runner_units,
    "speculative generations": lambda r: (
        case for run in r.runs for case in runner_generation(r, run)
    ),
}
