"""Hugging Face folders of language models: names, configurations, values."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hf_folder import CONFIGS, DREAM, LLADA, LLAMA, QWEN2, TOKENIZER, D, L, M, V, edited, tensors, write

from cspd_jax.converters import lm as converter
from cspd_jax.converters.hf import Values
from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks import lm
from cspd_jax.networks.lm_config import LMConfig

COMMON = {"vocab_size": V, "known_ids": V, "width": D, "depth": L, "mlp_width": M, "max_positions": 64}
EXPECTED = {
    "gpt_neox": LMConfig(
        family="gpt_neox", **COMMON, heads=2, kv_heads=2, head_dim=8, activation="gelu", gated_mlp=False,
        norm="layer", norm_eps=1e-5, parallel_residual=True, qkv_bias=True, out_bias=True, mlp_bias=True,
        rotary_share=0.25, bos_ids=(0,), eos_ids=(0,),
    ),
    "llama": LMConfig(
        family="llama", **COMMON, heads=4, kv_heads=2, head_dim=4, rope_theta=5e5, rope_scaling="llama3",
        rope_factor=8.0, rope_original_positions=32, bos_ids=(1,), eos_ids=(2, 3),
    ),
    "qwen2": LMConfig(
        family="qwen2", **COMMON, heads=4, kv_heads=2, head_dim=4, norm_eps=1e-6, qkv_bias=True,
        rope_theta=1e6, tie_embeddings=True, bos_ids=(5,), eos_ids=(6,),
    ),
}  # fmt: skip


def newer(config):
    """The same configuration with its rotary settings where newer files keep them."""
    old = {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"}
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    rope["rope_theta"] = config.get("rope_theta", config.get("rotary_emb_base"))
    if "rotary_pct" in config:
        rope["partial_rotary_factor"] = config["rotary_pct"]
    return {key: value for key, value in config.items() if key not in old} | {"rope_parameters": rope}


def read(folder, dtype=np.float32):
    source = open_source(folder)
    config = make_config(source)
    return config, convert(source, config, dtype)


@pytest.mark.parametrize("family", CONFIGS)
def test_configuration(tmp_path, family):
    """As older and as newer files say it. The values are compared by their logits, in test_lm_parity.py."""
    config = CONFIGS[family]
    assert make_config(open_source(write(tmp_path / "old", config))) == EXPECTED[family]
    found, params = read(write(tmp_path / "new", newer(config), files=3))
    assert found == EXPECTED[family]
    leaves = jax.tree.leaves(params)
    assert all(leaf.dtype == np.float32 and leaf.flags.c_contiguous for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == sum(tensor.size for tensor in tensors(config).values())


def test_masked_diffusion_models(tmp_path):
    found, params = read(write(tmp_path / "llada", LLADA))
    expected = LMConfig(
        family="llada", **COMMON, heads=4, kv_heads=4, head_dim=4, rope_theta=5e5, causal=False,
        eos_ids=(3,), mask_ids=(9,),
    )  # fmt: skip
    own = tensors(LLADA)
    assert found == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(t.size for t in own.values())
    found, _ = read(write(tmp_path / "dream", DREAM, files=2))
    masked = {"family": "Dream", "tie_embeddings": False, "causal": False, "shifted": True, "mask_ids": (8,)}
    assert found == dataclasses.replace(EXPECTED["qwen2"], **masked)
    left_out = edited(LLADA, n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=1.5, embedding_size=None)
    assert make_config(open_source(write(tmp_path / "short", left_out, own))) == expected


# What config.json says of Pythia-160m, Llama-3.2-1B, Qwen2-0.5B, Qwen3-0.6B, LLaDA-8B and Dream-7B, and the
# published number of parameters.
PUBLISHED = {
    ("gpt_neox", 162_322_944): CONFIGS["gpt_neox"] | {
        "vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072},
    ("llama", 1_235_814_400): LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
        "tie_word_embeddings": True},
    ("qwen2", 494_032_768): QWEN2 | {
        "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864},
    ("qwen3", 596_049_920): QWEN2 | {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072},
    ("llada", 8_015_581_184): LLADA | {
        "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
        "vocab_size": 126464, "embedding_size": 126464},
    ("Dream", 7_615_616_512): DREAM | {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064,
        "num_key_value_heads": 4, "intermediate_size": 18944},
}  # fmt: skip


@pytest.mark.parametrize("family, count", PUBLISHED)
def test_published_sizes(family, count):
    fields = converter.FAMILIES[family].fields(Values(PUBLISHED[family, count]))
    found = lm.abstract_params(LMConfig(family=family, known_ids=1, **fields))
    assert sum(leaf.size for leaf in jax.tree.leaves(found)) == count


def test_padded_vocabulary_and_end_of_text(tmp_path):
    others = {"tokenizer.json": TOKENIZER, "generation_config.json": {"eos_token_id": [2, 9, 2]}}
    config = make_config(open_source(write(tmp_path / "x", LLAMA, others=others)))
    assert (config.known_ids, config.vocab_size) == (8, V)
    assert (config.bos_ids, config.eos_ids) == ((1,), (2, 9))
    unigram = {"model": {"vocab": [["a", 0.0]] * 50}}
    config = make_config(open_source(write(tmp_path / "y", LLAMA, others={"tokenizer.json": unigram})))
    assert config.known_ids == V
