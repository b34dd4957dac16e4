"""Every program in benchmarks/ goes through all of its code on tiny models (`--toy`),
has a help, and understands the commands that the pages name."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NAMES = sorted(
    p.stem
    for p in BENCHMARKS.glob("*.py")
    if 'if __name__ == "__main__":' in p.read_text()
)


def results():
    return {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}


def runs_on_tiny_models(name, folder):
    """Runs a program, which prints numbers and leaves nothing here nor among the
    results."""
    before = results()
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / ".cache")}
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--toy"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\d", done.stdout + done.stderr)
    assert results() == before and {path.name for path in folder.iterdir()} <= {
        ".cache"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_runs_on_tiny_models(name, tmp_path):
    runs_on_tiny_models(name, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpu", "text"])  # they run with and without it
def test_all_of_it_runs_with_torch(name, tmp_path):
    runs_on_tiny_models(name, tmp_path)


def commands():
    """Returns what the pages and the programs' own docstrings tell to type: names and
    arguments."""
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    texts = [page.read_text(encoding="utf-8") for page in pages]
    texts += [
        (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
        for name in NAMES
    ]
    text = "\n".join(texts).replace("\\\n", " ")
    found = []
    quoted = re.findall(r"`python\s+benchmarks/([^`]+)`", text)
    for command in (
        *quoted,
        *re.findall(r"^(?:    .*?)?python benchmarks/(.+)$", text, re.MULTILINE),
    ):
        program, *arguments = shlex.split(
            command.partition(" #")[0].replace("...", " ")
        )
        # One of several.
        words = [re.sub(r"[\[\]]", "", word).partition("|")[0] for word in arguments]
        words = ["1" if word.isupper() else word for word in words]  # a placeholder
        found.append((program.removesuffix(".py"), words))
    return found


def test_programs_have_a_help_and_understand_the_commands_of_the_pages(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = commands()
    assert len(found) > 25
    for name, arguments in [*found, *((name, ["--toy"]) for name in NAMES)]:
        parser = importlib.import_module(name).make_parser()
        parser.parse_args(arguments)
        assert parser.format_help().startswith("usage:")
