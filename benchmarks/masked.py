"""Measures the passes and seconds of self-speculation and of stepwise decoding, for
masked-diffusion text, in one run.

    # Counts passes, for 23 prompts one at a time (results/masked-alone.json).
    python benchmarks/masked.py
    # Does the same by the model that sees the whole text (results/masked-whole.json).
    python benchmarks/masked.py --model masked-whole
    # Times one prompt, and eight side by side (results/masked.json).
    python benchmarks/masked.py --timed

The prompts are beginnings of held-out texts. Every text is compared with the text of
the stepwise reference, and the number of identical texts is printed. In float32 the two
can differ only by a near-tie. The program prints tables on standard error and one JSON
object on standard output.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
from toy import Parser, begin, held_out_prompts, load, machine, say

from cspd_jax.language_models import Prompts, as_prompts
from cspd_jax.masked import Options, SelfSpeculation, Stepwise, generate
from cspd_jax.measure import timed

PROMPTS = 23
PLACES = 64
REPEATS = 3
DECODERS: dict[str, dict[str, Any]] = {
    "one place per step": {},
    "two places per step": {"per_step": 2},
    "threshold 0.9": {"threshold": 0.9},
}
CHAINS = {f"draft_len {n}": SelfSpeculation(n) for n in (1, 2, 4, 8)}
SETS = {f"{n} texts": SelfSpeculation(texts=n) for n in (4, 8, 16, 32, 64)}


def measure(
    model: Any,
    kind: str,
    ways: dict[str, Any],
    options: Options,
    prompts: list[list[int]],
    side: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Returns a row for each way.

    ways: the ways by name; "stepwise" is the reference.
    repeats: the number of runs, of which the least seconds are kept; with 0, nothing is
        timed.
    side: the number of prompts side by side.
    """
    tokens, lengths = as_prompts(prompts)  # padded, so that each way compiles once
    batches = [
        Prompts(tokens[i : i + side], lengths[i : i + side])
        for i in range(0, len(prompts), side)
    ]
    run = lambda way: [generate(None, model, some, way, options) for some in batches]
    if repeats:
        runs = {way: functools.partial(run, how) for way, how in ways.items()}
        found = timed(runs, repeats)
    else:
        found = {way: (run(how), 0.0) for way, how in ways.items()}
    reference, base = found["stepwise"]
    rows = []
    say(f"{kind}: {len(prompts)} prompts, {side} side by side")
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
            "kind": kind,
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
        say(f"  {way}: " + ", ".join(f"{k} {row[k]}" for k in list(row)[4:]))
        rows.append(row)
    return rows


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--model", default="masked-default", help="(masked-default)")
    parser.add_argument("--timed", action="store_true", help="take the time")
    return parser


def main() -> None:
    args = begin(make_parser())
    options = Options(max_new_tokens=8 if args.toy else PLACES)
    model = load(args.model, args.toy)
    ways: dict[str, Any] = {"stepwise": Stepwise(), **CHAINS, **SETS}
    if model.config.block:
        ways["stepwise, no pass that only stores"] = Stepwise(ahead=True)
    if args.toy or args.timed:  # every third way
        ways = dict(list(ways.items())[::3])
    rows = []
    for kind, decoder in DECODERS.items():
        of_kind = dataclasses.replace(options, **decoder)
        for side in (1, 8) if args.timed else (1,):
            count = 2 if args.toy else side if args.timed else PROMPTS
            prompts = [
                ids[: len(ids) - i % 5]
                for i, ids in enumerate(held_out_prompts(count, 48, args.toy))
            ]
            rows += measure(
                model, kind, ways, of_kind, prompts, side, REPEATS * args.timed
            )
    print(json.dumps({"machine": machine(), "model": args.model, "rows": rows}))


if __name__ == "__main__":
    main()
