"""Speculative decoding that does not change what comes out, in JAX."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from cspd_jax import masked, parallel, samples, text
    from cspd_jax._utils.compilation import use_cache as use_compilation_cache
    from cspd_jax._utils.random import row_keys
    from cspd_jax.errors import UserError
    from cspd_jax.image.autotune import fastest
    from cspd_jax.image.chain_speculation import ChainSpeculation
    from cspd_jax.image.comparison import compare
    from cspd_jax.image.generation import generate, generate_batches, run, stream
    from cspd_jax.image.info import Info
    from cspd_jax.image.methods import DraftSpeculation, Method, Plain, ReleasedRunner, SelfSpeculation
    from cspd_jax.image.pixels import to_images, to_latents
    from cspd_jax.image.plan import Plan, Request, make_request, resolve
    from cspd_jax.image.protocol import CachedTokenModel, TokenModel
    from cspd_jax.image.shortcuts import Annealing, Checkerboard
    from cspd_jax.image.speculation import Exactness, PaperCriterion, PathCriterion
    from cspd_jax.models import VAE, ImageModel, TextModel, load, load_text, load_vae
    from cspd_jax.reports.pictures import picture
    from cspd_jax.tokenizers import Tokenizer, load_tokenizer

# Loaded when first used, so that the command line answers at once.
_WHERE = {
    "Annealing": "image.shortcuts",
    "CachedTokenModel": "image.protocol",
    "ChainSpeculation": "image.chain_speculation",
    "Checkerboard": "image.shortcuts",
    "DraftSpeculation": "image.methods",
    "Exactness": "image.speculation",
    "ImageModel": "models",
    "Info": "image.info",
    "Method": "image.methods",
    "PaperCriterion": "image.speculation.paper_criterion",
    "PathCriterion": "image.speculation.path_criterion",
    "Plain": "image.methods",
    "Plan": "image.plan",
    "ReleasedRunner": "image.methods",
    "Request": "image.plan",
    "SelfSpeculation": "image.methods",
    "TextModel": "models",
    "TokenModel": "image.protocol",
    "Tokenizer": "tokenizers",
    "UserError": "errors",
    "VAE": "models",
    "compare": "image.comparison",
    "fastest": "image.autotune",
    "generate": "image.generation",
    "generate_batches": "image.generation",
    "load": "models",
    "load_text": "models",
    "load_tokenizer": "tokenizers",
    "load_vae": "models",
    "make_request": "image.plan",
    "picture": "reports.pictures",
    "resolve": "image.plan",
    "row_keys": "_utils.random",
    "run": "image.generation",
    "stream": "image.generation",
    "to_images": "image.pixels",
    "to_latents": "image.pixels",
    "use_compilation_cache": "_utils.compilation",
}
_RENAMED = {"use_compilation_cache": "use_cache"}
_SUBPACKAGES = ("masked", "parallel", "samples", "text")

__all__ = [
    "VAE",
    "Annealing",
    "CachedTokenModel",
    "ChainSpeculation",
    "Checkerboard",
    "DraftSpeculation",
    "Exactness",
    "ImageModel",
    "Info",
    "Method",
    "PaperCriterion",
    "PathCriterion",
    "Plain",
    "Plan",
    "ReleasedRunner",
    "Request",
    "SelfSpeculation",
    "TextModel",
    "TokenModel",
    "Tokenizer",
    "UserError",
    "__version__",
    "compare",
    "fastest",
    "generate",
    "generate_batches",
    "load",
    "load_text",
    "load_tokenizer",
    "load_vae",
    "make_request",
    "masked",
    "parallel",
    "picture",
    "resolve",
    "row_keys",
    "run",
    "samples",
    "stream",
    "text",
    "to_images",
    "to_latents",
    "use_compilation_cache",
]


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"cspd_jax.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"cspd_jax.{_WHERE[name]}"), _RENAMED.get(name, name))


def __dir__():
    return sorted({*globals(), *__all__})
