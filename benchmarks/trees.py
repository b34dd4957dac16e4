"""Draft trees beside chains of drafts, for the pair that comes with the package, on held-out text.

    python benchmarks/trees.py                     # some minutes
    python benchmarks/trees.py --rows 8 --count 32

Tokens per target pass are over many rows, with their standard error; seconds are those of one row alone, the
median of runs in turns. Prints a table on standard error and one JSON object on standard output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys

import jax
import numpy as np

from cspd_jax import models
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.data.text import documents
from cspd_jax.text import Sampling, draft_tree
from cspd_jax.text.comparison import Request
from cspd_jax.tokenizers import ByteTokenizer

GAMMAS = (3, 4, 5)
TREES = ((3, 2, 1), (4, 2, 1, 1), (2, 2, 2, 1))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def held_out_prompts(count: int, length: int = 64) -> list[list[int]]:
    """Pieces of held-out documents."""
    texts = [ByteTokenizer().encode(d.text) for d in documents() if d.held_out]
    pieces = [
        t[i : i + length] for i in range(0, 64 * length, 4 * length) for t in texts if len(t) > i + length
    ]
    assert len(pieces) >= count
    return pieces[:count]


def ways(target, small, count: int, sampled: bool) -> dict[str, Request]:
    key, sampling = (jax.random.key(0), Sampling(1.0)) if sampled else (None, Sampling())
    base = Request(key, target, [], sampling=sampling, max_new_tokens=count, stop_ids=())
    of = functools.partial(dataclasses.replace, base)
    found = {"plain": base}
    for rule in ("google", "block") if sampled else ("block",):
        found |= {f"chain of {g}, {rule}": of(drafter=small, rule=rule, gamma=g) for g in GAMMAS}
    return found | {f"tree {','.join(map(str, w))}": of(drafter=draft_tree(small, w)) for w in TREES}


def per_pass(info) -> tuple[float, float]:
    """New tokens per target pass and its standard error, from the rows."""
    tokens, rounds = info.new_tokens.astype(float), info.rounds.astype(float)
    ratio = tokens.sum() / rounds.sum()
    return ratio, float(np.std(tokens - ratio * rounds, ddof=1) / rounds.mean() / np.sqrt(len(rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="rows for tokens per pass")
    parser.add_argument("--count", type=int, default=128, help="new tokens of each")
    parser.add_argument("--repeats", type=int, default=5, help="runs for the seconds")
    args = parser.parse_args()
    target, small = models.load_text("text-default"), models.load_text("text-default-draft")
    prompts, table = held_out_prompts(args.rows), []
    for sampled in (False, True):
        requests = ways(target, small, args.count, sampled)
        alone = {
            name: dataclasses.replace(request, prompts=prompts[:1]) for name, request in requests.items()
        }
        say(f"{'temperature 1' if sampled else 'greedy'}: tokens per target pass, target rows, draft passes")
        calls = {name: request.run for name, request in alone.items()}
        counted = {
            name: dataclasses.replace(request, prompts=prompts).run().info
            for name, request in requests.items()
        }
        for call in calls.values():
            jax.block_until_ready(call())  # this compiles
        taken = seconds_in_turns(calls, args.repeats)
        for name, info in counted.items():
            ratio, error = per_pass(info)
            seconds = statistics.median(taken[name])
            passes = int(info.calls.target_passes)
            table.append({
                "what": name, "sampled": sampled, "tokens_per_pass": ratio, "standard_error": error,
                "rows_per_pass": int(info.calls.target_rows) / passes / args.rows,
                "draft_passes_per_pass": int(info.calls.draft_passes) / passes,
                "seconds": seconds, "over_plain": statistics.median(taken["plain"]) / seconds,
                "truncated": int(info.truncated.sum()),
            })  # fmt: skip
            last = table[-1]
            say(f"  {name:20s} {ratio:.3f} +- {error:.3f}, {last['rows_per_pass']:.0f} rows,"
                f" {last['draft_passes_per_pass']:.1f} draft passes; 1 row: {seconds:.3f} s,"
                f" {last['over_plain']:.2f} of plain's speed")  # fmt: skip
    print(json.dumps({
        "rows": args.rows, "count": args.count, "repeats": args.repeats, "table": table,
        "processor": platform.processor() or platform.machine(), "jax": jax.__version__,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
