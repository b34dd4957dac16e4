"""Why speculate when fewer steps are faster? Exact and lossy ways to make pictures of words.

    python benchmarks/rivals.py OUT.json                # generate what is missing, test, print
    python benchmarks/rivals.py OUT.json --images 2000 --slow-images 200 --cells "plain;16 AR steps"
    python benchmarks/rivals.py OUT.json --markdown --picture docs/rivals.png   # from what is there
    python benchmarks/rivals.py OUT.json --rows docs/words.png   # pictures of an exact and a lossy way

Images are kept in parts (--keep FOLDER; OUT without its suffix), so an interrupted run goes on where it was.
Words are read letter by letter (cspd_jax/tools/evaluation/words.py); a word is right if the topic's list has
it. Every cell is compared with as many plain images of other keys: by the share of right words, by the
frequencies of all words, by the Fréchet distance of the reader's features of single letters, and by moments,
energy and a classifier. Cell "plain" is the control: the sampler of the reference with other keys; its
distance is the floor that any set of so many images has. Lossy means: another distribution than the full
sampler's, of one AR step per token and all denoising steps. Seconds are those that a tenth of the runs of 8
images stay below, less compilation: other work on the machine changes them least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from charts import marked, scatter
from toy import STEPS as TOY_STEPS
from toy import Parser, among, begin, load, results, say, write_results
from ways import asked, timed, training_data

from cspd_jax.image import pixels
from cspd_jax.image.generation import Request, resolve
from cspd_jax.image.pixels import as_bytes
from cspd_jax.keys import row_keys
from cspd_jax.reports.pictures import titled
from cspd_jax.tools.evaluation import words as measures
from cspd_jax.tools.evaluation.equality import FALSE_ALARM, TESTS
from cspd_jax.tools.evaluation.fid import frechet_distance
from cspd_jax.training.data.words import BLANK

BATCH = 8  # images side by side
# Settings of a cell that are not of its method, and what `generate` calls them.
NETWORKS = ("backbone", "head", "draft backbone", "draft head")
SAMPLING = {"steps": "respacing", "cfg": "cfg", "cfg_schedule": "cfg_schedule", "temperature": "temperature"}
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
TOY_READER = dataclasses.replace(measures.READER, steps=2, batch=64)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Holds pictures of one cell, and what they say.

    tokens: [N, L d].
    labels: [N], their topics.
    words: [N, lines], as a `Reading` has them.
    letters: [N, cells, F], the reader's features.
    """

    tokens: np.ndarray
    labels: np.ndarray
    words: np.ndarray
    letters: np.ndarray

    def first(self, n: int) -> Pictures:
        """Returns the first n of them."""
        return Pictures(self.tokens[:n], self.labels[:n], self.words[:n], self.letters[:n])

    def apart(self, other: Pictures) -> float:
        """Returns the Fréchet distance of single letters."""
        flat = lambda letters: letters.reshape(-1, letters.shape[-1])
        return frechet_distance(flat(self.letters), flat(other.letters))


def options_of(name: str, toy: bool) -> dict[str, Any]:
    """Returns the settings of a cell; a toy's have few tokens and denoising steps."""
    found = {**SAMPLED, **CELLS[name][1]}
    if toy:
        short = {"steps": f"ddim{TOY_STEPS}", "num_iter": 8, "anneal": [TOY_STEPS, 2]}
        found |= {key: value for key, value in short.items() if key in found}
    return found


def folder_of(name: str) -> str:
    """Returns the name of the folder that keeps a cell's images."""
    return "".join(c if c.isalnum() else "_" for c in name)


def request_of(target, draft, labels, settings: dict) -> Request:
    """Returns what to give `generate` for a cell's settings, but for the key."""
    options = {name: value for name, value in settings.items() if name not in SAMPLING}
    sampling = {SAMPLING[name]: value for name, value in settings.items() if name in SAMPLING}
    method, options = asked(draft, options, **sampling)
    if method.needs_final_noise is False:
        options = dataclasses.replace(options, final_noise=False)
    none: Any = None
    return Request(none, target, labels, method, resolve(target, method, options, len(labels)))


def generate(target, draft, folder: Path, n: int, seed: int, settings: dict, batch: int) -> dict:
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
            if (i + 1) * batch % 100 == 0:
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


def summary(made: dict, x: Pictures, reference: Pictures, control: Pictures, config: Any) -> dict[str, Any]:
    """Returns quality and cost of the pictures x of a cell."""
    n = len(x.tokens)
    reference, control = reference.first(n), control.first(n)
    parts, right = made["timed"], x.words != measures.MISSPELT
    calls, rows = (np.mean([p[name] for p in parts], axis=0) for name in ("sequential", "rows"))
    spread = right.mean(axis=1).std() / np.sqrt(n)  # lines of a picture may depend on one another
    ratio, p = measures.chi_square(x.words, x.labels, config)
    tests = {
        "misspelt": measures.as_often_right(x.words, reference.words, x.labels),
        "frequencies": measures.same_frequencies(x.words, reference.words, x.labels, config),
        **{name: test(x.tokens, reference.tokens, x.labels) for name, test in TESTS.items()},
    }
    return {
        "images": n,
        "lossless_beside_its_own_steps": bool(parts[0]["lossless"]),
        "ar_steps": made["rounds"],
        "sequential": dict(zip(NETWORKS, calls.tolist())),
        "rows_per_image": dict(zip(("backbone", "head"), ((rows[:2] + rows[2:]) / BATCH).tolist())),
        "seconds_per_image": float(np.quantile([p["seconds"] for p in parts], 0.1) / BATCH),
        "words": float(right.mean()),
        "words_error": float(spread),
        "pages": float(right.all(axis=1).mean()),
        "chi_square": ratio,
        "chi_square_p": p,
        "frechet": x.apart(reference),
        "floor": control.apart(reference),
        "p": tests,
        "refuted": min(tests.values()) <= FALSE_ALARM,
    }


# What is there, shown


def calls_of(row: dict) -> float:
    """Counts calls of all networks, one after the other."""
    return sum(row["sequential"].values())


def markdown(found: dict) -> str:
    """Writes the cells as a table."""
    lines = [
        "| way | | AR steps | calls in sequence | s / image | images | words | p, misspelt | p, frequencies"
        " | p, moments |",
        "|" + "---|" * 10,
    ]
    for row in found["cells"]:
        values = [
            "plain (control)" if row["cell"] == "plain" else row["cell"],
            row["kind"] if row["kind"] == "lossy" else "**exact**",
            f"{row['ar_steps']:.0f}", f"{calls_of(row):.0f}", f"{row['seconds_per_image']:.2f}",
            row["images"], f"{row['words']:.1%} ± {row['words_error']:.1%}",
            *(f"{row['p'][test]:.2g}" for test in ("misspelt", "frequencies", "moments")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines)


def picture(found: dict):
    """Draws words read right against calls and against seconds."""
    rows = found["cells"]
    names, kinds = [row["cell"] for row in rows], [row["kind"] for row in rows]
    right = [100 * row["words"] for row in rows]
    axes = (([calls_of(row) for row in rows], f"network calls in sequence, {BATCH} images side by side"),
            ([row["seconds_per_image"] for row in rows], "seconds per image, on this CPU"))  # fmt: skip
    left = "words spelt right, %"
    return titled([("", scatter(values, right, names, kinds, below, left)) for values, below in axes])


def beside(found: dict) -> tuple[str, str, str]:
    """Names plain, the exact way of the fewest calls, and the lossy way that is best with about as few."""
    exact = min((row for row in found["cells"] if row["kind"] == "exact"), key=calls_of)
    most = 1.2 * calls_of(exact)
    lossy = [row for row in found["cells"] if row["kind"] == "lossy" and calls_of(row) < most]
    return "plain", exact["cell"], max(lossy, key=lambda row: row["words"])["cell"]


def misspelt(reading: measures.Reading) -> np.ndarray:
    """Finds the letters [N, L] of words that no list has."""
    pages, lines = len(reading.text), len(reading.text[0])
    letters = np.array([[c != BLANK for c in line] for page in reading.text for line in page])
    return (letters.reshape(pages, lines, -1) & ~reading.right[:, :, None]).reshape(pages, -1)


def show(args: argparse.Namespace, found: dict, keep: Path):
    """Draws a page of every topic by each way of `beside`, misspelt words framed."""
    target = load(args.target, args.toy)
    reader, topics = open_reader(args, target), np.arange(target.config.num_classes)
    rows, pages = {row["cell"]: row for row in found["cells"]}, []
    for name in beside(found):
        with np.load(keep / folder_of(name) / "part-000.npz") as part:
            images = pixels.to_images(target, part["tokens"][topics])
        kind = "the reference" if name == "plain" else rows[name]["kind"]
        calls, right = calls_of(rows[name]), rows[name]["words"]
        title = f"{name} ({kind}): {calls:.0f} calls in sequence, {right:.1%} of the words spelt right"
        pages.append((title, marked(images, misspelt(reader(images, topics)))))
    return titled(pages)


def open_reader(args: argparse.Namespace, target) -> measures.Reader:
    """Returns what reads pictures of a model."""
    return measures.make_reader(training_data(target), TOY_READER if args.toy else measures.READER)


# Making it


def make_parser() -> Parser:
    small = {"images": 16, "slow_images": 8, "cells": "plain;4 AR steps"}
    parser = Parser(__doc__, file=Path("rivals.json"), **small)
    parser.add_argument("file", type=Path, nargs="?", default=Path("rivals.json"), metavar="OUT.json")
    parser.add_argument("--target", default="words", metavar="MODEL", help="of words (the embedded one)")
    parser.add_argument("--draft", default="words-draft", metavar="MODEL", help="that drafts")
    parser.add_argument("--images", type=int, default=2000, help="of a cell (2000), a multiple of 8")
    parser.add_argument("--slow-images", type=int, default=2000, help=f"of {', '.join(SLOW)} (2000)")
    parser.add_argument("--cells", type=among(CELLS), default=";".join(CELLS), help="by name, between ;")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of images (OUT without its suffix)")
    parser.add_argument("--picture", type=Path, help="draw what is there, and run nothing")
    parser.add_argument("--rows", type=Path, help="pictures of ways that are there, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print what is there, and run nothing")
    return parser


def main() -> None:
    args = begin(make_parser())
    found, keep = results(args.file, "cells"), args.keep or args.file.with_suffix("")
    if not (args.picture or args.markdown or args.rows):
        run(args, found, keep)
        args.markdown = True
    if args.toy:
        args.picture, args.rows = (args.file.with_suffix(end) for end in (".png", ".rows.png"))
    if args.picture:
        picture(found).save(args.picture)
    if args.rows:
        show(args, found, keep).save(args.rows)
    if args.markdown:
        print(markdown(found))


def run(args: argparse.Namespace, found: dict, keep: Path) -> None:
    """Makes the cells that are missing, tests them, and writes each into the file."""
    target = load(args.target, args.toy)
    drafted = any(CELLS[name][1].get("method") == "cspd" for name in args.cells)
    draft = load(args.draft, args.toy) if drafted or args.toy else None
    reader = open_reader(args, target)
    for name in CELLS if args.toy else ():  # all that are left out below
        request_of(target, draft, np.arange(BATCH), options_of(name, True))

    def pictures(made: dict) -> Pictures:
        images = pixels.to_images(target, made["tokens"])
        words, letters = reader(images, made["labels"]).words, reader.features(images)
        of_image = (len(images), -1)
        return Pictures(
            made["tokens"].reshape(of_image), made["labels"], words,
            letters.reshape(*of_image, letters.shape[-1]),
        )  # fmt: skip

    def made(name: str, n: int, seed: int, folder: str) -> dict:
        return generate(target, draft, keep / folder, n, seed, options_of(name, args.toy), BATCH)

    held_out = reader.data.batch(0, 8 if args.toy else 2000, split="held-out")
    found["reader_error"] = float(1 - reader(as_bytes(held_out.images), held_out.labels).right.mean())
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    reference = pictures(made("plain", args.images, REFERENCE_SEED, "reference"))
    control = pictures(made("plain", args.images, FIRST_SEED, "plain"))
    order = list(CELLS)
    for name in args.cells:
        n = min(args.images, args.slow_images) if name in SLOW else args.images
        seed, settings = FIRST_SEED + order.index(name), options_of(name, False)
        told = {"cell": name, "kind": CELLS[name][0], "seed": seed, "settings": settings}
        if any((told | {"images": n}).items() <= row.items() for row in found["cells"]):
            continue
        cell = made(name, n, seed, folder_of(name))
        row = told | summary(cell, pictures(cell), reference, control, reader.data) | machine
        found["cells"] = [old for old in found["cells"] if old["cell"] != name] + [row]
        found["cells"].sort(key=lambda row: order.index(row["cell"]))
        write_results(args.file, found)
        say(json.dumps(row))


if __name__ == "__main__":
    main()
