"""Why speculate when fewer steps are faster? Exact and lossy ways to make images: quality, calls, seconds.

    python benchmarks/rivals.py OUT.json                 # generate what is missing, test, print
    python benchmarks/rivals.py OUT.json --images 500 --slow-images 150 --cells "plain;16 AR steps"
    python benchmarks/rivals.py OUT.json --power         # also how small a fault the tests refute
    python benchmarks/rivals.py OUT.json --markdown --picture docs/rivals.png   # from what is there

Images are kept in parts (--keep FOLDER; OUT without its suffix), so an interrupted run goes on where it was.
Every cell is compared with as many plain images of other keys: the share of the right class, the Fréchet
distance of the features of a classifier trained on the same data, and the three tests of same_law.py. Cell
"plain" is the control: the sampler of the reference with other keys. Its distance is the floor that any set
of so many images has. Lossy means: another distribution than the full sampler's, of one AR step per token and
all denoising steps. Seconds are those that a tenth of the runs of 10 images stay below, less compilation:
other work on the machine changes them least.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np
from inputs import kept_cells
from same_law import TOY_CLASSIFIER, plan_of, say
from same_law import generate as generate_parts
from toy import STEPS as TOY_STEPS
from toy import Parser, begin, load

from cspd_jax.apps.evaluation import classifier as classifiers
from cspd_jax.apps.evaluation import statistics
from cspd_jax.apps.evaluation.data import open_source, training_config
from cspd_jax.apps.evaluation.equality import FALSE_ALARM, TESTS, p_values
from cspd_jax.image import pixels
from cspd_jax.reports.charts import scatter, stacked
from cspd_jax.training.settings_file import to_json

BATCH = 10  # images side by side
NOISY = {"final_noise": True}
PAPER = {"method": "cspd", "criterion": "paper"}
# name -> (exact or lossy beside the full sampler, its settings); the seeds follow the order, so append only.
CELLS: dict[str, tuple[str, dict]] = {
    "plain": ("exact", NOISY),
    "32 AR steps": ("lossy", {**NOISY, "num_iter": 32}),
    "16 AR steps": ("lossy", {**NOISY, "num_iter": 16}),
    "50 denoising steps": ("lossy", {**NOISY, "steps": "ddim50"}),
    "25 denoising steps": ("lossy", {**NOISY, "steps": "ddim25"}),
    "10 denoising steps": ("lossy", {**NOISY, "steps": "ddim10"}),
    "DiSA, 50 to 5": ("lossy", {**NOISY, "anneal": [50, 5]}),
    "GtR, 32 + 1 AR steps": ("lossy", {**NOISY, "reveal": [1]}),
    "GtR, 16 + 4 AR steps": ("lossy", {**NOISY, "reveal": [4], "num_iter": 20}),
    "plain + chains": ("exact", {**NOISY, "denoise": "speculative"}),
    "released runner": ("lossy", {"method": "cspd", "criterion": "official", "gamma": 8}),
    "self + chains": ("exact", {"method": "self", "gamma": 8, "denoise": "speculative"}),
    "self": ("exact", {"method": "self", "gamma": 8}),
    "paper's criterion": ("lossy", {**PAPER, "gamma": 3}),
    "4 AR steps": ("lossy", {**NOISY, "num_iter": 4}),
    "5 denoising steps": ("lossy", {**NOISY, "steps": "ddim5"}),
}
SLOW = ("plain + chains", "released runner", "self + chains", "self", "paper's criterion")
REFERENCE_SEED, FIRST_SEED = 41, 42
STEPS = "ddim100"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
REPETITIONS, NEEDED = 10, 9
SPLITS, TOY_SPLITS = 40, 2


def options_of(name: str) -> dict:
    return {"cfg": 1.0, "steps": STEPS, **CELLS[name][1]}


def shortened(options: dict, toy: bool) -> dict:
    """The settings of a cell; of the toy's tokens and denoising steps."""
    if not toy:
        return options
    found = {**options, "steps": f"ddim{TOY_STEPS}"}
    found |= {"num_iter": 8} if "num_iter" in options else {}
    return found | ({"anneal": [TOY_STEPS, 2]} if "anneal" in options else {})


def summary(made: dict, n: int, reference: dict, control: dict, measure) -> dict:
    """Quality and cost of a cell of n images; `measure` gives predicted labels and features of tokens."""
    x, y = made["tokens"][:n].reshape(n, -1), reference["tokens"][:n].reshape(n, -1)
    predicted, features = measure(made["tokens"][:n])
    _, expected = measure(reference["tokens"][:n])
    _, same = measure(control["tokens"][:n])
    parts = made["timed"]
    calls, rows = (np.mean([p[name] for p in parts], axis=0) for name in ("sequential", "total"))
    row = {
        "images": n,
        "lossless_beside_its_own_steps": bool(parts[0]["lossless"]),
        "ar_steps": made["rounds"],
        "sequential": dict(
            zip(("target_backbone", "target_head", "draft_backbone", "draft_head"), calls.tolist())
        ),
        "rows_per_image": dict(zip(("backbone", "head"), ((rows[:2] + rows[2:]) / BATCH).tolist())),
        "seconds_per_image": float(np.quantile([p["seconds"] for p in parts], 0.1) / BATCH),
        "right_class": float(np.mean(predicted == made["labels"][:n])),
        "frechet": statistics.frechet_distance(features, expected),
        "floor": statistics.frechet_distance(same, expected),
    }
    row |= p_values(x, y, made["labels"][:n])
    return row | {"refuted": min(row["moments"], row["energy"], row["classifier"]) <= FALSE_ALARM}


def two_sets(classes: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two disjoint random sets of n images, each with as many of every class."""
    random, kinds = np.random.default_rng(seed), np.unique(classes)
    each = n // len(kinds)
    members = [random.permutation(np.flatnonzero(classes == kind))[: 2 * each] for kind in kinds]
    both = np.stack(members, axis=1)  # [2 n / classes, classes]
    return both[:each].ravel(), both[each:].ravel()


def floors(features: np.ndarray, classes: np.ndarray, sizes: set[int], splits: int) -> list[dict]:
    """The distances of two disjoint sets of n plain images, of features [N, F]: 40 random pairs."""
    found = []
    for n in sorted(sizes):
        pairs = (two_sets(classes, n, seed) for seed in range(splits))
        each = [statistics.frechet_distance(features[a], features[b]) for a, b in pairs]
        found.append({"images": n, "least": min(each), "mean": float(np.mean(each)), "most": max(each)})
    return found


def power(reference: dict, control: dict, ten: dict, n: int, toy: bool) -> list[dict]:
    """The smallest share of wrong images that each test refutes in 9 of 10 repetitions.

    A repetition splits all plain images of both sets at random into two of n, within each class, and puts
    wrong images in the place of a share of the second.
    """
    plain = np.concatenate([reference["tokens"], control["tokens"]]).reshape(2 * n, -1)
    classes = np.concatenate([reference["labels"], control["labels"]])
    labels = reference["labels"]
    kinds = {
        "of 10 denoising steps": lambda x, at, random: ten["tokens"].reshape(n, -1)[at],
        "of the next class": lambda x, at, random: x[(at + 1) % n],  # labels are 0, 1, ..., 9, 0, ...
        "with noise of 0.1": lambda x, at, random: x[at] + 0.1 * random.standard_normal(x[at].shape),
    }
    found = []
    for kind, wrong in kinds.items():
        row: dict = {"wrong": kind, "images": n}
        for test in ("moments",) if toy else ("moments", "energy", "classifier"):
            shares = SHARES[-1:] if toy else SHARES
            row[test] = next(
                (s for s in shares if _often_refuted(test, s, wrong, plain, classes, labels)), None
            )  # None: not even if all are wrong
        say(f"power: {row}")
        found.append(row)
    return found


def _often_refuted(test, share, wrong, plain, classes, labels) -> bool:
    missed, n = 0, len(labels)
    for repetition in range(REPETITIONS):
        random = np.random.default_rng(repetition)
        first, second = two_sets(classes, n, repetition)
        x, y = plain[first], plain[second].copy()
        at = random.permutation(n)[: round(share * n)]
        y[at] = wrong(plain[second], at, random)
        missed += TESTS[test](x, y, labels) > FALSE_ALARM
        if missed > REPETITIONS - NEEDED:
            return False
    return True


def calls_of(row: dict) -> float:
    return sum(row["sequential"].values())


def markdown(found: dict) -> str:
    lines = [
        "| way | | AR steps | calls in sequence | head rows / image | s / image | images | right class"
        " | Fréchet (floor) | p, moments | p, energy | p, classifier |",
        "|" + "---|" * 12,
    ]
    for row in found["cells"]:
        kind = row["kind"] if row["kind"] == "lossy" else "**exact**"
        name = "plain (control)" if row["cell"] == "plain" else row["cell"]
        values = [
            name, kind, f"{row['ar_steps']:.0f}", f"{calls_of(row):.0f}",
            f"{row['rows_per_image']['head']:.0f}",
            f"{row['seconds_per_image']:.2f}", row["images"], f"{row['right_class']:.1%}",
            f"{row['frechet']:.2f} ({row['floor']:.2f})",
            *(f"{row[test]:.2g}" for test in ("moments", "energy", "classifier")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, values)) + " |")
    lines += ["", "| images of either set | least distance | mean | most |", "|---|---|---|---|"]
    for row in found.get("floors", []):
        lines.append(
            "| "
            + " | ".join([str(row["images"]), *(f"{row[k]:.2f}" for k in ("least", "mean", "most"))])
            + " |"
        )
    if found.get("power"):
        lines += ["", "| wrong images | of | moments | energy | classifier |", "|---|---|---|---|---|"]
    for row in found.get("power", []):
        shares = (row.get(test) for test in ("moments", "energy", "classifier"))
        told = ("never" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {row['wrong']} | {row['images']} | {' | '.join(told)} |")
    return "\n".join(lines)


def picture(found: dict):
    """Distance, as a multiple of that of two plain sets, against calls and against seconds."""
    rows, floor = found["cells"], {row["images"]: row for row in found["floors"]}
    names, kinds = [row["cell"] for row in rows], [row["kind"] for row in rows]
    heights = [row["frechet"] / floor[row["images"]]["mean"] for row in rows]
    widest = floor[max(floor)]
    band = (widest["least"] / widest["mean"], widest["most"] / widest["mean"])
    left = "Fréchet / that of two plain sets"
    axes = (([calls_of(row) for row in rows], "network calls in sequence, 10 images side by side"),
            ([row["seconds_per_image"] for row in rows], "seconds per image, on this CPU"))  # fmt: skip
    charts = (scatter(values, heights, names, kinds, below, left, band) for values, below in axes)
    return stacked(list(charts))


def make_parser() -> Parser:
    small = {"images": 20, "slow_images": 10, "cells": "plain;released runner", "power": True}
    parser = Parser(__doc__, file=Path("rivals.json"), **small)
    parser.add_argument("file", type=Path, metavar="OUT.json")
    parser.add_argument("--images", type=int, default=500, help="of a cell (500), a multiple of 10")
    parser.add_argument("--slow-images", type=int, default=150, help=f"of {', '.join(SLOW)} (150)")
    parser.add_names("--cells", CELLS, ";".join(CELLS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of images (OUT without its suffix)")
    parser.add_argument("--power", action="store_true", help="also measure what the tests can see")
    parser.add_argument("--picture", type=Path, help="draw what is there, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print what is there, and run nothing")
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    found = kept_cells(args.file, bool(args.picture or args.markdown))
    if args.picture:
        picture(found).save(args.picture)
    if args.markdown:
        print(markdown(found))
    if args.picture or args.markdown:
        return
    if args.images % BATCH or args.slow_images % BATCH:
        parser.error(f"images are made {BATCH} side by side; ask for a multiple")
    run(args, found)
    if args.toy:
        picture(found).save(args.file.with_suffix(".png"))


def run(args: argparse.Namespace, found: dict) -> None:
    target, draft = load("default", args.toy), load("default-draft", args.toy)
    keep = args.keep or args.file.with_suffix("")
    keep.mkdir(parents=True, exist_ok=True)
    config = training_config(target)
    data = {name: to_json(config)[name] for name in ("data_kind", "data")}
    settings = TOY_CLASSIFIER if args.toy else classifiers.ClassifierConfig()
    classify = classifiers.train_or_load(
        keep / "classifier.npz", open_source(config), data, settings, not args.toy
    )
    if args.toy:
        for name in CELLS:  # all that are left out below
            plan_of(target, draft, np.arange(BATCH), shortened(options_of(name), True), BATCH)

    def measure(tokens):
        return classify(pixels.to_images(target, tokens))

    def made(name: str, n: int, seed: int, folder: str) -> dict:
        options = shortened(options_of(name), args.toy)
        return generate_parts(target, draft, keep / folder, n, seed, options, BATCH)

    def write() -> None:
        order = list(CELLS)
        found["cells"].sort(key=lambda row: order.index(row["cell"]))
        args.file.parent.mkdir(parents=True, exist_ok=True)
        args.file.write_text(json.dumps(found, indent=1) + "\n")

    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    reference = made("plain", args.images, REFERENCE_SEED, "reference")
    control = made("plain", args.images, FIRST_SEED, "plain")
    for name in args.cells:
        n = min(args.images, args.slow_images) if name in SLOW else args.images
        seed = FIRST_SEED + list(CELLS).index(name)
        told = {"cell": name, "kind": CELLS[name][0], "seed": seed, "settings": options_of(name)}
        if any((told | {"images": n}).items() <= row.items() for row in found["cells"]):
            continue
        cell = made(name, n, seed, "".join(c if c.isalnum() else "_" for c in name))
        row = told | summary(cell, n, reference, control, measure) | machine
        found["cells"] = [old for old in found["cells"] if old["cell"] != name] + [row]
        write()
        print(json.dumps(row), file=sys.stderr, flush=True)
    both = np.concatenate([reference["tokens"], control["tokens"]])
    classes = np.concatenate([reference["labels"], control["labels"]])
    found["floors"] = floors(measure(both)[1], classes, {row["images"] for row in found["cells"]},
                             TOY_SPLITS if args.toy else SPLITS)  # fmt: skip
    write()
    if args.power:
        found["power"] = power(
            reference, control, made("10 denoising steps", args.images, FIRST_SEED + 5, "10_denoising_steps"),
            args.images, args.toy,
        )  # fmt: skip
        write()
    print(markdown(found))


if __name__ == "__main__":
    main()
