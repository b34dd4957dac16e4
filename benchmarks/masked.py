"""Masked-diffusion text: passes and seconds of self-speculation and of stepwise decoding, in one run.

    python benchmarks/masked.py                    # the model that comes with the package, several minutes
    python benchmarks/masked.py --new-tokens 64 --block 8 --batch 1,8

Prompts are beginnings of held-out texts. Every text is compared with that of its stepwise reference, and the
number of identical rows is printed: in float32 a difference can only be a near-tie. Lossy methods come last
in each table. Prints tables on standard error and one JSON object on standard output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys

import jax
import numpy as np

from cspd_jax import masked, models
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.data.text import documents
from cspd_jax.masked.comparison import Request
from cspd_jax.tokenizers import ByteTokenizer

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def held_out_prompts(count: int, length: int = 48) -> list[list[int]]:
    """The beginnings of held-out documents, of several lengths."""
    texts = [d.text for d in documents() if d.held_out and len(d.text.encode()) > 4 * length]
    return [ByteTokenizer().encode(text)[: length - i % 5] for i, text in enumerate(texts[:count])]


def measure(requests: dict[str, Request], repeats: int) -> dict:
    """By name: the output and the median seconds of each request, measured in turns after compilation."""
    calls = {name: request.run for name, request in requests.items()}
    outputs = {name: jax.block_until_ready(call()) for name, call in calls.items()}
    seconds = seconds_in_turns(calls, repeats)
    return {name: (outputs[name], statistics.median(seconds[name])) for name in calls}


def table(model, batch: int, cached: bool, args) -> list[dict]:
    base = Request(
        jax.random.key(0), model, held_out_prompts(batch), max_new_tokens=args.new_tokens, block=args.block,
        cached=cached, temperature=args.temperature,
    )  # fmt: skip
    requests = {"stepwise": base.stepwise()}
    requests |= {f"draft_len {n}": dataclasses.replace(base, gamma=n) for n in GAMMAS}
    if not cached:
        half = args.new_tokens // 2
        requests["top-k 3, draft_len 4 (lossy)"] = dataclasses.replace(base, gamma=4, accept_top_k=3)
        requests["schedule, half the steps (lossy)"] = dataclasses.replace(
            base, method="schedule", steps=half
        )
    found = measure(requests, args.repeats)
    reference, base_seconds = found["stepwise"]
    kind = "with a block cache" if cached else "without a cache"
    say(f"{batch} rows, {args.new_tokens} places, blocks of {args.block}, {kind}")
    rows = []
    for name, ((tokens, info), seconds) in found.items():
        passes = info.passes
        same = np.asarray(tokens) == np.asarray(reference.tokens)
        row = {
            "batch": batch, "cached": cached, "what": name, "passes": passes, "rows": int(info.calls.rows),
            "fewer_passes": reference.info.passes / passes, "seconds": seconds,
            "faster": base_seconds / seconds,
            "identical_rows": int(same.all(axis=1).sum()), "same_tokens": float(same.mean()),
        }  # fmt: skip
        if info.drafts is not None:
            gamma = len(info.tested_at)
            row["acceptance"] = info.acceptance or 0.0
            row["least_passes"] = masked.least_passes(args.new_tokens, args.block, gamma, cached)
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
