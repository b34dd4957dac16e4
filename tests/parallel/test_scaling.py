"""Messages between devices are counted in a program compiled for devices that a processor pretends to be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import dataclasses, json
import jax, jax.numpy as jnp
from collectives import collectives
from jax.sharding import NamedSharding, PartitionSpec
from cspd_jax import parallel

mesh = parallel.make_mesh("data=2,model=2")
shared = {
    name: jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    for name, spec in (("up", (None, "model")), ("down", ("model",)))
}
rows = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

def by_group(x, shared):
    layer = lambda _, x: jnp.tanh(jnp.tanh(x @ shared["up"]) @ shared["down"])
    x = jax.lax.fori_loop(0, 5, layer, x)
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: layer(0, x), x)

def run(rows, shared):
    joins = parallel.Join.ROWS
    return parallel.map_rows(lambda x, s: Out(by_group(x, s)), mesh, rows, shared, {Out: {"x": joins}}, 8)

import collections
Out = collections.namedtuple("Out", "x")
text = jax.jit(run).lower(rows, shared).compile().as_text()
found = collectives(text, [3.0], 4)
print(json.dumps([dataclasses.asdict(m) | {"between": m.crosses(2)} for m in found]))
"""


@pytest.fixture(scope="module")
def messages():
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(BENCHMARKS),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_sum_in_each_trip(messages):
    """Two products, the first cut along its outputs and the second along its inputs: one sum of 4 x 16
    numbers in each group, five times and three times."""
    sums = [m for m in messages if m["kind"] == "all-reduce" and m["bytes"] == 4 * 16 * 4]
    assert sorted(m["times"] for m in sums) == [3, 5]
    assert all(m["loops"] == 1 and m["groups"] == [[0, 1], [2, 3]] and not m["between"] for m in sums)


def test_groups_meet_only_at_the_end(messages):
    between = [m for m in messages if m["between"]]
    assert between and all(m["loops"] == 0 and m["times"] == 1 for m in between)


@pytest.mark.parametrize(
    "listed, groups",
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
    ],
)
def test_groups_as_they_are_written(monkeypatch, listed, groups):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import collectives

    text = (
        "ENTRY main (a: f32[8]) -> f32[8] {\n  a = f32[8] parameter(0)\n"
        f"  ROOT r = f32[8] all-reduce(%a), channel_id=1, replica_groups={listed}, to_apply=%add\n}}\n"
    )
    (found,) = collectives.collectives(text, (), 4)
    assert found.groups == groups and found.bytes == 32 and found.loops == 0
    assert found.seconds == collectives.NEAR["latency_seconds"]


def test_the_record_says_what_is_modelled():
    content = json.loads((BENCHMARKS / "results" / "scaling.json").read_text())
    for row in content["samplers"]:
        assert not any(m["between_groups"] and m["loops"] for m in row["messages"])
        seconds = {name for name in row if "seconds" in name} - {"compile_seconds"}
        assert seconds and all(name.startswith("modelled") for name in seconds)
