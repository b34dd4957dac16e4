"""Masked-diffusion text: passes and seconds of self-speculation and of stepwise decoding, in one run.

    python benchmarks/masked.py                    # the model that comes with the package, several minutes
    python benchmarks/masked.py --new-tokens 64 --block 8 --batch 1,8
    python benchmarks/masked.py --only alone --block 32    # passes alone, of prompts one at a time
    python benchmarks/masked.py --only sampled --batch 8    # temperatures and cuts as Dream and LLaDA are run

Prompts are beginnings of held-out texts. Every text is compared with that of its stepwise reference, and the
number of identical rows is printed: in float32 a difference can only be a near-tie. Lossy methods come last
in each table. Prints tables on standard error and one JSON object on standard output.
"""

from __future__ import annotations

import functools
import itertools
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, held_out_prompts, load_text, median_seconds, say, several

from cspd_jax import masked
from cspd_jax.masked import Request, SelfSpeculation, Stepwise, generate, passes, speculative
from cspd_jax.masked.canvas import window_at
from cspd_jax.masked.generation import prepare
from cspd_jax.masked.rule import candidates

GAMMAS = (1, 2, 4, 8)
TEXTS = (4, 8, 16, 32)
TEMPERATURES = (0.0, 0.2, 0.4, 1.0)
RECIPES = {
    "LLaDA": {"confidence": "clean"},
    "Dream, entropy, top-p 0.95": {"confidence": "entropy", "top_p": 0.95},
    "random places": {"confidence": "random"},
}


def prompts_of(count: int, toy: bool) -> list[list[int]]:
    """Returns the beginnings of held-out documents, of several lengths."""
    return [ids[: len(ids) - i % 5] for i, ids in enumerate(held_out_prompts(count, 48, toy))]


def measure(requests: dict[str, Request], repeats: int) -> dict:
    """Returns by name the output and the median seconds of each request, measured in turns."""
    calls = {name: functools.partial(generate, *request) for name, request in requests.items()}
    seconds = median_seconds(calls, repeats)
    return {name: (call(), seconds[name]) for name, call in calls.items()}


def table(model, batch: int, cached: bool, args) -> list[dict]:
    options = masked.Options(
        max_new_tokens=args.new_tokens, block=args.block, cached=cached, temperature=args.temperature
    )
    base = Request(jax.random.key(0), model, prompts_of(batch, args.toy), options=options)
    requests = {"stepwise": base._replace(method=Stepwise())}
    gammas = GAMMAS[:1] if args.toy else GAMMAS
    requests |= {f"draft_len {n}": base._replace(method=SelfSpeculation(n)) for n in gammas}
    if not args.temperature:
        texts = TEXTS[:1] if args.toy else TEXTS
        requests |= {f"{n} texts": base._replace(method=SelfSpeculation(texts=n)) for n in texts}
    if not cached:
        half = args.new_tokens // 2
        requests["schedule, half the steps (lossy)"] = base._replace(method=masked.Schedule(half))
    found = measure(requests, args.repeats)
    reference, base_seconds = found["stepwise"]
    kind = "with a block cache" if cached else "without a cache"
    say(f"{batch} rows, {args.new_tokens} places, blocks of {args.block}, {kind}")
    rows = []
    for name, ((tokens, info), seconds) in found.items():
        passes = info.sequential
        same = np.asarray(tokens) == np.asarray(reference.tokens)
        row = {
            "batch": batch, "cached": cached, "what": name, "passes": passes,
            "rows": sum(int(calls.rows) for calls in info.calls.values()),
            "fewer_passes": reference.info.sequential / passes, "seconds": seconds,
            "faster": base_seconds / seconds,
            "identical_rows": int(same.all(axis=1).sum()), "same_tokens": float(same.mean()),
        }  # fmt: skip
        if info.tested.size:
            row["acceptance"] = info.acceptance or 0.0
        accepted = f", acceptance {row['acceptance']:.2f}" if "acceptance" in row else ""
        say(f"  {name}: {passes} passes ({row['fewer_passes']:.2f}x fewer), {seconds:.3f} s"
            f" ({row['faster']:.2f}x){accepted}, identical {row['identical_rows']} of {batch}")  # fmt: skip
        rows.append(row)
    return rows


def alone(model, cached: bool, args) -> list[dict]:
    """Counts passes of prompts one at a time, by the length of a chain or the number of chosen texts."""
    prompts = prompts_of(args.prompts, args.toy)
    options = masked.Options(max_new_tokens=args.new_tokens, block=args.block, cached=cached)
    ways = {f"draft_len {n}": SelfSpeculation(n) for n in GAMMAS[1:]}
    ways |= {f"{n} texts": SelfSpeculation(texts=n) for n in (*TEXTS, 64)}
    kind = "with a block cache" if cached else "without a cache"
    say(f"{len(prompts)} prompts, each alone, {args.new_tokens} places, blocks of {args.block}, {kind}")
    rows, texts = [], [generate(None, model, [p], Stepwise(), options) for p in prompts]
    for name, way in list(ways.items())[:: 4 if args.toy else 1]:
        found = [generate(None, model, [p], way, options) for p in prompts]
        passes = [sum(out.info.sequential for out in outs) for outs in (texts, found)]
        same = sum(bool((a.tokens == b.tokens).all()) for a, b in zip(texts, found))
        row = {"what": name, "cached": cached, "block": args.block, "prompts": len(prompts),
               "passes": passes[1], "fewer_passes": passes[0] / passes[1], "identical": same}  # fmt: skip
        say(f"  {name}: {row['fewer_passes']:.2f}x fewer passes, identical {same} of {len(prompts)}")
        rows.append(row)
    return rows


def sampled(model, batch: int, args) -> list[dict]:
    """Measures passes, seconds and what is drafted wrongly, by temperature and measure of confidence."""
    rows = []
    say(f"{batch} rows, {args.new_tokens} places, blocks of {args.block}, without a cache")
    temperatures = TEMPERATURES[1:2] if args.toy else TEMPERATURES
    for (name, recipe), temperature in itertools.product(RECIPES.items(), temperatures):
        options = masked.Options(
            max_new_tokens=args.new_tokens, block=args.block, temperature=temperature, **recipe
        )
        base = Request(jax.random.key(0), model, prompts_of(batch, args.toy), options=options)
        requests = {"stepwise": base._replace(method=Stepwise())}
        requests |= {f"draft_len {n}": base._replace(method=SelfSpeculation(n)) for n in args.draft_lens}
        found = measure(requests, args.repeats)
        (tokens, info), base_seconds = found["stepwise"]
        drafts = second_moves(base, tokens, info.trace.steps)
        say(f"{name}, temperature {temperature:g}: " + ", ".join(f"{k} {v:.2f}" for k, v in drafts.items()))
        for what, (output, seconds) in found.items():
            same = np.asarray(output.tokens) == np.asarray(tokens)
            row = {
                "batch": batch, "recipe": name, "temperature": temperature, "what": what,
                "passes": output.info.sequential, "seconds": seconds, "faster": base_seconds / seconds,
                "identical_rows": int(same.all(axis=1).sum()), **drafts,
            }  # fmt: skip
            if output.info.tested.size:
                row["acceptance"] = output.info.acceptance
                row["rounds_of_a_row"] = float(np.mean(output.info.rounds))
                say(f"  {what}: {row['passes']} passes, {row['rounds_of_a_row']:.1f} rounds of a row,"
                    f" {row['faster']:.2f}x, acceptance {row['acceptance']:.2f},"
                    f" identical {row['identical_rows']} of {batch}")  # fmt: skip
            rows.append(row)
    return rows


def second_moves(request: Request, tokens, steps) -> dict[str, float]:
    """Counts how often the first drafted move has the right place, how often the token drafted for the place
    that comes next is right, and how often both hold."""
    inputs = prepare(*request)
    text, order = np.asarray(tokens), np.asarray(steps)
    right = np.asarray(_second_moves(inputs.canvas, inputs.way, text, order))
    place, token = right[..., 0], right[..., 1]
    return {
        "place right": float(place.mean()),
        "token right": float(token.mean()),
        "both": float((place & token).mean()),
    }


@jax.jit
def _second_moves(canvas, speculation, text, order):
    """Returns [S, B, 2] for the steps that have one after them."""
    row = jnp.arange(len(text))

    def at(step):
        now = jnp.where(order < step, text, canvas.mask_id)
        window = window_at(canvas, now, 2 * canvas.block)
        logits = passes.whole(canvas, window, now[:, None])[:, 0]
        steps = jnp.full(len(text), step)
        moves = speculative.draft(canvas, speculation, window, now, logits, steps)
        goes = jnp.argmax(order == step + 1, axis=1)
        guesses = candidates(canvas, logits, window.places, steps + 1).tokens
        guess = jnp.take_along_axis(guesses, (goes - window.places[:, 0])[:, None], axis=1)[:, 0]
        return jnp.stack([moves.place[:, 1] == goes, guess == text[row, goes]], axis=-1)

    return jax.lax.map(at, jnp.arange(canvas.places - 1))


def make_parser() -> Parser:
    parser = Parser(__doc__, batch="1", prompts=2, new_tokens=8, block=4, repeats=1)
    parser.add_argument("--batch", type=several(int), default="1,8")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[2], help="of --only sampled")
    parser.add_argument(
        "--only", choices=("greedy", "sampled", "alone"), default="greedy", help="--toy does all"
    )
    parser.add_argument("--prompts", type=int, default=23, help="of --only alone")
    return parser


def main() -> None:
    args = begin(make_parser())
    model = load_text("masked-default", args.toy)
    rows = []
    if args.only == "alone" or args.toy:
        rows += [*alone(model, False, args), *alone(model, True, args)]
    for batch in args.batch:
        if args.only == "sampled" or args.toy:
            rows += sampled(model, batch, args)
        if args.only == "greedy" or args.toy:
            for cached in (False, True):
                rows += table(model, batch, cached, args)
    device = {"jax": jax.__version__, "machine": platform.processor() or platform.machine()}
    print(json.dumps({**device, "options": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
