"""Every link from a page or notebook to another leads to a file, and to a heading."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for folder in (".", "docs", "tests", "notebooks")
    for page in sorted(Path(ROOT, folder).glob("*"))
    if page.suffix in (".md", ".ipynb")
]


def text_of(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def headings(page):
    """The names that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.*)$", text_of(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in found}


def broken(page):
    """The links of a page that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        file, _, heading = link.partition("#")
        there = page.parent / file if file else page
        if re.match("https?:", link):
            continue
        if not there.exists() or (heading and heading not in headings(there)):
            yield link


def test_links_lead_somewhere():
    assert len(PAGES) > 15
    assert not {page.name: list(broken(page)) for page in PAGES if any(broken(page))}


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n[1](#a-b) [2](#b) [3](none.md) [4](page.md#a-b)")
    assert list(broken(page)) == ["#b", "none.md"]
