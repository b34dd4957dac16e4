"""Couplings: given a target p, a drafter q and a draft from q, keep the draft or draw
from the residual of p.

`categorical` has those of tokens and of blocks of them, `siblings` that of several
drafts for one token, `gaussian` that of Gaussians, `resample` that of whatever has a
log density, and `block` that of paths of Gaussian transitions; `acceptance` has what
they share, and `draft_length` how long drafts should be.

All functions are pure, take a key that they consume, and treat a single lane; `vmap`
them for many. The value that a coupling (`couple_*`) returns is distributed as p, and
it equals the draft with probability 1 - TV(p, q), which is the maximum. They run inside
other programs, and look at no values: wrong arguments end in JAX's own errors.
"""
