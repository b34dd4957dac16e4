"""The code of docs/library.md runs, from top to bottom."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "library.md"


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 12
    names: dict = {"__name__": "library"}
    for number, block in enumerate(blocks, 1):
        # Nothing is kept on disk by the tests.
        code = block.replace("cspd_jax.use_compilation_cache()", "cspd_jax.use_compilation_cache")
        exec(compile(code, f"docs/library.md, block {number}", "exec"), names)
