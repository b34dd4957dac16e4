"""Speculative decoding that does not change what comes out, in JAX."""

import importlib
import pathlib
from typing import TYPE_CHECKING

__version__ = "0.7.0.dev0"

# In a checkout `converters/` lies beside this folder; installed, it lies inside it.
_ROOT = pathlib.Path(__file__).parent.parent
if (_ROOT / "converters" / "source.py").is_file() and not (
    _ROOT / "cspd_jax" / "converters"
).exists():
    __path__.append(str(_ROOT))


if TYPE_CHECKING:
    from cspd_jax import image, masked, parallel, text
    from cspd_jax._utils.compilation import DEVICE_LOOPS, device_loops
    from cspd_jax.check import UserError
    from cspd_jax.hub import load
    from cspd_jax.image.chain import ChainSpeculation
    from cspd_jax.image.comparison import fastest
    from cspd_jax.image.generation import generate, stream
    from cspd_jax.image.known import Known
    from cspd_jax.image.methods import DraftSpeculation, Plain, SelfSpeculation
    from cspd_jax.image.options import Options
    from cspd_jax.image.paper import PaperCriterion
    from cspd_jax.image.pixels import to_images
    from cspd_jax.image.rounds import PathCriterion
    from cspd_jax.keys import row_keys
    from cspd_jax.reports.citation import citation
    from cspd_jax.reports.pictures import picture

# Loaded when first used, so that the command line answers at once.
_WHERE = {
    "ChainSpeculation": "image.chain",
    "DEVICE_LOOPS": "_utils.compilation",
    "DraftSpeculation": "image.methods",
    "Known": "image.known",
    "Options": "image.options",
    "PaperCriterion": "image.paper",
    "PathCriterion": "image.rounds",
    "Plain": "image.methods",
    "SelfSpeculation": "image.methods",
    "UserError": "check",
    "citation": "reports.citation",
    "device_loops": "_utils.compilation",
    "fastest": "image.comparison",
    "generate": "image.generation",
    "load": "hub",
    "picture": "reports.pictures",
    "row_keys": "keys",
    "stream": "image.generation",
    "to_images": "image.pixels",
}
_SUBPACKAGES = ("image", "masked", "parallel", "text")

__all__ = [
    "DEVICE_LOOPS",
    "ChainSpeculation",
    "DraftSpeculation",
    "Known",
    "Options",
    "PaperCriterion",
    "PathCriterion",
    "Plain",
    "SelfSpeculation",
    "UserError",
    "__version__",
    "citation",
    "device_loops",
    "fastest",
    "generate",
    "image",
    "load",
    "masked",
    "parallel",
    "picture",
    "row_keys",
    "stream",
    "text",
    "to_images",
]


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"cspd_jax.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"cspd_jax.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
