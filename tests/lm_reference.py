"""Small random language models of the transformers library (5 or newer, with torch), to compare with."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import safetensors.torch
import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
CASES = {
    "gpt_neox": {
        "parallel": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                         "partial_rotary_factor": 0.25}},
        "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_new",
                       "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                           "partial_rotary_factor": 0.5}},
    },
    "llama": {
        "plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "llama3": {"rope_parameters": LLAMA3, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
                   "num_key_value_heads": 1, "head_dim": 6, "attention_bias": True, "mlp_bias": True},
    },
    "qwen2": {
        "tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_key_value_heads": 2,
                 "tie_word_embeddings": True},
        "untied": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_key_value_heads": 1,
                   "tie_word_embeddings": False},
    },
    "qwen3": {
        "tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_key_value_heads": 2,
                 "head_dim": 12, "tie_word_embeddings": True},
        "biases": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_key_value_heads": 1,
                   "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    },
}  # fmt: skip
# Masked-diffusion models: another family's random model, under their names and read with a full mask.
MASKED = {
    "llada": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                        "rms_norm_eps": 1e-5}),
    "dream": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                        "num_key_value_heads": 2, "tie_word_embeddings": False}),
}  # fmt: skip
MASK_ID = 63
_LLADA = (
    (r"model\.layers\.", "model.transformer.blocks."), (r"self_attn\.o_proj", "attn_out"),
    (r"self_attn\.", ""), (r"mlp\.gate_proj", "ff_proj"), (r"mlp\.up_proj", "up_proj"),
    (r"mlp\.down_proj", "ff_out"), (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ff_norm"), (r"model\.embed_tokens", "model.transformer.wte"),
    (r"model\.norm", "model.transformer.ln_f"), (r"lm_head", "model.transformer.ff_out"),
)  # fmt: skip
NAMES = [(family, case) for family, cases in CASES.items() for case in cases]
_CLASSES = {"gpt_neox": "GPTNeoX", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def random_model(family: str, case: str):
    """A model whose every weight, scale and bias is random, large enough for logits of a few units."""
    return _random_model(family, CASES[family][case], 1 + NAMES.index((family, case)))


def random_masked_model(family: str):
    return _random_model(*MASKED[family], 100 + len(family))


def _random_model(family: str, options: dict, seed: int):
    name = _CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape))
    return model


@torch.no_grad()
def round_to_half(model) -> None:
    """Weights that float16 holds exactly. `model.half()` would round the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


def random_tokens(rows: int = 2, length: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, length))


@torch.no_grad()
def logits(model, tokens: np.ndarray, **options) -> np.ndarray:
    options = {name: torch.as_tensor(value) for name, value in options.items()}
    return model(torch.as_tensor(tokens), **options).logits.numpy()


def save(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def masked_logits(family: str, model, tokens: np.ndarray) -> np.ndarray:
    """Every token sees all; of Dream, as its sampling loop shifts them."""
    length = tokens.shape[1]
    found = logits(model, tokens, attention_mask=np.zeros((len(tokens), 1, length, length), np.float32))
    return np.concatenate([found[:, :1], found[:, :-1]], axis=1) if family == "dream" else found


def save_masked(family: str, model, path: Path) -> Path:
    """The folder that this model would be published in."""
    path.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if family == "dream":
        config = model.config.to_dict() | {"model_type": "Dream", "architectures": ["DreamModel"]}
        config["auto_map"] = {"AutoModel": "modeling_dream.DreamModel"}
    else:
        for pattern, name in _LLADA:
            tensors = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
        config = {
            "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": SIZES["hidden_size"],
            "n_layers": SIZES["num_hidden_layers"], "n_heads": SIZES["num_attention_heads"],
            "n_kv_heads": SIZES["num_attention_heads"], "mlp_hidden_size": SIZES["intermediate_size"],
            "vocab_size": SIZES["vocab_size"], "embedding_size": SIZES["vocab_size"], "rms_norm_eps": 1e-5,
            "max_sequence_length": SIZES["max_position_embeddings"], "rope_theta": 5e5, "block_type": "llama",
            "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "alibi": False,
            "include_bias": False, "include_qkv_bias": False, "weight_tying": False, "scale_logits": False,
            "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"}, "eos_token_id": 1,
        }  # fmt: skip
    config["mask_token_id"] = MASK_ID
    (path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    return path
