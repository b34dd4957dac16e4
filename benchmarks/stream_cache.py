"""Rounds of `text.stream`, whose cache is written in place, beside rounds that make a new cache each time.

    python benchmarks/stream_cache.py

Pythia-70m's sizes with random weights, 8 rows with room for 1024 tokens. The ways take turns.
"""

from __future__ import annotations

import statistics
import time

import jax
from cases import PYTHIA_70M

from cspd_jax import text
from cspd_jax.networks import lm
from cspd_jax.text import generation

ROUNDS, REPEATS = 30, 3


def anew(inputs, state, cache):
    return generation.advance(inputs, state._replace(cache=cache))


def milliseconds(inputs, advance) -> float:
    """Of a round, the first one not counted."""
    state = generation._begin(inputs)
    for i in range(ROUNDS + 1):
        if i == 1:
            start = time.perf_counter()
        state = advance(inputs, state._replace(cache=None), state.cache)
        state.tokens.block_until_ready()
    return 1e3 * (time.perf_counter() - start) / ROUNDS


def main() -> None:
    model = lm.LM(PYTHIA_70M)
    params = jax.jit(lambda key: lm.init_params(PYTHIA_70M, key))(jax.random.key(0))
    options = text.Options(max_new_tokens=64, max_len=1024, stop_ids=())
    inputs = generation.prepare(None, (model, params), [[1] * 64] * 8, options=options)
    ways = {"in place": generation._advance, "anew": jax.jit(anew)}
    found = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, advance in ways.items():
            found[name].append(milliseconds(inputs, advance))
    for name, several in found.items():
        print(f"{name}: {statistics.median(several):.0f} ms a round")


if __name__ == "__main__":
    main()
