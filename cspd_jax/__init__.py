"""Speculative decoding that does not change what comes out, in JAX."""

import importlib

from cspd_jax._version import __version__

# Loaded when first used, so that the command line answers at once.
_LAZY = {
    "ImageModel": "cspd_jax.models",
    "load": "cspd_jax.models",
    "load_vae": "cspd_jax.models",
    "Info": "cspd_jax.generation",
    "generate": "cspd_jax.generation",
    "stream": "cspd_jax.generation",
    "to_images": "cspd_jax.generation",
    "to_latents": "cspd_jax.generation",
    "picture": "cspd_jax.reports",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__():
    return sorted({*globals(), *_LAZY})
