"""What a user imports: nothing changes by accident, and a type checker sees it."""

import ast
from pathlib import Path

import public_api

import cspd_jax


def test_public_names_and_signatures_are_those_recorded():
    """A change is made on purpose: `python tests/public_api.py --write`, and a line in CHANGELOG.md."""
    assert public_api.snapshot() == public_api.FILE.read_text(encoding="utf-8")


def test_what_a_type_checker_sees_is_what_there_is():
    source = Path(cspd_jax.__file__)
    guarded = next(
        node for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )  # fmt: skip
    seen = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in guarded.body
        for alias in node.names
    }
    assert set(seen) == set(cspd_jax.__all__) - {"__version__"}
    for name in seen:
        getattr(cspd_jax, name)
    for name, where in cspd_jax._WHERE.items():
        assert seen[name].startswith(f"cspd_jax.{where.split('.')[0]}")
    assert source.with_name("py.typed").exists()


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(cspd_jax, "generete") and "generate" in dir(cspd_jax)
