"""GGUF files: the same numbers as from Hugging Face's, their tokenizer, and what is
refused."""

import dataclasses
import json
import os

import chex
import hf_folder
import numpy as np
import pytest
from commands import run

from cspd_jax.check import UserError
from cspd_jax.converters.source import check, convert, make_config, open_source
from cspd_jax.networks.lm import frequencies
from cspd_jax.tokenizers import FileTokenizer

gguf = pytest.importorskip("gguf")
import gguf_file  # noqa: E402
from gguf_file import LLAMA, QWEN2, QWEN3  # noqa: E402

CONFIGS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "biased llama": {**LLAMA, "attention_bias": True},
}


def read(path):
    source = open_source(path)
    config = make_config(source)
    check(source, config)
    return config, convert(source, config)


@pytest.mark.parametrize("storage", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_numbers_of_the_hugging_face_folder(tmp_path, family, storage):
    config = CONFIGS[family]
    own = gguf_file.weights(config)
    file = gguf_file.write(tmp_path / "x.gguf", config, own, storage)
    # The folder then has what the file's numbers stand for: blocks lie within rows.
    if storage == "Q8_0":
        kind = gguf.GGMLQuantizationType.Q8_0
        rounded = lambda x: gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
        own = {
            name: rounded(array) if array.ndim == 2 else array
            for name, array in own.items()
        }
    expected, theirs = read(hf_folder.write(tmp_path / "folder", config, own))
    found, params = read(file)
    assert found == dataclasses.replace(expected, known_ids=262)
    chex.assert_trees_all_equal(params, theirs)
    source = open_source(file)
    assert source.num_params == sum(array.size for array in own.values())
    assert storage in source.dtype and "F32" in source.dtype


def test_rotary_scaling(tmp_path):
    own = gguf_file.weights(LLAMA)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = gguf_file.write(tmp_path / "a", LLAMA, own, **linear)
    config = make_config(open_source(file))
    assert (config.rope_scaling, config.rope_factor) == ("linear", 4.0)
    scaled = dataclasses.replace(
        config, rope_scaling="llama3", rope_factor=8.0, rope_original_positions=334
    )
    plain = dataclasses.replace(config, rope_scaling="none", rope_factor=1.0)
    factors = (frequencies(plain) / frequencies(scaled)).astype(np.float32)
    assert len(set(factors.tolist())) == 3  # one of them in between
    changes = {
        "rope_freqs.weight": factors,
        "llama.rope.scaling.original_context_length": 334,
    }
    found, params = read(gguf_file.write(tmp_path / "b", LLAMA, own, **changes))
    assert found == scaled and "head" in params
    changes["rope_freqs.weight"] = factors + np.float32(0.1)
    with pytest.raises(UserError, match="is not the table of llama3 scaling"):
        read(gguf_file.write(tmp_path / "c", LLAMA, own, **changes))
    changes["rope_freqs.weight"] = np.ones(4, np.float32)
    assert read(gguf_file.write(tmp_path / "d", LLAMA, own, **changes))[0] == plain


TEXT = "hello, 2024 <|start|>naïve\n  日本 it's<|end|>"


def tokenizer_of(tmp_path, family="llama", **changes):
    name = f"t{len(os.listdir(tmp_path))}"
    config = CONFIGS[family]
    file = gguf_file.write(
        tmp_path / f"{name}.gguf", config, gguf_file.weights(config), **changes
    )
    assert run(f"convert {file} {tmp_path / name}") == 0
    return FileTokenizer(tmp_path / name / "tokenizer" / "tokenizer.json", 262)


def test_tokenizer(tmp_path):
    names = gguf_file.tokens()
    shown = lambda ids: [names[i] for i in ids]
    found = tokenizer_of(tmp_path)
    ids = found.encode(TEXT)
    assert shown(ids)[:9] == ["hello", ",", "Ġ", "2", "0", "2", "4", "Ġ", "<|start|>"]
    assert ids[-1] == 261 and found.decode(ids) == TEXT
    file = tmp_path / "t0" / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == gguf_file.SPECIAL
    composed = tokenizer_of(tmp_path, "qwen2")
    assert composed.decode(composed.encode("nai\u0308ve")) == "naïve"
    first = tokenizer_of(tmp_path, **{"tokenizer.ggml.pre": "llama-bpe"})
    assert first.encode("hello") == [260, names.index("hello")]
    changes = {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}
    assert tokenizer_of(tmp_path, **changes).encode("he") == [260, names.index("he")]
