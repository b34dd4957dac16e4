"""Records what the transformers library makes of the published model of
tests/support/real_lm.py.

    python tests/golden/record_real_lm.py    # writes real_lm.npz beside itself

Per prompt: its ids, and at some positions the largest logits (float32) and their ids.
Of one prompt the ids of a long greedy continuation and, at each of them, by how much
the best logit is ahead of the second best. Needs torch, transformers, gguf and the
model's package.
"""

import hashlib
import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

import real_lm  # noqa: E402


def load(file):
    """The library's model and tokenizer."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


@torch.no_grad()
def logits(model, ids):
    """[N, V] at every position."""
    return model(torch.tensor([ids])).logits[0].numpy()


@torch.no_grad()
def greedy(model, ids, count):
    """The continuation, past any end of text, and how far ahead each id was."""
    found = []
    ahead = []
    given = torch.tensor([ids])
    cache = None
    for _ in range(count):
        out = model(given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = torch.topk(out.logits[0, -1], 2)
        found.append(int(best.indices[0]))
        ahead.append(float(best.values[0] - best.values[1]))
        given = torch.tensor([[found[-1]]])
    return found, ahead


def record():
    if (file := real_lm.find()) is None:
        raise SystemExit(
            f"the package {real_lm.PACKAGE} is not installed; see"
            " tests/support/real_lm.py"
        )
    model, tokenizer = load(file)
    arrays = {"sha256": np.array(hashlib.sha256(file.read_bytes()).hexdigest())}
    for i, prompt in enumerate(real_lm.PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        rows = logits(model, ids)[real_lm.positions(len(ids))]
        best = np.argsort(-rows, axis=-1)[:, : real_lm.TOP]
        arrays |= {
            f"ids_{i}": np.array(ids, np.int32),
            f"best_{i}": best.astype(np.int32),
        }
        arrays[f"logits_{i}"] = np.take_along_axis(rows, best, axis=-1)
    ids = tokenizer(real_lm.LONG)["input_ids"]
    found, ahead = greedy(model, ids, real_lm.LONG_TOKENS)
    arrays |= {"long_ids": np.array(ids, np.int32), "greedy": np.array(found, np.int32)}
    return arrays | {"ahead": np.array(ahead, np.float32)}


if __name__ == "__main__":
    out = HERE / "real_lm.npz"
    np.savez_compressed(out, **record())
    print(f"{out.name}: {out.stat().st_size / 1000:.0f} kB")
