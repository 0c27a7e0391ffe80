"""A tiny Llama with real random weights, for the demo and for end-to-end tests.

The weights matter. vLLM's ``load_format=dummy`` draws from U(-1e-3, 1e-3): logits then hardly depend on the KV
cache, and a run on deliberately corrupted KV gives identical tokens. Here every projection has a standard
deviation of ``gain / sqrt(fan_in)`` with a gain of 2 for attention, so that activations keep their scale through
the layers, attention is sharp, and a wrong KV byte changes the next tokens.

Needs torch and safetensors (both come with vLLM); imported when :func:`write_tiny_llama` is called.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ATTENTION_GAIN = 2.0
_HEAD_GAIN = 3.0
"""Spreads the logits, so that greedy decoding does not hang on ties."""


@dataclass(frozen=True)
class TinyLlama:
    """Shape of the model. The defaults give 4 MiB of float32 weights and 8 KiB of KV cache per token.

    Attributes:
        layers: decoder layers.
        heads: query heads.
        kv_heads: key/value heads; divides ``heads``, and the tensor parallel size must divide it.
        head_dim: elements per head.
        vocab: vocabulary size; prompts are plain token ids, there is no tokenizer.
        max_positions: longest sequence in tokens.
        dtype: torch dtype name; float32 keeps results comparable between batch shapes.
        seed: of the weights; another seed is another model.
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 1024
    max_positions: int = 4096
    dtype: str = "float32"
    seed: int = 0

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, all layers, at tensor parallel size 1."""
        element = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.head_dim * element

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
            "use_cache": True,
        }


def _weights(model: TinyLlama) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(model.seed)
    dtype = getattr(torch, model.dtype)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)).to(dtype)

    hidden, inner = model.hidden, 2 * model.hidden
    kv_width = model.kv_heads * model.head_dim
    tensors = {
        # Unit variance: the first norm sees what it would see in a trained model.
        "model.embed_tokens.weight": torch.randn(model.vocab, hidden, generator=generator).to(dtype),
        "lm_head.weight": matrix(model.vocab, hidden, _HEAD_GAIN),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    for layer in range(model.layers):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "self_attn.q_proj.weight": matrix(hidden, hidden, _ATTENTION_GAIN),
            name + "self_attn.k_proj.weight": matrix(kv_width, hidden, _ATTENTION_GAIN),
            name + "self_attn.v_proj.weight": matrix(kv_width, hidden, _ATTENTION_GAIN),
            name + "self_attn.o_proj.weight": matrix(hidden, hidden, _ATTENTION_GAIN),
            name + "mlp.gate_proj.weight": matrix(inner, hidden),
            name + "mlp.up_proj.weight": matrix(inner, hidden),
            name + "mlp.down_proj.weight": matrix(hidden, inner),
            name + "input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            name + "post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
        }
    return tensors


def write_tiny_llama(folder: Path, model: TinyLlama | None = None) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``; the same shape and seed give the same bytes.

    Args:
        folder: made if it does not exist. A folder that already holds this very model is left as it is.
        model: the shape; defaults to :class:`TinyLlama`.

    Returns:
        ``folder``.
    """
    from safetensors.torch import save_file

    model = model or TinyLlama()
    config = json.dumps(model.config() | {"memkv_seed": model.seed}, indent=1, sort_keys=True)
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    if weights_path.exists() and config_path.exists() and config_path.read_text() == config:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(model), weights_path, metadata={"format": "pt"})
    # Last: a folder with a config is complete.
    config_path.write_text(config)
    return folder
