"""What the pages print can be typed: commands and Python run page by page, in their order, at toy sizes.

A block that cannot run here says why in a comment before it, `<!-- not run: ... -->`; its commands are read
by the real parser all the same. Programs in benchmarks/ are run by test_benchmarks.py. Files that pages take
for given: tests/printed_files.py.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from printed_files import GIVEN

from cspd_jax import hub, weights
from cspd_jax.cli import main, make_parser, parser_of
from cspd_jax.networks.registry import kind_name
from cspd_jax.training import presets
from cspd_jax.training.data.text import Document

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^((?:<!--[^\n]*-->\n)*)```([^\n]*)\n(.*?)^```$", re.M | re.S)
PREPARED = ("python3 -m venv", ". .venv", "pip install")  # the environment that the tests run in

# How small it all is. A flag that a command has gets another value, by verb or for all of them; flags of
# ADDED are given besides, to each command that begins so.
OTHER = {
    "": {"--n": 4, "--labels": "0,1", "--num-iter": 4, "--steps": 4, "--grid": "1x2"},
    "distill": {"--samples": 64, "--questions": 20},
}
ADDED = {
    "generate": {"--n": 1},
    "sample": {"--n": 8, "--batch": 4},
    "text": {"--new-tokens": 8},
    "masked": {"--new-tokens": 8},
    "train": {"--steps": 2, "--batch": 2},
    "distill": {"--steps": 2, "--batch": 2},
    "distill --states": {"--ids": 20},
    "evaluate --samples": {"--batch": 4},
    "calibrate models/masked": {"--n": 2, "--new-tokens": 8},
    "convert sphere-b.pth": {"--heads": 2},
}
IN_PYTHON = {
    "50_000": "4", "max_new_tokens=64": "max_new_tokens=8", "respacing=28": "respacing=4",
    "grid=(16, 16)": "grid=(1, 2)", 'jax.config.update("jax_compilation_cache_dir", "compiled")': "",
}  # fmt: skip
CORPUS = tuple(Document(name, f"{name}: {'abcab ' * 400}") for name in ("tempfile", "b", "c"))


class Block(NamedTuple):
    """A fenced block: where its code begins, its language, and why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    code: str
    why_not: str | None

    @property
    def name(self) -> str:
        return f"{self.page.name}, line {self.line}"

    def commands(self) -> list[list[str]]:
        """Words of each command, without comments."""
        found = []
        for line in self.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                found.append(words[: words.index("&&")])
                words = words[words.index("&&") + 1 :]
            found.append(words)
        return [words for words in found if words]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCED.finditer(text):
        why = re.search(r"<!-- not run: (.+) -->", match[1])
        line = text[: match.start(3)].count("\n") + 1
        found.append(Block(page, line, match[2] or "sh", match[3], why[1] if why else None))
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def test_every_file_that_the_docs_name_exists():
    pages = PAGES
    folders = (ROOT, ROOT / "cspd_jax", ROOT / "tests", ROOT / "docs", ROOT / "benchmarks")
    pattern = re.compile(r"`([\w./*-]+\.(?:py|md|json|jsonl|txt|ipynb|toml))`|\]\(([\w./-]+)(?:#[\w-]+)?\)")
    made_by_users = {"report.json", "config.json", "tokenizer.json", "metrics.jsonl", "held_out.jsonl"}
    made_by_users |= {"manifest.json", "generation_config.json"}
    missing = []
    for page in pages:
        for code, link in pattern.findall(page.read_text(encoding="utf-8")):
            name = code or link
            if name.split("/")[-1] in made_by_users or "://" in name:
                continue
            places = [page.parent] if link else folders
            if not any(
                list(place.glob(name)) if "*" in name else (place / name).exists() for place in places
            ):
                missing.append(f"{page.name}: {name}")
    assert not missing


def is_elsewhere(words: list[str]) -> bool:
    """Whether a command makes the environment that the tests run in, or is one of test_benchmarks.py."""
    program = " ".join(words[:2])
    return " ".join(words).startswith(PREPARED) or (
        program.startswith(("python benchmarks/", "bash benchmarks/")) and (ROOT / words[1]).exists()
    )


def test_commands_are_understood():
    """By the parser of the command, also those that are not run; what nothing runs says so."""
    count = 0
    for block in ALL:
        for words in block.commands() if block.language == "sh" else ():
            assert block.why_not or words[0] == "cspd-jax" or is_elsewhere(words), f"{block.name}: {words}"
            if "cspd-jax" in words and words[0] != "cd":
                asked = make_parser().parse_args(words[words.index("cspd-jax") + 1 :])
                parser_of(asked.command)[1].parse_args(asked.arguments)
                count += 1
    assert count > 50


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    """The models of the package, each as narrow as the toy of its name in benchmarks/."""
    folder = tmp_path_factory.mktemp("shipped")
    for name, place in (hub.DEFAULTS | hub.TEXT_DEFAULTS).items():
        model = _toy().load(name)
        kind = "lm" if name in hub.TEXT_DEFAULTS else kind_name(model.config)
        weights.save(folder / place, kind, model.config, model.params, extra=model.metadata.get("extra"))
    return folder


def _toy():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import toy
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return toy


@pytest.fixture
def small(toys, tmp_path, monkeypatch) -> Path:
    """A folder to be in, in which everything is tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_SHIPPED", toys)
    monkeypatch.setattr("cspd_jax.training.data.text.documents", lambda: CORPUS)
    for name, run in presets.PRESETS.items():
        as_it_is = hasattr(run.model, "entering")
        fewer = {} if as_it_is else {"model": _toy().narrow(run.model)}
        fewer |= {"buckets": 1} if hasattr(run, "buckets") else {}
        fewer |= {"sample_every": 0} if hasattr(run, "sample_every") else {}
        monkeypatch.setitem(presets.PRESETS, name, dataclasses.replace(run, warmup=1, decay=1, **fewer))
    return tmp_path


def toy_sized(words: list[str]) -> list[str]:
    """A command of cspd-jax with other numbers."""
    verb, words = words[0], list(words)
    for flag, value in (OTHER[""] | OTHER.get(verb, {})).items():
        if flag in words:
            words[words.index(flag) + 1] = str(value)
    if words[1:] == ["--list"]:
        return words
    for flag, value in (ADDED.get(verb, {}) | ADDED.get(" ".join(words[:2]), {})).items():
        if flag not in words:
            words += [flag, str(value)]
    return words


def run(words: list[str], where: str) -> None:
    if is_elsewhere(words):
        return
    assert words[0] == "cspd-jax", f"{where}: {words[0]} is neither run nor marked so"
    words = toy_sized(words[1:])
    if words[0] == "convert":
        shutil.rmtree(words[2], ignore_errors=True)  # of the command before
    assert main(words) == 0, f"{where}: {shlex.join(words)}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_page_runs(page, small):
    for name, make in GIVEN.get(page.stem, {}).items():
        make(small / name)
    names: dict = {"__name__": page.stem}
    for block in blocks(page):
        if block.why_not:
            continue
        if block.language == "python":
            code = block.code
            for printed, smaller in IN_PYTHON.items():
                code = code.replace(printed, smaller)
            exec(compile(code, block.name, "exec", dont_inherit=True), names)
        elif block.language == "sh":
            for words in block.commands():
                run(words, block.name)
    jax.clear_caches()
