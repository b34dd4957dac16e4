"""Speculative decoding that does not change what comes out, in JAX."""

import importlib
import pathlib
from typing import TYPE_CHECKING

__version__ = "0.4.0"

# In a checkout `converters/` lies beside this folder; installed, it lies inside it.
_ROOT = pathlib.Path(__file__).parent.parent
if (_ROOT / "converters" / "source.py").is_file() and not (_ROOT / "cspd_jax" / "converters").exists():
    __path__.append(str(_ROOT))

if TYPE_CHECKING:
    from cspd_jax import masked, parallel, text
    from cspd_jax._utils.compilation import use_cache as use_compilation_cache
    from cspd_jax.errors import UserError
    from cspd_jax.image.autotune import fastest
    from cspd_jax.image.chain.speculation import ChainSpeculation
    from cspd_jax.image.comparison import compare
    from cspd_jax.image.generation import generate, generate_batches, run, stream
    from cspd_jax.image.info import Info
    from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
    from cspd_jax.image.methods import DraftSpeculation, Method, Plain, ReleasedRunner, SelfSpeculation
    from cspd_jax.image.pixels import to_images, to_latents
    from cspd_jax.image.plan import Plan, Request, make_request, resolve
    from cspd_jax.image.protocol import CachedTokenModel, TokenModel
    from cspd_jax.image.rounds import Exactness, PaperCriterion, PathCriterion
    from cspd_jax.keys import row_keys
    from cspd_jax.reports.pictures import picture
    from cspd_jax.weights.models import VAE, ImageModel, TextModel, load, load_text, load_vae
    from cspd_jax.weights.tokenizers import Tokenizer, load_tokenizer

# Loaded when first used, so that the command line answers at once.
_WHERE = {
    "Annealing": "image.lossy.shortcuts",
    "CachedTokenModel": "image.protocol",
    "ChainSpeculation": "image.chain.speculation",
    "Checkerboard": "image.lossy.shortcuts",
    "DraftSpeculation": "image.methods",
    "Exactness": "image.rounds",
    "ImageModel": "weights.models",
    "Info": "image.info",
    "Method": "image.methods",
    "PaperCriterion": "image.rounds.paper_criterion",
    "PathCriterion": "image.rounds.path_criterion",
    "Plain": "image.methods",
    "Plan": "image.plan",
    "ReleasedRunner": "image.methods",
    "Request": "image.plan",
    "SelfSpeculation": "image.methods",
    "TextModel": "weights.models",
    "TokenModel": "image.protocol",
    "Tokenizer": "weights.tokenizers",
    "UserError": "errors",
    "VAE": "weights.models",
    "compare": "image.comparison",
    "fastest": "image.autotune",
    "generate": "image.generation",
    "generate_batches": "image.generation",
    "load": "weights.models",
    "load_text": "weights.models",
    "load_tokenizer": "weights.tokenizers",
    "load_vae": "weights.models",
    "make_request": "image.plan",
    "picture": "reports.pictures",
    "resolve": "image.plan",
    "row_keys": "keys",
    "run": "image.generation",
    "stream": "image.generation",
    "to_images": "image.pixels",
    "to_latents": "image.pixels",
    "use_compilation_cache": "_utils.compilation",
}
_RENAMED = {"use_compilation_cache": "use_cache"}
_SUBPACKAGES = ("masked", "parallel", "text")

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
