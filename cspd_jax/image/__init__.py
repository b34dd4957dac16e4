"""Images from models of continuous tokens.

`generate`, `stream`, `fastest` and `compare` take a key, a model, labels, a method and `Options`, the one
list of options. `plan` checks and settles what is asked; `methods` are the ways to generate; `generation`
runs a plan. The algorithms know models by `protocol` only: `sampler` (the plain sampler, the reference),
`chain` (speculation along the denoising steps of a token), `rounds` (speculation over AR steps), `released`
(the published runner, lossy) and `lossy` (shortcuts of the plain sampler).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cspd_jax.image.autotune import fastest
    from cspd_jax.image.chain.speculation import ChainSpeculation
    from cspd_jax.image.comparison import Comparison, compare
    from cspd_jax.image.exactness import Exactness
    from cspd_jax.image.generation import generate, generate_batches, run, stream
    from cspd_jax.image.info import Info
    from cspd_jax.image.known import Known
    from cspd_jax.image.methods import DraftSpeculation, Method, Plain, ReleasedRunner, SelfSpeculation
    from cspd_jax.image.options import Options
    from cspd_jax.image.order import Spread
    from cspd_jax.image.pixels import to_images, to_latents, to_tokens
    from cspd_jax.image.plan import Plan, resolve
    from cspd_jax.image.protocol import CachedTokenModel, CausalTokenModel, TokenModel
    from cspd_jax.image.regions import keep
    from cspd_jax.image.rounds.paper_criterion import PaperCriterion
    from cspd_jax.image.rounds.path_criterion import PathCriterion

# Loaded when first used: the algorithms are imported without weights.
_WHERE = {
    "CachedTokenModel": "protocol",
    "CausalTokenModel": "protocol",
    "ChainSpeculation": "chain.speculation",
    "Comparison": "comparison",
    "DraftSpeculation": "methods",
    "Exactness": "exactness",
    "Info": "info",
    "Known": "known",
    "Method": "methods",
    "Options": "options",
    "PaperCriterion": "rounds.paper_criterion",
    "PathCriterion": "rounds.path_criterion",
    "Plain": "methods",
    "Plan": "plan",
    "ReleasedRunner": "methods",
    "SelfSpeculation": "methods",
    "Spread": "order",
    "TokenModel": "protocol",
    "compare": "comparison",
    "fastest": "autotune",
    "generate": "generation",
    "generate_batches": "generation",
    "keep": "regions",
    "resolve": "plan",
    "run": "generation",
    "stream": "generation",
    "to_images": "pixels",
    "to_latents": "pixels",
    "to_tokens": "pixels",
}

__all__ = [
    "CachedTokenModel",
    "CausalTokenModel",
    "ChainSpeculation",
    "Comparison",
    "DraftSpeculation",
    "Exactness",
    "Info",
    "Known",
    "Method",
    "Options",
    "PaperCriterion",
    "PathCriterion",
    "Plain",
    "Plan",
    "ReleasedRunner",
    "SelfSpeculation",
    "Spread",
    "TokenModel",
    "compare",
    "fastest",
    "generate",
    "generate_batches",
    "keep",
    "resolve",
    "run",
    "stream",
    "to_images",
    "to_latents",
    "to_tokens",
]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
