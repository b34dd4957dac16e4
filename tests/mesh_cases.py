"""Rows of the table of samplers on meshes of devices that one processor pretends to be.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_ENABLE_X64=1
    python tests/mesh_cases.py OUT.json "data=8:self;masked, ssd" "data=4,model=2:trained"

The rows run without a mesh and on each of those named with them; their tokens and counts are written. In
float64: rounding, which depends on shapes, must not decide anything.
"""

from __future__ import annotations

import json
import math
import sys

import jax
import numpy as np
import samplers
import tiny

import cspd_jax
from cspd_jax import parallel
from cspd_jax.models import ImageModel
from cspd_jax.networks import mar
from cspd_jax.networks.mar import MARModel

IMAGES = 10  # more than a data axis shares evenly
KEY = 3
NAMES = ("trained", *samplers.WAYS)


def image_model(mesh, seed=0):
    params = tiny.params(mar.abstract_params(tiny.PIXELS), seed, scale=0.05)
    params = jax.tree.map(lambda a: a.astype(np.float64), params)
    return samplers.placed(ImageModel, MARModel(tiny.PIXELS, jax.numpy.float64), params, mesh)


def half_known(images):
    """Each image knows another number of tokens."""
    random = np.random.default_rng(0)
    counts = np.arange(images) % (tiny.PIXELS.seq_len + 1)
    mask = random.random((images, tiny.PIXELS.seq_len)).argsort(axis=1) < counts[:, None]
    return cspd_jax.Known(random.normal(size=(*mask.shape, tiny.PIXELS.token_dim)), mask)


def request(name, mesh):
    """trained: along the chains of an untrained model nothing is accepted."""
    if name == "trained":
        options = cspd_jax.Options(num_iter=2, respacing="ddim10", **samplers.CHAINS)
        model = cspd_jax.load("default", np.float64, mesh)
        return jax.random.key(KEY), model, np.arange(3), cspd_jax.Plain(), options
    if name in samplers.IMAGE:
        models = {"model": image_model(mesh), "draft": image_model(mesh, 1)}
        known = {"known": half_known(IMAGES)} if name in ("plain", "self") else {}
        return samplers.IMAGE[name].request(KEY, images=IMAGES, **models, **known)
    return samplers.WAYS[name].request(KEY, mesh, rows=IMAGES)


def run(name, mesh):
    family = samplers.WAYS[name].family if name in samplers.WAYS else cspd_jax.image
    tokens, info = family.generate(*request(name, mesh))
    chains = name in samplers.IMAGE or name == "trained"
    return {
        "tokens": np.asarray(tokens).tolist(),
        "accepted": info.accepted.tolist(),
        "tested": info.tested.tolist(),
        "chains": [info.trace.chain_tested.tolist(), info.trace.chain_accepted.tolist()] if chains else [],
        "sequential": [int(calls.sequential) for calls in info.calls.values()],
    }


def mesh_of(sizes: str):
    """A mesh of as many of the devices as it needs."""
    return parallel.make_mesh(sizes, jax.devices()[: math.prod(parallel.parse_mesh(sizes).values())])


def main(out: str, *runs: str) -> None:
    asked = [run.split(":") for run in runs]
    wanted = [(name, sizes) for sizes, names in asked for name in names.split(";")]
    results = {}
    for name, sizes in dict.fromkeys([*((name, "none") for name, _ in wanted), *wanted]):
        results[f"{name}; {sizes}"] = run(name, None if sizes == "none" else mesh_of(sizes))
        print(name, sizes, flush=True)
        jax.clear_caches()  # programs hold memory maps, of which a process may have 65530
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
