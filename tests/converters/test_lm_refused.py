"""Hugging Face folders of language models that are refused, each in one sentence."""

from __future__ import annotations

import json
import os

import hf_folder
import numpy as np
import pytest
from hf_folder import CONFIGS, DREAM, LLADA, LLAMA, NEOX, QWEN2, TOKENIZER, D, V, edited, tensors, write

from cspd_jax.__main__ import main


def run(capsys, *argv):
    """(exit code, standard output, standard error)."""
    code = main([str(a) for a in argv])
    return (code, *capsys.readouterr())


def scaled(**changes):
    return edited(LLAMA, rope_scaling=edited(LLAMA["rope_scaling"], **changes))


@pytest.mark.parametrize(
    "config, sentence",
    [
        (edited(LLAMA, model_type="mamba"), "model_type is 'mamba'; known model types are gpt_neox"),
        (edited(LLAMA, architectures=["LlamaModel"]), "architectures is ['LlamaModel']; of llama, only L"),
        (edited(LLAMA, quantization_config={"bits": 4}), "quantization_config is {'bits': 4}; quantised"),
        (edited(QWEN2, num_experts=8), "num_experts is 8; mixtures of experts are not supported"),
        (edited(LLAMA, auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map is {'AutoModelForCausalLM"),
        (edited(QWEN2, use_sliding_window=True), "use_sliding_window is True; attention within a sliding"),
        (edited(QWEN2, layer_types=["full_attention", "sliding_attention"]), "only full_attention is supp"),
        (scaled(rope_type="yarn"), "rope_type is 'yarn'; rotary scalings other than linear and llama3"),
        (scaled(rope_type="absent", type="dynamic"), "rope_type is 'dynamic'; rotary scalings"),
        (scaled(low_freq_factor="absent"), "does not say low_freq_factor"),
        (scaled(low_freq_factor=4.0), "rope_low_frequency 4.0 must be below its rope_high_frequency 4.0"),
        (edited(LLAMA, rope_parameters={"rope_theta": 1e4}), "rope_theta two values, 500000.0 and 10000.0"),
        (edited(LLAMA, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; models of this family"),
        (edited(NEOX, rotary_pct=0.4), "rotated share 0.4 of 8 dimensions per head is 3; it must be an even"),
        (edited(NEOX, hidden_act="relu"), "hidden_act is 'relu'; known activations are gelu"),
        (edited(LLAMA, hidden_size="absent"), "does not say hidden_size"),
        (edited(LLAMA, hidden_size=18), "hidden_size 18 cannot be shared by 4 num_attention_heads"),
        (edited(LLAMA, num_key_value_heads=3), "4 query heads cannot share 3 key-value heads evenly"),
        (edited(LLAMA, eos_token_id=V), "eos_ids hold 40, which is no id of a vocabulary of 40"),
        (edited(LLAMA, format_version=1), "is a checkpoint of cspd-jax already"),
        (edited(LLAMA, intermediate_size=25), "6 misshapen (model.layers.0.mlp.down_proj.weight is [16, 24]"),
        (edited(LLAMA, attention_bias=True), "8 missing (model.layers.0.self_attn."),
        (edited(LLAMA, tie_word_embeddings=True), "tie_word_embeddings is true, but lm_head.weight is not"),
        (edited(QWEN2, tie_word_embeddings=False), "1 missing (lm_head.weight)"),
        (edited(LLADA, alibi=True), "alibi is True; only false is supported"),
        (edited(LLADA, block_type="sequential"), "block_type is 'sequential'; only 'llama' is supported"),
        (edited(LLADA, mask_token_id=None), "does not say mask_token_id"),
        (edited(DREAM, use_sliding_window=True), "use_sliding_window is True; attention within a sliding"),
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
