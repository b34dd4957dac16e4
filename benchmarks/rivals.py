"""Why speculate when fewer steps are faster? Exact and lossy ways to make pictures of words.

    python benchmarks/rivals.py OUT.json                # generate what is missing, test, print
    python benchmarks/rivals.py OUT.json --images 2000 --slow-images 200 --cells "plain;16 AR steps"
    python benchmarks/rivals.py OUT.json --power "misspelt;energy"  # and how small a fault these see
    python benchmarks/rivals.py OUT.json --markdown --picture docs/rivals.png   # from what is there
    python benchmarks/rivals.py OUT.json --rows docs/words.png   # pictures of an exact and a lossy way
    python benchmarks/rivals.py --perfect               # what a perfect model spells, without a network

Images are kept in parts (--keep FOLDER; OUT without its suffix), so an interrupted run goes on where it was.
Words are read letter by letter (cspd_jax/tools/evaluation/words.py); a word is right if the topic's list has
it. Every cell is compared with as many plain images of other keys: by the share of right words, by the
frequencies of all words, by the Fréchet distance of the reader's features of single letters, and by the
tests of same_law.py. Cell "plain" is the control: the sampler of the reference with other keys. Its distance
is the floor that any set of so many images has. Lossy means: another distribution than the full sampler's, of
one AR step per token and all denoising steps. Seconds are those that a tenth of the runs of 8 images stay
below, less compilation: other work on the machine changes them least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from inputs import kept_cells
from rivals_shown import BATCH, beside, markdown, picture, show
from same_law import generate as generate_parts
from same_law import plan_of
from toy import STEPS as TOY_STEPS
from toy import Parser, begin, narrow, random_params
from ways import training_config
from words_law import ALL_TESTS, Pictures, floors, p_values, parts_of, perfect, power

from cspd_jax.errors import UserError
from cspd_jax.image import pixels
from cspd_jax.image.pixels import as_bytes
from cspd_jax.networks.registry import kind_of
from cspd_jax.tools.evaluation import words as measures
from cspd_jax.tools.evaluation.equality import FALSE_ALARM
from cspd_jax.tools.evaluation.fid import frechet_distance
from cspd_jax.training.data.words import Words, WordsConfig
from cspd_jax.training.presets import PRESETS
from cspd_jax.training.settings import to_json
from cspd_jax.weights import models

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
    "GtR, 32 + 1 AR steps": ("lossy", {**NOISY, "order": [1]}),
    "GtR, 16 + 4 AR steps": ("lossy", {**NOISY, "order": [4], "num_iter": 20}),
    "plain + chains": ("exact", {**NOISY, "denoise": "speculative"}),
    "released runner": ("lossy", {"method": "cspd", "criterion": "official", "gamma": 8}),
    "self + chains": ("exact", {"method": "self", "gamma": 8, "denoise": "speculative"}),
    "self": ("exact", {"method": "self", "gamma": 8}),
    "paper's criterion": ("lossy", {**PAPER, "gamma": 3}),
    "4 AR steps": ("lossy", {**NOISY, "num_iter": 4}),
    "5 denoising steps": ("lossy", {**NOISY, "steps": "ddim5"}),
    "8 AR steps": ("lossy", {**NOISY, "num_iter": 8}),
    "16 AR, 25 denoising steps": ("lossy", {**NOISY, "num_iter": 16, "steps": "ddim25"}),
    "draft model": ("exact", {"method": "cspd", "criterion": "path", "gamma": 3}),
}
SLOW = ("released runner", "self + chains", "self", "paper's criterion", "draft model")
REFERENCE_SEED, FIRST_SEED = 41, 42
SAMPLED = {"cfg": 2.0, "cfg_schedule": "constant", "temperature": 0.9, "steps": "ddim100"}  # in every cell
SPLITS, TOY_SPLITS = 40, 2
WRONG = ("16 AR steps", "10 denoising steps")  # pictures whose share among plain ones the tests are to see
TOY_READER = dataclasses.replace(measures.READER, steps=2, batch=64)


def folder_of(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def load(args: argparse.Namespace, name: str) -> models.ImageModel:
    """A model of words; a toy of the same data."""
    if not args.toy:
        return models.load(name)
    run = PRESETS["words"]
    training = json.loads(json.dumps(to_json(run)))  # as a checkpoint has it
    config, metadata = narrow(run.model), {"extra": {"training": training}}
    params = random_params(config, 0.02 if name == args.draft else 0.0)
    return models.ImageModel("words", kind_of(config).network(config), params, metadata, run.data.topics)


def options_of(name: str) -> dict:
    return {**SAMPLED, **CELLS[name][1]}


def shortened(options: dict, toy: bool) -> dict:
    """The settings of a cell; of the toy's tokens and denoising steps."""
    if not toy:
        return options
    found = {**options, "steps": f"ddim{TOY_STEPS}"}
    found |= {"num_iter": 8} if "num_iter" in options else {}
    return found | ({"anneal": [TOY_STEPS, 2]} if "anneal" in options else {})


def summary(made: dict, x: Pictures, reference: Pictures, control: Pictures, config: WordsConfig) -> dict:
    """Quality and cost of the pictures x of a cell."""
    n = len(x.tokens)
    reference, control = reference.first(n), control.first(n)
    parts, right = made["timed"], x.words != measures.MISSPELT
    calls, rows = (np.mean([p[name] for p in parts], axis=0) for name in ("sequential", "total"))
    spread = right.mean(axis=1).std() / np.sqrt(n)  # lines of a picture may depend on one another
    ratio, p = measures.chi_square(x.words, x.labels, config)
    row = {
        "images": n,
        "lossless_beside_its_own_steps": bool(parts[0]["lossless"]),
        "ar_steps": made["rounds"],
        "sequential": dict(
            zip(("target_backbone", "target_head", "draft_backbone", "draft_head"), calls.tolist())
        ),
        "rows_per_image": dict(zip(("backbone", "head"), ((rows[:2] + rows[2:]) / BATCH).tolist())),
        "seconds_per_image": float(np.quantile([p["seconds"] for p in parts], 0.1) / BATCH),
        "words": float(right.mean()),
        "words_error": float(spread),
        "pages": float(right.all(axis=1).mean()),
        "chi_square": ratio,
        "chi_square_p": p,
        "frechet": frechet_distance(x.letters, reference.letters),
        "floor": frechet_distance(control.letters, reference.letters),
    }
    row["p"] = p_values(x, reference, config)
    return row | {"refuted": min(row["p"].values()) <= FALSE_ALARM}


def make_parser() -> Parser:
    small = {"images": 16, "slow_images": 8, "cells": "plain;4 AR steps"}
    parser = Parser(__doc__, file=Path("rivals.json"), **small)
    parser.add_argument("file", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--perfect", action="store_true", help="what a perfect model would spell")
    parser.add_argument("--target", default="words", metavar="MODEL", help="of words (the embedded one)")
    parser.add_argument("--draft", default="words-draft", metavar="MODEL", help="that drafts")
    parser.add_argument("--images", type=int, default=2000, help="of a cell (2000), a multiple of 8")
    parser.add_argument("--slow-images", type=int, default=2000, help=f"of {', '.join(SLOW)} (2000)")
    parser.add_names("--cells", CELLS, ";".join(CELLS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of images (OUT without its suffix)")
    parser.add_names("--power", ALL_TESTS)
    parser.add_argument("--picture", type=Path, help="draw what is there, and run nothing")
    parser.add_argument("--rows", type=Path, help="pictures of ways that are there, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print what is there, and run nothing")
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    if args.perfect:
        for num_iter in (64, 32, 16, 8, 4):
            share = perfect(PRESETS["words"].data, num_iter, 16 if args.toy else 800)
            print(f"{num_iter} AR steps: {share:.1%} of the words are right")
        return
    if args.file is None:
        parser.error("name the file of the results, OUT.json")
    found = kept_cells(args.file, bool(args.picture or args.markdown or args.rows))
    if args.picture:
        picture(found).save(args.picture)
    if args.markdown:
        print(markdown(found))
    if args.rows:
        draw_rows(args, found)
    if args.picture or args.markdown or args.rows:
        return
    if args.images % BATCH or args.slow_images % BATCH:
        parser.error(f"images are made {BATCH} side by side; ask for a multiple")
    run(args, found)
    if args.toy:
        picture(found).save(args.file.with_suffix(".png"))
        args.rows = args.file.with_suffix(".rows.png")
        draw_rows(args, found)


def open_reader(args: argparse.Namespace, target) -> measures.Reader:
    data = training_config(target).data
    if not isinstance(data, WordsConfig):
        raise UserError(
            f"--target {args.target} makes no pictures of words; give a model that does, as words"
        )
    settings = TOY_READER if args.toy else measures.READER
    return measures.make_reader(data, settings)


def misread(reader: measures.Reader, pictures: int) -> float:
    """Returns the share of words that the reader gets wrong on held-out pictures."""
    batch = Words(reader.config).batch(0, pictures, split="held-out")
    return float(1 - reader(as_bytes(batch.images), batch.labels).right.mean())


def draw_rows(args: argparse.Namespace, found: dict) -> None:
    target, keep = load(args, args.target), args.keep or args.file.with_suffix("")
    topics = np.arange(target.config.num_classes)
    made = {}
    for name in beside(found):
        with np.load(keep / folder_of(name) / "part-000.npz") as part:
            made[name] = pixels.to_images(target, part["tokens"][topics])
    show(found, made, open_reader(args, target)).save(args.rows)


def run(args: argparse.Namespace, found: dict) -> None:
    target = load(args, args.target)
    drafted = args.toy or any(options_of(name).get("method") == "cspd" for name in args.cells)
    draft = load(args, args.draft) if drafted else None
    keep = args.keep or args.file.with_suffix("")
    reader = open_reader(args, target)
    data = reader.config
    if args.toy:
        for name in CELLS:  # all that are left out below
            plan_of(target, draft, np.arange(BATCH), shortened(options_of(name), True), BATCH)

    def pictures(made: dict) -> Pictures:
        images = pixels.to_images(target, made["tokens"])
        tokens = made["tokens"].reshape(len(images), -1)
        reading = reader(images, made["labels"])
        return Pictures(tokens, made["labels"], reading.words, reader.features(images))

    def made(name: str, n: int, seed: int, folder: str) -> dict:
        options = shortened(options_of(name), args.toy)
        return generate_parts(target, draft, keep / folder, n, seed, options, BATCH)

    def write() -> None:
        order = list(CELLS)
        found["cells"].sort(key=lambda row: order.index(row["cell"]))
        args.file.parent.mkdir(parents=True, exist_ok=True)
        args.file.write_text(json.dumps(found, indent=1) + "\n")

    found["reader_error"] = misread(reader, 8 if args.toy else 2000)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    reference = pictures(made("plain", args.images, REFERENCE_SEED, "reference"))
    control = pictures(made("plain", args.images, FIRST_SEED, "plain"))
    for name in args.cells:
        n = min(args.images, args.slow_images) if name in SLOW else args.images
        seed = FIRST_SEED + list(CELLS).index(name)
        told = {"cell": name, "kind": CELLS[name][0], "seed": seed, "settings": options_of(name)}
        if any((told | {"images": n}).items() <= row.items() for row in found["cells"]):
            continue
        cell = made(name, n, seed, folder_of(name))
        row = told | summary(cell, pictures(cell), reference, control, data) | machine
        found["cells"] = [old for old in found["cells"] if old["cell"] != name] + [row]
        write()
        print(json.dumps(row), file=sys.stderr, flush=True)
    both = Pictures(*(np.concatenate(each) for each in zip(parts_of(reference), parts_of(control))))
    found["floors"] = floors(
        both, {row["images"] for row in found["cells"]}, TOY_SPLITS if args.toy else SPLITS
    )
    write()
    if args.power:
        seeds = {name: FIRST_SEED + list(CELLS).index(name) for name in WRONG}
        kinds = {name: pictures(made(name, args.images, seeds[name], folder_of(name))) for name in WRONG}
        found["power"] = power(both, kinds, data, args)
        write()
    print(markdown(found))


if __name__ == "__main__":
    main()
