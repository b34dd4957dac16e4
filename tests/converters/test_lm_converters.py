"""Hugging Face folders of language models: names, configurations, values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folder import CONFIGS, DREAM, LLADA, LLAMA, QWEN2, TOKENIZER, D, L, M, V, edited, tensors, write

from cspd_jax import weights
from cspd_jax.__main__ import main
from cspd_jax.check import UserError
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
def test_configuration_and_values(tmp_path, family):
    config = CONFIGS[family]
    assert make_config(open_source(write(tmp_path / "old", config))) == EXPECTED[family]
    found, params = read(write(tmp_path / "new", newer(config), files=3))
    assert found == EXPECTED[family]
    own = tensors(config)
    layer = params["layers_1"]
    same = np.testing.assert_array_equal
    if family == "gpt_neox":
        name = "gpt_neox.layers.1.attention.query_key_value"
        weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
        for which, letter in enumerate("qkv"):
            rows = [head * 24 + which * 8 + i for head in range(2) for i in range(8)]
            same(layer["attention"][letter]["kernel"], weight[rows].T)
            same(layer["attention"][letter]["bias"], bias[rows])
        same(layer["mlp"]["up"]["kernel"], own["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"].T)
        same(layer["mlp_norm"]["bias"], own["gpt_neox.layers.1.post_attention_layernorm.bias"])
        same(params["head"]["kernel"], own["embed_out.weight"].T)
    else:
        same(layer["attention"]["k"]["kernel"], own["model.layers.1.self_attn.k_proj.weight"].T)
        same(layer["attention"]["out"]["kernel"], own["model.layers.1.self_attn.o_proj.weight"].T)
        same(layer["mlp"]["down"]["kernel"], own["model.layers.1.mlp.down_proj.weight"].T)
        same(layer["attention_norm"]["scale"], own["model.layers.1.input_layernorm.weight"])
        same(params["embed"]["embedding"], own["model.embed_tokens.weight"])
        assert ("head" in params) == (family == "llama")
    leaves = jax.tree.leaves(params)
    assert all(leaf.dtype == np.float32 and leaf.flags.c_contiguous for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == sum(tensor.size for tensor in own.values())


@pytest.mark.quick("gpt_neox-sizes0", "llama-sizes1")
@pytest.mark.parametrize(
    "family, sizes",
    [
        ("gpt_neox", {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12,
                      "num_attention_heads": 12, "intermediate_size": 3072}),
        ("llama", {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
                   "tie_word_embeddings": True}),
        ("qwen2", {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}),
        ("qwen3", {"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
                   "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}),
    ],
)  # fmt: skip
def test_published_sizes(family, sizes):
    """Pythia-160m, Llama-3.2-1B, Qwen2-0.5B and Qwen3-0.6B have the published number of parameters."""
    published = {
        "gpt_neox": 162_322_944, "llama": 1_235_814_400, "qwen2": 494_032_768, "qwen3": 596_049_920,
    }  # fmt: skip
    given = CONFIGS["qwen2" if family == "qwen3" else family]
    fields = converter.FAMILIES[family].fields(Values({**given, **sizes}))
    config = LMConfig(family=family, known_ids=1, **fields)
    assert sum(leaf.size for leaf in jax.tree.leaves(lm.abstract_params(config))) == published[family]


def test_masked_diffusion_models(tmp_path):
    found, params = read(write(tmp_path / "llada", LLADA))
    expected = LMConfig(
        family="llada", **COMMON, heads=4, kv_heads=4, head_dim=4, rope_theta=5e5, causal=False,
        eos_ids=(3,), mask_ids=(9,),
    )  # fmt: skip
    assert found == expected
    own, same = tensors(LLADA), np.testing.assert_array_equal
    same(params["head"]["kernel"], own["model.transformer.ff_out.weight"].T)
    same(params["layers_1"]["mlp"]["down"]["kernel"], own["model.transformer.blocks.1.ff_out.weight"].T)
    same(params["layers_1"]["mlp"]["gate"]["kernel"], own["model.transformer.blocks.1.ff_proj.weight"].T)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(t.size for t in own.values())
    found, _ = read(write(tmp_path / "dream", DREAM, files=2))
    masked = {"family": "Dream", "tie_embeddings": False, "causal": False, "shifted": True, "mask_ids": (8,)}
    assert found == dataclasses.replace(EXPECTED["qwen2"], **masked)
    left_out = edited(LLADA, n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=1.5, embedding_size=None)
    assert make_config(open_source(write(tmp_path / "short", left_out, own))) == expected


@pytest.mark.slow
def test_published_sizes_of_masked_models():
    """LLaDA-8B and Dream-7B (Qwen2.5-7B's sizes) have the number of parameters that is published."""
    llada = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
             "vocab_size": 126464, "embedding_size": 126464}  # fmt: skip
    dream = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064,
             "num_key_value_heads": 4, "intermediate_size": 18944}  # fmt: skip
    for name, config, count in (
        ("llada", {**LLADA, **llada}, 8_015_581_184),
        ("Dream", {**DREAM, **dream}, 7_615_616_512),
    ):
        fields = converter.FAMILIES[name].fields(Values(config))
        found = lm.abstract_params(LMConfig(family=name, known_ids=1, **fields))
        assert sum(leaf.size for leaf in jax.tree.leaves(found)) == count


def test_tied_output(tmp_path):
    own = tensors(QWEN2)
    plain = read(write(tmp_path / "plain", QWEN2))[1]
    copied = own | {"lm_head.weight": own["model.embed_tokens.weight"].copy()}
    again = read(write(tmp_path / "copied", QWEN2, copied, files=2))[1]
    chex.assert_trees_all_equal(plain, again)
    copied["lm_head.weight"][3, 3] += 1
    with pytest.raises(UserError, match=r"tie_word_embeddings is true, but lm_head\.weight is not equal"):
        read(write(tmp_path / "other", QWEN2, copied))


def test_padded_vocabulary_and_end_of_text(tmp_path):
    others = {"tokenizer.json": TOKENIZER, "generation_config.json": {"eos_token_id": [2, 9, 2]}}
    config = make_config(open_source(write(tmp_path / "x", LLAMA, others=others)))
    assert (config.known_ids, config.vocab_size) == (8, V)
    assert (config.bos_ids, config.eos_ids) == ((1,), (2, 9))
    unigram = {"model": {"vocab": [["a", 0.0]] * 50}}
    config = make_config(open_source(write(tmp_path / "y", LLAMA, others={"tokenizer.json": unigram})))
    assert config.known_ids == V


# The command line.


def run(capsys, *argv):
    """(exit code, standard output, standard error)."""
    code = main([str(a) for a in argv])
    return (code, *capsys.readouterr())


def test_convert_and_info(tmp_path, capsys):
    others = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": {"a": "ü"}, "special_tokens_map.json": {}}
    folder = write(tmp_path / "qwen", QWEN2, files=2, others=others)
    code, out, err = run(capsys, "convert", f"{folder}/", tmp_path / "out", "--json", "--dtype", "bfloat16")
    assert code == 0 and "parameters of kind lm" in err
    converted = json.loads(out)
    assert (converted["kind"], converted["source"], converted["dtype"]) == ("lm", "qwen", "bfloat16")
    used = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    lines = "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in used)
    assert converted["source_sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    loaded = weights.load(tmp_path / "out", np.float32)
    assert loaded.config == dataclasses.replace(EXPECTED["qwen2"], known_ids=8)
    embedding = tensors(QWEN2)["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded.params["embed"]["embedding"], embedding.astype(np.float32))
    kept = sorted(p.name for p in (tmp_path / "out" / "tokenizer").iterdir())
    assert kept == ["tokenizer.json", "tokenizer_config.json"]
    for name in kept:
        assert (tmp_path / "out" / "tokenizer" / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["out", "qwen"]
    code, out, _ = run(capsys, "info", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out) == converted
    code, out, _ = run(capsys, "info", folder, "--json")
    described = json.loads(out)
    assert code == 0 and (described["kind"], described["dtype"]) == ("lm", "float32")
    assert described["params"] == converted["params"]
    assert described["source_sha256"] == converted["source_sha256"]
    assert run(capsys, "info", folder)[0] == 0
