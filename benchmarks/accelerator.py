"""Seconds per token on the accelerator that is here, and kernels per token on an H100 that is not.

    python benchmarks/accelerator.py --measure     # ten minutes at most; run it again to go on
    python benchmarks/accelerator.py --count       # compiles for an H100, without a GPU; see below
    python benchmarks/accelerator.py --table       # what the file holds, as Markdown

Rows are added to benchmarks/results/accelerator.json one by one, the most important first, and those that are
there for this device and version of JAX are not made again.

Seconds are those of one run over the tokens of one row: a batch of 8 makes eight tokens in the time of one.
Each is the median of several runs that took turns with the plain way (`plain_seconds_per_token`), behind a
run that is not timed. Nothing of a compilation is in them.

- The default model (trained weights, its own acceptance): whole images.
- MAR's sizes: the denoising chains of one token of each image, and one call of the backbone, apart. The
  weights are random; which drafts are accepted is replayed from the default model (see inner.py).
- Text: the embedded pair, and Pythia-160m's sizes with random weights and replayed acceptance (see text.py).

What --count gives is not measured. It compiles whole tokens (one AR step, or one round divided by the tokens
it makes) with XLA's own GPU pipeline, without autotuning, and adds up the kernels of every loop, trips
included; the trips of loops that end when the data say so are those of a run of the default model on this
machine. `modelled_seconds_per_token` gives each kernel the longest of a launch, its bytes and its products,
and each look of the host at a loop's condition a fixed time (kernels.py). It needs, in the version of jax
that is installed,

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np

import cspd_jax
from cspd_jax import ChainSpeculation, Plain, SelfSpeculation, models
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.data.text import documents
from cspd_jax.image import chain_timing, plain, speculation
from cspd_jax.image.chain_drafters import frozen
from cspd_jax.image.chain_speculation import ChainRandomness
from cspd_jax.image.plain import SamplerSettings
from cspd_jax.networks import lm, mar
from cspd_jax.networks.config import MAR_PRESETS
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.text import Drafting, ModelDrafter, generation
from cspd_jax.tokenizers import ByteTokenizer

FILE = Path(__file__).parent / "results" / "accelerator.json"
STEPS = 100
IDENTITY = ("model", "what", "batch", "guided", "dtype", "precision", "method", "respacing", "num_iter")
PYTHIA = LMConfig(
    family="gpt_neox", vocab_size=50304, known_ids=50304, width=768, depth=12, heads=12, kv_heads=12,
    head_dim=64, mlp_width=3072, max_positions=2048, activation="gelu", gated_mlp=False, norm="layer",
    parallel_residual=True, qkv_bias=True, out_bias=True, mlp_bias=True, rotary_share=0.25,
)  # fmt: skip


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to be timed or counted.

    about: the row's identity and what is known of it beforehand.
    function: pure, of `args`.
    args: pytrees of arrays, without typed keys.
    tokens: of one row of the batch, made by one run.
    facts: of the output: what happened, with `trips` for `count_launches`.
    """

    about: dict[str, Any]
    function: Callable
    args: tuple
    tokens: int
    facts: Callable[[Any], dict[str, Any]] = lambda out: {}

    @property
    def identity(self) -> dict[str, Any]:
        return {name: self.about[name] for name in IDENTITY}

    def compiled(self, args: tuple | None = None):
        with jax.default_matmul_precision(self.about["precision"]):
            return jax.jit(self.function).lower(*(self.args if args is None else args)).compile()


def about(model: str, what: str, batch: int, method: str, **more) -> dict[str, Any]:
    return {
        "model": model, "what": what, "batch": batch, "guided": False, "dtype": "float32", "precision": None,
        "method": method, "respacing": f"ddim{STEPS}", "num_iter": None, **more,
    }  # fmt: skip


# The default model


def image_cases(
    batch: int, cfg: float = 1.0, precision: str | None = None, short: bool = False
) -> list[Case]:
    """Whole images of the default model, by every exact way; the plain one first."""
    model = models.load("default")
    chains = ChainSpeculation((16,))
    ways: dict[str, tuple[Any, Any]] = {
        "plain": (Plain(), "plain"),
        "chains, M 16": (Plain(), chains),
        "self, gamma 4, K 4": (SelfSpeculation(gamma=4, proposals=4), "plain"),
        "self + chains, gamma 4, K 4": (SelfSpeculation(gamma=4, proposals=4), chains),
        "self, gamma 8, K 16": (SelfSpeculation(gamma=8, proposals=16), "plain"),
        "self + chains, gamma 8, K 16": (SelfSpeculation(gamma=8, proposals=16), chains),
        "chains, M 8": (Plain(), ChainSpeculation((8,))),
    }
    options: dict[str, Any] = {"cfg": cfg, "final_noise": True}
    options |= {"num_iter": 8, "respacing": "ddim10"} if short else {}
    labels = [i % 10 for i in range(batch)]
    return [
        _image_case(model, labels, name, {"method": method, "denoise": way, **options}, precision)
        for name, (method, way) in ways.items()
    ]


def _image_case(model, labels, name, options, precision) -> Case:
    batch, plan = len(labels), cspd_jax.resolve(model, cspd_jax.make_request(model, labels, **options))

    def sample(params, keys, labels, drafter):
        mine = dataclasses.replace(plan, drafter=drafter)
        return mine.sample(jax.random.wrap_key_data(keys), labels, params=params)

    def facts(out) -> dict[str, Any]:
        info = cspd_jax.image.info.summarise(plan, [out])
        rounds = int(info.sequential.target_backbone)
        found = {"calls_in_sequence": info.sequential._asdict(), "rounds": info.rounds}
        loops = [float(rounds)] if info.verified is not None else []
        if info.verified is not None:
            found["acceptance"] = info.verified.acceptance
        if info.chains is not None:
            found["head_calls_of_slowest"] = info.chains.slowest
            loops += [info.chains.slowest, info.chains.trips / (info.chains.slowest * rounds)]
        return {**found, "trips": loops}

    row = about(
        "default", "whole images", batch, name,
        guided=plan.settings.guided, precision=precision, respacing=plan.settings.respacing,
        num_iter=plan.settings.num_iter, acceptance_from="the model's own: trained weights",
        timed=f"a whole batch of images, {model.config.seq_len} tokens each",
    )  # fmt: skip
    keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
    args = (model.params, keys, jnp.asarray(labels, jnp.int32), plan.drafter)
    return Case(row, sample, args, model.config.seq_len, facts)


# MAR's sizes


@functools.lru_cache(maxsize=1)
def random_params(name: str, dtype: str) -> Any:
    """Normal numbers of standard deviation 0.02: an untrained head would output zero whatever it is given."""

    @jax.jit
    def draw(key):
        leaves, tree = jax.tree.flatten(mar.abstract_params(MAR_PRESETS[name]))
        keys = jax.random.split(key, len(leaves))
        drawn = [0.02 * jax.random.normal(k, a.shape, dtype) for k, a in zip(keys, leaves)]
        return jax.tree.unflatten(tree, drawn)

    return draw(jax.random.key(0))


@functools.lru_cache
def recorded(rows: int, windows: tuple[int, ...]) -> tuple[ChainRandomness, int]:
    import inner

    return inner.recorded(rows, windows)


def mar_params(name: str, dtype: str, abstract: bool) -> Any:
    if not abstract:
        return random_params(name, dtype)
    shapes = mar.abstract_params(MAR_PRESETS[name])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), shapes)


def chain_cases(
    name: str, batch: int, dtype: str = "float32", precision: str | None = None, *, abstract: bool = False,
    windows: tuple = (None, (16,), (8,), (32,)),
) -> list[Case]:  # fmt: skip
    """The denoising chains of one token of each image, the plain way first."""
    import inner

    config, found = MAR_PRESETS[name], []
    model = mar.MARModel(config, jnp.dtype(dtype))
    params = {"head": mar_params(name, dtype, abstract)["head"]}
    z = jax.random.normal(jax.random.key(1), (batch, config.decoder_width), dtype)
    settings = SamplerSettings(respacing=f"ddim{STEPS}")
    for lengths in windows:
        random, calls = (inner.randomness(batch, config.token_dim), STEPS)
        more: dict[str, Any] = {}
        if lengths:
            random, calls = recorded(batch, lengths)
            more = {"acceptance_from": "replayed from the default model", "head_calls_of_slowest": calls}

        def run(params, z, noise, uniforms, residual, drafter, lengths=lengths):
            random = ChainRandomness(noise, uniforms, jax.random.wrap_key_data(residual))
            return chain_timing.run_chains(
                model, params, z, random, drafter, 1.0, 1.0,
                settings=settings, speculation=lengths and ChainSpeculation(lengths),
            )  # fmt: skip

        def facts(out) -> dict[str, Any]:
            counts = out[1]
            if counts is None:
                return {}
            calls = int(counts.calls)
            return {"head_calls_of_slowest": calls, "trips": [calls, int(counts.trips) / calls]}

        row = about(
            name, "head chain", batch, f"chains, M {chain_timing.name_of(lengths)}" if lengths else "plain",
            dtype=dtype, precision=precision, timed=f"{STEPS} denoising steps of one token of each image",
            **more,
        )  # fmt: skip
        args = (params, z, random.noise, random.uniforms, jax.random.key_data(random.residual))
        found.append(Case(row, run, (*args, frozen(STEPS, config.token_dim)), 1, facts))
    return found


def backbone_case(
    name: str, batch: int, dtype: str = "float32", precision: str | None = None, *, abstract: bool = False
) -> Case:
    """The backbone's part of a token, 128 tokens known."""
    config, known = MAR_PRESETS[name], 128
    model = mar.MARModel(config, jnp.dtype(dtype))
    key = jax.random.key(2)
    tokens = jax.random.normal(key, (batch, config.seq_len, config.token_dim))
    reveal = jnp.argsort(jax.random.uniform(key, (batch, config.seq_len)), axis=1)
    embedding = jax.random.normal(key, (batch, config.encoder_width))
    number = jnp.full(batch, known, jnp.int32)

    def run(params, *args):
        return model.context(params, *args, bucket=known)

    row = about(
        name, "backbone", batch, "plain", dtype=dtype, precision=precision, respacing=None,
        timed=f"one call of the backbone for one token of each image, {known} tokens known",
    )  # fmt: skip
    params = {"backbone": mar_params(name, dtype, abstract)["backbone"]}
    return Case(row, run, (params, tokens, reveal, number, embedding, number[:, None]), 1)


def round_case(
    name: str, batch: int, dtype: str = "float32", precision: str | None = None, *, abstract: bool = False
) -> Case:
    """A round of self-speculation with plain chains, whose cost does not depend on what is accepted."""
    config, method = MAR_PRESETS[name], SelfSpeculation(gamma=8, proposals=16)
    model = mar.MARModel(config, jnp.dtype(dtype))
    settings = SamplerSettings(num_iter=config.seq_len, respacing=f"ddim{STEPS}", final_noise=True)

    def run(params, keys, labels):
        keys = jax.random.wrap_key_data(keys)
        options = {"settings": settings, "speculation": method.options}
        inputs, state = speculation.begin(model, params, keys, labels, **options)
        state, _ = speculation.run_round(inputs, state)
        return state.drafts, state.tokens

    row = about(
        name, "round", batch, "self, gamma 8, K 16", dtype=dtype, precision=precision,
        num_iter=config.seq_len,
        timed="one round of self-speculation, which commits several tokens of each image (not one)",
    )  # fmt: skip
    keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
    return Case(row, run, (mar_params(name, dtype, abstract), keys, jnp.zeros(batch, jnp.int32)), 1)


# Text


def text_case(name: str, model, prompts, count: int, more: dict[str, Any], **options) -> Case:
    """Greedy continuations of `count` tokens."""
    defaults: dict[str, Any] = {
        "drafter": None, "rule": "block", "sampling": cspd_jax.text.Sampling(), "max_new_tokens": count,
        "gamma": 4, "max_gamma": None, "max_len": None, "stop_ids": (), "cost": None, "confidence": None,
    }  # fmt: skip
    inputs = generation.prepare(None, model, prompts, **{**defaults, **options})

    def facts(out) -> dict[str, Any]:
        info = out.info
        passes, drafting = int(info.calls.target_passes), int(info.calls.draft_passes)
        found = {"calls_in_sequence": {"target": passes, "draft": drafting}}
        if options.get("drafter") is not None:
            found |= {"acceptance": float(info.acceptance), "gamma": options["gamma"]}
        return {**found, "trips": [float(passes), drafting / passes]}

    method = f"text-block, gamma {options['gamma']}" if options.get("drafter") is not None else "text-plain"
    row = about(
        name, "text", len(prompts), method, respacing=None,
        timed=f"{count} new tokens of each row behind {len(prompts[0])}, the prompt's pass included", **more,
    )  # fmt: skip
    return Case(row, generation.run, (inputs,), count, facts)


def embedded_cases(batch: int, count: int = 128, gammas=(2, 4)) -> list[Case]:
    target, small = models.load_text("text-default"), models.load_text("text-default-draft")
    texts = [d.text for d in documents() if d.held_out and len(d.text.encode()) > 256]
    prompts = [ByteTokenizer().encode(t)[:64] for t in texts[:batch]]
    more = {"acceptance_from": "the pair's own: trained weights"}
    case = functools.partial(text_case, "text-default", target, prompts, count, more)
    return [case(), *(case(drafter=small, gamma=g) for g in gammas)]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A draft model that is run for its time, while each of its tokens is right with a given probability.

    Parameters: (the model's, right [B, N] tokens, use [B, N] whether to propose them).
    """

    inner: ModelDrafter

    def begin(self, params, prompts, max_len):
        return self.inner.begin(params[0], prompts, max_len)

    def draft(self, params, state, request):
        weights, right, use = params
        drafts, state = self.inner.draft(weights, state, request)
        at = request.length[:, None] + jnp.arange(request.max_gamma)
        take = lambda a: jnp.take_along_axis(a, jnp.minimum(at, a.shape[1] - 1), axis=1)
        wrong = (take(right) + 1 + drafts.tokens % 2) % request.num_ids  # so that the draft is not left out
        return drafts._replace(tokens=jnp.where(take(use), take(right), wrong)), state


def pythia_cases(batch: int, dtype: str = "float32", count: int = 64, gammas=(2, 4)) -> list[Case]:
    acceptance = embedded_acceptance()
    target = lm.LM(PYTHIA, jnp.dtype(dtype))
    params = jax.jit(lambda key: jax.tree.map(lambda a: a.astype(dtype), lm.init_params(PYTHIA, key)))
    weights = params(jax.random.key(0))
    small = lm.LM(dataclasses.replace(PYTHIA, depth=2), jnp.dtype(dtype))
    kept = {k: v for k, v in weights.items() if not re.fullmatch(r"layers_([2-9]|1[01])", k)}
    prompts = np.random.default_rng(0).integers(0, 50_000, (batch, 64)).tolist()
    more = {"dtype": dtype, "acceptance_from": f"replayed: {acceptance:.3f}, of the embedded pair (gamma 4)"}
    plain = text_case("pythia-160m", (target, weights), prompts, count, more)
    right = jax.jit(plain.function)(*plain.args).tokens
    use = jax.random.bernoulli(jax.random.key(1), acceptance, right.shape)
    drafter = Drafting(Replayed(ModelDrafter(small)), (kept, right, use))
    case = functools.partial(text_case, "pythia-160m", (target, weights), prompts, count, more)
    return [plain, *(case(drafter=drafter, gamma=g) for g in gammas)]


@functools.lru_cache
def embedded_acceptance() -> float:
    case = embedded_cases(8, gammas=(4,))[-1]
    return case.facts(jax.jit(case.function)(*case.args))["acceptance"]


# Measuring


def groups(toy: bool) -> Iterator[tuple[str, Callable[[], list[Case]]]]:
    """Groups of cases, the most important first; the first of a group is the plain way."""
    if toy:
        yield "images", lambda: image_cases(2, short=True)[:4]
        yield "text", lambda: embedded_cases(2, count=8, gammas=(2,))
        return
    for batch in (1, 8):
        yield f"images, batch {batch}", functools.partial(image_cases, batch)
    for dtype in ("float32", "bfloat16"):
        yield f"MAR-B, {dtype}", functools.partial(mar_cases, "mar-base", 1, dtype)
    yield "MAR-B, full float32", functools.partial(mar_cases, "mar-base", 1, precision="float32")
    for batch in (1, 8):
        yield f"text, batch {batch}", functools.partial(embedded_cases, batch)
    yield "MAR-B, batch 8", functools.partial(mar_cases, "mar-base", 8)
    for batch in (1, 8):
        for name in ("mar-large", "mar-huge"):
            yield f"{name}, batch {batch}", functools.partial(mar_cases, name, batch)
    for batch in (1, 8):
        yield f"Pythia-160m, batch {batch}", functools.partial(pythia_cases, batch)
    yield "mar-huge, bfloat16", functools.partial(mar_cases, "mar-huge", 1, "bfloat16")
    yield "images, full float32", lambda: image_cases(1, precision="float32")[:4]
    yield "images, guidance 3", lambda: image_cases(1, cfg=3.0)


def mar_cases(name: str, batch: int, dtype: str = "float32", precision: str | None = None) -> list[Case]:
    cases = chain_cases(name, batch, dtype, precision)
    return [*cases, backbone_case(name, batch, dtype, precision), round_case(name, batch, dtype, precision)]


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind, "platform": device.platform, "devices": len(jax.devices()),
        "jax": jax.__version__, "host": platform.machine(), "python": platform.python_version(),
    }  # fmt: skip


def measure(file: Path, minutes: float, repeats: int, toy: bool) -> None:
    end = time.monotonic() + 60 * minutes
    here, rows = machine(), load(file)
    say(f"measuring on {here['device']} with jax {here['jax']}")
    cspd_jax.use_compilation_cache()
    mine = {"device": here["device"], "jax": here["jax"], "measured_here": True}

    for title, make in groups(toy):
        if time.monotonic() > end:
            return say("out of time: run it again to go on")
        try:
            cases, base = make(), None
        except Exception as error:  # as below
            say(f"{title}: failed: {type(error).__name__}: {str(error)[:200]}")
            continue
        say(f"{title}: {len(cases)} rows")
        for case in cases:
            if is_there(rows, case.identity, mine):
                continue
            if time.monotonic() > end:
                return say("out of time: run it again to go on")
            row = {**case.about, **mine, "command": "python benchmarks/accelerator.py --measure"}
            try:
                if base is None and case is not cases[0]:
                    base = _ready(cases[0])  # the plain way was measured in an earlier run
                ready = _ready(case)
                base = base or ready
                row |= _measured(case, ready, cases[0], base, repeats)
            except Exception as error:  # what fails (memory, a compiler's bug) must not end the rest
                row |= _nothing() | {"error": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            save(file, rows, here)
            report(row)
    say("all rows are there")


def is_there(rows: list[dict[str, Any]], identity: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether there is such a row; one that failed is tried again, and dropped here."""
    wanted = identity | mine
    same = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    for row in same:
        if row.get("error"):
            rows.remove(row)
    return any(not row.get("error") for row in same)


def _nothing() -> dict[str, Any]:
    names = ("kernels", "host_reads", "modelled_seconds", "measured_seconds")
    return {f"{name}_per_token": None for name in names}


def _ready(case: Case) -> tuple[Callable, dict[str, Any], float]:
    """The compiled program with its arguments, what happened in its first run, and seconds of compilation."""
    start = time.perf_counter()
    compiled = case.compiled()
    seconds = time.perf_counter() - start
    facts = case.facts(jax.block_until_ready(compiled(*case.args)))
    if jax.devices()[0].platform == "gpu":
        facts["text"] = compiled.as_text()
    return functools.partial(compiled, *case.args), facts, seconds


def _measured(case: Case, ready, plain: Case, base, repeats: int) -> dict[str, Any]:
    (run, facts, compiling), facts = ready, dict(ready[1])
    text, trips = facts.pop("text", None), facts.pop("trips", [])
    alike = case is not plain and case.about["what"] == plain.about["what"]
    runs = {"plain": base[0], "mine": run} if alike else {"mine": run}
    seconds = seconds_in_turns(runs, repeats, longest=20.0)
    per_token = {name: statistics.median(s) / case.tokens for name, s in seconds.items()}
    row = _nothing() | facts | {
        "measured_seconds_per_token": per_token["mine"], "fastest": min(seconds["mine"]) / case.tokens,
        "slowest": max(seconds["mine"]) / case.tokens, "repeats": len(seconds["mine"]), "tokens": case.tokens,
        "compile_seconds": compiling,
    }  # fmt: skip
    if alike:
        row["plain_seconds_per_token"] = per_token["plain"]
        row["ratio"] = per_token["plain"] / per_token["mine"]
    if text is not None:
        with contextlib.suppress(LookupError):  # a loop that only this compiler makes
            found = kernels.count_launches(text, trips, case.about)
            row["kernels_per_token"] = found.kernels / case.tokens
            row["host_reads_per_token"] = found.reads / case.tokens
    return row


# Counting

COUNTED = ("plain", "chains", "self", "self+chains")
AHEAD = SelfSpeculation(gamma=4, proposals=16)
WINDOW = ChainSpeculation((16,))


def counted_about(model: str, batch: int, guided: bool, dtype: str, method: str, **more) -> dict[str, Any]:
    return about(model, "token", batch, method, guided=guided, dtype=dtype, **more)


def token_case(name: str, batch: int, guided: bool, dtype: str, method: str, recorded: dict) -> Case:
    """A token of each image by the plain sampler, in the middle of the image: one AR step, whole."""
    config = MAR_PRESETS[name]
    known = config.seq_len // 2
    model = mar.MARModel(config, jnp.dtype(dtype))
    settings = SamplerSettings(
        num_iter=config.seq_len, respacing=f"ddim{STEPS}", guided=guided,
        chain=WINDOW if method == "chains" else None,
    )  # fmt: skip

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        made = plain.start(model, params, keys, labels, settings)
        tokens = jnp.zeros((batch, config.seq_len, config.token_dim))
        return made, plain.PlainState(tokens, None)

    def run(params, prepared, first, scale):
        made, state = prepared
        group = plain.GroupArrays(first, jnp.int32(1), scale)
        shape = {"settings": settings, "bucket": known, "width": 1}
        state, counts = plain.ar_step(model, params, made, state, group, jnp.float32(1), **shape)
        return state.tokens, counts

    params, labels = mar_params(name, dtype, abstract=True), jax.ShapeDtypeStruct((batch,), jnp.int32)
    scale = jax.ShapeDtypeStruct((batch,), jnp.float32)
    args = (params, jax.eval_shape(prepared, params, labels), jax.ShapeDtypeStruct((), jnp.int32), scale)
    row = counted_about(
        name, batch, guided, dtype, method, num_iter=config.seq_len,
        timed=f"one AR step, {known} tokens known", options="" if method == "plain" else "M 16",
    )  # fmt: skip
    if method == "chains":
        row |= {"head_calls_of_slowest": recorded["calls"], "acceptance_from": "a run of the default model"}
    return Case(row, run, args, 1)


def ahead_case(name: str, batch: int, guided: bool, dtype: str, method: str, recorded: dict) -> Case:
    """A round of self-speculation, which makes as many tokens as one of the default model."""
    config = MAR_PRESETS[name]
    model = mar.MARModel(config, jnp.dtype(dtype))
    settings = SamplerSettings(
        num_iter=config.seq_len, respacing=f"ddim{STEPS}", guided=guided, final_noise=True, prefix_buckets=1,
        chain=WINDOW if method == "self+chains" else None,
    )  # fmt: skip
    options: dict[str, Any] = {"settings": settings, "speculation": AHEAD.options}

    def prepared(params, labels):
        keys = cspd_jax.row_keys(jax.random.key(0), batch)
        return speculation.begin(model, params, keys, labels, cfg=3.0 if guided else 1.0, **options)

    params, labels = mar_params(name, dtype, abstract=True), jax.ShapeDtypeStruct((batch,), jnp.int32)
    row = counted_about(
        name, batch, guided, dtype, method, num_iter=config.seq_len, timed="one round of self-speculation",
        tokens_per_round=recorded["tokens_per_round"], head_calls_of_slowest=recorded["calls"],
        options="gamma 4, K 16" + (", M 16" if method == "self+chains" else ""),
        acceptance_from="a run of the default model",
    )  # fmt: skip
    args = jax.eval_shape(prepared, params, labels)
    return Case(row, speculation.run_round, args, recorded["tokens_per_round"])


def recorded_run(file: Path, method: str, batch: int) -> dict[str, float]:
    """Head calls of the slowest row and tokens per round, of runs of the default model; kept in the file.

    One image is one draw, so several are run where a batch is small.
    """
    content = json.loads(file.read_text()) if file.exists() else {}
    kept, name = content.get("recorded_runs", {}), f"{method}, batch {batch}"
    if name in kept:
        return kept[name]
    runs = max(1, 12 // batch)
    say(f"running the default model {runs} times: {name}")
    options: dict[str, Any] = {
        "method": AHEAD if method.startswith("self") else Plain(), "final_noise": True,
        "denoise": WINDOW if method.endswith("chains") else "plain",
    }  # fmt: skip
    model, infos = models.load("default"), []
    for i in range(runs):
        labels = [(i + j) % 10 for j in range(batch)]
        infos.append(cspd_jax.generate(jax.random.key(i), model, labels, **options)[1])
    rounds = sum(int(info.sequential.target_backbone) for info in infos)
    kept[name] = {
        "images": runs * batch,
        "calls": statistics.mean(float(STEPS) if i.chains is None else i.chains.slowest for i in infos),
        "tokens_per_round": sum(info.tokens / info.images for info in infos) / rounds,
    }
    write(file, {"rows": [], **content, "recorded_runs": kept})
    return kept[name]


def to_count(toy: bool) -> list[tuple[str, int, bool, str]]:
    """Model, batch, guidance and type of number, the most important first."""
    if toy:
        return [("mar-base", 1, False, "float32")]
    order = [("mar-base", 1, False, "float32"), ("mar-huge", 1, False, "float32")]
    types = [(False, "bfloat16"), (True, "float32"), (True, "bfloat16"), (False, "float32")]
    for batch in (1, 8, 64):
        for name in ("mar-base", "mar-huge", "mar-large"):
            order += [(name, batch, guided, dtype) for guided, dtype in types]
    return list(dict.fromkeys(order))


def count_cases(file: Path, toy: bool) -> Iterator[tuple[dict[str, Any], Callable[[], tuple[Case, list]]]]:
    """The identity of each row, and its case with the trips of the loops that end when the data say so."""
    for name, batch, guided, dtype in to_count(toy):
        for method in COUNTED:

            def make(name=name, batch=batch, guided=guided, dtype=dtype, method=method):
                recorded = recorded_run(file, method, batch) if method != "plain" else {}
                build = ahead_case if method.startswith("self") else token_case
                trips = [recorded["calls"]] if "chains" in method else []
                return build(name, batch, guided, dtype, method, recorded), trips

            identity = counted_about(name, batch, guided, dtype, method, num_iter=MAR_PRESETS[name].seq_len)
            yield identity, make


def count(file: Path, minutes: float, toy: bool) -> None:
    end = time.monotonic() + 60 * minutes
    sharding = kernels.h100()
    mine = {"device": "NVIDIA H100 80GB HBM3", "jax": jax.__version__, "measured_here": False}
    for identity, make in count_cases(file, toy):
        if is_there(load(file), {n: identity[n] for n in IDENTITY}, mine):
            continue
        if time.monotonic() > end:
            return say("out of time: run it again to go on")
        case, trips = make()
        rows = load(file)
        there = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), case.args)
        start = time.perf_counter()
        compiled = case.compiled(there)
        found = kernels.count_launches(compiled.as_text(), trips, case.about)
        memory = compiled.memory_analysis()
        row = {**case.about, **mine, "command": "python benchmarks/accelerator.py --count", **_nothing()}
        row |= {
            "kernels_per_token": found.kernels / case.tokens,
            "host_reads_per_token": found.reads / case.tokens,
            "bytes_per_token": found.bytes / case.tokens,
            "operations_per_token": found.operations / case.tokens,
            "peak_bytes": memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes,
            "modelled_seconds_per_token": found.seconds / case.tokens,
            "share": kernels.shares(found),
            "trips": trips,
            "compile_seconds": time.perf_counter() - start,
        }
        rows.append(row)
        save(file, rows, None)
        report(row)
    say("all rows are there")


# The file


def load(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"] if file.exists() else []


def save(file: Path, rows: list[dict[str, Any]], here: dict[str, Any] | None) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    machines = content.get("machines", [])
    if here is not None and here not in machines:
        machines.append(here)
    write(file, {**content, "machines": machines, "assumed_of_an_h100": kernels.ASSUMED, "rows": rows})


def write(file: Path, content: dict[str, Any]) -> None:
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)  # a run that is cut off leaves a whole file


def report(row: dict[str, Any]) -> None:
    name = f"{row['model']}, {row['what']}, batch {row['batch']}, {row['dtype']}, {row['method']}"
    if row.get("error"):
        return say(f"  {name}: failed: {row['error'][:200]}")
    parts = []
    for key, unit in (("measured", "measured"), ("modelled", "modelled")):
        if (s := row[f"{key}_seconds_per_token"]) is not None:
            parts.append(f"{1e3 * s:.3f} ms a token {unit}")
    if "ratio" in row:
        parts.append(f"{row['ratio']:.2f} times plain's speed")
    if row["kernels_per_token"] is not None:
        reads = row["host_reads_per_token"]
        parts.append(f"{row['kernels_per_token']:.0f} kernels, {reads:.1f} host reads a token")
    say(f"  {name}: {'; '.join(parts)} (compiled in {row['compile_seconds']:.0f} s)")


def table(file: Path) -> None:
    def number(value, factor=1.0, digits=3):
        return "" if value is None else f"{factor * value:.{digits}g}"

    content, by_device = json.loads(file.read_text()), collections.defaultdict(list)
    for row in content["rows"]:
        by_device[row["device"], row["jax"], row["measured_here"]].append(row)
    for (device, version, measured), rows in by_device.items():
        print(f"\n{device}, jax {version}, {'measured' if measured else 'compiled for and modelled'}\n")
        unit = "ms a token, measured" if measured else "ms a token, modelled"
        print(f"| model | batch | type | method | {unit} | plain / this | kernels | host reads | limits |")
        print("|---|---|---|---|---|---|---|---|---|")
        key = "measured_seconds_per_token" if measured else "modelled_seconds_per_token"
        plain = {_alike(r): r[key] for r in rows if r["method"] in ("plain", "text-plain")}
        for row in rows:
            ratio = row.get("ratio")
            if ratio is None and row[key] and plain.get(_alike(row)):
                ratio = plain[_alike(row)] / row[key]
            kind = row["dtype"] + (", full" if row["precision"] == "float32" else "")
            method = row["method"] + (", guidance" if row["guided"] else "")
            limits = sorted(row.get("share", {}).items(), key=lambda limit: -limit[1])[:2]
            cells = (
                f"{row['model']}, {row['what']}", row["batch"], kind, method, number(row[key], 1e3),
                f"{number(ratio)}x" if ratio else "", number(row["kernels_per_token"], digits=4),
                number(row["host_reads_per_token"]),
                ", ".join(f"{name} {100 * share:.0f} %" for name, share in limits),
            )  # fmt: skip
            print(f"| {' | '.join(str(c) for c in cells)} |")
    for row in content.get("eager", []):
        print(
            f"\nEager PyTorch {row['torch']}, {row['model']}, batch 1: {row['kernels_per_token']} launches a"
            f" token, {1e3 * row['modelled_seconds_per_token']:.1f} ms modelled (launches alone)"
        )


def _alike(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in IDENTITY if name != "method")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="on the device that JAX finds first")
    what.add_argument("--count", action="store_true", help="for an H100, without one")
    what.add_argument("--table", action="store_true", help="print what the file holds")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further row begins (9)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--toy", action="store_true", help="a few small rows, to try the program itself")
    args = parser.parse_args()
    if args.table:
        table(args.file)
    elif args.count:
        count(args.file, args.minutes, args.toy)
    else:
        measure(args.file, args.minutes, args.repeats, args.toy)


if __name__ == "__main__":
    main()
