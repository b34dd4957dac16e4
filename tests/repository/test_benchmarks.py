"""Every program in benchmarks/ goes through all of its code on tiny models (`--toy`), tells what it does
(`--help`) without doing it, and understands the commands that the pages name."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = sorted(p.stem for p in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in p.read_text())
QUICK = ("make_prompts",)  # in a few seconds
NEED_TORCH = ("plain", "eager_launches", "text", "real_lm", "gpu")
BESIDE_TORCH = ("inner", "causal")  # with a part that is left out without it

ADD_ONLY = (
    "accelerator",
    "gpu",
    "scaling",
)  # to committed rows, each known by its device; none is made again
OF_THE_REPOSITORY = ("ship_default",)  # what they are for

# Runs in benchmarks/'s place, so that one process imports everything once. argv: folder of the programs, JSON
# of [name, arguments] each, and the repository. Prints what is refused, and who would write there unasked.
PARSE = """
import importlib, json, pathlib, sys
refused, unasked = [], set()
for name, arguments in json.loads(sys.argv[2]):
    sys.path.insert(0, sys.argv[1])  # before the folders that programs put there
    parser = importlib.import_module(name).make_parser()
    for action in parser._actions:
        if isinstance(action.default, pathlib.Path) and action.default.is_relative_to(sys.argv[3]):
            unasked.add((name, action.dest))
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        refused.append([name, arguments, end.code])
print(json.dumps([refused, sorted(unasked)]))
"""
HELP = """
import contextlib, io, json, runpy, sys
found, folder, names = {}, sys.argv[1], json.loads(sys.argv[2])
for name in names:
    sys.path.insert(0, folder)  # before the folders that programs put there
    sys.argv, said = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
            found[name] = "went on"
        except SystemExit as end:
            found[name] = [end.code, said.getvalue()]
    assert "torch" not in sys.modules, name
print(json.dumps(found))
"""


REFUSED = """
import contextlib, io, json, runpy, sys
found, path = [], list(sys.path)
folder, asked = sys.argv[1], json.loads(sys.argv[2])
for name, *arguments in asked:
    sys.path[:] = [folder, *path]
    sys.argv, said, code = [name, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            try:
                runpy.run_path(f"{folder}/{name}", run_name="__main__")
            except Exception:
                sys.excepthook(*sys.exc_info())  # which says a sentence and ends it
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""
# All of them one after another, as importing and compiling is most of it. argv: as before, and where each one
# is run, in a folder of its own. Prints for each its exit code, its last words and the files that it left.
TOYS = """
import contextlib, io, json, os, pathlib, runpy, sys, traceback
folder, names, place = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
found, path = {}, list(sys.path)
for name in names:
    own = pathlib.Path(place, name)
    own.mkdir()
    os.chdir(own)
    sys.path[:] = [folder, *path]
    for module, held in list(sys.modules.items()):
        if str(getattr(held, "__file__", "")).startswith(folder):
            del sys.modules[module]  # what they share may remember the last one
    sys.argv, said, code = [f"{folder}/{name}.py", "--toy"], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = traceback.format_exc()
    found[name] = [code, said.getvalue()[-3000:], os.listdir()]
print(json.dumps(found))
"""


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / ".cache"), **more}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )


def committed() -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in BENCHMARKS.rglob("*") if "__pycache__" not in p.parts}


def all_of_it_runs(names: Iterable[str], folder: Path) -> None:
    kept = committed()
    arguments = [str(BENCHMARKS), json.dumps(list(names)), str(folder)]
    done = run(["-c", TOYS, *arguments], folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (code, said, left) in json.loads(done.stdout.splitlines()[-1]).items():
        assert code == 0 and re.search(r"\d", said) and "Traceback" not in said, (name, code, said)
        assert left == [], name
    assert committed() == kept  # no result is touched
    assert {p.name for p in folder.iterdir()} <= {".cache", *names}


def test_what_is_quick_runs_on_tiny_models(tmp_path):
    all_of_it_runs(QUICK, tmp_path)


@pytest.mark.slow
def test_all_of_it_runs_on_tiny_models(tmp_path):
    all_of_it_runs([name for name in NAMES if name not in (*QUICK, *NEED_TORCH)], tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", NEED_TORCH)
def test_all_of_it_runs_with_torch(name, tmp_path):
    all_of_it_runs([name], tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", BESIDE_TORCH)
def test_all_of_it_runs_beside_torch(name, tmp_path):
    pytest.importorskip("torch")
    done = run([str(BENCHMARKS / f"{name}.py"), "--toy"], tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert all(row["reference"] for row in found.get("token", [])) and all(
        row["torch"] for row in found["seconds"] if name == "causal"
    )


@pytest.mark.slow
def test_help_does_nothing_else(tmp_path):
    done = run(["-c", HELP, str(BENCHMARKS), json.dumps(NAMES)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (code, said) in json.loads(done.stdout).items():
        assert code == 0 and said.startswith("usage:") and "--toy" in said, name
    assert [p.name for p in tmp_path.iterdir() if p.name != ".cache"] == []  # matplotlib's


def commands() -> list[tuple[str, list[str]]]:
    """What the pages and the programs' own docstrings tell to type: names and arguments."""
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


@pytest.mark.slow
def test_the_commands_of_the_pages_are_understood(tmp_path):
    found = commands()
    assert len(found) > 50 and {name for name, _ in found} <= set(NAMES)
    toys = [(name, ["--toy"]) for name in NAMES]
    done = run(["-c", PARSE, str(BENCHMARKS), json.dumps(found + toys), str(ROOT)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    refused, unasked = json.loads(done.stdout)
    assert not refused, done.stderr
    read = {("convert_memory", "shapes")}
    assert {name for name, what in unasked if (name, what) not in read} <= {*ADD_ONLY, *OF_THE_REPOSITORY}


@pytest.mark.slow
def test_rows_of_another_machine_are_not_continued(tmp_path):
    file = tmp_path / "auto.json"
    file.write_text(json.dumps({"here": {"machine": "another"}, "rows": []}))
    before = file.read_bytes()
    done = run([str(BENCHMARKS / "auto.py"), "--toy", "--file", str(file)], tmp_path)
    assert done.returncode == 2 and "name another file" in done.stderr and file.read_bytes() == before


BAD_INPUT = [
    ("rivals.py x.json --images 0", "'0' is not a positive whole number"),
    ("rivals.py x.json --cells nosuch", "'nosuch' is unknown; there are plain; 32 AR steps"),
    ("rivals.py x.json --markdown", "x.json holds no results yet"),
    ("rivals.py damaged.json --markdown", "damaged: "),
    ("rivals.py x.json --target nosuch", "nosuch is neither a checkpoint folder nor"),
    ("rivals.py list.json --markdown", "list.json does not hold cells, as this program writes them"),
    ("rivals.py x.json --target default", "default makes no pictures of words"),
    ("same_law.py here --n 0", "'0' is not a positive whole number"),
    ("same_law.py here --num-iter 99", "--num-iter is 99; it must be at most 64"),
    ("same_law.py here --steps flow5", "steps 'flow5' do not go with this model"),
    ("same_law.py here --cfg nan", "cfg is nan; it must be a finite number"),
    ("causal_ahead.py --images 1", "ask for at least 2"),
    ("causal_ahead.py --draft default", "--draft default is no causal model"),
    ("causal_ahead.py --draft words-causal", "the draft does not fit the target"),
    ("masked.py --only alone --temperature nan", "'nan' is not a number from 0 to"),
    ("masked.py --only sampled --temperature -1", "'-1' is not a number from 0 to"),
    ("text.py --only pythia --acceptance nan", "'nan' is not a number from 0 to 1"),
    ("text.py --only pythia --acceptance 2", "'2' is not a number from 0 to 1"),
    ("methods.py x.jsonl --methods nosuch", "'nosuch' is unknown; there are plain"),
    ("methods.py x.jsonl --batch x", "'x' is not a positive whole number"),
    ("chain_rivals.py x.json --windows 0", "'0' is not a positive whole number"),
    ("methods.py list.json", "list.json does not hold rows"),
    ("methods.py nowhere/x.jsonl", "nowhere, where x.jsonl would be written, is no folder"),
    ("accelerator.py --table --file list.json", "list.json does not hold rows"),
    ("convert_memory.py --shapes list.json", "list.json does not hold keys"),
    ("causal.py --sizes nosuch", "'nosuch' is unknown; there are"),
    ("trees.py --ways (", "'(' is no regular expression"),
    ("paper.py nosuch", "'nosuch' is unknown; there are table1"),
]


@pytest.mark.slow
def test_bad_input_is_one_sentence(tmp_path):
    """All of it in one process, which imports everything once."""
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    asked = [command.split() for command, _ in BAD_INPUT]
    done = run(["-c", REFUSED, str(BENCHMARKS), json.dumps(asked)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for (command, sentence), (code, said) in zip(BAD_INPUT, found, strict=True):
        assert code == 2 and sentence in said and "Traceback" not in said, (command, code, said)
    assert {p.name for p in tmp_path.iterdir()} <= {"damaged.json", "list.json", ".cache"}
