"""Measures the passes and seconds of self-speculation and of stepwise decoding, for
masked-diffusion text, in one run.

    # Measures the model that comes with the package, in several minutes.
    python benchmarks/masked.py
    # Counts passes only, for 23 prompts one at a time (results/masked-alone.json).
    python benchmarks/masked.py --only alone
    # Uses the temperatures and cuts with which Dream and LLaDA are run.
    python benchmarks/masked.py --only sampled

The prompts are beginnings of held-out texts. Every text is compared with the text of
the stepwise reference, and the number of identical texts is printed. In float32 the two
can differ only by a near-tie. Lossy methods come last in each table. The program prints
tables on standard error and one JSON object on standard output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from toy import Parser, begin, held_out_prompts, load, machine, say

from cspd_jax.masked import Options, Schedule, SelfSpeculation, Stepwise, generate
from cspd_jax.measure import timed

PROMPTS = 23
PLACES = 64
BLOCK = 8
REPEATS = 3
TEMPERATURES = (0.0, 0.2, 0.4, 1.0)
RECIPES: dict[str, dict[str, Any]] = {
    "LLaDA": {"confidence": "clean"},
    "Dream, entropy, top-p 0.95": {"confidence": "entropy", "top_p": 0.95},
    "random places": {"confidence": "random"},
}
CHAINS = {f"draft_len {n}": SelfSpeculation(n) for n in (1, 2, 4, 8)}
DECODERS: dict[str, dict[str, Any]] = {
    "one place per step": {},
    "two places per step": {"per_step": 2},
    "threshold 0.9": {"threshold": 0.9},
}
SETS = {f"{n} texts": SelfSpeculation(texts=n) for n in (4, 8, 16, 32, 64)}


def jobs(
    part: str, options: Options
) -> Iterator[tuple[str, int, int, Options, dict[str, Any], int]]:
    """Yields the measurements of a part. Each is (name, number of prompts, number of
    prompts side by side, options, ways, number of timed runs)."""
    lossy = {"schedule, half the steps (lossy)": Schedule(options.max_new_tokens // 2)}
    for kind, decoder in DECODERS.items():
        of_kind = dataclasses.replace(options, **decoder)
        ways = {**CHAINS, **({} if decoder else SETS)}
        if part == "alone":
            yield kind, PROMPTS, 1, of_kind, ways, 0
        for rows in (1, 8) if part == "greedy" else ():
            timed_ways = {**ways, **({} if decoder else lossy)}
            yield kind, rows, rows, of_kind, timed_ways, REPEATS
    for (name, recipe), temperature in itertools.product(RECIPES.items(), TEMPERATURES):
        if part == "sampled":
            some = dataclasses.replace(options, temperature=temperature, **recipe)
            yield name, 8, 8, some, {"draft_len 2": CHAINS["draft_len 2"]}, REPEATS


def measure(model: Any, job: tuple, toy: bool) -> list[dict[str, Any]]:
    """Returns a row for stepwise decoding and one for each way. Seconds are the least
    of several runs."""
    name, count, side, options, ways, repeats = job
    prompts = [
        ids[: len(ids) - i % 5]
        for i, ids in enumerate(held_out_prompts(count, 48, toy))
    ]
    batches = [prompts[i : i + side] for i in range(0, len(prompts), side)]
    run = lambda way: [
        generate(jax.random.key(0), model, some, way, options) for some in batches
    ]
    ways = {"stepwise": Stepwise(), **ways}
    if toy:
        ways = {way: ways[way] for way in list(ways)[:: len(ways) - 1]}
        repeats = min(repeats, 1)
    found = timed(
        {way: functools.partial(run, how) for way, how in ways.items()}, max(repeats, 1)
    )
    (reference, base) = found["stepwise"]
    rows = []
    say(
        f"{name}, temperature {options.temperature:g}: {len(prompts)} prompts, {side}"
        " side by side"
    )
    for way, (made, seconds) in found.items():
        passes, before = (
            sum(info.sequential for _, info in outputs) for outputs in (made, reference)
        )
        same = [np.all(a.tokens == b.tokens, axis=1) for a, b in zip(made, reference)]
        tested, accepted = (
            sum(int(np.sum(getattr(i, w))) for _, i in made)
            for w in ("tested", "accepted")
        )
        row = {
            "kind": name,
            "temperature": options.temperature,
            "prompts": len(prompts),
            "batch": side,
            "what": way,
            "passes": passes,
            "fewer_passes": before / passes,
            "identical": int(np.sum(same)),
            "acceptance": accepted / tested if tested else None,
        }
        if repeats:
            row |= {"seconds": seconds, "faster": base / seconds}
        shown = list(row)[4:]
        say(
            "  "
            + ", ".join(
                f"{k} {row[k]:.3g}" if isinstance(row[k], float) else f"{k} {row[k]}"
                for k in shown
            )
        )
        rows.append(row)
    return rows


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument(
        "--only",
        choices=("greedy", "sampled", "alone"),
        default="greedy",
        help="--toy does all",
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    options = Options(
        max_new_tokens=8 if args.toy else PLACES, block=4 if args.toy else BLOCK
    )
    model = load("masked-default", args.toy)
    rows = []
    for part in ("alone", "sampled", "greedy") if args.toy else (args.only,):
        several = list(jobs(part, options))
        for job in several[:: 5 if args.toy and part == "sampled" else 1]:
            rows += measure(
                model,
                (*job[:1], 2, min(job[2], 2), *job[3:]) if args.toy else job,
                args.toy,
            )
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
