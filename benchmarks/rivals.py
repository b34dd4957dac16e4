"""Why speculate when fewer steps are faster? Exact and lossy ways to make pictures of words.

    python benchmarks/rivals.py OUT.json                # generate what is missing, test, print
    python benchmarks/rivals.py OUT.json --images 2000 --slow-images 200 --cells "plain;16 AR steps"
    python benchmarks/rivals.py OUT.json --power "misspelt;energy"  # and how small a fault these see
    python benchmarks/rivals.py OUT.json --markdown --picture docs/rivals.png   # from what is there
    python benchmarks/rivals.py OUT.json --rows docs/words.png   # pictures of an exact and a lossy way
    python benchmarks/rivals.py --perfect               # what a perfect model spells, without a network

Images are kept in parts (--keep FOLDER; OUT without its suffix), so an interrupted run goes on where it was.
Words are read letter by letter (cspd_jax/apps/evaluation/words.py); a word is right if the topic's list has
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
import math
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from inputs import kept_cells
from same_law import generate as generate_parts
from same_law import plan_of, say
from toy import STEPS as TOY_STEPS
from toy import Parser, begin, narrow, random_params

from cspd_jax.apps.evaluation import statistics
from cspd_jax.apps.evaluation import words as measures
from cspd_jax.apps.evaluation.data import training_config
from cspd_jax.apps.evaluation.equality import FALSE_ALARM, TESTS
from cspd_jax.image import pixels
from cspd_jax.image.order import reveal_groups
from cspd_jax.networks.registry import kind_of
from cspd_jax.reports.charts import scatter, stacked
from cspd_jax.reports.pictures import marked, titled
from cspd_jax.training.data.words import BLANK, WordsConfig
from cspd_jax.training.data.words import words as listed_words
from cspd_jax.training.presets import PRESETS
from cspd_jax.training.settings_file import to_json
from cspd_jax.weights import models

BATCH = 8  # images side by side
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
    "8 AR steps": ("lossy", {**NOISY, "num_iter": 8}),
    "16 AR, 25 denoising steps": ("lossy", {**NOISY, "num_iter": 16, "steps": "ddim25"}),
    "draft model": ("exact", {"method": "cspd", "criterion": "path", "gamma": 3}),
}
SLOW = ("released runner", "self + chains", "self", "paper's criterion", "draft model")
REFERENCE_SEED, FIRST_SEED = 41, 42
SAMPLED = {"cfg": 2.0, "cfg_schedule": "constant", "temperature": 0.9, "steps": "ddim100"}  # in every cell
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
REPETITIONS, NEEDED = 10, 9
ALL_TESTS = ("misspelt", "frequencies", *TESTS)
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


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Pictures of one cell, and what they say.

    tokens: [N, L d].
    labels: [N], their topics.
    words: [N, lines], as a `Reading` has them.
    letters: [N cells, F], the reader's features.
    """

    tokens: np.ndarray
    labels: np.ndarray
    words: np.ndarray
    letters: np.ndarray

    def first(self, n: int) -> Pictures:
        return self.at(np.arange(n))

    def at(self, chosen: np.ndarray) -> Pictures:
        cells = self.letters.reshape(len(self.tokens), -1, self.letters.shape[-1])[chosen]
        letters = cells.reshape(-1, cells.shape[-1])
        return Pictures(self.tokens[chosen], self.labels[chosen], self.words[chosen], letters)


def parts_of(x: Pictures) -> tuple[np.ndarray, ...]:
    return x.tokens, x.labels, x.words, x.letters


def p_values(x: Pictures, y: Pictures, config: WordsConfig) -> dict[str, float]:
    """Of all tests, of pictures with the same labels."""
    found = {name: test(x.tokens, y.tokens, x.labels) for name, test in TESTS.items()}
    return {
        "misspelt": measures.as_often_right(x.words, y.words, x.labels),
        "frequencies": measures.same_frequencies(x.words, y.words, x.labels, config),
        **found,
    }


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
        "frechet": statistics.frechet_distance(x.letters, reference.letters),
        "floor": statistics.frechet_distance(control.letters, reference.letters),
    }
    row["p"] = p_values(x, reference, config)
    return row | {"refuted": min(row["p"].values()) <= FALSE_ALARM}


def two_sets(classes: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two disjoint random sets of n images, each with as many of every class."""
    random, kinds = np.random.default_rng(seed), np.unique(classes)
    each = n // len(kinds)
    members = [random.permutation(np.flatnonzero(classes == kind))[: 2 * each] for kind in kinds]
    both = np.stack(members, axis=1)  # [2 n / classes, classes]
    return both[:each].ravel(), both[each:].ravel()


def floors(plain: Pictures, sizes: set[int], splits: int) -> list[dict]:
    """The distances of two disjoint sets of n plain pictures: 40 random pairs."""
    found = []
    for n in sorted(sizes):
        pairs = (two_sets(plain.labels, n, seed) for seed in range(splits))
        each = [statistics.frechet_distance(plain.at(a).letters, plain.at(b).letters) for a, b in pairs]
        found.append({"images": n, "least": min(each), "mean": float(np.mean(each)), "most": max(each)})
    return found


def power(
    plain: Pictures, wrong: dict[str, Pictures], config: WordsConfig, args: argparse.Namespace
) -> list[dict]:
    """The smallest share of wrong pictures that each test of `args.power` refutes in 9 of 10 repetitions.

    A repetition splits the plain pictures at random into two sets, within each topic, and puts wrong pictures
    in the place of a share of the second.
    """
    found = []
    for kind, bad in wrong.items():
        row: dict = {"wrong": kind, "images": len(plain.tokens) // 2}
        for test in ("misspelt",) if args.toy else args.power:
            shares = SHARES[-1:] if args.toy else SHARES
            row[test] = next(
                (s for s in shares if _often_refuted(test, s, bad, plain, config)), None
            )  # None: not even if all are wrong
        say(f"power: {row}")
        found.append(row)
    return found


def _often_refuted(test: str, share: float, bad: Pictures, plain: Pictures, config: WordsConfig) -> bool:
    missed, n = 0, len(plain.tokens) // 2
    for repetition in range(REPETITIONS):
        random = np.random.default_rng(repetition)
        first, second = (plain.at(half) for half in two_sets(plain.labels, n, repetition))
        tokens, words = second.tokens.copy(), second.words.copy()
        at = random.permutation(n)[: round(share * n)]
        for label in np.unique(second.labels[at]):  # a wrong picture of the same topic
            here, there = at[second.labels[at] == label], np.flatnonzero(bad.labels == label)
            taken = there[: len(here)]
            tokens[here], words[here] = bad.tokens[taken], bad.words[taken]
        if test == "misspelt":
            p = measures.as_often_right(first.words, words, first.labels)
        elif test == "frequencies":
            p = measures.same_frequencies(first.words, words, first.labels, config)
        else:
            p = TESTS[test](first.tokens, tokens, first.labels)
        missed += p > FALSE_ALARM
        if missed > REPETITIONS - NEEDED:
            return False
    return True


def calls_of(row: dict) -> float:
    return sum(row["sequential"].values())


def markdown(found: dict) -> str:
    lines = [
        "| way | | AR steps | calls in sequence | head rows / image | s / image | images | words | chi-square"
        " | Fréchet (floor) | p, misspelt | p, frequencies | p, moments | p, energy | p, classifier |",
        "|" + "---|" * 15,
    ]
    for row in found["cells"]:
        kind = row["kind"] if row["kind"] == "lossy" else "**exact**"
        name = "plain (control)" if row["cell"] == "plain" else row["cell"]
        values = [
            name, kind, f"{row['ar_steps']:.0f}", f"{calls_of(row):.0f}",
            f"{row['rows_per_image']['head']:.0f}",
            f"{row['seconds_per_image']:.2f}", row["images"],
            f"{row['words']:.1%} ± {row['words_error']:.1%}", f"{row['chi_square']:.2f}",
            f"{1e3 * row['frechet']:.1f} ({1e3 * row['floor']:.1f})",
            *(f"{p:.2g}" for p in row["p"].values()),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, values)) + " |")
    if found.get("floors"):
        lines += ["", "| images of either set | least distance | mean | most |", "|---|---|---|---|"]
    for row in found.get("floors", []):
        each = (f"{1e3 * row[k]:.1f}" for k in ("least", "mean", "most"))
        lines.append(f"| {row['images']} | {' | '.join(each)} |")
    if found.get("power"):
        tests = [test for test in ALL_TESTS if test in found["power"][0]]
        lines += ["", f"| wrong images | of | {' | '.join(tests)} |", "|" + "---|" * (2 + len(tests))]
    for row in found.get("power", []):
        shares = (row[test] for test in tests)
        told = ("never" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {row['wrong']} | {row['images']} | {' | '.join(told)} |")
    return "\n".join(lines)


def picture(found: dict):
    """Words read right against calls and against seconds."""
    rows = found["cells"]
    names, kinds = [row["cell"] for row in rows], [row["kind"] for row in rows]
    right = [100 * row["words"] for row in rows]
    axes = (([calls_of(row) for row in rows], f"network calls in sequence, {BATCH} images side by side"),
            ([row["seconds_per_image"] for row in rows], "seconds per image, on this CPU"))  # fmt: skip
    left = "words spelt right, %"
    return stacked([scatter(values, right, names, kinds, below, left) for values, below in axes])


def show(found: dict, made: dict[str, np.ndarray], read: Callable[..., measures.Reading]):
    """A row of pictures of plain, of an exact way, and of the lossy one with the nearest number of calls.

    made: uint8 images of the topics 0, 1, 2, ...; misspelt words are framed in them.
    """
    rows = {row["cell"]: row for row in found["cells"]}
    pages = []
    for name, images in made.items():
        reading = read(images, np.arange(len(images)))
        words = [[c != BLANK for c in line] for page in reading.text for line in page]
        letters = np.array(words).reshape(len(images), len(reading.text[0]), -1)
        marks = (letters & ~reading.right[:, :, None]).reshape(len(images), -1)
        kind = "the reference" if name == "plain" else rows[name]["kind"]
        calls, right = calls_of(rows[name]), rows[name]["words"]
        title = f"{name} ({kind}): {calls:.0f} calls in sequence, {right:.1%} of the words spelt right"
        pages.append((title, marked(images, marks)))
    return titled(pages)


def beside(found: dict) -> tuple[str, str, str]:
    """Plain, the exact way of the fewest calls, and the lossy way that has the nearest number of them."""
    exact = min((row for row in found["cells"] if row["kind"] == "exact"), key=calls_of)
    lossy = [row for row in found["cells"] if row["kind"] == "lossy" and "AR steps" in row["cell"]]
    near = min(lossy, key=lambda row: abs(np.log(calls_of(row) / calls_of(exact))))
    return "plain", exact["cell"], near["cell"]


def perfect(config: WordsConfig, num_iter: int, pages: int, seed: int = 0) -> float:
    """The share of words that a perfect model spells right, where the letters of an AR step are each drawn
    from their own distribution given those of earlier steps. It knows cells exactly, and the topic."""
    random, length, right = np.random.default_rng(seed), config.lines**2, 0
    for page in range(pages):
        listed = possible(config, config.topics[page % len(config.topics)])  # [H, cells of a line]
        fits = np.ones((config.lines, len(listed)), bool)  # with what is known of each line
        shown = np.zeros((config.lines, config.lines), int)
        order = random.permutation(length)
        for group in reveal_groups(length, num_iter):
            now = order[group.start : group.start + group.size]
            for line, cell in zip(*divmod(now, config.lines)):
                # What fits nothing is continued like any word.
                choice = np.flatnonzero(fits[line]) if fits[line].any() else np.arange(len(listed))
                shown[line, cell] = listed[random.choice(choice), cell]
            for line, cell in zip(*divmod(now, config.lines)):
                fits[line] &= listed[:, cell] == shown[line, cell]
        right += sum((listed == line).all(axis=1).any() for line in shown)
    return right / (pages * config.lines)


def possible(config: WordsConfig, topic: str) -> np.ndarray:
    """All lines of a topic, [H, cells] of letters, each word as often as any other."""
    lines = []
    for word in listed_words(topic):
        starts = min(config.indents, config.lines - len(word) + 1)
        each = [(BLANK * start + word).ljust(config.lines, BLANK) for start in range(starts)]
        lines += each * (math.lcm(*range(1, config.indents + 1)) // starts)
    return np.array([[ord(c) for c in line] for line in lines])


def make_parser() -> Parser:
    small = {"images": 16, "slow_images": 8, "cells": "plain;4 AR steps"}
    parser = Parser(__doc__, file=Path("rivals.json"), **small)
    parser.add_argument("file", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--perfect", action="store_true", help="what a perfect model would spell")
    parser.add_argument("--target", default="words", metavar="MODEL", help="of words (the embedded one)")
    parser.add_argument("--draft", default="runs/words-draft/model", metavar="MODEL", help="that drafts")
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


def open_reader(args: argparse.Namespace, target, keep: Path) -> measures.Reader:
    data = training_config(target).data
    assert isinstance(data, WordsConfig)
    settings = TOY_READER if args.toy else measures.READER
    return measures.make_reader(data, keep / "reader.npz", settings, not args.toy)


def draw_rows(args: argparse.Namespace, found: dict) -> None:
    target, keep = load(args, args.target), args.keep or args.file.with_suffix("")
    topics = np.arange(target.config.num_classes)
    made = {}
    for name in beside(found):
        with np.load(keep / folder_of(name) / "part-000.npz") as part:
            made[name] = pixels.to_images(target, part["tokens"][topics])
    show(found, made, open_reader(args, target, keep)).save(args.rows)


def run(args: argparse.Namespace, found: dict) -> None:
    target = load(args, args.target)
    drafted = args.toy or any(options_of(name).get("method") == "cspd" for name in args.cells)
    draft = load(args, args.draft) if drafted else None
    keep = args.keep or args.file.with_suffix("")
    keep.mkdir(parents=True, exist_ok=True)
    reader = open_reader(args, target, keep)
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

    found["reader_error"] = measures.error(reader, 8 if args.toy else 2000)
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
