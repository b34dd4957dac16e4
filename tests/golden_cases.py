"""Compares the library with numbers recorded from the public PyTorch implementations of
MAR and its speculative runner.

    # The largest difference of every group, for every file in DIR.
    python tests/golden_cases.py DIR

`fixture` and `GROUPS` are for the files mar_*.npz; for runs of the speculative runner
see `runner_cases`. A group yields (what, difference, tolerance); the tests ask that
none exceeds its tolerance.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

import jax
import jax.numpy as jnp
import numpy as np
from batches import batch_of
from recorded import GOLDEN, Network, Recorded, difference
from runner_cases import RUNNER_GROUPS, runner, runner_names

from cspd_jax.diffusion.schedule import make_schedule
from cspd_jax.image.options import Options
from cspd_jax.image.order import guidance_scale, reveal_groups
from cspd_jax.image.pixels import unpatchify
from cspd_jax.keys import row_keys


class Fixture(Recorded, Network):
    """A recorded MAR model."""

    def __init__(self, folder, name):
        Recorded.__init__(self, folder, name)
        Network.__init__(self, folder, name)
        self.floors = json.loads(bytes(self.arrays["f32_floor_json"]))


@functools.cache
def fixture(folder=GOLDEN, name="mar_tiny"):
    return Fixture(folder, name)


def relative(ours, theirs):
    return difference(ours, theirs) / float(np.abs(theirs).max())


def backbone(f):
    """z of every position, from some known tokens."""
    labels = jnp.asarray(f["net/labels"])
    tokens = jnp.asarray(f["net/tokens"])
    every = jnp.broadcast_to(jnp.arange(f.config.seq_len), tokens.shape[:2])

    @jax.jit
    def forward(known, mask, embedding):
        order = jnp.argsort(mask, axis=1, stable=True)
        shown = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
        z = f.model.context(
            f.params, shown, order, known, embedding, every, bucket=f.config.seq_len
        )
        return jnp.take_along_axis(z, jnp.argsort(order, axis=1)[:, :, None], axis=1)

    for which in ("cond", "uncond"):
        embedding = f.model.embed_class(
            f.params, labels, jnp.full(len(labels), which == "uncond")
        )
        for group in [name for name in f.under("net/") if name.endswith("known")]:
            mask = jnp.asarray(f[f"net/{group}/mask"])
            z = forward(jnp.sum(mask < 0.5, axis=1), mask, embedding)
            error = difference(z, f[f"net/{group}/{which}/z"])
            yield f"z, {group}, {which}", error, 3e-5


def _bound(f, run):
    """Ill-conditioned runs: ten times the reference's own float32 error; the others:
    2e-4."""
    return 2e-4 if run.startswith("wc/") else 10 * f.floors[run][0]


def generations(f, prefix):
    length = f.config.seq_len
    dim = f.config.token_dim
    respacing = f.config.respacing
    if prefix == "wc/":
        respacing = f"ddim{respacing.removeprefix('ddim')}"
    for name in f.under(prefix + "ar/"):
        at = f"{prefix}ar/{name}/"
        num_iter, cfg, constant, temperature = (float(s) for s in f[at + "settings"])
        options = Options(
            num_iter=int(num_iter),
            respacing=respacing,
            cfg=cfg,
            cfg_schedule="constant" if constant else "linear",
            temperature=temperature,
            final_noise=False,
        )
        groups = reveal_groups(length, options.num_iter)
        scales = guidance_scale(groups, cfg, options.cfg_schedule)
        recorded = f[at + "cfg_iter"][f[at + "n_pred"] > 0]
        yield at + "guidance", difference(scales, recorded), 1e-6
        labels = f[at + "labels"]
        steps = make_schedule(options.respacing).num_steps
        noise = np.zeros((steps + 1, len(labels), length, dim), np.float32)
        for step in f.under(at + "step"):
            row, position = f[f"{at}step{step}/index"].T
            noise[-1, row, position] = f[f"{at}step{step}/init_noise"]
            rest = f[f"{at}step{step}/step_noise"]
            noise[:-1, row, position] = rest[::-1, : len(row)]
        keys = row_keys(jax.random.key(0), len(labels))
        batch = batch_of(
            f.model,
            f.params,
            keys,
            labels,
            options,
            order=jnp.asarray(f[at + "orders"])[..., ::-1],  # MAR masks from the front
            noise=jnp.asarray(noise),
        )
        tokens = batch.generate().tokens
        yield at + "tokens", difference(tokens, f[at + "tokens"]), _bound(f, at[:-1])
        latents = unpatchify(tokens, f.config.patch_size).transpose(0, 3, 1, 2)
        yield at + "latents", difference(latents, f[at + "latents"]), _bound(f, at[:-1])


GROUPS = {
    "backbone": backbone,
    "generations": lambda f: generations(f, ""),
    "generations (well conditioned)": lambda f: generations(f, "wc/"),
}


def main(folder):
    failures = 0
    recorded = [
        (path.stem, GROUPS, fixture) for path in sorted(folder.glob("mar_*.npz"))
    ]
    recorded += [(name, RUNNER_GROUPS, runner) for name in runner_names(folder)]
    for name, groups, load in recorded:
        for group, check in groups.items():
            cases = list(check(load(folder, name)))
            if not cases:
                continue
            what, error, bound = max(
                cases, key=lambda c: c[1] / c[2] if c[2] else c[1] > 0
            )
            bad = [c for c in cases if not c[1] <= c[2]]
            failures += len(bad)
            print(
                f"{name:16} {group:31} {len(cases):4} cases, {len(bad)} beyond"
                f" tolerance; nearest: {what} {error:.1e} (tolerance {bound:.1e})"
            )
    return 1 if failures else 0


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN))
