"""A GGUF file of a Llama model, written out as the checkpoint folder that transformers reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_fn import errors
from dflash_fn.zoo import gguf_tokenizer, weight_file

__all__ = ["WEIGHTS", "require_packages", "write_checkpoint"]

WEIGHTS = "model.safetensors"
"""Name of the file that the weights go to."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
COUNTS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
}


def require_packages() -> None:
    """Raise unless the packages that a conversion imports are installed.

    Raises:
        BackendMissing: one is not.
    """
    try:
        import gguf  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise errors.BackendMissing(
            f"converting a GGUF file needs {error.name or error}, which is not installed; "
            f"run: {errors.install_line('torch')}"
        ) from None


def write_checkpoint(path: Path, folder: Path) -> dict[str, str]:
    """Write weights in float32, config, generation config and tokenizer.

    Args:
        path: a GGUF file of architecture `llama` with a byte-level BPE tokenizer.
        folder: an empty folder.

    Returns:
        The SHA-256 of the weight file, by its name.

    Raises:
        CheckpointError: the file holds something else.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise errors.CheckpointError(f"{path.name}: not a readable GGUF file ({error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    gguf_tokenizer.write_tokenizer(fields, folder, context=config["max_position_embeddings"])
    return {WEIGHTS: weight_file.write_float32(folder / WEIGHTS, _shapes(reader), _tensors(reader, config))}


def make_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the config.json that GGUF's metadata describes.

    Raises:
        CheckpointError: it describes another architecture, or lacks a key.
    """
    if fields.get("general.architecture") != "llama":
        raise errors.CheckpointError(f"GGUF architecture {fields.get('general.architecture')!r}, expected 'llama'")
    try:
        counts = {ours: int(fields[f"llama.{theirs}"]) for theirs, ours in COUNTS.items()}
        theta = _shortest(fields["llama.rope.freq_base"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            **counts,
            "hidden_act": "silu",
            "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": tied,
            "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
            "use_cache": True,
            "dtype": "float32",
        }
    except KeyError as error:
        raise errors.CheckpointError(f"GGUF metadata lacks {error.args[0]!r}") from None


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32, so that 1e-5 does not become 9.99999975e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _shapes(reader: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by our names, in the file's order; GGUF counts dimensions from the innermost."""
    return {_rename(tensor.name): tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    import gguf

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        name = _rename(tensor.name)
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        num_heads = heads.get(name.split(".")[-2])
        yield name, unpermute(value, num_heads) if num_heads else value


def _rename(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    layer, part = match.groups() if match else (None, name)
    ours = OUTSIDE.get(part) if layer is None else IN_LAYER.get(part)
    if ours is None:
        raise errors.CheckpointError(f"GGUF tensor {name!r} has no place in a Llama model")
    return f"{ours}.weight" if layer is None else f"model.layers.{layer}.{ours}.weight"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a head, which pairs (0, 1), (2, 3), ... for RoPE, not (i, i + D/2).

    Args:
        weight: [num_heads * D, H], a query or key projection.
        num_heads: of that projection.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)
