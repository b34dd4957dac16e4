"""Images from models of continuous tokens.

`generate` makes them in one call, and `stream` step by step. `prepare` returns what
`generate` would make, as a `Batch` for your own `jit`, and `resolve` how, as a
`Recipe`. The algorithms know models by `protocol` only: `sampler` (the reference),
`chain` (speculation along the denoising steps of a token), `rounds` (over AR steps),
`coupled` (which keeps what it drafted), `paper` and `released` (the published criterion
and runner, lossy) and `lossy` (shortcuts of the plain sampler).
"""

from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.generation import generate, prepare, resolve, stream
from cspd_jax.image.known import Known
from cspd_jax.image.methods import (
    DraftSpeculation,
    Method,
    Plain,
    Released,
    SelfSpeculation,
)
from cspd_jax.image.options import Options
from cspd_jax.image.order import Spread
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.pixels import to_images, to_latents, to_tokens
from cspd_jax.image.protocol import CachedTokenModel, CausalTokenModel, TokenModel
from cspd_jax.image.recipe import Batch, Recipe
from cspd_jax.image.regions import keep

__all__ = [
    "Batch",
    "CachedTokenModel",
    "CausalTokenModel",
    "ChainSpeculation",
    "DraftSpeculation",
    "Known",
    "Method",
    "Options",
    "PaperCriterion",
    "PathCriterion",
    "Plain",
    "Recipe",
    "Released",
    "SelfSpeculation",
    "Spread",
    "TokenModel",
    "generate",
    "keep",
    "prepare",
    "resolve",
    "stream",
    "to_images",
    "to_latents",
    "to_tokens",
]
