"""A folder is a layer: it imports the folders below it, at the top of a file, in a
function or for types. Algorithms import neither networks nor weights."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from test_size import tokens_of

# From the bottom up.
LAYERS = (
    "check",
    "audit",
    "_utils",
    "measure",
    "info",
    "diffusion",
    "coupling",
    "keys",
    "parallel",
    "shell",
    "networks",
    "models",
    "language_models",
    "sampling",
    "tokenizers",
    "image",
    "text",
    "masked",
    "comparison",
    "converters",
    "weights",
    "hub",
    "training",
    "reports",
    "cli",
    "tools",
)
# Families know nothing of one another.
NOT_BELOW = {("text", "image"), ("masked", "image"), ("masked", "text")}
FAMILIES = ("cspd_jax.image", "cspd_jax.text", "cspd_jax.masked")
# Their modules that import networks; all others are algorithms.
OF_NETWORKS = {
    "cspd_jax.image.pixels",
    "cspd_jax.image.prompts",
    "cspd_jax.masked.generation",
    "cspd_jax.text.states",
    "cspd_jax.text.trees.head",
}
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cspd_jax"


def modules():
    """Name -> syntax tree; `converters/` is installed inside the package."""
    paths = [(path, path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")]
    paths += [
        (p, "cspd_jax" / p.relative_to(ROOT))
        for p in (ROOT / "converters").rglob("*.py")
    ]
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text("utf-8")
        )
        for path, name in paths
    }


def imports(tree, known):
    """The modules of the package that a file imports, inside functions too."""
    if isinstance(tree, ast.Import):
        return {alias.name for alias in tree.names} & known.keys()
    if isinstance(tree, ast.ImportFrom):
        inside = {f"{tree.module}.{alias.name}" for alias in tree.names}
        return (
            inside if inside <= known.keys() else inside | {tree.module}
        ) & known.keys()
    return set().union(*(imports(child, known) for child in ast.iter_child_nodes(tree)))


TREES = modules()


def layer_of(module):
    return module.split(".")[1]


def is_below(lower, upper):
    return (
        LAYERS.index(lower) <= LAYERS.index(upper) and (upper, lower) not in NOT_BELOW
    )


def test_a_layer_imports_the_layers_below_it():
    inside = TREES.keys() - {"cspd_jax", "cspd_jax.__main__"}
    assert {layer_of(module) for module in inside} == set(LAYERS)
    for module in inside:
        for other in imports(TREES[module], TREES) - {"cspd_jax"}:
            assert is_below(layer_of(other), layer_of(module)), (
                f"{module} imports {other}"
            )


def test_algorithms_import_no_networks():
    """Nor weights, which lie above them."""
    found = {
        module
        for module in TREES
        if module.startswith(FAMILIES)
        if any("cspd_jax.networks" in other for other in imports(TREES[module], TREES))
    }
    assert found == OF_NETWORKS


def test_functions_are_small():
    """At most 8 parameters and 750 tokens, outside networks, where a signature follows
    a published one."""
    outside = [name for name in TREES if not name.startswith("cspd_jax.networks")]
    for module in outside:
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = node.args
                every = (*named.posonlyargs, *named.args, *named.kwonlyargs)
                parameters = {argument.arg for argument in every} - {"self", "cls"}
                size = tokens_of(ast.unparse(node))
                found = (module, node.name, parameters, size)
                assert len(parameters) <= 8 and size <= 750, found


def test_keys_of_seeds_are_made_in_one_place():
    """`jax.random.key` asks which generator is the default; where shapes alone count,
    it may, too."""
    making = re.compile(r"random\.(key|PRNGKey)\(.*")
    found = {
        (path.relative_to(PACKAGE).as_posix(), made[0])
        for path in PACKAGE.rglob("*.py")
        for made in making.finditer(
            re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.S)
        )
    }
    names = {path for path, _ in found - {("networks/layers.py", "random.key(0)))")}}
    assert names == {"keys.py"}, names


OPTIONAL = {
    "gguf",
    "gradio",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "scipy",
    "tokenizers",
}


def test_the_package_loads_nothing_that_need_not_be_there():
    code = "import sys, cspd_jax; print(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {*OPTIONAL, "orbax", "torch", "transformers"}
    assert {"cspd_jax", "jax", "safetensors"} <= loaded


def test_an_import_upwards_is_found():
    """The negative control of the tests above."""
    assert not is_below("tools", "cli")
    assert not is_below("image", "text")
    assert is_below("keys", "masked")
    tree = ast.parse(
        "from cspd_jax.image import sampler\ndef f():\n    import cspd_jax.hub\n"
    )
    assert imports(tree, TREES) == {"cspd_jax.image.sampler", "cspd_jax.hub"}
