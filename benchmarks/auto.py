"""How far the measured choice (`fastest`) is behind the best fixed one, for all three families.

    python benchmarks/auto.py
    python benchmarks/auto.py --file benchmarks/results/auto.json   # and keeps it; run it again to go on

Every way that `fastest` may choose is timed on the whole job, in turns, and the time of the one it chose is
divided by the least. The measurement that leads to the choice is not in it (`deciding_seconds`, of which most
is compilation).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from toy import Parser, begin, held_out_prompts, load, load_text
from ways import machine

from cspd_jax import Options, Plain, SelfSpeculation, masked, text
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.image import autotune, generation
from cspd_jax.image.chain import choice
from cspd_jax.image.plan import resolve
from cspd_jax.masked.comparison import Request as MaskedRequest
from cspd_jax.networks.quantised import quantise
from cspd_jax.text.comparison import Request as TextRequest

# Named ways to run a job, and the name of the one that is chosen for it.
Job = tuple[dict[str, Callable[[], Any]], Callable[[], str]]


def text_job(rows: int, draft: str, toy: bool) -> Job:
    target = load_text("text-default", toy)
    network, params = target.network, target.params
    drafter = {
        "model": lambda: load_text("text-default-draft", toy),
        "int8": lambda: (network, quantise(params, 8)),
        "lookup": text.PromptLookup,
    }[draft]()
    options = text.Options(max_new_tokens=8 if toy else 128, stop_ids=())
    request = TextRequest(None, target, held_out_prompts(rows, 64, toy), drafter, options)
    ways = {"plain": request.plain().run}
    ways |= {f"gamma {g}": request.with_options(gamma=g).run for g in (2, 4)}
    return ways, lambda: text.fastest(*request).way


def masked_job(rows: int, toy: bool) -> Job:
    arguments = None, load_text("masked-default", toy), held_out_prompts(rows, 64, toy)
    options = masked.Options(max_new_tokens=16 if toy else 64)
    request = MaskedRequest(*arguments, options=options)
    ways = {"stepwise": request.stepwise().run}
    ways |= {f"gamma {g}": request._replace(method=masked.SelfSpeculation(g)).run for g in (2, 4, 8)}
    return ways, lambda: masked.fastest(*arguments, options).way


def image_job(batch: int, toy: bool) -> Job:
    """16 AR steps of 25 denoising steps: all ways in a minute or two."""
    model, key, labels = load("default", toy), jax.random.key(0), [i % 10 for i in range(batch)]
    steps = 5 if toy else 25
    options = Options(denoise="auto", num_iter=16, respacing=f"ddim{steps}", final_noise=True)
    ways = {}
    for name, method in (("plain", Plain()), ("self", SelfSpeculation())):
        for chain, way in choice.candidates(steps).items():
            plan = resolve(model, labels, method, dataclasses.replace(options, denoise=way or "plain"))
            ways[f"{name}, {chain}"] = functools.partial(generation.run, key, plan)

    def chosen() -> str:
        plan = autotune.fastest(key, model, labels, options)
        chain = plan.options.chain
        return f"{plan.method.name}, {choice.name_of(chain.draft_lengths) if chain else 'plain'}"

    return ways, chosen


def jobs(toy: bool) -> Iterator[tuple[str, Callable[[], Job]]]:
    for rows in (1,) if toy else (1, 8):
        for draft in ("model", "int8", "lookup"):
            yield f"text, {rows} rows, {draft}", functools.partial(text_job, rows, draft, toy)
        yield f"masked, {rows} rows", functools.partial(masked_job, rows, toy)
        yield f"images, {rows}", functools.partial(image_job, rows, toy)


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("auto.json"), repeats=1)
    parser.add_argument("--file", type=Path, help="where rows are kept, of one machine (nowhere)")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    here = {**machine(), "jax": jax.__version__}
    rows = []
    if args.file is not None and args.file.exists():
        kept = json.loads(args.file.read_text())
        if kept["here"] != here:
            parser.error(f"{args.file} has rows of {kept['here']}, and this is {here}; name another file")
        rows = kept["rows"]
    for name, make in jobs(args.toy):
        if any(row["job"] == name for row in rows):
            continue
        ways, chosen = make()
        start = time.perf_counter()
        choice = chosen()
        deciding = time.perf_counter() - start
        for run in ways.values():
            jax.block_until_ready(run()[0])  # this compiles
        runs = {way: (lambda run=run: run()[0]) for way, run in ways.items()}
        turns = seconds_in_turns(runs, args.repeats, longest=60.0)
        seconds = {way: statistics.median(several) for way, several in turns.items()}
        best = min(seconds, key=lambda way: seconds[way])
        behind = seconds[choice] / seconds[best]
        rows.append(
            {"job": name, "chosen": choice, "best": best, "behind": behind, "seconds": seconds,
             "deciding_seconds": deciding}
        )  # fmt: skip
        if args.file is not None:
            args.file.write_text(json.dumps({"here": here, "rows": rows}, indent=1) + "\n")
        times = ", ".join(f"{way} {s:.2f} s" for way, s in seconds.items())
        print(f"{name}: chose {choice}, {100 * (behind - 1):.0f} % behind the best ({times})", flush=True)


if __name__ == "__main__":
    main()
