"""Records small EAGLE-3 heads in the forms in which they are published, and what PyTorch makes with them.

    python tests/golden/record_eagle.py        # needs torch and transformers; writes tests/golden/eagle.zip

The layer follows the published description with transformers' Llama parts: `input_layernorm` of the embedding
and `hidden_norm` of the state side by side into the attention, the state as the residual. Three heads:
`research` (pytorch_model.bin, ids of its own), `specforge` (model.safetensors, named layers, every id, an
embedding of its own) and `speculators` (layers.0, sizes in an object, the normed state as the residual).
"""

from __future__ import annotations

import io
import json
import pathlib
import zipfile

import numpy as np
import torch
from safetensors.torch import save
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

HERE = pathlib.Path(__file__).parent
IDS, WIDTH, LENGTH = 40, 24, 9
SIZES = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 36, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": IDS, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 500.0, "head_dim": 6,
    "tie_word_embeddings": False,
}  # fmt: skip
HEADS = {
    "research": {"own": 28, "embedding": False, "normed": False, "prefix": "midlayer.", "width": 24},
    "specforge": {"own": IDS, "embedding": True, "normed": False, "prefix": "midlayer.", "width": 20},
    "speculators": {"own": 31, "embedding": True, "normed": True, "prefix": "layers.0.", "width": 24},
}  # fmt: skip


class Head(torch.nn.Module):
    """One layer over [embedding, state], with a cache of what it saw."""

    def __init__(self, config: LlamaConfig, own: int, width: int, normed: bool):
        super().__init__()
        c, self.config, self.normed = config, config, normed
        linear = lambda inside, outside: torch.nn.Linear(inside, outside, bias=False)
        norm = lambda: LlamaRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = linear(3 * width, c.hidden_size)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            norm(), norm(), norm(), norm(),
        )  # fmt: skip
        self.q_proj = linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.mlp = LlamaMLP(c)
        self.lm_head = linear(c.hidden_size, own)
        self.rotary = LlamaRotaryEmbedding(c)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, start: int) -> torch.Tensor:
        """[Q, D] each -> the states after them [Q, D]."""
        c, count = self.config, len(state)
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)[None]
        heads = lambda y: y.reshape(1, count, -1, c.head_dim).transpose(1, 2)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, torch.arange(start, start + count)[None]))
        keys, values = torch.cat([*self.keys, k], dim=2), torch.cat([*self.values, v], dim=2)
        self.keys, self.values = [keys], [values]
        group = c.num_attention_heads // c.num_key_value_heads
        seen = torch.arange(keys.shape[2]) <= start + torch.arange(count)[:, None]
        scores = q @ repeat_kv(keys, group).transpose(2, 3) / c.head_dim**0.5
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        out = (weights @ repeat_kv(values, group)).transpose(1, 2).reshape(count, -1)
        h = (normed if self.normed else state) + self.o_proj(out)
        return h + self.mlp(self.post_attention_layernorm(h))


def tensors_of(head: Head, prefix: str) -> dict[str, torch.Tensor]:
    inside = {"q_proj", "k_proj", "v_proj", "o_proj"}
    in_layer = {"input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp"}
    found = {}
    for name, tensor in head.state_dict().items():
        first = name.split(".")[0]
        if first in inside:
            name = f"{prefix}self_attn.{name}"
        elif first in in_layer:
            name = prefix + name
        if "rotary" not in name:
            found[name] = tensor.contiguous()
    return found


def record(name: str, how: dict, files: dict[str, bytes]) -> None:
    generator = torch.Generator().manual_seed(len(name))
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    head = Head(LlamaConfig(**SIZES), how["own"], how["width"], how["normed"])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * draw(*parameter.shape) + (parameter.ndim == 1))
    table = draw(IDS, WIDTH)
    ids = torch.sort(torch.randperm(IDS, generator=generator)[: how["own"]])[0]
    tensors = tensors_of(head, how["prefix"])
    if how["embedding"]:
        tensors["embed_tokens.weight"] = table
    if how["own"] < IDS:
        tensors["d2t"] = ids - torch.arange(how["own"])
        tensors["t2d"] = torch.isin(torch.arange(IDS), ids)
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": how["own"]}
    if name == "specforge":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": how["width"]}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}
        del config["draft_vocab_size"]
    if name == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "transformer_layer_config": SIZES, "draft_vocab_size": how["own"],
            "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8],
        }  # fmt: skip
    files[f"{name}/config.json"] = json.dumps(config).encode()
    if name == "research":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        files[f"{name}/pytorch_model.bin"] = buffer.getvalue()
    else:
        files[f"{name}/model.safetensors"] = save(tensors)

    states, tokens = draw(LENGTH, 3 * how["width"]), torch.randint(IDS, (LENGTH + 1,), generator=generator)
    with torch.no_grad():
        after = head(table[tokens[1:]], head.fc(states), 0)
        logits, state = [head.lm_head(head.norm(after))], after[-1:]
        drafted = []
        for step in range(3):  # its own states fed back
            drafted.append(int(ids[logits[-1][-1].argmax()]))
            state = head(table[drafted[-1:]], state, LENGTH + step)
            logits.append(head.lm_head(head.norm(state)))
    buffer = io.BytesIO()
    np.savez(
        buffer, states=states.numpy(), tokens=tokens.numpy(), table=table.numpy(), ids=ids.numpy(),
        drafted=np.array(drafted), logits=torch.cat(logits).numpy(),
    )  # fmt: skip
    files[f"{name}/recorded.npz"] = buffer.getvalue()


def main() -> None:
    files: dict[str, bytes] = {}
    for name, how in HEADS.items():
        record(name, how, files)
    with zipfile.ZipFile(HERE / "eagle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for place, content in files.items():
            archive.writestr(zipfile.ZipInfo(place, (2026, 1, 1, 0, 0, 0)), content)
    print(f"{HERE / 'eagle.zip'}: {', '.join(files)}")


if __name__ == "__main__":
    main()
