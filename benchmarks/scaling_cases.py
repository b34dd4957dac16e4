"""The programs whose scaling is counted: samplers on a mesh as `generate` runs them, and a training state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from cases import LLADA_8B
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cspd_jax
from cspd_jax import ChainSpeculation, Plain, masked, text
from cspd_jax.image import sharded as image_sharded
from cspd_jax.image.options import Options
from cspd_jax.masked import generation as masked_generation
from cspd_jax.masked import loop as masked_loop
from cspd_jax.masked import sharded as masked_sharded
from cspd_jax.networks import lm, mar
from cspd_jax.networks.config import MAR_PRESETS
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.parallel import DATA, shardings
from cspd_jax.text import generation as text_generation
from cspd_jax.text import sharded as text_sharded
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.data.folder import FolderConfig
from cspd_jax.training.image.step import init_state
from cspd_jax.training.placement import Placement

WINDOW = 16
NEW_TOKENS, PROMPT, GAMMA = 64, 64, 4
LLAMA_8B = LMConfig(
    family="llama", vocab_size=128256, known_ids=128256, width=4096, depth=32, heads=32, kv_heads=8,
    head_dim=128, mlp_width=14336, max_positions=8192, rope_theta=500_000.0,
)  # fmt: skip
RECORDED = json.loads((Path(__file__).parent / "results" / "accelerator.json").read_text())["recorded_runs"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A sampler, of any number of devices.

    rows: of each group of devices.
    steps: AR steps, passes or rounds of a run, by which its seconds are divided.
    turns: how many of them the outermost loop makes; a text's first is before it.
    unit: their name.
    trips: of the loops that end when the data say so, by depth.
    lower: of a mesh, for ahead-of-time compilation.
    """

    model: str
    dtype: str
    method: str
    rows: int
    steps: float
    turns: float
    unit: str
    trips: tuple[float, ...]
    lower: Callable[[Mesh], Any]


def images(name: str, dtype: str, rows: int, chains: bool) -> Program:
    """All AR steps of MAR, one token each, with T = 100; the whole image is the one prefix bucket."""
    config = MAR_PRESETS[name]
    network, shapes = mar.MARModel(config, jnp.dtype(dtype)), mar.abstract_params(config)
    chain = ChainSpeculation((WINDOW,)) if chains else "plain"

    def lower(mesh: Mesh):
        count = rows * mesh.shape[DATA]
        keys = jax.eval_shape(lambda: cspd_jax.row_keys(jax.random.key(0), count))
        number = jax.ShapeDtypeStruct((), jnp.float32)
        of_rows = image_sharded.Rows(
            keys, jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((count,), bool), None
        )
        params = _placed(mesh, shapes, dtype, config)
        cfg, temperature = _whole(mesh, (number, number))
        options = Options(
            num_iter=config.seq_len, respacing="ddim100", guided=False, denoise=chain, prefix_buckets=1,
            cfg=cfg, temperature=temperature,
        )  # fmt: skip
        shared = image_sharded.Shared(params, None, options)
        of_rows = _whole(mesh, of_rows)
        return image_sharded._run.lower(of_rows, shared, network=network, method=Plain(), mesh=mesh)

    method = f"chains, M {WINDOW}" if chains else "plain"
    trips = (RECORDED[f"{method}, batch {rows}"]["calls"],) if chains else ()
    return Program(name, dtype, method, rows, config.seq_len, config.seq_len, "AR step", trips, lower)


def causal(dtype: str, rows: int, config: LMConfig = LLAMA_8B) -> Program:
    """A model of the sizes of Llama 3 8B, decoding token by token."""
    network, shapes = lm.LM(config, jnp.dtype(dtype)), lm.abstract_params(config)

    def prepared(count):
        return lambda params: text_generation.prepare(
            None, (network, params), [[1] * PROMPT] * count,
            options=text.Options(max_new_tokens=NEW_TOKENS, stop_ids=()),
        )  # fmt: skip

    def lower(mesh: Mesh):
        params = _placed(mesh, shapes, dtype, config)
        inputs = jax.eval_shape(prepared(rows * mesh.shape[DATA]), params)
        others = _whole(mesh, dataclasses.replace(inputs, params=None))
        inputs = dataclasses.replace(others, params=params)
        return text_sharded._run.lower(text_generation.run, inputs, mesh)

    turns = NEW_TOKENS - 1.0  # the prompt's pass gives the first token
    return Program("llama-8b", dtype, "text-plain", rows, NEW_TOKENS, turns, "pass", (turns,), lower)


def filling(dtype: str, rows: int) -> Program:
    """LLaDA-8B, by self-speculation."""
    network, shapes = lm.LM(LLADA_8B, jnp.dtype(dtype)), lm.abstract_params(LLADA_8B)

    def prepared(count):
        return lambda params: masked_generation.prepare(
            None, (network, params), [[1] * PROMPT] * count, masked.SelfSpeculation(GAMMA),
            masked.Options(max_new_tokens=NEW_TOKENS, block=8),
        )  # fmt: skip

    def lower(mesh: Mesh):
        params = _placed(mesh, shapes, dtype, LLADA_8B)
        inputs = jax.eval_shape(prepared(rows * mesh.shape[DATA]), params)
        canvas = dataclasses.replace(inputs.canvas, params=None)
        others = _whole(mesh, dataclasses.replace(inputs, canvas=canvas))
        canvas = dataclasses.replace(others.canvas, params=params)
        inputs = dataclasses.replace(others, canvas=canvas)
        return masked_sharded._run.lower(masked_loop.run, inputs, mesh)

    rounds = RECORDED[f"ssd, batch {rows}"]["rounds"]
    turns = rounds - 1
    return Program("llada-8b", dtype, f"ssd, gamma {GAMMA}", rows, rounds, turns, "round", (turns,), lower)


def _placed(mesh: Mesh, shapes: Any, dtype: str, config: Any) -> Any:
    """Parameters as a checkpoint's loader places them."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, dtype, sharding=s), shapes, shardings(mesh, shapes, config)
    )


def _whole(mesh: Mesh, tree: Any) -> Any:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), tree)


def state_bytes(name: str, mesh: Mesh) -> int:
    """Of the state of a training run, on one device of the mesh."""
    model = MAR_PRESETS[name]
    config = TrainConfig(model=model, data=FolderConfig("."), batch=mesh.shape[DATA])
    state = jax.eval_shape(lambda: init_state(config))
    placed = Placement(config.batch, mesh).of_state(state, model)
    sizes = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize, state, placed)
    return sum(jax.tree.leaves(sizes))
