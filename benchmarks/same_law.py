"""Is the law of the images the plain sampler's? Thousands of images of every method, and statistical tests.

    python benchmarks/same_law.py FOLDER                               # generate what is missing, then test
    python benchmarks/same_law.py FOLDER --n 4000 --steps ddim25 --cells "plain;self;cspd path" --cfg 1

FOLDER keeps every part of every cell, so an interrupted run goes on where it was; parts of other
settings are not taken for these. Each method is tested against plain images of other keys, with noise in the
last denoising step in both, by

  means, squares: the largest standardised difference of the 2 x L x d first and second moments (Bonferroni),
  energy:         energy distance, labels permuted within the classes,
  classifier:     least squares on squares and products of 32 principal components, tested on held-out halves.

A p-value of at most 1e-4 refutes equality: with three tests, a cell's false alarm is at most 3e-4. "plain"
itself, with a third set of keys, is the control that must pass; the lossy methods are those that may be
caught. The class accuracy is a classifier's, trained on the same data. Prints a table on standard error and
writes FOLDER/results.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from methods import METHODS
from toy import Parser, among, begin, load, say, several, write_results
from ways import SMALL, asked, timed, training_data

from cspd_jax.image import pixels
from cspd_jax.image.generation import Request, resolve
from cspd_jax.keys import row_keys
from cspd_jax.tools.evaluation import classifier as classifiers
from cspd_jax.tools.evaluation.equality import FALSE_ALARM, p_values

# Few drafts take the least arithmetic, and exactness does not depend on how many there are.
FRUGAL = {
    "self": {"gamma": 3},
    "self + inner": {"gamma": 3},
    "cspd path": {"gamma": 2},
}
FRUGAL_IN_GROUPS = {"gamma": 1}  # of the same methods where a step reveals several tokens
# By cell; no two share their noise.
SEEDS = {
    "reference": 1,
    "plain": 2,
    "self": 1001,
    "cspd path": 1002,
    "cspd official (lossy)": 1003,
    "cspd paper, inner temperature 42 (lossy)": 1004,
    "self, one context (lossy)": 1005,
    "self + inner": 1006,
}
BATCH = 100
# Settings of a cell that are not of its method, and what `generate` calls them.
NETWORKS = ("backbone", "head", "draft backbone", "draft head")
SAMPLING = {"steps": "respacing", "cfg": "cfg", "cfg_schedule": "cfg_schedule", "temperature": "temperature"}


def folder_of(name: str) -> str:
    """Returns the name of the folder that keeps a cell's images."""
    return "".join(c if c.isalnum() else "_" for c in name)


def frugal(name: str, in_groups: bool) -> dict:
    return FRUGAL_IN_GROUPS if in_groups and name in FRUGAL else FRUGAL.get(name, {})


def request_of(target, draft, labels, settings: dict) -> Request:
    """Returns what to give `generate` for a cell's settings, but for the key."""
    options = {name: value for name, value in settings.items() if name not in SAMPLING}
    sampling = {SAMPLING[name]: value for name, value in settings.items() if name in SAMPLING}
    method, options = asked(draft, options, **sampling)
    if method.needs_final_noise is False:
        options = dataclasses.replace(options, final_noise=False)
    none: Any = None
    return Request(none, target, labels, method, resolve(target, method, options, len(labels)))


def generate(target, draft, folder: Path, n: int, seed: int, settings: dict, batch: int = BATCH) -> dict:
    """Returns tokens [N, L, d] and labels of a cell, made `batch` by `batch`, and what those parts cost that
    were timed; parts that exist are read."""
    folder.mkdir(parents=True, exist_ok=True)
    told, made_by = folder / "settings.json", {"seed": seed, **settings}
    if told.exists() and json.loads(told.read_text()) != made_by:
        sys.exit(f"{folder} holds images of other settings; name another folder")
    told.write_text(json.dumps(made_by) + "\n")
    labels = np.arange(batch) % target.config.num_classes
    request = None
    parts = []
    for i in range(-(-n // batch)):
        path = folder / f"part-{i:03d}.npz"
        if not path.exists():
            if request is None:
                request = request_of(target, draft, labels, settings)
            keys = row_keys(jax.random.key(seed), batch, i * batch)
            tokens, info, seconds = timed(request._replace(key=keys))
            cost: dict[str, Any] = {"seconds": seconds}
            for what in ("sequential", "rows"):
                cost[what] = [int(getattr(info.calls[name], what)) for name in NETWORKS]
            partial = path.with_suffix(".partial.npz")
            tested = (int(np.sum(info.tested)), int(np.sum(info.accepted)))
            lossless = info.exact
            np.savez(
                partial,
                tokens=np.float32(tokens),
                tested=tested,
                rounds=float(np.mean(info.rounds)),
                lossless=lossless,
                **cost,
            )
            partial.replace(path)
            if (i + 1) * batch % BATCH == 0:
                say(f"{folder.name}: {(i + 1) * batch} of {n}")
        with np.load(path) as part:
            parts.append({name: part[name] for name in part.files})
    tested, accepted = np.sum([p["tested"] for p in parts], axis=0)
    return {
        "tokens": np.concatenate([p["tokens"] for p in parts])[:n],
        "labels": np.tile(labels, len(parts))[:n],
        "acceptance": float(accepted / tested) if tested else None,
        "rounds": float(np.mean([p["rounds"] for p in parts])),
        "timed": [p for p in parts if "seconds" in p],
    }


def make_parser() -> Parser:
    small = {"n": 20, "steps": "ddim5", "num_iter": "16", "cfg": "1", "cells": "plain;self"}
    parser = Parser(__doc__, folder=Path("law"), **small)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--n", type=int, default=4000)
    parser.add_argument("--steps", default="ddim100", help="of the denoising chains (ddim100)")
    parser.add_argument("--num-iter", type=several(int), default="64,16", help="AR steps")
    parser.add_argument("--cfg", type=several(float), default="1,3")
    cells = among(name for name in SEEDS if name in METHODS)
    parser.add_argument("--cells", type=cells, default="plain;self;cspd path", help="by name, between ;")
    return parser


def main() -> None:
    args = begin(make_parser())
    target, draft = load("default", args.toy), load("default-draft", args.toy)
    data = training_data(target)
    args.folder.mkdir(parents=True, exist_ok=True)
    settings = SMALL if args.toy else classifiers.ClassifierConfig()
    classify = classifiers.train(data, settings)
    batch = min(args.n, BATCH)
    out = args.folder / "results.json"
    results = json.loads(out.read_text()) if out.exists() else []
    for cfg, num_iter in itertools.product(args.cfg, args.num_iter):
        options = {"cfg": cfg, "num_iter": num_iter, "steps": args.steps}
        here = f"cfg{cfg:g}-iter{num_iter}-{args.steps}"
        plainly = {**METHODS["plain"], **options}
        seed = SEEDS["reference"]
        made = generate(target, draft, args.folder / f"{here}-reference", args.n, seed, plainly, batch)
        reference = made["tokens"].reshape(args.n, -1)
        for name in args.cells:
            settings = {**METHODS[name], **frugal(name, num_iter < target.config.seq_len), **options}
            cell = {"method": name, "n": args.n, "seed": SEEDS[name], "settings": settings}
            if any(all(old.get(k) == v for k, v in cell.items()) for old in results):
                continue
            folder = args.folder / f"{here}-{folder_of(name)}"
            found = generate(target, draft, folder, args.n, SEEDS[name], settings, batch)
            images = pixels.to_images(target, found["tokens"])
            right = np.mean(classify(images)[0] == found["labels"])
            row = cell | {
                "acceptance": found["acceptance"],
                "rounds": found["rounds"],
                "right_class": float(right),
            }
            row |= p_values(found["tokens"].reshape(args.n, -1), reference, found["labels"])
            row["refuted"] = min(row["moments"], row["energy"], row["classifier"]) <= FALSE_ALARM
            row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
            results.append(row)
            write_results(out, results)
            say(
                f"{here} {name}: right class {right:.2%}; p = {row['moments']:.2g} (moments, largest z"
                f" {row['largest_z']:.1f}), {row['energy']:.2g} (energy), {row['classifier']:.2g}"
                f" (classifier){'; REFUTED' if row['refuted'] else ''}"
            )


if __name__ == "__main__":
    main()
