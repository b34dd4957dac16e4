"""What gpu.py measures of JAX: tokens, rounds and texts at the sizes of published models.

The unit is what one call of the library does: AR steps in one scan, or rounds in one loop, so that whatever
the host does between kernels is in it. The weights are random; which drafts are accepted is replayed from
runs of the embedded models, whose weights are trained (results/accepted.json, by version 0.6).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import LLADA_8B, PYTHIA_1_4B, PYTHIA_160M, Case, about
from counted_cases import FILE, NEW_TOKENS, PROMPT, Filling, Way
from replayed import Replayed, replaying
from toy import STEPS as TOY_STEPS
from toy import narrow, sizes

import cspd_jax
from cspd_jax.image import rounds, sampler
from cspd_jax.image.bound import bind
from cspd_jax.image.counts import add_up, no_counts
from cspd_jax.image.options import Options
from cspd_jax.image.order import Raster
from cspd_jax.masked import generation as masked_generation
from cspd_jax.networks import lm
from cspd_jax.networks.config import MAR_PRESETS, SPHERE_PRESETS, MARConfig
from cspd_jax.networks.registry import kind_of
from cspd_jax.text import Drafting, ModelDrafter
from cspd_jax.text import generation as text_generation

RECORDED = Path(__file__).parent / "results" / "accepted.json"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Says how much is measured: tokens of an image, and how many are known before them."""

    toy: bool

    @property
    def tokens(self) -> int:
        return 2 if self.toy else 32

    def known(self, length: int) -> int:
        return length * 3 // 8

    def window(self, window: int | None) -> int | None:
        return min(window, 3) if self.toy and window else window


# What is accepted


def toy_accepted() -> dict[str, Any]:
    """Returns what results/accepted.json has of trained models, as small as a toy, and made up.

    chains: by model and window, [T, R]: drafts kept by a head call that began with so many steps left, less
        one.
    rounds: by gamma, [images, tokens]: transitions kept by the round that began so many tokens behind the
        first quarter of the image.
    text: the share of the embedded pair's drafts that are accepted.
    """
    chains = [[min(left, 2)] * 4 for left in range(TOY_STEPS)]
    of_gamma = lambda gamma: [[TOY_STEPS * (at % gamma) for at in range(4 + 2 * gamma)]] * 2
    names = ("default", "default-causal")
    return {
        "chains": {f"{name}, M 3": chains for name in names},
        "rounds": {str(gamma): of_gamma(gamma) for gamma in (4, 8)},
        "text": 0.5,
    }


def calls_of(kept: np.ndarray) -> np.ndarray:
    """Counts the head calls [R] of each chain."""
    left, calls = np.full(kept.shape[1], len(kept)), np.zeros(kept.shape[1], int)
    while np.any(left):
        calls += left > 0
        taken = kept[np.maximum(left - 1, 0), np.arange(len(left))] + 1
        left = np.maximum(left - taken, 0)
    return calls


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Holds what is replayed."""

    found: Mapping[str, Any]

    def chains(self, name: str, window: int, rows: int) -> np.ndarray:
        """Returns [T, rows] of so many chains side by side, whose slowest takes a typical number of calls."""
        kept = np.asarray(self.found["chains"][f"{name}, M {window}"], np.int32)
        if rows > kept.shape[1]:
            kept = np.tile(kept, (1, -(-rows // kept.shape[1])))
        groups = [kept[:, i : i + rows] for i in range(0, kept.shape[1] - rows + 1, rows)]
        slowest = [calls_of(group).max() for group in groups]
        return groups[int(np.argsort(slowest, kind="stable")[len(groups) // 2])]

    def blocks(self, gamma: int, images: int) -> np.ndarray:
        """Returns [images, tokens] of rounds."""
        table = np.asarray(self.found["rounds"][str(gamma)], np.int32)
        return table[np.arange(images) % len(table)]


# Images


@functools.lru_cache(maxsize=1)
def random_params(config: Any, dtype: str) -> Any:
    """Draws normal numbers of standard deviation 0.02, as an untrained head would output zero."""
    module = lm if isinstance(config, lm.LMConfig) else kind_of(config)

    @jax.jit
    def draw(key):
        leaves, tree = jax.tree.flatten(module.abstract_params(config))
        keys = jax.random.split(key, len(leaves))
        drawn = [
            (0.02 * jax.random.normal(k, a.shape, jnp.float32)).astype(dtype) for k, a in zip(keys, leaves)
        ]
        return jax.tree.unflatten(tree, drawn)

    return draw(jax.random.key(0))


def image_case(
    name: str,
    way: Way,
    accepted: Accepted,
    scale: Scale,
    batch: int = 1,
    guided: bool = False,
    dtype: str = "bfloat16",
    respacing: str | None = None,
) -> Case:
    """Makes tokens of an image whose first 3/8 are known, by AR steps or by rounds."""
    presets = {**MAR_PRESETS, **SPHERE_PRESETS}
    config = sizes(presets, name, scale.toy)
    of_mar = isinstance(config, MARConfig)
    steps = config.respacing if scale.toy else respacing or ("ddim100" if of_mar else "flow100")
    window = scale.window(way.window)
    options = Options(
        num_iter=config.seq_len, respacing=steps, guided=guided, cfg=3.0 if guided else 1.0,
        denoise="plain" if window is None else cspd_jax.ChainSpeculation((window,)),
        final_noise=of_mar, prefix_buckets=4 if of_mar and not scale.toy else 1,
        order=None if of_mar else Raster(),
        cfg_schedule="linear" if of_mar else "constant",
    )  # fmt: skip
    row = about(
        name, "token", batch, way.method, options=way.options, guided=guided, dtype=dtype,
        respacing=respacing or ("ddim100" if of_mar else "flow100"), num_iter=presets[name].seq_len,
        acceptance_from="replayed from the embedded models" if way.method != "plain" else None,
        timed=f"{scale.tokens} tokens of an image behind {scale.known(config.seq_len)} known ones",
    )  # fmt: skip
    model = kind_of(config).network(config, jnp.dtype(dtype))
    params, labels = random_params(config, dtype), jnp.zeros(batch, jnp.int32)
    keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
    chains, side = None, batch * (1 + way.gamma)
    if window is not None:
        chains = accepted.chains("default" if of_mar else "default-causal", window, side)
        chains = chains[-_steps(steps) :]
    make = rounds_program if way.gamma else steps_program
    blocks = accepted.blocks(way.gamma, batch) if way.gamma else None
    run, facts = make(model, options, scale, way)
    return Case(row, run, (params, keys, labels, chains, blocks), scale.tokens, facts)


def _steps(respacing: str) -> int:
    return cspd_jax.diffusion.schedule.sampling_schedule(respacing).num_steps


def steps_program(model, options: Options, scale: Scale, way: Way) -> tuple[Callable, Callable]:
    """Makes AR steps of the plain sampler in one scan, and what is known after it."""
    first = scale.known(model.seq_len)
    segment, groups = next(
        (segment, groups)
        for segment, groups in sampler.plan_segments(model.seq_len, options)
        if groups[0].start <= first <= groups[-1].start
    )
    wanted = tuple(group for group in groups if first <= group.start)[: scale.tokens]
    assert len(wanted) == scale.tokens

    def run(params, keys, labels, chains, blocks):
        with replaying(chains):
            bound = bind(model, params, jax.random.wrap_key_data(keys), labels, options)
            state = sampler.empty_state(bound)
            state, work = sampler.ar_steps(bound, segment, state, sampler.group_arrays(wanted, options))
        return state.tokens, work

    def facts(out) -> dict[str, Any]:
        calls = int(out[1].head.sequential)
        return {} if options.chain is None else {"head_calls_per_token": calls / scale.tokens}

    return run, facts


def rounds_program(model, options: Options, scale: Scale, way: Way) -> tuple[Callable, Callable]:
    """Makes rounds of self-speculation in one loop until there are as many tokens, and what happened."""
    first = scale.known(model.seq_len)
    speculation = rounds.Speculation(cspd_jax.PathCriterion(), way.gamma)  # as many as were recorded

    def run(params, keys, labels, chains, blocks):
        with replaying(chains, blocks, first):
            inputs, state = rounds.begin(
                model,
                params,
                jax.random.wrap_key_data(keys),
                labels,
                options,
                speculation=speculation,
            )
            images = jnp.full(labels.shape, first, jnp.int32)
            state = state._replace(group=images, num_drafts=jnp.full_like(images, way.gamma))

            def unfinished(carry):
                return jnp.any(carry[0].group < first + scale.tokens)

            def another(carry):
                state, total = carry
                state, counts = rounds.run_round(inputs, state)
                return state, add_up(total, counts)

            state, counts = jax.lax.while_loop(unfinished, another, (state, no_counts(inputs.images)))
        return state.group, counts, state.tokens

    def facts(out) -> dict[str, Any]:
        group, counts, _ = out
        tokens, number = float(np.mean(group)) - first, int(np.max(counts.rounds))
        return {
            "tokens": tokens, "rounds": number, "tokens_per_round": tokens / number,
            "head_calls_per_round": int(counts.target.head.sequential) / number,
        }  # fmt: skip

    return run, facts


# Text and masked text


def text_cases(accepted: Accepted, scale: Scale, dtype: str = "bfloat16") -> list[Case]:
    """Makes greedy texts: plain, and by drafts that are right as often as the embedded ones."""
    config, small = (narrow(c) if scale.toy else c for c in (PYTHIA_1_4B, PYTHIA_160M))
    network, weights = lm.LM(config, jnp.dtype(dtype)), random_params(config, dtype)
    drafting, kept = lm.LM(small, jnp.dtype(dtype)), random_params.__wrapped__(small, dtype)
    prompts = np.random.default_rng(0).integers(0, config.known_ids, (1, PROMPT)).tolist()
    count = 8 if scale.toy else NEW_TOKENS
    asked = cspd_jax.text.Options(rule="block", max_new_tokens=count, stop_ids=(), gamma=4)
    row = functools.partial(about, "pythia-1.4b", "text", 1, dtype=dtype, respacing=None)
    timed = f"{count} new tokens behind {PROMPT}, the prompt's pass included"
    inputs = text_generation.prepare(None, (network, weights), prompts, None, asked)
    plain = Case(row("text-plain", timed=timed), text_generation.run, (inputs,), count)

    def drafted() -> tuple:
        right = jax.jit(plain.function)(*plain.args).tokens
        use = jax.random.bernoulli(jax.random.key(1), accepted.found["text"], right.shape)
        drafter = Drafting(Replayed(ModelDrafter(drafting)), (kept, right, use))
        return (text_generation.prepare(None, (network, weights), prompts, drafter, asked),)

    def facts(out) -> dict[str, Any]:
        return {"acceptance": float(out.info.acceptance), "rounds": int(out.info.calls["target"].sequential)}

    about_block = row(
        "text-block", options="Pythia-160m drafts, gamma 4", timed=timed, acceptance_from="replayed"
    )
    return [plain, Case(about_block, text_generation.run, drafted(), count, facts)]


def masked_case(how: Filling, scale: Scale) -> Case:
    """Makes a masked text of LLaDA-8B's sizes. Its weights are random and accept nothing, so a round is
    timed and counts for as many tokens as one of the embedded model fills."""
    config = narrow(LLADA_8B) if scale.toy else LLADA_8B
    network, weights = lm.LM(config, jnp.bfloat16), random_params(config, "bfloat16")
    inputs = masked_generation.prepare(None, (network, weights), [[1] * PROMPT], *how.asked())
    row = about(
        "llada-8b", "token", 1, how.method, options=how.options, dtype="bfloat16", respacing=None,
        timed=f"rounds of {NEW_TOKENS} places behind {PROMPT}; tokens a round are the embedded model's",
    )  # fmt: skip
    runs = json.loads(FILE.read_text())["recorded_runs"]
    per_round = 1.0 if (name := how.run(1)) is None else NEW_TOKENS / runs[name]["rounds"]

    def facts(out) -> dict[str, Any]:
        calls = out.info.calls
        number = max(int(np.max(out.info.trace.rounds)) + 1, int(calls["block"].sequential))
        return {"tokens": number * per_round, "rounds": number, "tokens_per_round": per_round}

    return Case(row, masked_generation.run, (inputs,), NEW_TOKENS, facts)
