"""Generations of all three families on meshes of devices that one processor pretends to be.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_ENABLE_X64=1
    python tests/mesh_cases.py OUT.json "data=8:chains,masked" "data=4,model=2:chains"

The cases run without a mesh and on each of those named with them; their tokens and counts are written. In
float64: rounding, which depends on shapes, must not decide anything.
"""

from __future__ import annotations

import json
import math
import sys

import jax
import masked_models
import numpy as np
import text_models
import tiny

import cspd_jax
from cspd_jax import masked, parallel, text
from cspd_jax.models import ImageModel, TextModel
from cspd_jax.networks import mar
from cspd_jax.networks.lm import LM
from cspd_jax.networks.mar import MARModel

IMAGES = 10  # more than a data axis shares evenly
KEY = 3


def placed(kind, name, network, params, mesh):
    if mesh is None:
        return kind(name, network, jax.tree.map(jax.numpy.asarray, params))
    return kind(name, network, parallel.place(mesh, params, network.config), mesh=mesh)


def image_model(mesh, seed=0):
    params = tiny.params(mar.abstract_params(tiny.PIXELS), seed, scale=0.05)
    params = jax.tree.map(lambda a: a.astype(np.float64), params)
    return placed(ImageModel, f"tiny-{seed}", MARModel(tiny.PIXELS, jax.numpy.float64), params, mesh)


def image(method, load=image_model, images=IMAGES, num_iter=6, **options):
    def run(mesh):
        made = method(lambda seed: image_model(mesh, seed))
        labels = np.arange(images) % 5
        tokens, info = cspd_jax.generate(
            jax.random.key(KEY), load(mesh), labels, made, cspd_jax.Options(num_iter=num_iter, **options)
        )
        return tokens, {
            "accepted": info.accepted.tolist(),
            "tested": info.tested.tolist(),
            "chains": [info.trace.chain_tested.tolist(), info.trace.chain_accepted.tolist()],
            "sequential": [int(calls.sequential) for calls in info.calls.values()],
        }

    return run


def trained(mesh):
    """Along the chains of an untrained model nothing is accepted."""
    return cspd_jax.load("default", np.float64, mesh)


def continued(mesh, **options):
    lm = text_models.model()
    weights = text_models.params(lm)
    target = placed(TextModel, "target", lm, weights, mesh)
    draft = placed(TextModel, "draft", lm, text_models.near(weights), mesh)
    options = text.Options(max_new_tokens=12, gamma=3, **options)
    prompts = text_models.prompts(IMAGES, 5)
    tokens, info = text.generate(jax.random.key(KEY), target, prompts, draft, options)
    calls = info.calls
    return tokens, {
        "accepted": info.accepted.tolist(),
        "tested": info.tested.tolist(),
        "sequential": [int(of.sequential) for of in calls.values()],
    }


def filled(mesh, **options):
    network = LM(masked_models.LLADA, jax.numpy.float64)
    model = placed(TextModel, "masked", network, masked_models.params_of(masked_models.LLADA, 0), mesh)
    prompts = text_models.prompts(IMAGES, 5, ids=masked_models.MASK)
    tokens, info = masked.generate(
        jax.random.key(KEY), model, prompts, options=masked.Options(max_new_tokens=8, block=4, **options)
    )
    return tokens, {
        "accepted": info.accepted.tolist(),
        "tested": info.tested.tolist(),
        "sequential": [info.sequential],
    }


def half_known(images):
    """Each image knows another number of tokens."""
    random = np.random.default_rng(0)
    counts = np.arange(images) % (tiny.PIXELS.seq_len + 1)
    mask = random.random((images, tiny.PIXELS.seq_len)).argsort(axis=1) < counts[:, None]
    return cspd_jax.Known(random.normal(size=(*mask.shape, tiny.PIXELS.token_dim)), mask)


CASES = {
    "plain known": image(lambda model: cspd_jax.Plain(), known=half_known(IMAGES)),
    "self known": image(lambda model: cspd_jax.SelfSpeculation(gamma=2), known=half_known(IMAGES)),
    "plain": image(lambda model: cspd_jax.Plain(), cfg=2.0),
    "chains": image(
        lambda model: cspd_jax.Plain(),
        trained,
        3,
        2,
        respacing="ddim10",
        denoise=cspd_jax.ChainSpeculation((4,)),
    ),
    "self": image(lambda model: cspd_jax.SelfSpeculation(gamma=2)),
    "draft": image(lambda model: cspd_jax.DraftSpeculation(model(1), gamma=2), cfg=2.0),
    "released": image(lambda model: cspd_jax.image.ReleasedRunner(model(1), gamma=2), final_noise=False),
    "greedy text": continued,
    "sampled text": lambda mesh: continued(mesh, temperature=0.8, top_p=0.9),
    "masked": lambda mesh: filled(mesh, guidance=0.5),
    "cached masked": lambda mesh: filled(mesh, temperature=0.7, cached=True),
}


def mesh_of(sizes: str):
    """A mesh of as many of the devices as it needs."""
    return parallel.make_mesh(sizes, jax.devices()[: math.prod(parallel.parse_mesh(sizes).values())])


def main(out: str, *runs: str) -> None:
    asked = [run.split(":") for run in runs]
    wanted = [(name, sizes) for sizes, names in asked for name in names.split(",")]
    results = {}
    for name, sizes in dict.fromkeys([*((name, "none") for name, _ in wanted), *wanted]):
        tokens, counts = CASES[name](None if sizes == "none" else mesh_of(sizes))
        results[f"{name}; {sizes}"] = {"tokens": np.asarray(tokens).tolist(), **counts}
        print(name, sizes, flush=True)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
