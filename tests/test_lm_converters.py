"""Hugging Face folders of language models: names, configurations, and everything that is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

import hf_folder
import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folder import CONFIGS, DREAM, LLADA, LLAMA, NEOX, QWEN2, D, L, M, V, tensors, write

from cspd_jax import checkpoints
from cspd_jax.checkpoints.kinds import get_kind, read_config
from cspd_jax.cli import main
from cspd_jax.converters import hf_lm
from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.errors import UserError
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
    ],
)  # fmt: skip
def test_published_sizes(family, sizes):
    """Pythia-160m, Llama-3.2-1B and Qwen2-0.5B have the number of parameters that is published."""
    published = {"gpt_neox": 162_322_944, "llama": 1_235_814_400, "qwen2": 494_032_768}
    fields = hf_lm.FAMILIES[family].fields(hf_lm.Values({**CONFIGS[family], **sizes}, "config"))
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
        fields = hf_lm.FAMILIES[name].fields(hf_lm.Values(config, "config"))
        found = lm.abstract_params(LMConfig(family=name, known_ids=1, **fields))
        assert sum(leaf.size for leaf in jax.tree.leaves(found)) == count


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(tmp_path, dtype):
    own = {name: tensor.astype(dtype) for name, tensor in tensors(LLAMA).items()}
    folder = write(tmp_path / "x", LLAMA, own)
    assert open_source(folder).dtype == np.dtype(dtype).name
    wide, narrow = read(folder)[1], read(folder, ml_dtypes.bfloat16)[1]
    expected = own["lm_head.weight"].T
    np.testing.assert_array_equal(wide["head"]["kernel"], expected.astype(np.float32))
    np.testing.assert_array_equal(narrow["head"]["kernel"], expected.astype(ml_dtypes.bfloat16))


def test_biases_of_llama(tmp_path):
    config = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    found, params = read(write(tmp_path / "x", config))
    assert (found.qkv_bias, found.out_bias, found.mlp_bias) == (True, True, True)
    bias = tensors(config)["model.layers.0.self_attn.o_proj.bias"]
    np.testing.assert_array_equal(params["layers_0"]["attention"]["out"]["bias"], bias)


def test_tied_output(tmp_path):
    own = tensors(QWEN2)
    plain = read(write(tmp_path / "plain", QWEN2))[1]
    copied = own | {"lm_head.weight": own["model.embed_tokens.weight"].copy()}
    again = read(write(tmp_path / "copied", QWEN2, copied, files=2))[1]
    jax.tree.map(np.testing.assert_array_equal, plain, again)
    copied["lm_head.weight"][3, 3] += 1
    with pytest.raises(UserError, match=r"tie_word_embeddings is true, but lm_head\.weight is not equal"):
        read(write(tmp_path / "other", QWEN2, copied))


def test_buffers_of_older_files_are_ignored(tmp_path):
    old = {"attention.bias": np.ones((1, 1, 8, 8), bool), "attention.masked_bias": np.float16(-1e4),
           "attention.rotary_emb.inv_freq": np.ones(1, np.float32)}  # fmt: skip
    own = tensors(NEOX) | {f"gpt_neox.layers.1.{k}": np.asarray(v) for k, v in old.items()}
    source = open_source(write(tmp_path / "x", NEOX, own))
    assert source.num_params == sum(t.size for t in tensors(NEOX).values())
    convert(source, make_config(source))
    own = tensors(LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    read(write(tmp_path / "y", LLAMA, own))


def test_defaults_that_files_leave_out(tmp_path):
    short = {k: v for k, v in LLAMA.items() if not k.startswith(("rope", "rms", "attention", "hidden_act"))}
    config = make_config(open_source(write(tmp_path / "x", {**short, "rope_scaling": None})))
    assert (config.rope_theta, config.norm_eps, config.activation) == (1e4, 1e-6, "silu")
    short = {k: v for k, v in NEOX.items() if not k.startswith(("rot", "use", "layer", "hidden_act"))}
    config = make_config(open_source(write(tmp_path / "y", short)))
    assert dataclasses.replace(config) == EXPECTED["gpt_neox"]
    del short["model_type"]
    assert (
        make_config(open_source(write(tmp_path / "z", {"model_type": None, **short}, tensors(NEOX))))
        == config
    )


def test_linear_scaling_and_sequential_residual(tmp_path):
    config = {**NEOX, "rope_scaling": {"type": "linear", "factor": 2}, "use_parallel_residual": False}
    found = make_config(open_source(write(tmp_path / "x", config)))
    assert (found.rope_scaling, found.rope_factor, found.parallel_residual) == ("linear", 2.0, False)


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
    "added_tokens": [{"id": 7, "content": "<e>"}],
}


def test_padded_vocabulary_and_end_of_text(tmp_path):
    others = {"tokenizer.json": TOKENIZER, "generation_config.json": {"eos_token_id": [2, 9, 2]}}
    config = make_config(open_source(write(tmp_path / "x", LLAMA, others=others)))
    assert (config.known_ids, config.vocab_size) == (8, V)
    assert (config.bos_ids, config.eos_ids) == ((1,), (2, 9))
    unigram = {"model": {"vocab": [["a", 0.0]] * 50}}
    config = make_config(open_source(write(tmp_path / "y", LLAMA, others={"tokenizer.json": unigram})))
    assert config.known_ids == V


def test_configuration_goes_through_json():
    for config in EXPECTED.values():
        values = json.loads(json.dumps(dataclasses.asdict(config)))
        assert read_config(get_kind("lm", "x"), values, "x") == config
        assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(UserError, match="config field causal is 1; it must be true or false"):
        read_config(get_kind("lm", "x"), {**values, "causal": 1}, "x")


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
    loaded = checkpoints.load(tmp_path / "out", np.float32)
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
    assert described["config"] == converted["config"] and described["params"] == converted["params"]
    assert described["source_sha256"] == converted["source_sha256"]
    assert run(capsys, "info", folder)[0] == 0


def edited(config, **changes):
    return {key: value for key, value in {**config, **changes}.items() if value != "absent"}


def scaled(**changes):
    return edited(LLAMA, rope_scaling=edited(LLAMA["rope_scaling"], **changes))


@pytest.mark.parametrize(
    "config, sentence",
    [
        (edited(LLAMA, model_type="mamba"), "model_type is 'mamba'; known model types are gpt_neox"),
        (edited(LLAMA, model_type=None, architectures=["X"]), "architectures is ['X']; known model types"),
        (edited(LLAMA, architectures=["LlamaModel"]), "architectures is ['LlamaModel']; of llama, only L"),
        (edited(LLAMA, architectures="LlamaModel"), "architectures is 'LlamaModel'; it must be a list"),
        (edited(LLAMA, quantization_config={"bits": 4}), "quantization_config is {'bits': 4}; quantised"),
        (edited(QWEN2, num_experts=8), "num_experts is 8; mixtures of experts are not supported"),
        (edited(LLAMA, auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map is {'AutoModelForCausalLM"),
        (edited(QWEN2, use_sliding_window=True), "use_sliding_window is True; attention within a sliding"),
        (edited(QWEN2, layer_types=["full_attention", "sliding_attention"]), "only full_attention is supp"),
        (scaled(rope_type="yarn"), "rope_type is 'yarn'; rotary scalings other than linear and llama3"),
        (scaled(rope_type="absent", type="dynamic"), "rope_type is 'dynamic'; rotary scalings"),
        (scaled(type="linear"), "rope_type two values, 'llama3' and 'linear'"),
        (scaled(mrope_section=[1]), "rope_scaling holds 'mrope_section', which is not supported"),
        (scaled(low_freq_factor="absent"), "does not say low_freq_factor"),
        (scaled(low_freq_factor=4.0), "rope_low_frequency 4.0 must be below its rope_high_frequency 4.0"),
        (scaled(factor="8"), "factor is '8'; it must be a number"),
        (scaled(factor=0), "rope_factor is 0.0; it must be a positive number"),
        (scaled(rope_type="default"), "factor is 8.0; it needs a rope_type that uses it"),
        (edited(LLAMA, rope_scaling=3), "rope_scaling is 3; it must be an object"),
        (edited(LLAMA, rope_parameters={"rope_theta": 1e4}), "rope_theta two values, 500000.0 and 10000.0"),
        (edited(LLAMA, rope_theta=10**400), "it must be a number of ordinary size"),
        (edited(LLAMA, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; models of this family"),
        (edited(NEOX, rotary_pct=0.4), "rotated share 0.4 of 8 dimensions per head is 3; it must be an even"),
        (edited(NEOX, rotary_pct=1.5), "rotated share 1.5 of 8 dimensions"),
        (edited(NEOX, hidden_act="relu"), "hidden_act is 'relu'; known activations are gelu"),
        (edited(LLAMA, hidden_size="absent"), "does not say hidden_size"),
        (edited(LLAMA, hidden_size="16"), "hidden_size is '16'; it must be a whole number"),
        (edited(LLAMA, hidden_size=18), "hidden_size 18 cannot be shared by 4 num_attention_heads"),
        (edited(LLAMA, num_attention_heads=0), "hidden_size 16 cannot be shared by 0"),
        (edited(LLAMA, num_key_value_heads=3), "4 query heads cannot share 3 key-value heads evenly"),
        (edited(LLAMA, num_hidden_layers=10**9), "tensors of 2 layers; num_hidden_layers is 1000000000"),
        (edited(LLAMA, vocab_size=0), "vocab_size is 0; it must be at least 1"),
        (edited(LLAMA, tie_word_embeddings=1), "tie_word_embeddings is 1; it must be true or false"),
        (edited(LLAMA, attention_bias="yes"), "attention_bias is 'yes'; it must be true or false"),
        (edited(LLAMA, eos_token_id=["2"]), "eos_token_id is ['2']; it must be an id or a list of ids"),
        (edited(LLAMA, eos_token_id=V), "eos_ids hold 40, which is no id of a vocabulary of 40"),
        (edited(LLAMA, format_version=1), "is a checkpoint of cspd-jax already"),
        (edited(LLAMA, intermediate_size=25), "6 misshapen (model.layers.0.mlp.down_proj.weight is [16, 24]"),
        (edited(LLAMA, attention_bias=True), "8 missing (model.layers.0.self_attn."),
        (edited(LLAMA, tie_word_embeddings=True), "tie_word_embeddings is true, but lm_head.weight is not"),
        (edited(QWEN2, tie_word_embeddings=False), "1 missing (lm_head.weight)"),
        (edited(LLADA, alibi=True), "alibi is True; only false is supported"),
        (edited(LLADA, block_type="sequential"), "block_type is 'sequential'; only 'llama' is supported"),
        (edited(LLADA, mask_token_id=None), "does not say mask_token_id"),
        (edited(LLADA, n_heads=3), "d_model 16 cannot be shared by 3 n_heads"),
        (edited(LLADA, n_layers=3), "has the tensors of 2 layers; n_layers is 3"),
        (edited(DREAM, mask_token_id=V), "mask_ids hold 40, which is no id of a vocabulary of 40"),
        (edited(DREAM, use_sliding_window=True), "use_sliding_window is True; attention within a sliding"),
        (edited(LLAMA, hidden_size=10**30, head_dim=4), "21 misshapen (model.embed_tokens.weight is"),
    ],
)  # fmt: skip
def test_refused_configurations(tmp_path, capsys, config, sentence):
    masked = {"llada": LLADA, "Dream": DREAM}
    own = tensors({**CONFIGS, **masked}.get(config["model_type"], LLAMA))
    refused(tmp_path, capsys, write(tmp_path / "x", config, own), sentence)


def refused(tmp_path, capsys, folder, *sentences):
    before = sorted(os.listdir(tmp_path))
    code, out, err = run(capsys, "convert", folder, tmp_path / "out")
    lines = [line for line in err.splitlines() if not line.startswith("converting")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert all(sentence in err for sentence in sentences), err
    assert sorted(os.listdir(tmp_path)) == before


def test_missing_extra_and_misshapen_tensors(tmp_path, capsys):
    own = tensors(NEOX)
    name = "gpt_neox.layers.1.attention.query_key_value.bias"
    without = {k: v for k, v in own.items() if k != name}
    refused(tmp_path, capsys, write(tmp_path / "a", NEOX, without), f"1 missing ({name})")
    more = own | {"gpt_neox.layers.0.attention.q_norm.weight": np.ones(8, np.float32)}
    refused(tmp_path, capsys, write(tmp_path / "b", NEOX, more, files=2), "1 unknown (gpt_neox.layers.0.att")
    wrong = own | {name: np.zeros(47, np.float32)}
    refused(
        tmp_path, capsys, write(tmp_path / "c", NEOX, wrong), f"1 misshapen ({name} is [47] instead of [48])"
    )
    bad = own | {name: np.full(48, np.nan, np.float32)}
    refused(tmp_path, capsys, write(tmp_path / "d", NEOX, bad), f"tensor {name} holds NaN or infinity")
    whole = own | {name: np.zeros(48, np.int32)}
    refused(tmp_path, capsys, write(tmp_path / "e", NEOX, whole), f"tensor {name} has type int32")
    biased = tensors(QWEN2) | {"model.layers.0.self_attn.o_proj.bias": np.ones(D, np.float32)}
    refused(
        tmp_path,
        capsys,
        write(tmp_path / "f", QWEN2, biased),
        "1 unknown (model.layers.0.self_attn.o_proj.bias)",
    )


def test_broken_folders(tmp_path, capsys):
    folder = tmp_path / "x"
    folder.mkdir()
    refused(tmp_path, capsys, folder, "is a folder without config.json")
    (folder / "config.json").write_text("{")
    refused(tmp_path, capsys, folder, "config.json is not readable JSON")
    (folder / "config.json").write_text("[]")
    refused(tmp_path, capsys, folder, "config.json must hold a JSON object")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    refused(
        tmp_path,
        capsys,
        folder,
        "has neither model.safetensors nor model.safetensors.index.json",
        "no weights",
    )
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, capsys, folder, "(it has pytorch_model.bin)")
    (folder / "model.safetensors").write_bytes(b"hello")
    refused(tmp_path, capsys, folder, "not a complete safetensors file")
    write(folder, LLAMA, others={"tokenizer.json": {"model": {}}})
    refused(tmp_path, capsys, folder, "tokenizer.json has no vocabulary")
    code, _, err = run(capsys, "convert", folder, tmp_path / "out", "--heads", "4,4")
    assert code == 2 and "--heads does not apply to a checkpoint of kind lm" in err
    code, _, err = run(capsys, "convert", folder, tmp_path / "out", "--weights", "model")
    assert code == 2 and "--weights is for .pth files" in err


def test_broken_indices(tmp_path, capsys):
    folder = write(tmp_path / "x", LLAMA, files=2)
    index = folder / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"]

    def listed(changes, sentence):
        weights = {k: v for k, v in {**right, **changes}.items() if v is not None}
        index.write_text(json.dumps({"weight_map": weights}))
        refused(tmp_path, capsys, folder, sentence)

    name, other = "model.norm.weight", "model-00003-of-00003.safetensors"
    listed(
        {name: "../secret.safetensors"}, "'../secret.safetensors', which is not a .safetensors file beside it"
    )
    listed({name: 3}, "names '3'")
    listed({name: other}, f"{other} does not exist")
    swapped = next(file for file in right.values() if file != right[name])
    listed({name: swapped}, f"says that {swapped} holds tensor {name}, which it does not")
    listed({"ghost": swapped}, f"says that {swapped} holds tensor ghost, which it does not")
    listed({name: None}, f"does not list tensor {name}")
    index.write_text("{}")
    refused(tmp_path, capsys, folder, "has no weight_map")
    index.write_text(json.dumps({"weight_map": right}))
    hf_folder.save_file({name: np.ones(D, np.float32)}, folder / other)
    listed({"more": other}, f"holds tensor {name} in two files")


def test_copies_are_all_or_nothing(tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "x", LLAMA, others={"tokenizer.json": TOKENIZER})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    refused(tmp_path, capsys, folder, "out cannot be written: No space left on device")
