"""The results of `cspd-jax reproduce all` in docs/reproduction.md, below what is written there by hand.

    cspd-jax reproduce all --out OUT
    python benchmarks/reproduction_page.py OUT

Replaces everything after the line `<!-- results -->`, and the pictures in docs/reproduction/.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from PIL import Image
from toy import Parser, begin

from cspd_jax.apps.paper import NAMES
from cspd_jax.apps.paper.experiment import Table
from cspd_jax.apps.paper.results import markdown_table
from cspd_jax.errors import UserError

DOCS = Path(__file__).parents[1] / "docs"
MARK = "<!-- results -->\n"


def section(told: dict, picture: bool) -> str:
    """An experiment, without what all have in common."""
    tables = "\n\n".join(markdown_table(Table(**table)) for table in told["tables"])
    shown = f"\n\n![{told['title']}](reproduction/{told['name']}.png)" if picture else ""
    return (
        f"## {told['name']}: {told['title']}\n\n`{told['command']}`\n\n"
        f"The paper: {told['the_paper_shows']}\n\nWhy ours differs: {told['why_ours_differs']}\n\n"
        f"{tables}{shown}\n"
    )


def times(reports: list[dict]) -> str:
    """What each experiment takes alone, and all together, whose cells are shared."""
    lines = ["| experiment | cells | images | seconds alone |", "|---|---|---|---|"]
    lines += [
        f"| {told['name']} | {told['cells']} | {told['images']} | {told['seconds']:.0f} |" for told in reports
    ]
    return "\n".join(lines)


def write_toy(out: Path, docs: Path) -> None:
    """What `cspd-jax reproduce` leaves, of one experiment, and a page."""
    (out / "cells").mkdir(parents=True)
    docs.mkdir()
    name = next(iter(NAMES))
    table = {"title": "A table", "columns": ["way", "seconds"], "rows": [["plain", 1.0]], "note": ""}
    told = {
        "name": name, "title": "An experiment", "command": f"cspd-jax reproduce {name}", "cells": 1,
        "images": 1, "the_paper_shows": "so", "why_ours_differs": "it does not", "seconds": 1.0,
        "tables": [table],
        "machine": {"processor": "none", "cores": 1}, "versions": {"jax": "0"},
    }  # fmt: skip
    (out / f"{name}.json").write_text(json.dumps(told))
    (out / "cells" / "one.json").write_text(json.dumps({"row": {"spent": 1.0}}))
    Image.new("RGB", (4, 4)).save(out / f"{name}.png")
    (docs / "reproduction.md").write_text(f"By hand.\n\n{MARK}")


def make_parser() -> Parser:
    parser = Parser(__doc__, out=Path("out"), docs=Path("docs"))
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page (docs)")
    return parser


def main() -> None:
    args = begin(make_parser())
    out, docs = args.out, args.docs
    if args.toy:
        write_toy(out, docs)
    files = {name: out / f"{name}.json" for name in NAMES}
    reports = [json.loads(file.read_text()) for file in files.values() if file.exists()]
    if not reports:
        raise UserError(f"{out} holds none of {', '.join(file.name for file in files.values())}")
    missing = [f"`{name}`" for name, file in files.items() if not file.exists()]
    spent = [json.loads(p.read_text()) for p in (out / "cells").glob("*.json") if "derived" not in p.name]
    together = sum(cell["row"]["spent"] for cell in spent) / 60
    first = reports[0]
    machine, packages = first["machine"], first["versions"]
    (docs / "reproduction").mkdir(exist_ok=True)
    sections = []
    for told in reports:
        picture = out / f"{told['name']}.png"
        if picture.exists():
            shutil.copyfile(picture, docs / "reproduction" / picture.name)
        sections.append(section(told, picture.exists()))
    head = (
        f"{machine['processor']}, {machine['cores']} threads; "
        + ", ".join(f"{name} {version}" for name, version in packages.items())
        + f". All together, with what they share run once: {together:.0f} minutes.\n"
    )
    if missing:
        head += f"\nNot run yet: {', '.join(missing)}.\n"
    page = docs / "reproduction.md"
    written = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text("\n".join([f"{written}{MARK}", f"{times(reports)}\n", head, *sections]), encoding="utf-8")
    print(f"{page}: {len(reports)} experiments")


if __name__ == "__main__":
    main()
