"""Makes what is compiled for an H100 and counted: one token, or one round divided by its tokens.

How often the loops run that end when the data say so, and how many tokens a round makes, are those of runs of
the default models on a CPU, which version 0.6 recorded in results/accelerator.json.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from cases import LLADA_8B, STEPS, Case, about

import cspd_jax
from cspd_jax import ChainSpeculation, SelfSpeculation, masked
from cspd_jax.image import rounds, sampler
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.masked import generation as masked_generation
from cspd_jax.masked import loop as masked_loop
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


class Counted(NamedTuple):
    """Holds a row that is to be made.

    identity: see `cases.IDENTITY`.
    make: its case, and the trips of the loops that end when the data say so, by depth.
    """

    identity: dict[str, Any]
    make: Callable[[], tuple[Case, list[float]]]


@functools.cache
def recorded(run: str) -> dict[str, float]:
    """Returns how often loops ran in a run of the default models."""
    return json.loads(FILE.read_text())["recorded_runs"][run]


def cases(toy: bool) -> Iterator[Counted]:
    """Yields all rows, the most important first."""
    if toy:
        yield from images("mar-base", 1, False, "float32", WAYS[:4])
        return
    for guided in (False, True):
        for dtype in ("bfloat16", "float32"):
            yield from images("mar-base", 1, guided, dtype)
    yield from images("mar-base", 8, False, "bfloat16", [WAYS[0], WAYS[1], WAYS[3]])
    for batch in (1, 8):
        yield from fillings(batch)
    for name in ("mar-large", "mar-huge", "sphere-b"):
        yield from images(name, 1, False, "bfloat16", WAYS[:1])


def of_each_kind() -> list[tuple[Case, list[float]]]:
    """Makes the first and the last case of every kind, traced and not compiled."""
    kinds = (
        images("mar-large", 1, False, "bfloat16"), images("sphere-b", 1, True, "float32", WAYS[:1]),
        fillings(1),
    )  # fmt: skip
    return [counted.make() for kind in map(list, kinds) for counted in (kind[0], kind[-1])]


# Images


def images(name: str, batch: int, guided: bool, dtype: str, ways: Sequence[Way] = WAYS) -> Iterator[Counted]:
    """Yields rows of a token of each image, in the middle of it."""
    presets = {**MAR_PRESETS, **SPHERE_PRESETS}
    steps = "flow" if name in SPHERE_PRESETS else "ddim"
    for way in ways:
        row = about(
            name, "token", batch, way.method, options=way.options, guided=guided, dtype=dtype,
            respacing=f"{steps}{STEPS}", num_iter=presets[name].seq_len,
        )  # fmt: skip

        def make(row=row, way=way):
            run = {} if way.chain is None else recorded(f"{way.method}, {way.options}, batch {batch}")
            return image_case(row, way, run), [run["calls"]] if run else []

        yield Counted(row, make)


def image_case(row: dict[str, Any], way: Way, run: dict[str, float]) -> Case:
    """Makes an AR step, or a round; run: what the default models did."""
    if run:
        calls = {"head_calls_of_slowest": run["calls"], "more_trips": run["more_trips"]}
        row = {**row, "acceptance_from": "runs of the default models", **calls}
    common = {"respacing": row["respacing"], "guided": row["guided"], "denoise": way.chain or "plain"}
    if row["model"] in SPHERE_PRESETS:
        return _step(row, Options(**common, cfg_schedule="constant", prefix_buckets=1, order=Raster()))
    cfg = 3.0 if row["guided"] else 1.0
    options = Options(**common, num_iter=row["num_iter"], cfg=cfg, prefix_buckets=4)
    return _round(row, way, options, run) if way.gamma else _step(row, options)


def image_params(config: Any, dtype: str) -> Any:
    """Returns the shapes of a model's parameters."""
    shapes = kind_of(config).abstract_params(config)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes)


def _step(row: dict[str, Any], options: Options) -> Case:
    """Makes an AR step of the plain sampler in the middle of the image: a token of each image."""
    config, batch = {**MAR_PRESETS, **SPHERE_PRESETS}[row["model"]], row["batch"]
    model, known = kind_of(config).network(config, jnp.dtype(row["dtype"])), config.seq_len // 2

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        made = sampler.bind(model, params, keys, labels, options)
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


def _round(row: dict[str, Any], way: Way, options: Options, run: dict[str, float]) -> Case:
    """Makes a round of speculation over AR steps, of as many tokens as those of the default models."""
    batch, config = row["batch"], MAR_PRESETS[row["model"]]
    model = mar.MARModel(config, jnp.dtype(row["dtype"]))
    params, labels = image_params(config, row["dtype"]), jax.ShapeDtypeStruct((batch,), jnp.int32)
    options = dataclasses.replace(options, final_noise=True)

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        speculation = SelfSpeculation(way.gamma).speculation
        return rounds.begin(model, params, keys, labels, options, speculation=speculation)

    timed = "one round of speculation over AR steps"
    row = {**row, "timed": timed, "tokens_per_round": run["tokens_per_round"]}
    return Case(row, rounds.run_round, jax.eval_shape(prepared, params, labels), run["tokens_per_round"])


# Masked text


def abstract(config: LMConfig, dtype: str) -> tuple[lm.LM, Any]:
    """Returns a language model and the shapes of its parameters."""
    shapes = lm.abstract_params(config)
    return lm.LM(config, jnp.dtype(dtype)), jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes
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

    def run(self, batch: int) -> str:
        """Names the run of the default model."""
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


def fillings(batch: int) -> Iterator[Counted]:
    """Yields rows of masked texts of LLaDA-8B's sizes."""
    for how in FILLINGS:
        row = about(
            "llada-8b", "token", batch, how.method, options=how.options, dtype="bfloat16", respacing=None
        )

        def make(row=row, how=how):
            run = {"rounds": float(NEW_TOKENS)} if how == FILLINGS[0] else recorded(how.run(batch))
            shares = {name: run[name] for name in ("refresh", "verify") if name in run}
            return filling_case(row | {"shares_of_rounds": shares}, how, run), [run["rounds"]]

        yield Counted(row, make)


def filling_case(row: dict[str, Any], how: Filling, run: dict[str, float]) -> Case:
    """Makes the rounds of a generation in one loop, behind the pass that reads the prompts."""
    network, params = abstract(LLADA_8B, row["dtype"])

    def begun(params):
        prompts = [[1] * PROMPT] * row["batch"]
        inputs = masked_generation.prepare(None, (network, params), prompts, *how.asked())
        return inputs, masked_loop.begin(inputs)

    def rounds(inputs, state):
        unfinished = lambda state: ~jnp.all(state.step >= NEW_TOKENS)
        return jax.lax.while_loop(unfinished, lambda state: masked_loop.advance(inputs, state), state)

    row = {
        **row, "timed": f"all rounds of {NEW_TOKENS} new tokens behind {PROMPT}",
        "tokens_per_round": NEW_TOKENS / run["rounds"],
    }  # fmt: skip
    if run["rounds"] < NEW_TOKENS:
        row["acceptance_from"] = "runs of the default models"
    return Case(row, rounds, jax.eval_shape(begun, params), NEW_TOKENS)
