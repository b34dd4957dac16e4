"""Masked-diffusion text: passes and seconds of self-speculation beside stepwise decoding, in one run.

    python benchmarks/masked.py                    # the embedded model, several minutes
    python benchmarks/masked.py --new-tokens 64 --block 8 --batch 1,8

Prompts are beginnings of held-out texts. Every cell's text is compared with its stepwise reference's, and the
number of identical rows is printed: in float32 a difference can only be a near-tie. The lossy ways stand
below. Prints tables on standard error and one JSON object on standard
output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import jax
import numpy as np

from cspd_jax import masked, models
from cspd_jax.data.text import documents
from cspd_jax.masked.comparison import Generation, run
from cspd_jax.tokenizers import ByteTokenizer

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def held_out_prompts(count: int, length: int = 48) -> list[list[int]]:
    """The beginnings of held-out documents, of several lengths."""
    texts = [d.text for d in documents() if d.held_out and len(d.text.encode()) > 4 * length]
    return [ByteTokenizer().encode(text)[: length - i % 5] for i, text in enumerate(texts[:count])]


def measure(model, cells: dict[str, tuple[str, dict]], prompts, repeats: int) -> dict:
    """By name: the result and the median seconds of each cell, taken in turn after a run that compiles."""
    made = {
        name: Generation(model.model, model.params, prompts, method, options)
        for name, (method, options) in cells.items()
    }
    times = {name: [] for name in made}
    found = {name: run(generation) for name, generation in made.items()}
    for _ in range(repeats):
        for name, generation in made.items():
            start = time.perf_counter()
            run(generation)
            times[name].append(time.perf_counter() - start)
    return {name: (found[name], statistics.median(times[name])) for name in made}


def table(model, batch: int, cached: bool, args) -> list[dict]:
    base = {"new_tokens": args.new_tokens, "block": args.block, "cached": cached}
    if args.temperature:
        base |= {"temperature": args.temperature, "keys": jax.random.key(0)}
    cells = {"stepwise": ("stepwise", base)}
    cells |= {f"draft_len {n}": ("ssd", {**base, "draft_len": n}) for n in DRAFT_LENGTHS}
    if not cached:
        cells["top-k 3, draft_len 4 (lossy)"] = ("ssd", {**base, "draft_len": 4, "top_k": 3})
        cells["schedule, half the steps (lossy)"] = ("schedule", {**base, "steps": args.new_tokens // 2})
    found = measure(model, cells, held_out_prompts(batch), args.repeats)
    reference, base_seconds = found["stepwise"]
    least = reference.passes + reference.block_passes
    kind = "with a block cache" if cached else "without a cache"
    say(f"{batch} rows, {args.new_tokens} places, blocks of {args.block}, {kind}")
    rows = []
    for name, (result, seconds) in found.items():
        passes = result.passes + result.block_passes
        same = np.asarray(result.text) == np.asarray(reference.text)
        row = {
            "batch": batch, "cached": cached, "what": name, "passes": passes, "rows": result.rows,
            "fewer_passes": least / passes, "seconds": seconds, "faster": base_seconds / seconds,
            "identical_rows": int(same.all(axis=1).sum()), "same_tokens": float(same.mean()),
        }  # fmt: skip
        if result.tested is not None:
            draft_len = len(result.tested)
            row["acceptance"] = float(result.accepted.sum() / max(1, result.tested.sum()))
            row["least_passes"] = masked.least_passes(args.new_tokens, args.block, draft_len, cached)
        accepted = f", acceptance {row['acceptance']:.2f}" if "acceptance" in row else ""
        say(f"  {name}: {passes} passes ({row['fewer_passes']:.2f}x fewer), {seconds:.3f} s"
            f" ({row['faster']:.2f}x){accepted}, identical {row['identical_rows']} of {batch}")  # fmt: skip
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = models.load_text("masked-default")
    rows = []
    for batch in (int(x) for x in args.batch.split(",")):
        for cached in (False, True):
            rows += table(model, batch, cached, args)
    device = {"jax": jax.__version__, "machine": platform.processor() or platform.machine()}
    print(json.dumps({**device, "options": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
