"""A tiny language model whose tokens are the words w0 to w63, with a tokenizer and a
chat template."""

import json

import jax.numpy as jnp
import pytest
import text_models

from cspd_jax import weights

IDS = 64
TARGET = text_models.model(
    IDS,
    dtype=jnp.float32,
    depth=3,
    bos_ids=(1,),
    eos_ids=(2,),
    tie_embeddings=True,
    max_positions=256,
)
TEMPLATE = (
    "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}{% if"
    " add_generation_prompt %}w5{% endif %}"
)


def tokenizer(around="", ids=IDS):
    """around: what it puts around each text $A, such as "w1 $A"."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(ids)}, "w0")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if around:
        special = [("w1", 1), ("w2", 2)]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            around, None, special
        )
    return made.to_str()


def save(folder, params, template=None):
    """Its checkpoint folder."""
    (folder / "tokenizer.json").write_text(tokenizer())
    files = {"tokenizer/tokenizer.json": folder / "tokenizer.json"}
    if template is not None:
        settings = {"chat_template": template, "bos_token": {"content": "w1"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        files["tokenizer/tokenizer_config.json"] = folder / "tokenizer_config.json"
    weights.save(folder / "model", "lm", TARGET.config, params, companions=files)
    return folder / "model"
