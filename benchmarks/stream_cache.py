"""Rounds of `text.stream`, whose cache is written in place, beside rounds that make a new cache each time.

    python benchmarks/stream_cache.py

Pythia-70m's sizes with random weights, 8 rows with room for 1024 tokens. The ways take turns.
"""

from __future__ import annotations

import statistics
import time

import jax
from cases import PYTHIA_70M
from toy import Parser, begin, narrow

from cspd_jax import text
from cspd_jax.networks import lm
from cspd_jax.text import generation, rounds


def anew(inputs, state, cache):
    return rounds.advance(inputs, state._replace(cache=cache))


def milliseconds(inputs, advance, rounds: int) -> float:
    """Of a round, the first one not counted."""
    state = generation._begin(inputs)
    for i in range(rounds + 1):
        if i == 1:
            start = time.perf_counter()
        state = advance(inputs, state._replace(cache=None), state.cache)
        state.tokens.block_until_ready()
    return 1e3 * (time.perf_counter() - start) / rounds


def make_parser() -> Parser:
    parser = Parser(__doc__, rounds=2, repeats=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main() -> None:
    args = begin(make_parser())
    config = narrow(PYTHIA_70M) if args.toy else PYTHIA_70M
    model = lm.LM(config)
    params = jax.jit(lambda key: lm.init_params(config, key))(jax.random.key(0))
    options = text.Options(max_new_tokens=64, max_len=1024, stop_ids=())
    inputs = generation.prepare(None, (model, params), [[1] * 64] * 8, options=options)
    ways = {"in place": generation._advance, "anew": jax.jit(anew)}
    found = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, advance in ways.items():
            found[name].append(milliseconds(inputs, advance, args.rounds))
    for name, several in found.items():
        print(f"{name}: {statistics.median(several):.0f} ms a round")


if __name__ == "__main__":
    main()
