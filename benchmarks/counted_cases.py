"""What is compiled for an H100 and counted: one token, or one round divided by the tokens that it makes.

How often the loops run that end when the data say so, and how many tokens a round makes, are those of runs of
the default models on this machine, which are kept in the file.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_rows import say, write
from cases import LLADA_8B, PYTHIA_1_4B, PYTHIA_70M, PYTHIA_160M, STEPS, Case, about

import cspd_jax
from cspd_jax import ChainSpeculation, DraftSpeculation, Plain, SelfSpeculation, masked, text
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.image import rounds, sampler
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.image.rounds import PathCriterion
from cspd_jax.masked import generation as masked_generation
from cspd_jax.masked import loop as masked_loop
from cspd_jax.networks import lm, mar
from cspd_jax.networks.config import MAR_PRESETS, SPHERE_PRESETS, MARConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.registry import kind_of
from cspd_jax.text import generation as text_generation
from cspd_jax.text import rounds as text_rounds
from cspd_jax.training.data.text import documents
from cspd_jax.weights import models
from cspd_jax.weights.tokenizers import ByteTokenizer

GAMMA = 4  # of drafts by a smaller model, of text and of masked text
NAMED = {"drafts": GAMMA}  # trips of the loop over the drafts of a smaller image model
NEW_TOKENS = 64
PROMPT = 64


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to make images. method: self, draft, chains, self+chains, ...; window: M of the chains."""

    method: str
    window: int | None = None
    gamma: int = 0
    drafter: str = "gains"

    @property
    def options(self) -> str:
        parts = ["MAR-B drafts"] if self.method.startswith("draft") else []
        parts += [f"gamma {self.gamma}"] if self.gamma else []
        parts += [f"M {self.window}"] if self.window else []
        return ", ".join(parts + (["Jacobian"] if self.drafter == "jacobian" else []))

    @property
    def chain(self) -> ChainSpeculation | None:
        return None if self.window is None else ChainSpeculation((self.window,), self.drafter)


WAYS = (
    Way("plain"),
    Way("chains", 16),
    Way("self", None, 8),
    Way("self+chains", 32, 8),
    Way("chains", 32),
    Way("self+chains", 16, 4),
    Way("chains", 32, drafter="jacobian"),
    Way("self+chains", 32, 8, "jacobian"),
)
DRAFTED = (Way("draft", None, GAMMA), Way("draft+chains", 16, GAMMA))


class Counted(NamedTuple):
    """A row that is to be made.

    identity: see `cases.IDENTITY`.
    make: its case, and the trips of the loops that end when the data say so, by depth.
    """

    identity: dict[str, Any]
    make: Callable[[], tuple[Case, list[float]]]


def cases(file: Path | None, toy: bool) -> Iterator[Counted]:
    """The most important first."""
    if toy:
        yield from images(file, "mar-base", 1, False, "float32", WAYS[:4])
        return
    plain_types = [(False, "bfloat16"), (False, "float32")]
    types = [*plain_types, (True, "bfloat16"), (True, "float32")]
    for guided, dtype in types:
        yield from images(file, "mar-base", 1, guided, dtype)
    for name in ("mar-huge", "mar-large"):
        for guided, dtype in plain_types:
            yield from images(file, name, 1, guided, dtype)
    for batch in (1, 8):
        for dtype in ("bfloat16", "float32"):
            yield from texts(file, "pythia-160m", batch, dtype)
            yield from texts(file, "pythia-1.4b", batch, dtype)
        yield from fillings(file, "llada-8b", batch, "bfloat16")
    for batch in (8, 64):
        yield from images(file, "mar-base", batch, False, "bfloat16", WAYS[:4])
    for name in SPHERE_PRESETS:
        for guided, dtype in plain_types:
            yield from causal_images(file, name, guided, dtype)
    for batch in (1, 8, 64):
        for name in ("mar-huge", "mar-large", "mar-base"):
            for guided, dtype in types:
                yield from images(file, name, batch, guided, dtype)


def of_each_kind() -> list[tuple[Case, list[float]]]:
    """The first and the last case of every kind, traced and not compiled."""
    kinds = (
        images(None, "mar-large", 1, False, "bfloat16"), causal_images(None, "sphere-b", True, "float32"),
        texts(None, "pythia-160m", 1, "float32"), fillings(None, "llada-8b", 1, "bfloat16"),
    )  # fmt: skip
    return [counted.make() for kind in map(list, kinds) for counted in (kind[0], kind[-1])]


# Images


def images(
    file: Path | None, name: str, batch: int, guided: bool, dtype: str, ways: Sequence[Way] = WAYS
) -> Iterator[Counted]:
    drafted = () if name == "mar-base" else DRAFTED  # by MAR-B
    for way in (*ways, *drafted):
        row = about(
            name, "token", batch, way.method, options=way.options, guided=guided, dtype=dtype,
            num_iter=MAR_PRESETS[name].seq_len,
        )  # fmt: skip

        def make(row=row, way=way):
            run = {} if way.method == "plain" else image_run(file, way, batch)
            return image_case(row, way, run), [run["calls"]] if way.chain else []

        yield Counted(row, make)


def causal_images(file: Path | None, name: str, guided: bool, dtype: str) -> Iterator[Counted]:
    """A token of one image by SphereAR, in the middle of it."""
    for way in (Way("plain"), Way("chains", 16), Way("chains", 32), Way("chains", 32, drafter="jacobian")):
        row = about(
            name, "token", 1, way.method, options=way.options, guided=guided, dtype=dtype,
            respacing="flow100", num_iter=SPHERE_PRESETS[name].seq_len,
        )  # fmt: skip

        def make(row=row, way=way):
            run = {} if way.chain is None else image_run(file, way, 1, "default-causal")
            if run:
                calls = {"head_calls_of_slowest": run["calls"], "more_trips": run["more_trips"]}
                row = {**row, "acceptance_from": "runs of the default models", **calls}
            options = Options(
                respacing="flow100", guided=guided, cfg_schedule="constant", prefix_buckets=1,
                denoise=way.chain or "plain", order=Raster(),
            )  # fmt: skip
            return _step(row, options), [run["calls"]] if run else []

        yield Counted(row, make)


def image_case(row: dict[str, Any], way: Way, run: dict[str, float]) -> Case:
    if run:
        calls = {"head_calls_of_slowest": run["calls"]} if way.chain else {}
        more = {"more_trips": run["more_trips"]}
        row = {**row, "acceptance_from": "runs of the default models", **calls, **more}
    options = Options(
        num_iter=row["num_iter"], respacing=f"ddim{STEPS}", guided=row["guided"],
        cfg=3.0 if row["guided"] else 1.0, denoise=way.chain or "plain", prefix_buckets=4,
    )  # fmt: skip
    return _round(row, way, options, run) if way.gamma else _step(row, options)


def mar_params(name: str, dtype: str) -> Any:
    return image_params(MAR_PRESETS[name], dtype)


def image_params(config: Any, dtype: str) -> Any:
    shapes = kind_of(config).abstract_params(config)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes)


def _step(row: dict[str, Any], options: Options) -> Case:
    """An AR step of the plain sampler in the middle of the image: a token of each image."""
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
    """A round of speculation over AR steps, which makes as many tokens as those of the default models."""
    batch, dtype = row["batch"], jnp.dtype(row["dtype"])
    model = mar.MARModel(MAR_PRESETS[row["model"]], dtype)
    params, labels = mar_params(row["model"], row["dtype"]), jax.ShapeDtypeStruct((batch,), jnp.int32)
    options = dataclasses.replace(options, final_noise=True)
    drafting = None
    if way.method.startswith("self"):
        small = None
        speculation = SelfSpeculation(way.gamma).speculation
    else:
        small = mar_params("mar-base", row["dtype"])
        drafting = mar.MARModel(MAR_PRESETS["mar-base"], dtype)
        speculation = rounds.TokenSpeculation(PathCriterion(), way.gamma)

    def prepared(params, small, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        draft = drafting and rounds.Draft(drafting, small)
        return rounds.begin(model, params, keys, labels, options, speculation=speculation, draft=draft)

    timed = "one round of speculation over AR steps"
    row = {**row, "timed": timed, "tokens_per_round": run["tokens_per_round"]}
    args = jax.eval_shape(prepared, params, small, labels)
    return Case(row, rounds.run_round, args, run["tokens_per_round"])


# Text and masked text


def abstract(config: LMConfig, dtype: str) -> tuple[lm.LM, Any]:
    shapes = lm.abstract_params(config)
    return lm.LM(config, jnp.dtype(dtype)), jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes
    )


def in_a_loop(row: dict[str, Any], prepared: Callable, params: Any, run: dict[str, float], module) -> Case:
    """The rounds of a generation in one loop, behind the pass that reads the prompts.

    prepared: params -> the inputs of `module`, text or masked text.
    """

    def begun(params):
        inputs = prepared(params)
        return inputs, module.begin(inputs)

    def rounds(inputs, state):
        unfinished = lambda state: (
            ~jnp.all(state.done if hasattr(state, "done") else state.step >= NEW_TOKENS)
        )
        return jax.lax.while_loop(unfinished, lambda state: module.advance(inputs, state), state)

    row = {
        **row, "timed": f"all rounds of {NEW_TOKENS} new tokens behind {PROMPT}",
        "tokens_per_round": NEW_TOKENS / run["rounds"],
    }  # fmt: skip
    if run["rounds"] < NEW_TOKENS:
        row["acceptance_from"] = "runs of the default models"
    return Case(row, rounds, jax.eval_shape(begun, params), NEW_TOKENS)


def texts(file: Path | None, name: str, batch: int, dtype: str) -> Iterator[Counted]:
    config, small, who = {
        "pythia-160m": (PYTHIA_160M, PYTHIA_70M, "Pythia-70m"),
        "pythia-1.4b": (PYTHIA_1_4B, PYTHIA_160M, "Pythia-160m"),
    }[name]
    prompts = [[1] * PROMPT] * batch
    for method in ("text-plain", "text-block"):
        options = "" if method == "text-plain" else f"{who} drafts, gamma {GAMMA}"
        row = about(name, "token", batch, method, options=options, dtype=dtype, respacing=None)

        def make(row=row, method=method):
            run = {"rounds": float(NEW_TOKENS)} if method == "text-plain" else text_run(file, batch)
            network, params = abstract(config, dtype)
            drafting, drafts = abstract(small, dtype)

            def prepared(params):
                drafter = None if method == "text-plain" else (drafting, params[1])
                options = text.Options(rule="block", max_new_tokens=NEW_TOKENS, gamma=GAMMA, stop_ids=())
                return text_generation.prepare(None, (network, params[0]), prompts, drafter, options)

            case = in_a_loop(row, prepared, (params, drafts), run, text_rounds)
            # In a round the first draft is made before the loop over the others.
            return case, [run["rounds"], run.get("draft_passes_per_round", 1.0) - 1]

        yield Counted(row, make)


@dataclasses.dataclass(frozen=True)
class Filling:
    """A way to fill in masked text. texts: of a pass, for chosen sets; None is a chain of GAMMA."""

    method: str
    texts: int | None = None
    cached: bool = False

    @property
    def options(self) -> str:
        of_method = f"gamma {GAMMA}" if self.texts is None else f"{self.texts} texts"
        parts = [of_method] * (self.method == "ssd") + ["block cache"] * self.cached
        return ", ".join(parts)

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


def fillings(file: Path | None, name: str, batch: int, dtype: str) -> Iterator[Counted]:
    prompts = [[1] * PROMPT] * batch
    for how in FILLINGS:
        row = about(name, "token", batch, how.method, options=how.options, dtype=dtype, respacing=None)

        def make(row=row, how=how):
            run = {"rounds": float(NEW_TOKENS)} if how == FILLINGS[0] else masked_run(file, how, batch)
            network, params = abstract(LLADA_8B, dtype)
            prepared = lambda params: masked_generation.prepare(
                None, (network, params), prompts, *how.asked()
            )
            shares = {name: run[name] for name in ("refresh", "verify") if name in run}
            return in_a_loop(row | {"shares_of_rounds": shares}, prepared, params, run, masked_loop), [
                run["rounds"]
            ]

        yield Counted(row, make)


# Runs of the default models


def kept(file: Path | None, name: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The numbers of `run`, or as found when it was run before; without a file, any."""
    if file is None:
        numbers = ("calls", "tokens_per_round", "more_trips", "rounds", "draft_passes_per_round", "refresh")
        return dict.fromkeys(numbers, 1.0)
    content = json.loads(file.read_text()) if file.exists() else {}
    runs = content.get("recorded_runs", {})
    if name not in runs:
        say(f"running the default model: {name}")
        runs[name] = run()
        write(file, {"rows": [], **content, "recorded_runs": runs})
    return runs[name]


def image_run(file: Path | None, way: Way, batch: int, name: str = "default") -> dict[str, float]:
    """Head calls of the slowest row, and tokens per round of speculation over AR steps.

    One image is one draw, so several are run where a batch is small.
    """

    def run() -> dict[str, float]:
        method: Any = Plain()
        if way.method.startswith("self"):
            method = SelfSpeculation(way.gamma)
        elif way.method.startswith("draft"):
            method = DraftSpeculation(models.load("default-draft"), gamma=way.gamma)
        model, infos = models.load(name), []
        noise = None if is_flow(model.config.respacing) else True
        options = Options(denoise=way.chain or "plain", final_noise=noise)
        for i in range(max(1, 12 // batch)):
            labels = [(i + j) % 10 for j in range(batch)]
            infos.append(cspd_jax.generate(jax.random.key(i), model, labels, method, options)[1])
        rounds = sum(int(info.sequential.target_backbone) for info in infos)
        return {
            "images": sum(info.images for info in infos),
            "calls": statistics.mean(float(STEPS) if i.chains is None else i.chains.slowest for i in infos),
            "tokens_per_round": sum(info.tokens / info.images for info in infos) / rounds,
            "more_trips": statistics.mean(more_trips(info) for info in infos),
        }

    whose = "" if name == "default" else f"{name}: "
    return kept(file, f"{whose}{way.method}, {way.options}, batch {batch}", run)


def more_trips(info) -> float:
    """Trips of the loop over a block's coins in a head call, besides the first, which is before the loop."""
    if info.chains is None:
        return 0.0
    return max(0.0, info.chains.trips / (info.chains.slowest * info.sequential.target_backbone) - 1)


def held_out(count: int, longer_than: int) -> list[list[int]]:
    found = [d.text for d in documents() if d.held_out and len(d.text.encode()) > longer_than]
    return [ByteTokenizer().encode(found[i % len(found)])[:PROMPT] for i in range(count)]


def text_run(file: Path | None, batch: int) -> dict[str, float]:
    """Rounds of a batch, and passes of the draft model in each."""

    def run() -> dict[str, float]:
        target, small = models.load_text("text-default"), models.load_text("text-default-draft")
        prompts, found = held_out(max(batch, 8), 4 * PROMPT), []
        for at in range(0, len(prompts), batch):
            options = text.Options(max_new_tokens=NEW_TOKENS, gamma=GAMMA, stop_ids=())
            _, info = text.generate(None, target, prompts[at : at + batch], small, options)
            found.append((int(info.calls.target_passes), int(info.calls.draft_passes)))
        rounds, drafts = np.mean(found, axis=0)
        return {
            "texts": len(prompts), "rounds": float(rounds), "draft_passes_per_round": float(drafts / rounds),
        }  # fmt: skip

    return kept(file, f"text-block, batch {batch}", run)


def masked_run(file: Path | None, how: Filling, batch: int) -> dict[str, float]:
    """Rounds of a batch; with a cache, in which share of them there is a pass over everything, and one over a
    block."""

    def run() -> dict[str, float]:
        model = models.load_text("masked-default")
        prompts, found = held_out(max(batch, 8), 4 * PROMPT), []
        for at in range(0, len(prompts), batch):
            info = masked.generate(None, model, prompts[at : at + batch], *how.asked())[1]
            whole, block = int(info.calls.whole_passes), int(info.calls.block_passes)
            turns = max(int(np.max(info.rounds)) + 1, block)  # of rows that wait for each other: no fewer
            found.append([turns, whole, block])
        rounds, whole, block = np.mean(np.array(found, float), axis=0).tolist()
        told = {"texts": len(prompts), "rounds": rounds}
        return told | ({"refresh": whole / rounds, "verify": block / rounds} if how.cached else {})

    old = {Filling("ssd"): f"ssd, batch {batch}"}
    return kept(file, old.get(how, f"{how.method}, {how.options}, batch {batch}"), run)
