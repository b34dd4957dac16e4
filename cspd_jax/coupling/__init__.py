"""Couplings: given a target p, a drafter q and a draft from q, a coupling keeps the
draft or draws from the residual (p - q)_+.

- `categorical`: one token, or a block of tokens.
- `siblings`: several drafts for one token.
- `gaussian`: diagonal Gaussians.
- `block`: a path of Gaussian transitions.
- `resample`: any distributions with log densities.
- `residual`: exact draws from the residual of two Gaussians.
- `acceptance`: the accept test and the result types that the other modules share.
- `draft_length`: how many drafts pay off.

All functions are pure. Those that draw consume the key that they take, and treat a
single lane; use `vmap` for many lanes. The value that a coupling (`couple_*`) returns
is distributed as p. With a single draft it equals the draft with probability 1 - TV(p,
q), which is the maximum. The functions run inside other programs and do not check
values, so wrong arguments end in JAX's own errors.
"""
