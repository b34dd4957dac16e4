"""What is measured on an accelerator: whole images, denoising chains, rounds and texts, by every exact way.

- The default model (trained weights, its own acceptance): whole images.
- MAR's sizes: the denoising chains of one token of each image, and one call of the backbone, apart. The
  weights are random; which drafts are accepted is replayed from the default model (see inner.py).
- Text: the embedded pair, and Pythia-160m's sizes with random weights and replayed acceptance (see text.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import inner
import jax
import jax.numpy as jnp
import numpy as np
from cases import PYTHIA_160M, Case, about
from replayed import Replayed
from toy import held_out_prompts, load, load_text, narrow, sizes

import cspd_jax
from cspd_jax import ChainSpeculation, Plain, SelfSpeculation
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import rounds
from cspd_jax.image.chain import choice
from cspd_jax.image.chain.drafters import frozen
from cspd_jax.image.info import summarise
from cspd_jax.image.options import Options
from cspd_jax.networks import lm, mar
from cspd_jax.networks.config import MAR_PRESETS
from cspd_jax.text import Drafting, ModelDrafter, generation


def groups(toy: bool) -> Iterator[tuple[str, Callable[[], list[Case]]]]:
    """Groups of cases, the most important first; the first of a group is the plain way."""
    if toy:
        yield "images", lambda: image_cases(1, toy=True)[:4:3]
        yield "MAR-B", lambda: mar_cases("mar-base", 1, toy=True)
        yield "text", lambda: embedded_cases(1, 8, (2,), toy=True)
        yield "Pythia-160m", lambda: pythia_cases(1, count=8, gammas=(2,), toy=True)
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


def mar_cases(
    name: str, batch: int, dtype: str = "float32", precision: str | None = None, toy: bool = False
) -> list[Case]:
    windows = (None, (3,)) if toy else (None, (16,), (8,), (32,))
    case = (name, batch, dtype, precision, toy)
    return [*chain_cases(*case, windows), backbone_case(*case), round_case(*case)]


# The default model


def image_cases(batch: int, cfg: float = 1.0, precision: str | None = None, toy: bool = False) -> list[Case]:
    """Whole images of the default model, by every exact way; the plain one first."""
    model = load("default", toy)
    chains = ChainSpeculation((3,) if toy else (16,))
    ways: dict[str, tuple[Any, Any]] = {
        "plain": (Plain(), "plain"),
        "chains; M 16": (Plain(), chains),
        "self; gamma 4": (SelfSpeculation(gamma=4), "plain"),
        "self+chains; gamma 4, M 16": (SelfSpeculation(gamma=4), chains),
        "chains; M 8": (Plain(), ChainSpeculation((8,))),
    }
    options: dict[str, Any] = {"cfg": cfg, "final_noise": True}
    labels = [i % 10 for i in range(batch)]
    return [
        _image_case(model, labels, name, {"method": method, "denoise": way, **options}, precision)
        for name, (method, way) in ways.items()
    ]


def _image_case(model, labels, name, options, precision) -> Case:
    method, _, settings = name.partition("; ")
    method_of, options = options.pop("method"), Options(**options)
    batch, plan = len(labels), cspd_jax.image.resolve(model, labels, method_of, options)

    def sample(params, keys, labels, drafter):
        mine = dataclasses.replace(plan, options=dataclasses.replace(plan.options, chain_drafter=drafter))
        return mine.sample(jax.random.wrap_key_data(keys), labels, params=params)

    def facts(out) -> dict[str, Any]:
        info = summarise(plan, [out])
        rounds = int(info.sequential.target_backbone)
        found = {"calls_in_sequence": info.sequential._asdict(), "rounds": info.rounds}
        loops = [float(rounds)] if info.verified is not None else []
        if info.verified is not None:
            found["acceptance"] = info.verified.acceptance
        if info.chains is not None:
            found["head_calls_of_slowest"] = info.chains.slowest
            loops.append(info.chains.slowest)
        return {**found, "trips": loops}

    row = about(
        "default", "whole images", batch, method, options=settings,
        guided=plan.options.guided, precision=precision, respacing=plan.options.respacing,
        num_iter=plan.options.num_iter, acceptance_from="the model's own: trained weights",
        timed=f"a whole batch of images, {model.config.seq_len} tokens each",
    )  # fmt: skip
    keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
    args = (model.params, keys, jnp.asarray(labels, jnp.int32), plan.options.chain_drafter)
    return Case(row, sample, args, model.config.seq_len, facts)


# MAR's sizes


@functools.lru_cache(maxsize=1)
def random_params(name: str, dtype: str, toy: bool) -> Any:
    """Normal numbers of standard deviation 0.02: an untrained head would output zero whatever it is given."""

    @jax.jit
    def draw(key):
        leaves, tree = jax.tree.flatten(mar.abstract_params(sizes(MAR_PRESETS, name, toy)))
        keys = jax.random.split(key, len(leaves))
        drawn = [0.02 * jax.random.normal(k, a.shape, dtype) for k, a in zip(keys, leaves)]
        return jax.tree.unflatten(tree, drawn)

    return draw(jax.random.key(0))


def chain_cases(
    name: str, batch: int, dtype: str, precision: str | None, toy: bool, windows: tuple
) -> list[Case]:
    """The denoising chains of one token of each image, the plain way first."""
    config, found = sizes(MAR_PRESETS, name, toy), []
    respacing = config.respacing
    steps = sampling_schedule(respacing).num_steps
    model = mar.MARModel(config, jnp.dtype(dtype))
    params = {"head": random_params(name, dtype, toy)["head"]}
    z = jax.random.normal(jax.random.key(1), (batch, config.decoder_width), dtype)
    options = Options(respacing=respacing)
    for lengths in windows:
        kept, more = np.zeros((steps, batch), np.int32), {}
        if lengths:
            kept, calls = inner.recorded(load("default", toy), batch, lengths)
            more = {"acceptance_from": "replayed from the default model",
                    "head_calls_of_slowest": int(calls.max())}  # fmt: skip

        def run(params, z, noise, keys, kept, drafter, lengths=lengths):
            way = ChainSpeculation(lengths) if lengths else "plain"
            mine = dataclasses.replace(options, denoise=way, chain_drafter=drafter)
            return inner.replayed(model, params, z, noise, jax.random.wrap_key_data(keys), mine, kept)

        def facts(out) -> dict[str, Any]:
            counts = out[1]
            if counts is None:
                return {}
            calls = int(counts.calls)
            return {"head_calls_of_slowest": calls, "trips": [calls]}

        row = about(
            name, "head chain", batch, "chains" if lengths else "plain",
            options=f"M {choice.name_of(lengths)}" if lengths else "",
            dtype=dtype, precision=precision,
            timed=f"{steps} denoising steps of one token of each image", respacing=respacing, **more,
        )  # fmt: skip
        noise, keys = inner.randomness(batch, config.token_dim, steps)
        args = (params, z, noise, jax.random.key_data(keys), kept, frozen(steps, config.token_dim))
        found.append(Case(row, run, args, 1, facts))
    return found


def backbone_case(name: str, batch: int, dtype: str, precision: str | None, toy: bool) -> Case:
    """The backbone's part of a token, half of them known."""
    config = sizes(MAR_PRESETS, name, toy)
    known = config.seq_len // 2
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
    params = {"backbone": random_params(name, dtype, toy)["backbone"]}
    return Case(row, run, (params, tokens, reveal, number, embedding, number[:, None]), 1)


def round_case(name: str, batch: int, dtype: str, precision: str | None, toy: bool) -> Case:
    """A round of self-speculation with plain chains, whose cost does not depend on what is accepted."""
    config, method = sizes(MAR_PRESETS, name, toy), SelfSpeculation(gamma=4)
    model = mar.MARModel(config, jnp.dtype(dtype))
    options = Options(num_iter=config.seq_len, respacing=config.respacing, final_noise=True, prefix_buckets=4)

    def run(params, keys, labels):
        keys = jax.random.wrap_key_data(keys)
        inputs, state = rounds.begin(model, params, keys, labels, options, speculation=method.speculation)
        state, _ = rounds.run_round(inputs, state)
        return state.drafts, state.tokens

    row = about(
        name, "round", batch, "self", options="gamma 4", dtype=dtype, precision=precision,
        num_iter=config.seq_len, respacing=config.respacing,
        timed="one round of self-speculation, which commits several tokens of each image (not one)",
    )  # fmt: skip
    keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
    return Case(row, run, (random_params(name, dtype, toy), keys, jnp.zeros(batch, jnp.int32)), 1)


# Text


def text_case(name: str, model, prompts, count: int, more: dict[str, Any], **options) -> Case:
    """Greedy continuations of `count` tokens."""
    own = {name: value for name, value in options.items() if name != "drafter"}
    asked = cspd_jax.text.Options(**{"rule": "block", "max_new_tokens": count, "stop_ids": (), **own})
    inputs = generation.prepare(None, model, prompts, options.get("drafter"), asked)

    def facts(out) -> dict[str, Any]:
        info = out.info
        passes, drafting = int(info.calls.target_passes), int(info.calls.draft_passes)
        found = {"calls_in_sequence": {"target": passes, "draft": drafting}}
        if options.get("drafter") is not None:
            found |= {"acceptance": float(info.acceptance), "gamma": options["gamma"]}
        return {**found, "trips": [float(passes), drafting / passes]}

    method, settings = "text-plain", ""
    if options.get("drafter") is not None:
        method, settings = "text-block", f"gamma {options['gamma']}"
    row = about(
        name, "text", len(prompts), method, options=settings, respacing=None,
        timed=f"{count} new tokens of each row behind {len(prompts[0])}, the prompt's pass included", **more,
    )  # fmt: skip
    return Case(row, generation.run, (inputs,), count, facts)


def embedded_cases(batch: int, count: int = 128, gammas=(2, 4), toy: bool = False) -> list[Case]:
    target, small = (load_text(name, toy) for name in ("text-default", "text-default-draft"))
    prompts = held_out_prompts(batch, 64, toy)
    more = {"acceptance_from": "the pair's own: trained weights"}
    case = functools.partial(text_case, "text-default", target, prompts, count, more)
    return [case(), *(case(drafter=small, gamma=g) for g in gammas)]


def pythia_cases(
    batch: int, dtype: str = "float32", count: int = 64, gammas=(2, 4), toy: bool = False
) -> list[Case]:
    acceptance = embedded_acceptance(toy)
    config = narrow(PYTHIA_160M) if toy else PYTHIA_160M
    target = lm.LM(config, jnp.dtype(dtype))
    params = jax.jit(lambda key: jax.tree.map(lambda a: a.astype(dtype), lm.init_params(config, key)))
    weights = params(jax.random.key(0))
    small = lm.LM(dataclasses.replace(config, depth=min(2, config.depth)), jnp.dtype(dtype))
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
def embedded_acceptance(toy: bool) -> float:
    case = (embedded_cases(1, 8, (2,), toy) if toy else embedded_cases(8, gammas=(4,)))[-1]
    return case.facts(jax.jit(case.function)(*case.args))["acceptance"]
