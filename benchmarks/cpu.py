"""Measures where exact speculation pays on the machine at hand: seconds of images by
the embedded models, one and eight together. The plain sampler, speculation along chains
and speculation over tokens take turns.

    python benchmarks/cpu.py FILE.json  # measures, and prints the table
    python benchmarks/cpu.py FILE.json --markdown  # prints the table of a file
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from toy import Parser, begin, load, machine, results, say, write_results

from cspd_jax.comparison import Request, side_by_side
from cspd_jax.image import ChainSpeculation, Options, Plain, SelfSpeculation

MODELS = ("words-causal", "default-causal", "words", "default")
IMAGES = (1, 8)
REPEATS = 5
CAUSAL = {
    "M 8": (Plain(), ChainSpeculation(8)),
    "M 12": (Plain(), ChainSpeculation(12)),
    "M 16": (Plain(), ChainSpeculation(16)),
}
WAYS = CAUSAL | {
    "gamma 2, M 8": (SelfSpeculation(2), ChainSpeculation(8)),
    "gamma 8, M 16": (SelfSpeculation(8), ChainSpeculation(16)),
}


def measured(name: str, images: int, toy: bool) -> dict[str, Any]:
    """Returns the least seconds and the calls in sequence of every way."""
    model = load(name, toy)
    ways = {"plain": (Plain(), "plain"), **(CAUSAL if "causal" in name else WAYS)}
    labels = np.arange(images) % model.config.num_classes
    requests = {
        way: Request(
            jax.random.key(0),
            model,
            labels,
            method,
            Options(denoise=denoise, **model.sampling),
        )
        for way, (method, denoise) in ways.items()
    }
    made = side_by_side(requests, 1 if toy else REPEATS)
    return {
        "model": name,
        "images": images,
        "seconds": {way: info.seconds for way, (_, info) in made.items()},
        "calls": {way: info.sequential for way, (_, info) in made.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown: seconds of the plain sampler, and how
    many times as fast the other ways are."""
    lines = [["model", "images", "plain", *WAYS], ["---"] * (3 + len(WAYS))]
    for row in rows:
        plain = row["seconds"]["plain"]
        faster = {way: plain / seconds for way, seconds in row["seconds"].items()}
        best = max(faster, key=lambda way: faster[way])
        cells = {way: f"{of:.2f}x" for way, of in faster.items()}
        cells[best] = f"**{cells[best]}**"
        ways = [cells.get(way, "") for way in WAYS]
        lines.append([f"`{row['model']}`", str(row["images"]), f"{plain:.2f} s", *ways])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("cpu.json"))
    parser.add_argument("file", type=Path, help="the results")
    parser.add_argument(
        "--markdown", action="store_true", help="print an existing file's table"
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    if not args.markdown:
        rows = []
        few = slice(None, None, 2 if args.toy else 1)
        for name in MODELS[few]:
            for images in IMAGES[few]:
                rows.append(measured(name, images, args.toy))
                say(str(rows[-1]))
        write_results(args.file, {"machine": machine(), "rows": rows})
    print(table(results(args.file)["rows"]))


if __name__ == "__main__":
    main()
