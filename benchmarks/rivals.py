"""Compares exact and lossy ways to make pictures of words. It answers why one should
speculate when fewer steps are faster.

    python benchmarks/rivals.py OUT.json  # generates missing images, tests, prints
    # Draws a chart from existing results.
    python benchmarks/rivals.py OUT.json --markdown --picture docs/rivals.png
    # Draws pictures of an exact and a lossy way.
    python benchmarks/rivals.py OUT.json --rows docs/words.png

Images are stored in the folder OUT, so an interrupted run can be continued. Words are
read letter by letter (tests/support/word_reader.py). A word is right if the list
of the picture's topic has it. Every cell is compared with the same number of plain
images with other keys: by the share of right words, and by moments, energy and a
classifier. The cell "plain" is the control, which is the reference's sampler with other
keys. A lossy cell has another distribution than the full sampler, which takes one AR
step per token and all denoising steps. The seconds of a cell are the 10 % quantile over
its runs of 8 images, without compilation; other work on the machine changes this
quantile the least.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import jax
import numpy as np
import word_reader as measures
from charts import marked, scatter
from equality import TESTS
from PIL import Image
from toy import STEPS as TOY_STEPS
from toy import (
    Parser,
    begin,
    load,
    machine,
    results,
    say,
    timed_images,
    write_results,
)

from cspd_jax.comparison import Request
from cspd_jax.image import (
    DraftSpeculation,
    PaperCriterion,
    Plain,
    Released,
    SelfSpeculation,
    pixels,
)
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.reports.pictures import titled
from cspd_jax.training.config import data_from_json
from cspd_jax.training.data.words import BLANK

BATCH = 8  # images side by side
NETWORKS = ("backbone", "head", "draft backbone", "draft head")
# The options of every cell.
SAMPLED = {
    "cfg": 2.0,
    "cfg_schedule": "constant",
    "temperature": 0.9,
    "respacing": "ddim100",
}
# The values that a toy run has in their place.
SHORT = {
    "respacing": f"ddim{TOY_STEPS}",
    "num_iter": 8,
    "anneal": Annealing(TOY_STEPS, 2),
}
REFERENCE_SEED = 41
TOY_READER = dataclasses.replace(measures.READER, steps=2, batch=64)


class Cell(NamedTuple):
    """A way to make images.

    seed: the seed of its keys.
    kind: whether it is exact or lossy, compared with the full sampler.
    options: the options that differ from SAMPLED.
    method: a function of the draft model. It returns the method.
    """

    seed: int
    kind: str
    options: dict[str, Any]
    method: Callable[[Any], Any] = lambda draft: Plain()


_ours = lambda draft: SelfSpeculation(8)
CHAINS = {"denoise": "speculative"}
CELLS = {
    "plain": Cell(42, "exact", {}),
    "plain + chains": Cell(51, "exact", CHAINS),
    "self + chains": Cell(53, "exact", CHAINS, _ours),
    "self": Cell(54, "exact", {}, _ours),
    "draft model": Cell(
        60, "exact", {}, lambda draft: DraftSpeculation(draft, gamma=3)
    ),
    "16 AR, 25 denoising steps": Cell(
        59, "lossy", {"num_iter": 16, "respacing": "ddim25"}
    ),
    "4 AR steps": Cell(56, "lossy", {"num_iter": 4}),
    "16 AR steps": Cell(44, "lossy", {"num_iter": 16}),
    "32 AR steps": Cell(43, "lossy", {"num_iter": 32}),
    "25 denoising steps": Cell(46, "lossy", {"respacing": "ddim25"}),
    "10 denoising steps": Cell(47, "lossy", {"respacing": "ddim10"}),
    "DiSA, 50 to 5": Cell(48, "lossy", {"anneal": Annealing(50, 5)}),
    "GtR, 16 + 4 AR steps": Cell(
        50, "lossy", {"order": Checkerboard(4), "num_iter": 20}
    ),
    "released runner": Cell(52, "lossy", {}, lambda draft: Released(draft, gamma=8)),
    "paper's criterion": Cell(
        55, "lossy", {}, lambda draft: DraftSpeculation(draft, PaperCriterion(), 3)
    ),
}


class Pictures(NamedTuple):
    """The pictures of one cell, and their words.

    tokens: [N, L d] the tokens of each picture.
    labels: [N] the topic of each picture.
    words: [N, lines] the words of each picture, see `Reading`.
    """

    tokens: np.ndarray
    labels: np.ndarray
    words: np.ndarray

    def first(self, n: int) -> Pictures:
        return Pictures(*(a[:n] for a in self))


def request_of(cell: Cell, target: Any, draft: Any, toy: bool) -> Request:
    """Returns the request of a cell, without its key."""
    values = SAMPLED | cell.options
    method = cell.method(draft)
    if toy:
        values |= {name: value for name, value in SHORT.items() if name in values}
    options = Options(**values, final_noise=method.needs_final_noise is not False)
    labels = np.arange(BATCH) % target.config.num_classes
    none = None
    return Request(none, target, labels, method, options)


def generate(request: Request, n: int, seed: int, file: Path) -> dict[str, np.ndarray]:
    """Returns the tokens [N, L, d] of a cell, which are made in batches of 8, and the
    cost of each batch. If the file has N images already, it is read instead."""
    if file.exists():
        with np.load(file) as there:
            if len(there["tokens"]) == n:
                return {name: there[name] for name in there.files}
    tokens = []
    seconds = []
    calls = []
    rounds = []
    for i in range(0, n, BATCH):
        key = row_keys(jax.random.key(seed), BATCH, i)
        made, info, took = timed_images(request._replace(key=key))
        tokens.append(np.float32(made))
        seconds.append(took)
        calls.append([int(info.calls[name].sequential) for name in NETWORKS])
        rounds.append(float(np.mean(info.rounds)))
    found = {
        "tokens": np.concatenate(tokens)[:n],
        "seconds": seconds,
        "sequential": calls,
        "rounds": rounds,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **found)
    return found


def summary(made: dict, x: Pictures, reference: Pictures) -> dict[str, Any]:
    """Returns the quality and the cost of the pictures x of a cell."""
    n = len(x.tokens)
    right = x.words != measures.MISSPELT
    other = reference.first(n)
    return {
        "images": n,
        "ar_steps": float(np.mean(made["rounds"])),
        "sequential": dict(zip(NETWORKS, np.mean(made["sequential"], axis=0).tolist())),
        "seconds_per_image": float(np.quantile(made["seconds"], 0.1) / BATCH),
        "words": float(right.mean()),
        # The lines of a picture may depend on one another, so whole pictures count.
        "words_error": float(right.mean(axis=1).std() / np.sqrt(n)),
        "p": {
            "misspelt": measures.as_often_right(x.words, other.words, x.labels),
            **{
                name: test(x.tokens, other.tokens, x.labels)
                for name, test in TESTS.items()
            },
        },
    }


# Tables and pictures of existing results


def calls_of(row: dict) -> float:
    """Returns the number of sequential calls of all networks."""
    return sum(row["sequential"].values())


def markdown(cells: list[dict]) -> str:
    """Returns the cells as a table in Markdown."""
    head = [
        "way",
        "",
        "calls in sequence",
        "s / image",
        "images",
        "words",
        "p, misspelt",
        "p, moments",
    ]
    lines = [head, ["---"] * len(head)]
    for row in cells:
        lines.append(
            [
                "plain (control)" if row["cell"] == "plain" else row["cell"],
                row["kind"] if row["kind"] == "lossy" else "**exact**",
                f"{calls_of(row):.0f}",
                f"{row['seconds_per_image']:.2f}",
                str(row["images"]),
                f"{row['words']:.1%} ± {row['words_error']:.1%}",
                *(f"{row['p'][test]:.2g}" for test in ("misspelt", "moments")),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(cells: list[dict]) -> Image.Image:
    """Draws the share of right words over the number of calls, and over the seconds."""
    names = [row["cell"] for row in cells]
    kinds = [row["kind"] for row in cells]
    right = [100 * row["words"] for row in cells]
    axes = (
        (
            [calls_of(row) for row in cells],
            f"network calls in sequence, {BATCH} images side by side",
        ),
        ([row["seconds_per_image"] for row in cells], "seconds per image, on a CPU"),
    )
    left = "words spelt right, %"
    return titled(
        [
            ("", scatter(values, right, names, kinds, below, left))
            for values, below in axes
        ]
    )


def beside(cells: list[dict]) -> tuple[str, str, str]:
    """Returns the names of three ways: plain, the exact way with the fewest calls, and
    the best lossy way with about as few calls."""
    exact = min((row for row in cells if row["kind"] == "exact"), key=calls_of)
    lossy = [
        row
        for row in cells
        if row["kind"] == "lossy" and calls_of(row) < 1.2 * calls_of(exact)
    ]
    return "plain", exact["cell"], max(lossy, key=lambda row: row["words"])["cell"]


def misspelt(reading: measures.Reading) -> np.ndarray:
    """Returns bool [N, L], true for the letters of words that are not in the list of
    the picture's topic."""
    pages = len(reading.text)
    lines = len(reading.text[0])
    letters = np.array(
        [[c != BLANK for c in line] for page in reading.text for line in page]
    )
    return (letters.reshape(pages, lines, -1) & ~reading.right[:, :, None]).reshape(
        pages, -1
    )


def show(
    target: Any, reader: measures.Reader, cells: list[dict], keep: Path
) -> Image.Image:
    """Draws a page of every topic by each of the ways that `beside` returns, with
    frames around misspelt words."""
    rows = {row["cell"]: row for row in cells}
    pages = []
    topics = np.arange(target.config.num_classes)
    for name in beside(cells):
        with np.load(keep / f"{name}.npz") as made:
            images = pixels.to_images(target, made["tokens"][topics])
        kind = "the reference" if name == "plain" else rows[name]["kind"]
        calls = calls_of(rows[name])
        right = rows[name]["words"]
        title = (
            f"{name} ({kind}): {calls:.0f} calls in sequence, {right:.1%} of the"
            " words spelt right"
        )
        pages.append((title, marked(images, misspelt(reader(images, topics)))))
    return titled(pages)


# The program


def make_parser() -> Parser:
    small = {"images": 16, "slow_images": 8, "cells": ["plain", "4 AR steps"]}
    parser = Parser(__doc__, file=Path("rivals.json"), **small)
    parser.add_argument("file", type=Path, metavar="OUT.json")
    parser.add_argument(
        "--images", type=int, default=1000, help="of a cell (1000), a multiple of 8"
    )
    parser.add_argument(
        "--slow-images", type=int, default=200, help="of a cell of speculation (200)"
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=CELLS,
        default=list(CELLS),
        metavar="CELL",
        help="by name",
    )
    parser.add_argument(
        "--picture", type=Path, help="draw what is there, and run nothing"
    )
    parser.add_argument(
        "--rows", type=Path, help="pictures of ways that are there, and run nothing"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print what is there, and run nothing"
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    found = results(args.file) or {"cells": []}
    keep = args.file.with_suffix("")
    models: tuple = ()
    if args.rows or not (args.picture or args.markdown):
        target = load("words", args.toy)
        settings = TOY_READER if args.toy else measures.READER
        data = data_from_json(target.metadata["extra"]["training"])
        models = target, measures.make_reader(data, settings)
    if not (args.picture or args.markdown or args.rows):
        run(args, found, keep, *models)
        args.markdown = True
    if args.toy:
        args.picture, args.rows = (
            args.file.with_suffix(end) for end in (".png", ".rows.png")
        )
    if args.picture:
        picture(found["cells"]).save(args.picture)
    if args.rows:
        show(*models, found["cells"], keep).save(args.rows)
    if args.markdown:
        print(markdown(found["cells"]))


def run(
    args: argparse.Namespace,
    found: dict,
    keep: Path,
    target: Any,
    reader: measures.Reader,
) -> None:
    """Makes the missing cells, tests them, and writes each into the file."""
    draft = load("words-draft", args.toy)
    # A toy run makes few cells, but the requests of all.
    for cell in CELLS.values() if args.toy else ():
        request_of(cell, target, draft, True)

    def pictures(name: str, n: int, seed: int, file: str) -> tuple[dict, Pictures]:
        request = request_of(CELLS[name], target, draft, args.toy)
        made = generate(request, n, seed, keep / f"{file}.npz")
        labels = np.resize(request.what, n)
        images = pixels.to_images(target, made["tokens"])
        return made, Pictures(
            made["tokens"].reshape(n, -1), labels, reader(images, labels).words
        )

    _, reference = pictures("plain", args.images, REFERENCE_SEED, "reference")
    for name in args.cells:
        cell = CELLS[name]
        n = args.images if isinstance(cell.method(draft), Plain) else args.slow_images
        told = {"cell": name, "kind": cell.kind, "seed": cell.seed, "images": n}
        if not any(told.items() <= row.items() for row in found["cells"]):
            row = told | summary(*pictures(name, n, cell.seed, name), reference)
            rows = {old["cell"]: old for old in found["cells"]} | {
                name: row | {"machine": machine()}
            }
            found["cells"] = [rows[name] for name in CELLS if name in rows]
            write_results(args.file, found)
            say(f"{name}: {row}")


if __name__ == "__main__":
    main()
