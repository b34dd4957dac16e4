"""Builds the wheel and the source archive, installs each alone in environments of its own, and shows what a
user of them gets: sizes, seconds, and an image.

    python tests/release.py                              # this Python, newest and oldest versions
    python tests/release.py --python python3.13          # another one, too; may be repeated
    python tests/release.py --keep dist                  # where the two files stay

Needs `build` (extra dev) and packages to install from, and some minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_REPEATS = 5
_SMALL = ("generate", "--method", "plain", "--num-iter", "4", "--steps", "5", "--labels", "0", "--n", "1")
_IMPORT = "import time; t = time.perf_counter(); import cspd_jax; print(time.perf_counter() - t)"
_VERSIONS = "import jax, numpy, flax; print('JAX', jax.__version__, 'NumPy', numpy.__version__)"


def build(folder: Path) -> list[Path]:
    """The source archive, and the wheel that is made of it."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]


def tried(file: Path, python: str, oldest: bool, folder: Path) -> str:
    """A row of the table: the file installed in a new environment, and what it does there."""
    environment = folder / "venv"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    inside = environment / "bin" / "python"
    bounds = ["-c", str(ROOT / "tests" / "oldest.txt")] * oldest
    started = time.perf_counter()
    subprocess.run([inside, "-m", "pip", "install", "-q", *bounds, str(file)], check=True)
    installed = time.perf_counter() - started
    # Away from the repository, and with a cache of its own.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    clean["XDG_CACHE_HOME"] = str(folder / "cache")

    def told(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=folder, env=clean, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    program = environment / "bin" / "cspd-jax"
    told(program, "--version")  # writes the byte code
    version = statistics.median(_seconds(lambda: told(program, "--version")) for _ in range(_REPEATS))
    imported = statistics.median(float(told(inside, "-c", _IMPORT)) for _ in range(_REPEATS))
    image = _seconds(lambda: told(program, *_SMALL, "--out", "made"))
    assert (folder / "made" / "samples.png").exists()
    name = f"{file.suffix.lstrip('.')}, {told(inside, '--version')}, {told(inside, '-c', _VERSIONS)}"
    return f"| {name} | {installed:.0f} s | {version:.2f} s | {imported:.3f} s | {image:.1f} s |"


def _seconds(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="another interpreter to install for")
    parser.add_argument("--keep", type=Path, help="folder for the wheel and the source archive")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = build(args.keep or folder / "dist")
        for file in files:
            print(f"{file.name}: {file.stat().st_size / 2**20:.2f} MiB")
        print("| installed alone | install | `--version` | `import cspd_jax` | an image, cold |")
        print("|---|---|---|---|---|")
        wheel, archive = files
        runs = [
            (wheel, sys.executable, False),
            (wheel, sys.executable, True),
            (archive, sys.executable, False),
        ]
        runs += [(wheel, python, False) for python in args.python]
        for number, (file, python, oldest) in enumerate(runs):
            place = folder / str(number)
            place.mkdir()
            print(tried(file, python, oldest, place), flush=True)


if __name__ == "__main__":
    main()
