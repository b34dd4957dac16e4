"""Runs notebooks from top to bottom in a temporary folder, and keeps what they show.

    python notebooks/execute.py [notebooks/1_mar.ipynb ...]

Progress bars and the time of execution are not kept. Prints the seconds that each took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> float:
    """Seconds; the file is replaced only by a notebook that ran to its end."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook,
            timeout=3600,
            kernel_name="python3",
            resources=resources,
            record_timing=False,
        ).execute()
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]
            for output in cell.outputs:
                # Of pictures that are there as PNG, too.
                output.get("data", {}).pop("image/jpeg", None)
    partial = path.with_suffix(".partial")
    nbformat.write(notebook, partial)
    partial.replace(path)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path)
    for path in parser.parse_args().notebooks or sorted(HERE.glob("*.ipynb")):
        print(f"{path.name}: {execute(path):.0f} s", flush=True)


if __name__ == "__main__":
    main()
