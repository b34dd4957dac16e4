"""Block verification of Gaussian transitions whose p and q have the same variances, in
closed form: no trials and no loop over coins.

Let sigma be the standard deviations of a transition, delta = (mu_p - mu_q) / sigma the
whitened shift, and r its length. Along delta, the coordinate u of (x - mu_p) / sigma is
N(0, 1) under p and N(-r, 1) under q, and all directions across it have the same law
under both. So

    log p / q = r u + r^2 / 2,
    pi p > q  exactly for  u > c = -log(pi) / r - r / 2,
    int_{u > a} (pi p - q) = pi Phi(-a) - Phi(-(a + r)) =: T(a),    S = T(c).

The coin after which i drafts are kept falls heads with probability S / (S + 1 - pi),
see `coupling.block`. A draw of the residual (pi p - q)_+ / S is a draw of p whose
coordinate along delta is replaced by the solution u of T(u) = v S, with v uniform. T
falls from S to 0, so sections of a bracket find it.

The steps of a flow have variances that no network changes (`diffusion.flow`), so their
blocks are verified here.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import accepts, unit_interval
from cspd_jax.coupling.block import Prefixes, VerifiedBlock
from cspd_jax.coupling.residual import log_ratio
from cspd_jax.diffusion.gaussian import Gaussian

Array = jax.Array

_SECTIONS = 5  # each into this many parts: 2^25 in all
_PARTS = 32
_FAR = 8.0  # a normal number is never as large
_FARTHEST = 1e3  # no threshold has to be further away
_SMALL = 0.1  # a shift below which the difference of two tails is expanded


@dataclasses.dataclass(frozen=True)
class ClosedForm(Prefixes):
    """The formulas along the shift, for scalars or arrays of one shape."""

    def shift(self, p: Gaussian, q: Gaussian) -> Array:
        """Returns delta [..., d]."""
        return (p.mean - q.mean) * jnp.exp(-0.5 * p.log_var)

    def threshold(self, log_pi: Array, r: Array) -> Array:
        """Returns c, above which pi p is larger than q."""
        return -log_pi / r - r / 2

    def mass(self, log_pi: Array, r: Array, a: Array) -> Array:
        """Returns T(a), the mass of pi p - q above a."""
        middle = a + r / 2
        # Phi(a + r) - Phi(a), by the tails that are small.
        above = middle > 0
        tails = below(jnp.where(above, -a, a + r)) - below(jnp.where(above, -a - r, a))
        density = jnp.exp(-0.5 * middle**2) / math.sqrt(2 * math.pi)
        near = r * density * (1 + r**2 / 24 * (middle**2 - 1))
        between = jnp.where(r < _SMALL, near, tails)
        return jnp.maximum(between + jnp.expm1(log_pi) * below(-a), 0)

    def coordinate(self, log_pi: Array, r: Array, c: Array, v: Array) -> Array:
        """Returns the u [] that solves T(u) = v T(c). It cuts a bracket into parts, and
        goes on with the part that has u; T is computed at all their ends at a time."""
        wanted = v * self.mass(log_pi, r, c)
        low = jnp.maximum(c, -_FAR)
        width = jnp.maximum(c, 0) + _FAR - low
        for _ in range(_SECTIONS):
            width = width / _PARTS
            ends = low + width * jnp.arange(1, _PARTS)
            low += width * jnp.sum(self.mass(log_pi, r, ends) > wanted)
        return low


def below(x: Array) -> Array:
    """Returns Phi(x)."""
    return 0.5 * jax.lax.erfc(x * -math.sqrt(0.5))


def verify_shifted_block(
    key: Array,
    p: Gaussian,
    q: Gaussian,
    drafts: Array,
    valid: Array | None = None,
    *,
    form: ClosedForm = ClosedForm(),
) -> VerifiedBlock:
    """Verifies M drafted transitions as one block, as `block.verify_gaussian_block`
    does, where q has the variances of p.

    p, q: [M, d] the target's and the drafter's Gaussian for each transition, given the
        drafts before it.
    drafts: [M, d] draft i is drawn from row i of q.
    valid: [M] which drafts exist (default: all). The block consists of these, and the
        others count as kept.
    """
    most, dim = drafts.shape
    valid = jnp.ones(most, bool) if valid is None else valid
    log_pi = form.log_pi(jnp.where(valid, log_ratio(p, q, drafts), 0))
    key_coins, key_state = jax.random.split(key)
    bits = jax.random.bits(key_coins, (most + 2,), jnp.uint32)
    u = unit_interval(bits, log_pi.dtype)
    delta = form.shift(p, q).astype(log_pi.dtype)
    r = jnp.linalg.norm(delta, axis=-1)
    finite = jnp.isfinite(r)
    safe = jnp.where(finite, jnp.maximum(r, jnp.finfo(r.dtype).tiny), 1)
    c = jnp.clip(form.threshold(log_pi[:-1], safe), -_FARTHEST, _FARTHEST)
    heads_mass = form.mass(log_pi[:-1], safe, c)
    tails_mass = -jnp.expm1(log_pi[:-1])
    heads = ~finite | (u[:most] * (heads_mass + tails_mass) <= heads_mass)
    index = jnp.arange(most, dtype=jnp.int32)
    last = jnp.max(jnp.where(valid & heads, index, -1))
    kept = jnp.where(accepts(u[most], log_pi[-1]), jnp.int32(most), last)
    row = jnp.clip(kept, 0, most - 1)
    along = form.coordinate(log_pi[row], safe[row], c[row], u[-1])
    direction = delta[row] / safe[row]
    z = jax.random.normal(key_state, (dim,), log_pi.dtype)
    z += (along - jnp.sum(z * direction)) * direction
    p_row: Gaussian = jax.tree.map(lambda a: a[row], p)
    value = p_row.mean + jnp.exp(0.5 * p_row.log_var) * z
    value = jnp.where(finite[row], value, p_row.mean)
    return VerifiedBlock(kept, value, ~finite[row])
