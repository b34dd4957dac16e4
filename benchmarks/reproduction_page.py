"""The results of `cspd-jax reproduce all` in docs/reproduction.md, below what is written there by hand.

    cspd-jax reproduce all --out OUT
    python benchmarks/reproduction_page.py OUT

Replaces everything after the line `<!-- results -->`, and the pictures in docs/reproduction/.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from cspd_jax.apps.paper import NAMES
from cspd_jax.apps.paper.experiment import Table
from cspd_jax.apps.paper.results import markdown_table

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


def main() -> None:
    out = Path(sys.argv[1])
    files = {name: out / f"{name}.json" for name in NAMES}
    reports = [json.loads(file.read_text()) for file in files.values() if file.exists()]
    missing = [f"`{name}`" for name, file in files.items() if not file.exists()]
    spent = [json.loads(p.read_text()) for p in (out / "cells").glob("*.json") if "derived" not in p.name]
    together = sum(cell["row"]["spent"] for cell in spent) / 60
    first = reports[0]
    machine, packages = first["machine"], first["versions"]
    (DOCS / "reproduction").mkdir(exist_ok=True)
    sections = []
    for told in reports:
        picture = out / f"{told['name']}.png"
        if picture.exists():
            shutil.copyfile(picture, DOCS / "reproduction" / picture.name)
        sections.append(section(told, picture.exists()))
    head = (
        f"{machine['processor']}, {machine['cores']} threads; "
        + ", ".join(f"{name} {version}" for name, version in packages.items())
        + f". All together, with what they share run once: {together:.0f} minutes.\n"
    )
    if missing:
        head += f"\nNot run yet: {', '.join(missing)}.\n"
    page = DOCS / "reproduction.md"
    written = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text("\n".join([f"{written}{MARK}", f"{times(reports)}\n", head, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
