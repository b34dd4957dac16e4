"""Every program in benchmarks/ goes through all of its code on tiny models (`--toy`), has a help, and
understands the commands that the pages name."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in p.read_text())
QUICK = ("ship_default",)  # in a few seconds

# One process imports everything once. argv: folder of the programs, JSON of [name, arguments] each. Prints
# the help of every program that is named, and which arguments are refused.
PARSE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
helps, refused = {}, []
for name, arguments in json.loads(sys.argv[2]):
    parser = importlib.import_module(name).make_parser()
    helps[name] = parser.format_help()
    try:
        parser.parse_args(arguments)
    except SystemExit:
        refused.append([name, arguments])
assert "torch" not in sys.modules
print(json.dumps([helps, refused]))
"""


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / ".cache"), **more}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def runs_on_tiny_models(name: str, folder: Path) -> None:
    """Runs a program, which prints numbers and leaves nothing here nor among the results."""
    results = {p: p.read_bytes() for p in (BENCHMARKS / "results").iterdir()}
    done = run([str(BENCHMARKS / f"{name}.py"), "--toy"], folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert re.search(r"\d", done.stdout + done.stderr)
    assert {p: p.read_bytes() for p in (BENCHMARKS / "results").iterdir()} == results
    assert {p.name for p in folder.iterdir()} <= {".cache"}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_what_is_quick_runs_on_tiny_models(name, tmp_path):
    runs_on_tiny_models(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_all_of_it_runs_on_tiny_models(name, tmp_path):
    runs_on_tiny_models(name, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpu", "text"])  # they run with and without it
def test_all_of_it_runs_with_torch(name, tmp_path):
    runs_on_tiny_models(name, tmp_path)


def commands() -> list[tuple[str, list[str]]]:
    """Returns what the pages and the programs' own docstrings tell to type: names and arguments."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [(BENCHMARKS / f"{name}.py").read_text(encoding="utf-8").split('"""')[1] for name in NAMES]
    found = []
    for text in texts:
        text = text.replace("\\\n", " ")
        quoted = re.findall(r"`python\s+benchmarks/([^`]+)`", text)
        blocks = re.findall(r"^(?:    .*?)?python benchmarks/(.+)$", text, re.MULTILINE)
        for command in (*quoted, *blocks):
            program, *arguments = shlex.split(command.partition(" #")[0].replace("...", " "))
            words = [re.sub(r"[\[\]]", "", word).partition("|")[0] for word in arguments]  # one of several
            words = ["1" if word.isupper() else word for word in words]  # a placeholder
            found.append((program.removesuffix(".py"), words))
    return found


def test_programs_have_a_help_and_understand_the_commands_of_the_pages(tmp_path):
    found = commands()
    assert len(found) > 25 and {name for name, _ in found} <= set(NAMES)
    asked = [*found, *((name, ["--toy"]) for name in NAMES)]
    helps, refused = json.loads(run(["-c", PARSE, str(BENCHMARKS), json.dumps(asked)], tmp_path).stdout)
    assert not refused
    for name, said in helps.items():
        assert said.startswith("usage:") and "--toy" in said, name
