"""Makes what is compiled for an H100 and counted: one token, or one round divided by its tokens.

How often the loops run that end when the data say so, and how many tokens a round makes, are those of runs of
the default models on a CPU, which version 0.6 recorded in results/accelerator.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from cases import LLADA_8B, STEPS, Case, about

import cspd_jax
from cspd_jax import ChainSpeculation, SelfSpeculation, masked
from cspd_jax.image import rounds, sampler
from cspd_jax.image.bound import bind
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.masked import generation as masked_generation
from cspd_jax.networks import lm, mar
from cspd_jax.networks.config import MAR_PRESETS, SPHERE_PRESETS, MARConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.registry import kind_of

FILE = Path(__file__).parent / "results" / "accelerator.json"
GAMMA = 4  # of masked text
NEW_TOKENS = 64
PROMPT = 64


@dataclasses.dataclass(frozen=True)
class Way:
    """Names a way to make images. method: plain, chains, self+chains; window: M of the chains."""

    method: str
    window: int | None = None
    gamma: int = 0

    @property
    def options(self) -> str:
        parts = [f"gamma {self.gamma}"] if self.gamma else []
        return ", ".join(parts + ([f"M {self.window}"] if self.window else []))

    def run(self, batch: int) -> str | None:
        """Names the run of the default model, if one is needed."""
        return None if self.window is None else f"{self.method}, {self.options}, batch {batch}"

    @property
    def chain(self) -> ChainSpeculation | None:
        return None if self.window is None else ChainSpeculation((self.window,))


WAYS = (
    Way("plain"),
    Way("chains", 16),
    Way("chains", 32),
    Way("self+chains", 16, 4),
    Way("self+chains", 32, 8),
)


@dataclasses.dataclass(frozen=True)
class Filling:
    """Names a way to fill in masked text. texts: of a pass, for chosen sets; None is a chain of GAMMA."""

    method: str
    texts: int | None = None
    cached: bool = False

    @property
    def options(self) -> str:
        of_method = f"gamma {GAMMA}" if self.texts is None else f"{self.texts} texts"
        parts = [of_method] * (self.method == "ssd") + ["block cache"] * self.cached
        return ", ".join(parts)

    def run(self, batch: int) -> str | None:
        """Names the run of the default model, if one is needed."""
        if self == FILLINGS[0]:
            return None
        parts = [self.method, self.options] if self.cached else [self.method]
        return ", ".join([*parts, f"batch {batch}"])

    def asked(self) -> tuple[Any, masked.Options]:
        way = masked.Stepwise() if self.method != "ssd" else masked.SelfSpeculation(GAMMA, texts=self.texts)
        return way, masked.Options(max_new_tokens=NEW_TOKENS, block=8, cached=self.cached)


FILLINGS = (
    Filling("stepwise"),
    Filling("ssd"),
    Filling("stepwise, cached", cached=True),
    Filling("ssd", 16, cached=True),
    Filling("ssd", 32, cached=True),
)


def rows(toy: bool) -> Iterator[tuple[dict[str, Any], Way | Filling]]:
    """Yields what is known of all rows beforehand, and their ways; the most important first."""
    if toy:
        yield from images("mar-base", 1, False, "float32", WAYS[:4])
        return
    for guided in (False, True):
        for dtype in ("bfloat16", "float32"):
            yield from images("mar-base", 1, guided, dtype)
    yield from images("mar-base", 8, False, "bfloat16", [WAYS[0], WAYS[1], WAYS[3]])
    for batch, how in itertools.product((1, 8), FILLINGS):
        options = {"options": how.options, "dtype": "bfloat16", "respacing": None}
        yield about("llada-8b", "token", batch, how.method, **options), how
    for name in ("mar-large", "mar-huge", "sphere-b"):
        yield from images(name, 1, False, "bfloat16", WAYS[:1])


def images(
    name: str, batch: int, guided: bool, dtype: str, ways: Sequence[Way] = WAYS
) -> Iterator[tuple[dict[str, Any], Way]]:
    """Yields rows of a token of each image, in the middle of it."""
    steps = "flow" if name in SPHERE_PRESETS else "ddim"
    for way in ways:
        yield about(
            name, "token", batch, way.method, options=way.options, guided=guided, dtype=dtype,
            respacing=f"{steps}{STEPS}", num_iter={**MAR_PRESETS, **SPHERE_PRESETS}[name].seq_len,
        ), way  # fmt: skip


def make(row: dict[str, Any], how: Way | Filling) -> tuple[Case, list[float]]:
    """Makes a case, and the trips of its loops that end when the data say so, by depth."""
    name = how.run(row["batch"])
    run: dict[str, float] = {} if name is None else json.loads(FILE.read_text())["recorded_runs"][name]
    if run:
        row = row | {"acceptance_from": "runs of the default models"}
    if isinstance(how, Filling):
        shares = {name: run[name] for name in ("refresh", "verify") if name in run}
        rounds = run.get("rounds", float(NEW_TOKENS))
        return filling_case(row | {"shares_of_rounds": shares}, how, rounds), [rounds]
    if run:
        row = row | {"head_calls_of_slowest": run["calls"], "more_trips": run["more_trips"]}
    common = {"respacing": row["respacing"], "guided": row["guided"], "denoise": how.chain or "plain"}
    common["final_noise"] = False
    if row["model"] in SPHERE_PRESETS:
        options = Options(**common, cfg_schedule="constant", prefix_buckets=1, order=Raster())
    else:
        cfg = 3.0 if row["guided"] else 1.0
        options = Options(**common, num_iter=row["num_iter"], cfg=cfg, prefix_buckets=4)
    case = round_case(row, how, options, run["tokens_per_round"]) if how.gamma else step_case(row, options)
    return case, [run["calls"]] if run else []


# Images


def image_params(config: Any, dtype: str) -> Any:
    """Returns the shapes of a model's parameters."""
    shapes = kind_of(config).abstract_params(config)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes)


def step_case(row: dict[str, Any], options: Options) -> Case:
    """Makes an AR step of the plain sampler in the middle of the image: a token of each image."""
    config, batch = {**MAR_PRESETS, **SPHERE_PRESETS}[row["model"]], row["batch"]
    model, known = kind_of(config).network(config, jnp.dtype(row["dtype"])), config.seq_len // 2

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        made = bind(model, params, keys, labels, options)
        return made, sampler.empty_state(made)

    def step(params, prepared, first, scale):
        made, state = prepared
        group = sampler.GroupArrays(first, jnp.int32(1), scale)
        segment = sampler.Segment(known, 1, options.respacing)
        return sampler.ar_step(dataclasses.replace(made, params=params), segment, state, group)

    params, labels = image_params(config, row["dtype"]), jax.ShapeDtypeStruct((batch,), jnp.int32)
    scale = jax.ShapeDtypeStruct((batch,), jnp.float32)
    args = (params, jax.eval_shape(prepared, params, labels), jax.ShapeDtypeStruct((), jnp.int32), scale)
    donated = () if isinstance(config, MARConfig) else (1,)  # the cache is written in place
    return Case({**row, "timed": f"one AR step, {known} tokens known"}, step, args, 1, donated=donated)


def round_case(row: dict[str, Any], way: Way, options: Options, tokens: float) -> Case:
    """Makes a round of speculation over AR steps, of as many tokens as those of the default models."""
    batch, config = row["batch"], MAR_PRESETS[row["model"]]
    model = mar.MARModel(config, jnp.dtype(row["dtype"]))
    params, labels = image_params(config, row["dtype"]), jax.ShapeDtypeStruct((batch,), jnp.int32)
    options = dataclasses.replace(options, final_noise=True)

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        speculation = SelfSpeculation(way.gamma).speculation(config.seq_len)
        return rounds.begin(model, params, keys, labels, options, speculation=speculation)

    timed = "one round of speculation over AR steps"
    row = {**row, "timed": timed, "tokens_per_round": tokens}
    return Case(row, rounds.run_round, jax.eval_shape(prepared, params, labels), tokens)


# Masked text


def abstract(config: LMConfig, dtype: str) -> tuple[lm.LM, Any]:
    """Returns a language model and the shapes of its parameters."""
    shapes = lm.abstract_params(config)
    return lm.LM(config, jnp.dtype(dtype)), jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes
    )


def filling_case(row: dict[str, Any], how: Filling, number: float) -> Case:
    """Makes the rounds of a generation in one loop, behind the pass that reads the prompts."""
    network, params = abstract(LLADA_8B, row["dtype"])

    def begun(params):
        prompts = [[1] * PROMPT] * row["batch"]
        inputs = masked_generation.prepare(None, (network, params), prompts, *how.asked())
        return inputs, inputs.way.begin(inputs.canvas)

    def rounds(inputs, state):
        unfinished = lambda state: ~jnp.all(state.step >= NEW_TOKENS)
        return jax.lax.while_loop(unfinished, lambda state: inputs.way.advance(inputs.canvas, state), state)

    row = {
        **row, "timed": f"all rounds of {NEW_TOKENS} new tokens behind {PROMPT}",
        "tokens_per_round": NEW_TOKENS / number,
    }  # fmt: skip
    return Case(row, rounds, jax.eval_shape(begun, params), NEW_TOKENS)
