"""Rows of the table of samplers on meshes of devices that one processor pretends to be.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_ENABLE_X64=1
    python tests/support/mesh_cases.py FOLDER

The rows of MESHES run without a mesh and on each of theirs; FOLDER/results.json has
their tokens and counts. In float64: rounding, which depends on shapes, must not decide
anything. Before that, parameters must lie where they belong, and images have the bits
of batches of their group's size.
"""

import json
import math
import pathlib
import sys

import chex
import hf_folder
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
# Every loop of the library on a mesh of both axes, whose other rows differ from these
# in numbers; and some of each family on meshes of other proportions.
MESHES = {
    "data=4,model=2": (
        "trained",
        "plain",
        "plain, groups, guided, cold",
        "annealed checkerboard",
        "self",
        "self, groups, guided",
        "self, coupled, both levels",
        "draft, adaptive, both levels",
        "paper, Sigma = 1, groups, guided, own noise",
        "released",
        "text, plain, top-k, top-p",
        "text, google, model",
        "text, block, model, adapted",
        "text, block, lookup",
        "text, block, head",
        "text, tree",
        "masked, ssd",
        "masked, ssd, Dream, guided",
        "masked, ssd, blocks",
        "masked, stepwise, blocks",
        "masked, schedule",
    ),
    "data=8": ("text, greedy, model",),
    "data=2,model=4": ("self, guided", "masked, ssd"),
}


def image_model(mesh, seed=0):
    params = tiny.params(mar.abstract_params(tiny.PIXELS), seed, scale=0.05)
    params = jax.tree.map(lambda a: a.astype(np.float64), params)
    return samplers.placed(
        ImageModel, MARModel(tiny.PIXELS, jax.numpy.float64), params, mesh
    )


def request(name, mesh):
    """trained: along the chains of an untrained model nothing is accepted."""
    if name == "trained":
        options = cspd_jax.Options(num_iter=2, respacing="ddim10", **samplers.CHAINS)
        model = cspd_jax.load("default", np.float64, mesh)
        return jax.random.key(KEY), model, np.arange(3), cspd_jax.Plain(), options
    if name in samplers.IMAGE:
        models = {"model": image_model(mesh), "draft": image_model(mesh, 1)}
        known = samplers.some_known(IMAGES, tiny.PIXELS.seq_len, tiny.PIXELS.token_dim)
        more = {"known": known} if name in ("plain", "self") else {}
        return samplers.IMAGE[name].request(KEY, images=IMAGES, **models, **more)
    return samplers.WAYS[name].request(KEY, mesh, rows=IMAGES)


def run(name, mesh):
    family = samplers.WAYS[name].family if name in samplers.WAYS else cspd_jax.image
    tokens, info = family.generate(*request(name, mesh))
    chains = name in samplers.IMAGE or name == "trained"
    return {
        "tokens": np.asarray(tokens).tolist(),
        "accepted": info.accepted.tolist(),
        "tested": info.tested.tolist(),
        "chains": [info.trace.chain_tested.tolist(), info.trace.chain_accepted.tolist()]
        if chains
        else [],
        "sequential": [int(calls.sequential) for calls in info.calls.values()],
    }


def mesh_of(sizes):
    """A mesh of as many of the devices as it needs."""
    count = math.prod(int(part.partition("=")[2]) for part in sizes.split(","))
    return parallel.make_mesh(sizes, jax.devices()[:count])


def held(params):
    """Bytes on each device."""
    counts = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            counts[shard.device] += shard.data.nbytes
    return list(counts.values())


def check_placed(name):
    """Every device holds its share of the same numbers."""
    whole, placed = (
        cspd_jax.load(name, None, mesh).params
        for mesh in (None, mesh_of("data=2,model=4"))
    )
    chex.assert_trees_all_equal(*map(jax.device_get, (placed, whole)))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    least, *_, most = sorted(held(placed))
    assert least == most < 0.7 * total
    assert held(cspd_jax.load(name, None, mesh_of("data=8")).params) == [total] * 8


def check_bits(name):
    """An image's bits are those that a batch of its group's size gives."""
    model, placed = (
        cspd_jax.load(name, None, mesh) for mesh in (None, mesh_of("data=4"))
    )
    keys = cspd_jax.row_keys(jax.random.key(5), 8)
    labels = np.arange(8) % 5
    for method in (cspd_jax.Plain(), cspd_jax.SelfSpeculation(gamma=2)):
        how = method, cspd_jax.Options(num_iter=4, cfg=2.0)
        spread, _ = cspd_jax.generate(keys, placed, labels, *how)
        pairs = [
            cspd_jax.generate(keys[i : i + 2], model, labels[i : i + 2], *how)[0]
            for i in (0, 2, 4, 6)
        ]
        assert np.array_equal(spread, np.concatenate(pairs))


def main(folder):
    saved = tiny.save_mar(folder / "mar")
    hf_folder.write(folder / "hf", hf_folder.LLAMA)
    check_placed(saved)
    check_placed(str(folder / "hf"))
    check_bits(saved)
    wanted = [(name, sizes) for sizes, names in MESHES.items() for name in names]
    results = {}
    alone = [(name, "none") for name, _ in wanted]
    for name, sizes in dict.fromkeys([*alone, *wanted]):
        mesh = None if sizes == "none" else mesh_of(sizes)
        results[f"{name}; {sizes}"] = run(name, mesh)
        print(name, sizes, flush=True)
        # Programs hold memory maps, of which a process may have 65530.
        jax.clear_caches()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
