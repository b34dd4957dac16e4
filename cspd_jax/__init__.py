"""Speculative decoding that does not change what comes out, in JAX."""

from cspd_jax._version import __version__

__all__ = ["__version__"]
