"""Tiny random model folders in the Hugging Face format, written from the published names and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

V, D, L, H, KV, M = 40, 16, 2, 4, 2, 24  # ids, width, layers, heads, key-value heads, width of the MLP

NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": V, "hidden_size": D,
    "num_hidden_layers": L, "num_attention_heads": 2, "intermediate_size": M, "hidden_act": "gelu",
    "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": D,
    "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": KV, "intermediate_size": M,
    "hidden_act": "silu", "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3],
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": V, "hidden_size": D,
    "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": KV, "intermediate_size": M,
    "hidden_act": "silu", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1, "tie_word_embeddings": True,
    "bos_token_id": 5, "eos_token_id": 6,
}  # fmt: skip
LLADA = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": D, "n_layers": L, "n_heads": H,
    "n_kv_heads": H, "mlp_hidden_size": M, "vocab_size": V, "embedding_size": V, "max_sequence_length": 64,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "rope": True, "alibi": False, "include_bias": False, "include_qkv_bias": False,
    "weight_tying": False, "eos_token_id": 3, "pad_token_id": 3, "mask_token_id": 9,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
}  # fmt: skip
DREAM = {
    **QWEN2, "architectures": ["DreamModel"], "model_type": "Dream", "tie_word_embeddings": False,
    "mask_token_id": 8, "pad_token_id": 7, "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
}  # fmt: skip
CONFIGS = {"gpt_neox": NEOX, "llama": LLAMA, "qwen2": QWEN2}


def tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under the family's published names."""
    rng = np.random.default_rng(seed)
    shapes = {"gpt_neox": _neox, "llada": _llada}.get(config["model_type"], lambda: _llama(config))()
    return {name: 0.2 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _neox() -> dict[str, tuple[int, ...]]:
    shapes = {"gpt_neox.embed_in.weight": (V, D), "embed_out.weight": (V, D)}
    linear = {"attention.query_key_value": (3 * D, D), "attention.dense": (D, D)}
    linear |= {"mlp.dense_h_to_4h": (M, D), "mlp.dense_4h_to_h": (D, M)}
    for i in range(L):
        at = f"gpt_neox.layers.{i}."
        for name, shape in linear.items():
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}{name}.weight": (D,), f"{at}{name}.bias": (D,)}
    return shapes | {"gpt_neox.final_layer_norm.weight": (D,), "gpt_neox.final_layer_norm.bias": (D,)}


def _llama(config: dict) -> dict[str, tuple[int, ...]]:
    width, mlp, heads = (config[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    narrow, kind = width * config["num_key_value_heads"] // heads, config["model_type"]
    outer = (config["vocab_size"], width)
    shapes = {"model.embed_tokens.weight": outer, "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = outer
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows in {"q": width, "k": narrow, "v": narrow, "o": width}.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, width)
            if config.get("attention_bias") or (kind in ("qwen2", "Dream") and name != "o"):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if kind == "qwen3":
            shapes |= {f"{at}self_attn.{letter}_norm.weight": (width // heads,) for letter in "qk"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (width, mlp)}
        shapes |= {f"{at}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def _llada() -> dict[str, tuple[int, ...]]:
    at = "model.transformer."
    shapes = {f"{at}wte.weight": (V, D), f"{at}ln_f.weight": (D,), f"{at}ff_out.weight": (V, D)}
    linear = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (D, D))
    linear |= {"ff_proj": (M, D), "up_proj": (M, D), "ff_out": (D, M), "attn_norm": (D,), "ff_norm": (D,)}
    return shapes | {f"{at}blocks.{i}.{n}.weight": s for i in range(L) for n, s in linear.items()}


def write(path: Path, config: dict, weights: dict | None = None, files: int = 1, others: dict | None = None):
    """The folder `path`, its tensors in `files` files, and other JSON files by name."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in (others or {}).items():
        (path / name).write_text(json.dumps(content))
    weights = tensors(config) if weights is None else weights
    if files == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names, where = list(weights), {}
    for n in range(files):
        file = f"model-{n + 1:05}-of-{files:05}.safetensors"
        part = names[n::files]
        save_file({name: weights[name] for name in part}, path / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
    "added_tokens": [{"id": 7, "content": "<e>"}],
}


def edited(config, **changes):
    """A configuration with other values; "absent" takes a key away."""
    return {key: value for key, value in {**config, **changes}.items() if value != "absent"}
