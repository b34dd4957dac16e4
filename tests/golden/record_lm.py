"""Records small language models of the transformers library and their logits, for tests without it.

    python tests/golden/record_lm.py    # writes lm_FAMILY.zip of every family beside itself

Each file holds, per case, the folder that `save_pretrained` writes (float16 weights) and `logits.npz`: token
ids and the logits that these weights give in float32.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import lm_reference  # noqa: E402


def record(family: str) -> Path:
    out = HERE / f"lm_{family}.zip"
    with zipfile.ZipFile(out, "w") as archive, tempfile.TemporaryDirectory() as scratch:
        for case in lm_reference.CASES[family]:
            model = lm_reference.random_model(family, case)
            lm_reference.round_to_half(model)
            shards = {"max_shard_size": "20KB"} if family == "qwen2" and case == "untied" else {}
            folder = lm_reference.save(copy.deepcopy(model).half(), Path(scratch) / case, **shards)
            tokens = lm_reference.random_tokens()
            _add_case(archive, case, folder, tokens, lm_reference.logits(model, tokens))
    return out


def record_masked(family: str) -> Path:
    out = HERE / f"lm_{family}.zip"
    with zipfile.ZipFile(out, "w") as archive, tempfile.TemporaryDirectory() as scratch:
        model = lm_reference.random_masked_model(family)
        lm_reference.round_to_half(model)
        folder = lm_reference.save_masked(family, copy.deepcopy(model).half(), Path(scratch) / "masked")
        tokens = lm_reference.random_tokens()
        _add_case(archive, "masked", folder, tokens, lm_reference.masked_logits(family, model, tokens))
    return out


def _add_case(archive: zipfile.ZipFile, case: str, folder: Path, tokens, logits) -> None:
    for file in sorted(folder.iterdir()):
        _add(archive, f"{case}/{file.name}", file.read_bytes())
    arrays = io.BytesIO()
    np.savez(arrays, tokens=tokens.astype(np.uint8), logits=logits)
    _add(archive, f"{case}/logits.npz", arrays.getvalue())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """With a fixed date, so that the same models give the same file."""
    entry = zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0))
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    made = [record(family) for family in lm_reference.CASES]
    made += [record_masked(family) for family in lm_reference.MASKED]
    for path in made:
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
