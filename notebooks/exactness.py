"""Is speculation exact? The shortest proof: draws, a law in closed form, and mistakes
that its test refutes.

    python notebooks/exactness.py [PICTURE.png]  # about ten seconds on a CPU

The library samples a target p with drafts from another distribution q. A test of
Kolmogorov and Smirnov compares the draws with the distribution function of p. Its
p-value is valid for any number of draws (Massart): of ten thousand runs of a correct
sampler, at most one has a p-value of 0.0001 or less. With 3,000 draws the test refutes
a sampler if the two distribution functions differ by more than 0.041 somewhere. The
same test is then applied to plausible mistakes.
"""

import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw
from scipy.special import ndtr

from cspd_jax import audit
from cspd_jax.coupling.gaussian import couple_gaussians
from cspd_jax.coupling.residual import gaussian_residual
from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.gaussian import Gaussian, coefficients, log_density
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.chain import ChainSpeculation, not_begun, speculate_chain
from cspd_jax.image.chain_drafters import frozen

DRAWS = 3_000
WINDOW = 4  # denoising steps that are drafted for a head call
normal = jax.random.normal


# 1. One draw. Target N(0, 1), draft N(1.2, 0.5).

P = Gaussian(jnp.zeros(1), jnp.zeros(1))
Q = Gaussian(jnp.array([1.2]), jnp.log(jnp.array([0.5])))

FRESH = "a rejected draft is replaced by a draw from p"
POWER = "kept with probability min(1, (p / q)^0.3)"


@jax.jit
@jax.vmap
def one_draw(key: jax.Array) -> dict[str, jax.Array]:
    """Draws from Q. The library keeps the draft or replaces it, and so do two mistaken
    samplers, with the same draft. A rejected draft must be replaced by a draw from the
    residual, and a draft must be kept with probability min(1, p / q)."""
    for_draft, for_coupling, for_mistake, for_residual = jax.random.split(key, 4)
    draft = Q.mean + jnp.exp(0.5 * Q.log_var) * normal(for_draft, (1,))
    coupled = couple_gaussians(for_coupling, P, Q, draft)
    fresh = jnp.where(coupled.accepted, draft, normal(for_mistake, (1,)))
    log_ratio = log_density(P, draft) - log_density(Q, draft)
    kept = jnp.log(jax.random.uniform(for_mistake)) < 0.3 * log_ratio
    power = jnp.where(kept, draft, gaussian_residual(for_residual, P, Q).value)
    return {"the library": coupled.value, FRESH: fresh, POWER: power}


# 2. A chain of denoising steps, as in the head of an image model. The data are
# N(0.7, 0.3^2). The best prediction of the noise eps is known, and each step is linear
# in the state. So the law of the token is known, too.

SPEC = "ddim20"
MEAN = 0.7
DEVIATION = 0.3
STEPS = sampling_schedule(SPEC).num_steps


class Head:
    """Denoises N(MEAN, DEVIATION^2) without a mistake; its variance lies in the middle
    of its range."""

    def embed_time(self, params, timesteps):
        return jnp.asarray(sampling_schedule(SPEC).alphas_cumprod, jnp.float32)[:, None]

    def modulate(self, params, time, z):
        return jnp.broadcast_arrays(time, z)[0]

    def denoise(self, params, x, abar):
        spread = abar * DEVIATION**2 + 1 - abar
        eps = jnp.sqrt(1 - abar) * (x - jnp.sqrt(abar) * MEAN) / spread
        return jnp.concatenate([eps, jnp.zeros_like(eps)], axis=-1)


def law_of_the_chain() -> tuple[float, float]:
    """Returns mean and deviation of the token: those of a composition of linear steps,
    in float64."""
    s = sampling_schedule(SPEC)
    mean = 0.0
    variance = 1.0
    for i in reversed(range(STEPS)):
        abar = s.alphas_cumprod[i]
        c1 = s.posterior_mean_coef1[i]
        c2 = s.posterior_mean_coef2[i]
        spread = abar * DEVIATION**2 + 1 - abar
        gain = np.sqrt(abar) * DEVIATION**2 / spread  # of x in the predicted token
        a = c1 * gain + c2
        b = c1 * MEAN * (1 - abar) / spread
        noise = np.exp(0.5 * (s.log_betas[i] + s.posterior_log_variance_clipped[i]))
        mean = a * mean + b
        variance = a**2 * variance + noise
    return float(mean), math.sqrt(variance)


@dataclasses.dataclass(frozen=True)
class Careless(ChainSpeculation):
    """Speculates as the library does, except that a careless sampler reuses its random
    numbers: the noise of a dropped draft comes back."""

    careless: jax.Array | bool = True

    def call_keys(self, keys: jax.Array, left: jax.Array) -> jax.Array:
        return jnp.where(self.careless, keys, super().call_keys(keys, left))


@jax.jit
def tokens(key: jax.Array, careless: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws tokens. The drafts of a window assume that the head's prediction does not
    change. Also returns the mean number of head calls."""
    head = Head()
    c = coefficients(sampling_schedule(SPEC))
    time = head.embed_time(None, None)
    z = jnp.zeros((DRAWS, 1))
    chains = Chains(head, None, time, z, c, final_noise=True)
    drafter = frozen(STEPS, 1)
    begun = not_begun(drafter, normal(key, (DRAWS, 1)), jnp.full(DRAWS, STEPS))
    keys = jax.random.split(key, DRAWS)
    # With `large`, head calls are compiled for all chains only, not for half of them.
    how = Careless(WINDOW, large=WINDOW * DRAWS, careless=careless)
    x, counts = speculate_chain(chains, keys, begun, drafter, how)
    return x[:, 0], counts.rounds.mean()


def picture(panels: list[tuple[str, np.ndarray, float, float]]) -> Image.Image:
    """Draws each sample as bars, and the density that it should have as a line. There
    are three panels to a line."""
    canvas = Image.new("RGB", (990, 190 * -(-len(panels) // 3)), "white")
    pen = ImageDraw.Draw(canvas)
    z = np.linspace(-4, 4, 61)
    for i, (title, sample, mean, deviation) in enumerate(panels):
        left = 15 + 330 * (i % 3) + 5 * np.arange(60)
        bottom = 180 + 190 * (i // 3)
        share = np.histogram((sample - mean) / deviation, z)[0] / len(sample)
        should = (
            np.exp(-0.5 * (z[1:] / 2 + z[:-1] / 2) ** 2)
            / math.sqrt(2 * math.pi)
            * (z[1] - z[0])
        )
        for x, high in zip(left, bottom - 1900 * share):
            pen.rectangle([x, high, x + 3, bottom], fill="#7aa6d8")
        pen.line(list(zip(left + 2, bottom - 1900 * should)), fill="black", width=2)
        pen.text((left[0], bottom - 175), title, fill="black")
    return canvas


def main() -> None:
    # Each program runs once or twice, so it should compile quickly.
    jax.config.update("jax_disable_most_optimizations", True)
    drawn = one_draw(jax.random.split(jax.random.key(0), DRAWS))
    panels = [
        (f"one draw: {name}", np.asarray(drawn[name])[:, 0], 0.0, 1.0)
        for name in ("the library", FRESH, POWER)
    ]
    law = law_of_the_chain()
    for name, careless in (
        ("the library", False),
        ("noise of dropped drafts is used again", True),
    ):
        sample, calls = tokens(jax.random.key(1), careless)
        title = f"a chain: {name} ({calls:.1f} calls for {STEPS} steps)"
        panels.append((title, np.asarray(sample), *law))
    print(f"{DRAWS} draws each. False-alarm rate: {audit.FALSE_ALARM}")
    for title, sample, mean, deviation in panels:
        p = audit.ks_p_value((sample - mean) / deviation, ndtr)
        refuted = ", REFUTED" if p <= audit.FALSE_ALARM else ""
        print(f"{title:76} p = {p:.3g}{refuted}")
    for file in sys.argv[1:]:
        picture(panels).save(file)


if __name__ == "__main__":
    main()
