"""What lies where on a mesh of 8 devices, and that images have the bits of batches of their group's size.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/mesh_bits.py FOLDER
"""

import pathlib
import sys

import hf_folder
import jax
import jax.numpy as jnp
import numpy as np
import tiny

import cspd_jax
from cspd_jax import parallel


def held(params):
    """Bytes on each device."""
    counts = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            counts[shard.device] += shard.data.nbytes
    return list(counts.values())


def check_placed(load, name):
    """Every device holds its share of the same numbers."""
    whole, mesh = load(name).params, parallel.make_mesh("data=2,model=4")
    placed = load(name, None, mesh).params
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), whole, placed))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert len(set(held(placed))) == 1 and held(placed)[0] < 0.7 * total, (held(placed), total)
    replicated = load(name, None, parallel.make_mesh("data=8")).params
    assert held(replicated) == [total] * 8


def check_bits(model, placed):
    """An image's bits are those that a batch of its group's size gives."""
    keys, labels = cspd_jax.row_keys(jax.random.key(5), 8), np.arange(8) % 5
    for method in (cspd_jax.Plain(), cspd_jax.SelfSpeculation(gamma=2)):
        how = method, cspd_jax.Options(num_iter=4, cfg=2.0)
        spread, _ = cspd_jax.generate(keys, placed, labels, *how)
        pairs = [cspd_jax.generate(keys[i : i + 2], model, labels[i : i + 2], *how)[0] for i in (0, 2, 4, 6)]
        assert np.array_equal(spread, jnp.concatenate(pairs))


def main(folder):
    mar = tiny.save_mar(folder / "mar")
    check_placed(cspd_jax.load, mar)
    hf_folder.write(folder / "hf", hf_folder.LLAMA)
    check_placed(cspd_jax.load, str(folder / "hf"))
    mesh = parallel.make_mesh("data=4", jax.devices()[:4])
    check_bits(cspd_jax.load(mar), cspd_jax.load(mar, None, mesh))
    print("all is where it belongs")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
