"""The rest of pages of words, given a part of them: calls, seconds, and whether the words are right.

    python benchmarks/inpainting.py OUT.json                       # generate, test, print
    python benchmarks/inpainting.py OUT.json --images 400 --regions "left-half;border"
    python benchmarks/inpainting.py OUT.json --markdown            # from what is there
    python benchmarks/inpainting.py OUT.json --rows docs/inpainting.png

Held-out pages of the data set are kept in part (cspd_jax.image.keep) and completed. Words are read as in
rivals.py; of each way they are compared with the plain sampler's, made with other keys. Calls are those of a
batch of 8; "of a whole page" are the same way's with nothing kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from inputs import kept_cells
from rivals import BATCH, load, open_reader
from rivals_shown import misspelt
from toy import STEPS as TOY_STEPS
from toy import Parser, begin

from cspd_jax import Known, Options, Plain, SelfSpeculation
from cspd_jax.image import generation, keep, pixels, plan
from cspd_jax.image.info import Info
from cspd_jax.image.pixels import as_bytes
from cspd_jax.reports.pictures import marked, titled
from cspd_jax.tools.evaluation import words as measures
from cspd_jax.training.data.words import Words

# name -> (exact or lossy, method, options)
WAYS = {
    "plain": ("exact", Plain(), {}),
    "plain + chains": ("exact", Plain(), {"denoise": "speculative"}),
    "self + chains": ("exact", SelfSpeculation(8), {"denoise": "speculative"}),
    "8 AR steps": ("lossy", Plain(), {"num_iter": 8}),
    "4 AR steps": ("lossy", Plain(), {"num_iter": 4}),
}
REGIONS = ("50%", "left-half", "top-half", "border")
SHOWN = ("self + chains", "4 AR steps")
REFERENCE_SEED, SEED = 7, 8


class Pages(NamedTuple):
    """Pages of the data set: their topics [N], and their tokens [N, L, d]."""

    labels: np.ndarray
    tokens: np.ndarray


def made_by(
    model, way: str, pages: Pages, mask: np.ndarray, seed: int, toy: bool
) -> tuple[np.ndarray, Info, float]:
    """The images, what they cost, and seconds of a batch: the fastest."""
    _, method, options = WAYS[way]
    known = Known(pages.tokens, mask) if mask.any() else None
    small = {"respacing": f"ddim{TOY_STEPS}"} if toy else {}
    how = Options(**{**model.sampling, "final_noise": True, "known": known, **options, **small})
    made = plan.resolve(model, pages.labels, method, how, BATCH)
    seconds, begun = [], time.perf_counter()

    def on_step(steps: int) -> None:  # a batch is one call
        nonlocal begun
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()

    tokens, info = generation.generate_batches(jax.random.key(seed), made, on_step)
    return pixels.to_images(model, tokens), info, min(seconds)


def measure(model, reader, pages: Pages, region: str, ways: list[str], toy: bool) -> list[dict]:
    mask, nothing = keep(region, model), np.zeros(model.network.seq_len, bool)
    reference, _, _ = made_by(model, "plain", pages, mask, REFERENCE_SEED, toy)
    reference_words, rows = reader(reference, pages.labels).words, []
    few = Pages(*(part[:BATCH] for part in pages))
    for way in ways:
        images, info, seconds = made_by(model, way, pages, mask, SEED, toy)
        whole = sum(made_by(model, way, few, nothing, SEED, toy)[1].sequential)
        reading, tokens = reader(images, pages.labels), pixels.to_tokens(model, images)
        right, batches = reading.right.mean(axis=1), len(pages.labels) / BATCH
        rows.append(
            {
                "region": region,
                "kept": int(mask.sum()),
                "way": way,
                "kind": WAYS[way][0],
                "images": len(images),
                "calls": sum(info.sequential) / batches,
                "calls_of_a_whole_page": whole,
                "seconds_per_image": seconds / BATCH,
                "words": float(right.mean()),
                "words_error": float(right.std() / np.sqrt(len(right))),
                "p": measures.as_often_right(reading.words, reference_words, pages.labels),
                "kept_bit_for_bit": bool((tokens[:, mask] == pages.tokens[:, mask]).all()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "| kept | of 64 tokens | way | | calls in sequence | of a whole page | s / image | words right"
        " | p beside plain |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        kind = "lossy" if row["kind"] == "lossy" else "**exact**"
        lines.append(
            f"| {row['region']} | {row['kept']} | {row['way']} | {kind} | {row['calls']:.0f}"
            f" | {row['calls_of_a_whole_page']:.0f} | {row['seconds_per_image']:.2f}"
            f" | {row['words']:.1%} ± {row['words_error']:.1%} | {row['p']:.2g} |"
        )
    return "\n".join(lines)


def show(model, reader, pages: Pages, region: str, rows: list[dict], toy: bool):
    """What stays, and how an exact and a lossy way complete it; misspelt words are framed."""
    mask, nothing = keep(region, model), np.zeros((len(pages.labels), model.network.seq_len), bool)
    shown = np.where(mask[:, None], pages.tokens, 0)
    found = [(f"what stays: {region}", marked(pixels.to_images(model, shown), nothing))]
    for row in rows:
        if row["region"] == region and row["way"] in SHOWN:
            images, _, _ = made_by(model, row["way"], pages, mask, SEED, toy)
            told = f"{row['way']} ({row['kind']}): {row['calls']:.0f} calls in sequence"
            told += f", {row['words']:.1%} of the words right"
            found.append((told, marked(images, misspelt(reader(images, pages.labels)))))
    return titled(found)


def make_parser() -> Parser:
    small = {"images": 8, "regions": "50%", "ways": ";".join(("plain", *SHOWN))}
    parser = Parser(__doc__, file=Path("inpainting.json"), rows=Path("inpainting.png"), **small)
    parser.add_argument("file", type=Path, metavar="OUT.json")
    parser.add_argument("--target", default="words", metavar="MODEL", help="of words (the embedded one)")
    parser.add_argument("--images", type=int, default=80, help="pages (80), a multiple of 8")
    parser.add_names("--regions", REGIONS, ";".join(REGIONS))
    parser.add_names("--ways", WAYS, ";".join(WAYS))
    parser.add_argument("--rows", type=Path, help="pictures of the first of --regions")
    parser.add_argument("--markdown", action="store_true", help="print what is there, and run nothing")
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    found = kept_cells(args.file, bool(args.markdown or (args.rows and not args.toy)))
    if args.markdown:
        print(markdown(found["cells"]))
        return
    args.draft = None
    model = load(args, args.target)
    reader = open_reader(args, model)
    if args.images % BATCH:
        parser.error(f"pages are made {BATCH} side by side; ask for a multiple")
    if not found["cells"] or not args.rows:
        pages = held_out(model, reader, args.images)
        found["cells"] = []
        for region in args.regions:
            found["cells"] += measure(model, reader, pages, region, args.ways, args.toy)
        found |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        print(markdown(found["cells"]))
    if args.rows:
        pages = held_out(model, reader, BATCH)
        show(model, reader, pages, args.regions[0], found["cells"], args.toy).save(args.rows)


def held_out(model, reader: measures.Reader, count: int) -> Pages:
    """Pages that no model was trained on."""
    batch = Words(reader.config).batch(0, count, split="held-out")
    images = as_bytes(batch.images)
    return Pages(batch.labels, pixels.to_tokens(model, images))


if __name__ == "__main__":
    main()
