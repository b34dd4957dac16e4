"""What TensorFloat32 products do to the densities of denoising paths, tried on a CPU.

    python benchmarks/precision.py            # about a minute
    python benchmarks/precision.py --file benchmarks/results/precision.json   # and keeps it

An H100 multiplies float32 matrices in TensorFloat32 unless it is told not to: inputs are rounded to 10 bits
of mantissa, sums are float32. Here the inputs of the head's products are rounded the same way. Paths of
T = 100 steps are drawn by the default model in float32, and their log densities are evaluated

- by the rounded head: how far another distribution it stands for (`shift`);
- twice by the same head, the second time with every product off by a rounding error of float32 (relative
  1.2e-7 at random), as sums in another order are where a path is drawn in one program and verified in another
  (`noise`). Such an error is small, but it can tip the rounding of the next product's input.

An acceptance test compares a uniform with a ratio of two such densities. If one of them is off by delta, a
token's test comes out wrong with probability |delta| at most: the mean bounds what exactness loses.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, load

from cspd_jax.diffusion.chain import Chains, path_log_density, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.chain import calibration
from cspd_jax.image.options import Options

KEPT = {"float32": 23, "TensorFloat32": 10, "bfloat16": 7}  # bits of mantissa


def rounded(x: jax.Array, bits: int) -> jax.Array:
    """x with so many bits of mantissa, to the nearest, ties to even."""
    drop = 23 - bits
    if drop == 0 or x.dtype != jnp.float32:
        return x
    number = jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = jnp.uint32((1 << (drop - 1)) - 1) + ((number >> drop) & 1)
    return jax.lax.bitcast_convert_type((number + half) >> drop << drop, jnp.float32)


@contextlib.contextmanager
def products_of(bits: int, nudged: bool = False):
    """Every product of a layer has inputs of so many bits; `nudged`: and a random last digit."""
    exact, count = jax.lax.dot_general, itertools.count()

    def dot_general(a, b, *args, **kwargs):
        product = exact(rounded(a, bits), rounded(b, bits), *args, **kwargs)
        if not nudged:
            return product
        sign = jax.random.rademacher(jax.random.key(next(count)), product.shape, product.dtype)
        return product * (1 + 2.0**-23 * sign)

    jax.lax.dot_general = dot_general
    try:
        yield
    finally:
        jax.lax.dot_general = exact


def make_parser() -> Parser:
    parser = Parser(__doc__, tokens=8, file=Path("precision.json"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--file", type=Path, help="where what is found is written (nowhere)")
    return parser


def main() -> None:
    args = begin(make_parser())
    model, key = load("default", args.toy), jax.random.key(0)
    respacing = model.config.respacing
    schedule = sampling_schedule(respacing)
    c, steps = coefficients(schedule), schedule.num_steps
    contexts = calibration.get(model, Options(respacing=respacing)).calibration.contexts[0]
    z = jnp.asarray(contexts)[jnp.arange(args.tokens) % contexts.shape[0]]
    noise = jax.random.normal(key, (steps + 1, args.tokens, model.config.token_dim))

    def features():
        return model.network.embed_time(model.params, jnp.asarray(schedule.timestep_map))

    def chains(z):
        return Chains(model.network, model.params, features(), z, c, final_noise=True)

    path = jax.jit(lambda z: sample_path(chains(z), noise))(z)
    states = jnp.concatenate([path.states, noise[-1:]])

    def density(bits, nudged):
        with products_of(bits, nudged):
            run = jax.jit(lambda z: path_log_density(chains(z), states))
            return np.asarray(run(z), np.float64)

    found, rows = {}, []
    for name, bits in KEPT.items():
        once, again = density(bits, False), density(bits, True)
        found[name] = once
        shift, change = np.abs(once - found["float32"]), np.abs(again - once)
        row = {"products": name, "bits": bits, "tokens": args.tokens, "steps": steps}
        for what, delta in (("shift", shift), ("noise", change)):
            row |= {
                f"{what}_mean": delta.mean(),
                f"{what}_99": np.quantile(delta, 0.99),
                f"{what}_most": delta.max(),
            }
        row["noise_bound"] = np.minimum(1, np.expm1(np.minimum(change, 1))).mean()
        rows.append({k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()})
        print(
            f"{name}: shift {shift.mean():.2g} on average, {np.quantile(shift, 0.99):.2g} at 99 %;"
            f" noise {change.mean():.2g}, {np.quantile(change, 0.99):.2g}"
        )
    if args.file is not None:
        args.file.write_text(json.dumps({"model": "default", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
