"""Each room of the house may only become smaller, counted in code.

    python tests/repository/test_size.py  # the rooms: tokens, recorded, ceiling
    python tests/repository/test_size.py --write  # records what has become smaller

A token is a name, a number, a string or a sign. Comments, docstrings, line ends and
indentation are free, and a long name costs what a short one does.
"""

import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("size.json")
SLACK = 1.03  # what a room may have above what is recorded

# (folders and files inside cspd_jax/ or above it, the ceiling to reach).
ROOMS = {
    "coupling, diffusion, keys": (("coupling", "diffusion", "keys.py"), 10_500),
    "image": (("image",), 27_500),
    "text": (("text", "sampling.py", "language_models.py"), 14_500),
    "masked": (("masked",), 12_800),
    "networks": (("networks",), 23_000),
    "shell, models, weights, parallel, _utils": (
        (
            "models.py",
            "weights.py",
            "hub.py",
            "tokenizers.py",
            "_utils",
            "check.py",
            "info.py",
            "measure.py",
            "comparison.py",
            "parallel.py",
            "shell.py",
            "__init__.py",
        ),
        13_400,
    ),
    "audit": (("audit.py",), 2_600),
    "converters": (("../converters",), 13_400),
    "training": (("training",), 17_300),
    "cli, reports, tools": (("cli", "reports", "tools", "__main__.py"), 19_000),
    "tests": (("../tests",), 104_000),
    "benchmarks": (("../benchmarks",), 28_000),
}
OUTSIDE = ("tests", "benchmarks")
PAGES = ("README.md", "docs")
MOST_WORDS = 18_000
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def tokens_of(code):
    """Counts the tokens of a module without its comments, docstrings and layout."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    found = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(
        token.type not in LAYOUT and token.start not in docstrings for token in found
    )


def words_of(page):
    return len(page.split())


def files(places, base, kind):
    found = []
    for place in places:
        path = base / place
        found += [path] if path.is_file() else path.rglob(f"*.{kind}")
    return found


def total(paths, measure):
    return sum(measure(path.read_text(encoding="utf-8")) for path in paths)


def sizes():
    """Returns (size, ceiling) of each room in tokens, and of the pages in words."""
    found = {
        name: (total(files(places, ROOT / "cspd_jax", "py"), tokens_of), ceiling)
        for name, (places, ceiling) in ROOMS.items()
    }
    found["words of the pages"] = total(files(PAGES, ROOT, "md"), words_of), MOST_WORDS
    return found


def allowed(recorded, ceiling):
    """Returns the largest size that passes: a room is free below its ceiling, and has a
    little room above what is recorded."""
    return max(ceiling, int(SLACK * recorded))


def test_no_room_grows():
    """What has become smaller is recorded by `--write`."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    grown = [
        f"{name} has {size}, {size - allowed(recorded[name], ceiling)} more than it may"
        for name, (size, ceiling) in sizes().items()
        if size > allowed(recorded[name], ceiling)
    ]
    advice = (
        "delete what nobody needs in the same room; if the growth is worth it, say so"
        " in the pull request and raise the number in tests/repository/size.json by"
        " hand"
    )
    assert not grown, f"{'; '.join(grown)}: {advice}"


def test_layout_and_words_are_free():
    """The same function, written densely and with room, has one size; another argument
    has another."""
    dense = "def f(a, b): return a+b"
    roomy = '''
def f(a, b):  # two numbers
    """Adds."""

    return (
        a + b
    )
'''
    assert tokens_of(roomy) == tokens_of(dense) + 2  # the parentheses
    assert tokens_of("def f(a, b, c): return a+b") > tokens_of(dense)


def test_every_file_of_the_package_is_in_a_room():
    counted = {
        path.resolve()
        for places, _ in ROOMS.values()
        for path in files(places, ROOT / "cspd_jax", "py")
    }
    package = (ROOT / "cspd_jax").rglob("*.py")
    assert not [path for path in package if path.resolve() not in counted]


def main():
    now = sizes()
    recorded = {}
    if RECORDED.exists():
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    for name, (size, ceiling) in now.items():
        print(f"{name:42} {size:7} {recorded.get(name, size):7} {ceiling:7}")
    package = sum(now[name][0] for name in ROOMS if name not in OUTSIDE)
    print(f"{'package with converters':42} {package:7}")
    if "--write" in sys.argv:
        least = {
            name: min(size, recorded.get(name, size)) for name, (size, _) in now.items()
        }
        RECORDED.write_text(json.dumps(least, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
