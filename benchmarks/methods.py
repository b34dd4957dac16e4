"""Every method on the default pair, in one run: seconds, network calls one after the other, acceptance.

    python benchmarks/methods.py results.jsonl                       # all cells
    python benchmarks/methods.py results.jsonl --batch 1,8 --cfg 1   # some of them
    python benchmarks/methods.py results.jsonl --gammas --batch 8    # self-speculation with several gamma

One line of JSON per cell is appended to the file; cells that are there already are not run again, so an
interrupted run goes on where it was. A cell is one batch with one key; its seconds are those of the one run,
less compilation. A table of the file's cells is printed on standard error.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
from toy import Parser, among, begin, load, say, several
from ways import asked, timed

from cspd_jax.image.generation import Request, settle
from cspd_jax.image.options import Options
from cspd_jax.reports import report

PAPER = {"method": "cspd", "criterion": "paper", "gamma": 3}
METHODS = {
    "plain": {"final_noise": True},
    "plain, 16 AR steps": {"final_noise": True, "num_iter": 16},
    "inner": {"final_noise": True, "denoise": "speculative"},
    "self": {"method": "self"},
    "self + inner": {"method": "self", "denoise": "speculative"},
    "self, gamma 16": {"method": "self", "gamma": 16},
    "self, 16 AR steps": {"method": "self", "num_iter": 16, "gamma": 4},
    "cspd path": {"method": "cspd", "gamma": 3},
    "cspd paper, Sigma = 1": {**PAPER, "sigma": False},
    "cspd paper (lossy)": PAPER,
    "cspd paper, inner temperature 42 (lossy)": {**PAPER, "gamma": 8, "inner_temperature": 42.0},
    "cspd official (lossy)": {"method": "cspd", "criterion": "official", "gamma": 8},
}
GAMMAS = {f"self, gamma {gamma}": {"method": "self", "gamma": gamma} for gamma in (1, 2, 4, 8, 16)}
TOY = ["plain", "self", "cspd paper (lossy)"]


def cell(target, draft, name: str, batch: int, cfg: float, seed: int) -> dict:
    labels = np.arange(batch) % target.config.num_classes
    method, options = asked(draft, {**METHODS, **GAMMAS}[name], cfg=cfg)
    if method.needs_final_noise is False:
        options = dataclasses.replace(options, final_noise=False)
    _, info, seconds = timed(Request(jax.random.key(seed), target, labels, method, options))
    row = {"seconds_per_image": seconds / batch, "lossless": info.exact, "calls": report.calls(info.calls)}
    row |= {
        "rounds": float(np.mean(info.rounds)),
        "tokens_per_round": float(np.mean(info.made / info.rounds)),
    }
    if info.tested.shape[1]:
        row |= {
            "acceptance": info.acceptance,
            "by_distance": report.rates(np.sum(info.accepted, axis=0), np.sum(info.tested, axis=0)),
            "tested": int(np.sum(info.tested)),
            "truncated": int(np.sum(info.truncated)),
        }
    return row


def table(rows: list[dict]) -> None:
    for row in rows:
        seq, found = {name: n["sequential"] for name, n in row["calls"].items()}, ""
        if "acceptance" in row and row["acceptance"] is not None:
            near = ["-" if a is None else f"{a:.2f}" for a in row["by_distance"]]
            found = f"; acceptance {row['acceptance']:.3f}, by distance {' '.join(near)}"
        seconds = f"{row['seconds_per_image']:.3f} s/image, " if "seconds_per_image" in row else ""
        say(
            f"B={row['batch']} cfg={row['cfg']:g} {row['method']}: {seconds}"
            f"{sum(seq.values())} calls in sequence ({', '.join(str(n) for n in seq.values())}),"
            f" {row['tokens_per_round']:.1f} tokens a round{found}"
        )


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("methods.jsonl"), batch="1", cfg="1")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch", type=several(int), default="1,8,64")
    parser.add_argument("--cfg", type=several(float), default="1,3")
    parser.add_argument("--methods", type=among({**METHODS, **GAMMAS}), help="some, by name, between ;")
    parser.add_argument("--gammas", action="store_true", help="self-speculation with several gamma")
    parser.add_argument("--draft", default="default-draft", help="another draft model")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = begin(make_parser())
    rows = [json.loads(line) for line in args.file.read_text().splitlines()] if args.file.exists() else []
    target, draft = load("default", args.toy), load(args.draft, args.toy)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "seed": args.seed}
    parts = [args.gammas]
    if args.toy:
        for options in {**METHODS, **GAMMAS}.values():
            method, _ = asked(draft, options)  # all that are left out below
            settle(target, method, Options(final_noise=method.needs_final_noise is not False))
        args.methods, parts = args.methods or TOY, [False, True]
    for gammas in parts:
        names = args.methods if args.methods else list(GAMMAS if gammas else METHODS)
        if args.toy and gammas:
            names = list(GAMMAS)[:1]
        for cfg in args.cfg:
            for batch, name in itertools.product(args.batch, names):
                row = {"batch": batch, "cfg": cfg, "method": name, "draft": args.draft, **machine}
                if any(row.items() <= old.items() for old in rows):
                    continue
                row |= cell(target, draft, name, batch, cfg, args.seed)
                rows.append(row)
                table([row])
                with args.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
