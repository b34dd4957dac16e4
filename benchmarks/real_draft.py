"""A published chat model with a draft that was distilled from it, beside plain decoding.

    python benchmarks/real_draft.py TARGET DRAFT                  # on the questions in prompts/held-out.txt
    python benchmarks/real_draft.py TARGET DRAFT --texts 2 --new-tokens 32 --gammas 2

TARGET and DRAFT are checkpoint folders: DRAFT is what `cspd-jax distill --cut` made for TARGET. One question
at a time; the ways take turns, and of each question's repeats the least time counts. Look-up, which needs no
model, stands beside the draft. A greedy text that is not that of plain decoding is compared with it: how far
apart the two best logits of the target are where the texts part. Prints a table on standard error, and writes
what it found where --file says.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, load_text

from cspd_jax import text
from cspd_jax._utils.files import write_text
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.text import Prompts
from cspd_jax.text.comparison import Request, measure_draft_cost
from cspd_jax.training.data.prompts import prompt_ids, read_lines
from cspd_jax.weights import models

HERE = Path(__file__).parent
ROOM = 64  # for a prompt: all have one shape, so each way is compiled once


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def padded(ids: list[int]) -> Prompts:
    return Prompts(np.pad(np.array([ids], np.int32), ((0, 0), (0, ROOM - len(ids)))), np.array([len(ids)]))


def ways_of(draft: models.TextModel, gammas: list[int]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """By name: the drafter, and the options that differ."""
    ways: dict[str, tuple[Any, dict[str, Any]]] = {"plain": (None, {})}
    ways |= {f"draft, gamma {g}": (draft, {"gamma": g}) for g in gammas}
    return ways | {"lookup, gamma 3": (text.PromptLookup(), {"gamma": 3})}


def compared(args, target, ways, questions, temperature: float) -> list[dict[str, Any]]:
    """One row for each way: acceptance, tokens per pass, seconds of all questions, and which texts differ."""
    totals: dict[str, dict[str, Any]] = {
        name: {"tested": 0, "accepted": 0, "tokens": 0, "passes": 0, "seconds": 0.0, "texts": []}
        for name in ways
    }
    for number, ids in enumerate(questions):
        key = jax.random.key(number) if temperature else None
        asked = text.Options(
            temperature=temperature, max_new_tokens=args.new_tokens, max_len=ROOM + args.new_tokens
        )
        outputs: dict[str, text.TextOutput] = {}

        def run(name: str) -> text.TextOutput:
            drafter, changed = ways[name]
            options = dataclasses.replace(asked, **changed)  # noqa: B023
            outputs[name] = text.generate(key, target, padded(ids), drafter, options)  # noqa: B023
            return outputs[name]  # noqa: B023

        runs = {name: functools.partial(run, name) for name in ways}
        if number == 0:
            for call in runs.values():  # this compiles
                jax.block_until_ready(call())
        seconds = seconds_in_turns(runs, args.repeats)
        for name, (tokens, info) in outputs.items():
            total = totals[name]
            total["tested"] += int(info.tested.sum())
            total["accepted"] += int(info.accepted.sum())
            total["tokens"] += int(info.new_tokens.sum())
            total["passes"] += int(info.rounds.sum())
            total["seconds"] += min(seconds[name])
            total["texts"].append(np.asarray(tokens)[0, len(ids) : int(info.lengths[0])].tolist())
        say(f"  question {number + 1} of {len(questions)}: " + ", ".join(
            f"{name} {min(found):.2f} s" for name, found in seconds.items()))  # fmt: skip
    plain = totals["plain"]
    rows = []
    for name, total in totals.items():
        same = [a == b for a, b in zip(total["texts"], plain["texts"])]
        each = total["seconds"] / total["tokens"] / (plain["seconds"] / plain["tokens"])
        row = {
            "temperature": temperature,
            "way": name,
            "tokens": total["tokens"],
            "acceptance": round(total["accepted"] / total["tested"], 3) if total["tested"] else None,
            "tokens_per_pass": round(total["tokens"] / total["passes"], 3),
            "seconds": round(total["seconds"], 3),
            "seconds_per_token_plain_1": round(each, 3),
        }
        if not temperature:
            pairs = zip(questions, total["texts"], plain["texts"])
            parted = [gap(target, *pair) for pair, equal in zip(pairs, same) if not equal]
            row |= {"identical_texts": sum(same), "logit_gaps_where_texts_part": parted}
        rows.append(row)
        say(f"{name:18} T {temperature:g}: " + ", ".join(f"{k} {v}" for k, v in list(row.items())[2:]))
    return rows


def gap(target, question: list[int], found: list[int], plain: list[int]) -> float:
    """How far apart the target's two best logits are at the first id where two texts differ."""
    both = list(zip(found, plain))
    place = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    tokens = jnp.asarray([question + plain[:place]])
    best = jnp.sort(target.network.forward(target.params, tokens)[0, -1])[-2:]
    return float(best[1] - best[0])


def pass_seconds(model, repeats: int) -> dict[str, float]:
    """The least time of a pass over 1 to 5 tokens with 100 before them."""
    runs = {}
    for count in range(1, 6):
        cache = model.network.empty_cache(1, 128)
        tokens, places = jnp.ones((1, count), jnp.int32), 100 + jnp.arange(count)[None]
        call = jax.jit(lambda p, t, at, c: jnp.max(model.network.apply(p, t, at, c)[0]))
        runs[str(count)] = lambda call=call, t=tokens, at=places, c=cache: call(model.params, t, at, c)
        jax.block_until_ready(runs[str(count)]())
    return {name: round(min(found), 4) for name, found in seconds_in_turns(runs, repeats).items()}


def make_parser() -> Parser:
    small = {"target": "text-default", "draft": "text-default-draft", "texts": 1, "new_tokens": 8}
    parser = Parser(__doc__, **small, gammas="2", repeats=1, file=Path("draft.json"))
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "held-out.txt")
    parser.add_argument("--texts", type=int, default=16, help="questions")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--gammas", default="2,3,4")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--file", type=Path, help="where what is found is written (nowhere)")
    return parser


def main() -> None:
    args = begin(make_parser())
    target, draft = load_text(args.target, args.toy), load_text(args.draft, args.toy)
    models.check_vocabularies(target, draft)
    lines = read_lines(args.prompts)
    spread = np.linspace(0, len(lines) - 1, min(args.texts, len(lines))).round().astype(int)
    questions = prompt_ids(target, [lines[i] for i in spread])
    if args.toy:  # its ids are bytes
        questions = [ids[:ROOM] for ids in questions]
    assert max(map(len, questions)) <= ROOM
    found: dict[str, Any] = {
        "target": target.metadata.get("source"),
        "draft": {
            "layers": draft.config.depth,
            "ids": draft.config.known_ids,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(draft.params)),
            **draft.metadata.get("extra", {}).get("cut", {}),
        },
        "questions": len(questions),
        "new_tokens": args.new_tokens,
        "machine": {"processor": platform.machine(), "threads": os.cpu_count(), "jax": jax.__version__},
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }
    found["pass_seconds"] = {
        name: pass_seconds(model, 5) for name, model in (("target", target), ("draft", draft))
    }
    request = Request(None, target, questions[:1], draft, text.Options(max_new_tokens=32, stop_ids=()))
    found["cost_of_a_draft"] = round(measure_draft_cost(request), 4)
    say(f"passes {found['pass_seconds']}, cost of a draft {found['cost_of_a_draft']}")
    ways = ways_of(draft, [int(g) for g in args.gammas.split(",")])
    found["rows"] = []
    for temperature in map(float, args.temperatures.split(",")):
        found["rows"] += compared(args, target, ways, questions, temperature)
        found["load_average_at_end"] = round(os.getloadavg()[0], 2)
        if args.file is not None:
            write_text(args.file, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
