"""Image generation with models of continuous tokens.

`generate` makes images in one call, and `stream` yields them step by step. `prepare`
returns the images that `generate` would make as a `Batch`, for your own `jit`.
`resolve` returns how images are made, as a `Recipe`.

The algorithms use a model only through the interface in `protocol`:

- `sampler` is the plain sampler, and the reference for the other algorithms.
- `chain` speculates along the denoising steps of a token.
- `rounds` speculates over AR steps.
- `coupled` speculates over AR steps, too, and keeps the drafts after a rejected one.
- `paper` is the published criterion, and `released` the published runner; both are
  lossy.
- `lossy` has lossy shortcuts of the plain sampler.
"""

from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.generation import generate, prepare, resolve, stream
from cspd_jax.image.known import Known
from cspd_jax.image.lossy import Annealing, Checkerboard
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
    "Annealing",
    "Batch",
    "CachedTokenModel",
    "CausalTokenModel",
    "ChainSpeculation",
    "Checkerboard",
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
