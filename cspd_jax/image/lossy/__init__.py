"""Lossy shortcuts of the plain sampler."""

from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard

__all__ = ["Annealing", "Checkerboard"]
