"""A checkpoint's decoder as an OpenVINO graph, built from its config and weights: no tracing, no exporter.

The graph is the one that OpenVINO's own tools write: inputs input_ids, attention_mask, position_ids and beam_idx,
output logits, keys and values as state. Its attention, norms and rotary embedding are spelled so that the plugins
fuse them, and any OpenVINO program can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omnidraft.cache import shards_of
from omnidraft.errors import UnsupportedModelError

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_ROPES = ("default", "linear", "llama3", "yarn")
GROUP = 64  # int4 weights that share a scale

Tensors = Callable[[str], torch.Tensor | None]


def check_config(config: Any, name: str) -> None:
    """Refuse what `build` cannot express.

    Raises:
        UnsupportedModelError: another architecture, or a variant of a known one.
    """
    fault = _fault(config)
    if fault:
        raise UnsupportedModelError(
            f"engine openvino cannot convert {name} ({fault}; it knows {', '.join(ARCHITECTURES)}); "
            "use engine='transformers', or a folder that optimum-intel exported"
        )


def _fault(config: Any) -> str | None:
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type}"
    for parameters in _rope_parameters(config).values():
        if (kind := parameters.get("rope_type", "default")) not in _ROPES:
            return f"rotary embedding {kind}"
    for feature in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, feature, None):
            return feature
    return None


def build(folder: Path, config: Any, precision: str) -> ov.Model:
    """The graph of a checkpoint, weights in `precision`. `config`: that of the text model."""
    with ExitStack() as files:
        return _Decoder(config, _open(folder, files), precision).model()


def take_adapter(model: ov.Model, rank: int) -> None:
    """Give every linear layer two inputs, by its name in the checkpoint: .lora_A [rank, in] and .lora_B [out, rank]."""
    inputs = []
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "MatMul" or not name.startswith("model.layers."):
            continue
        outputs, width = node.input_value(1).get_partial_shape().to_shape()
        down = _input(f"{name}.lora_A", [rank, width], np.float32)
        up = _input(f"{name}.lora_B", [outputs, rank], np.float32)
        inputs += [down, up]
        readers = list(node.output(0).get_target_inputs())
        narrow = op.matmul(node.input_value(0), down, transpose_a=False, transpose_b=True)
        adapted = op.add(node.output(0), op.matmul(narrow, up, transpose_a=False, transpose_b=True))
        for reader in readers:
            reader.replace_source_output(adapted.output(0))
    model.add_parameters(inputs)
    model.validate_nodes_and_infer_types()


def _open(folder: Path, files: ExitStack) -> Tensors:
    """Read tensors by name, one at a time."""
    names: dict[str, Any] = {}
    for shard in shards_of(folder):
        file = files.enter_context(safe_open(folder / shard, framework="pt"))
        names |= dict.fromkeys(file.keys(), file)
    return lambda name: names[name].get_tensor(name) if name in names else None


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Layer type -> parameters of its rotary embedding."""
    parameters = config.rope_parameters
    types = set(_layer_types(config))
    return {kind: parameters.get(kind, parameters) for kind in types}


def _layer_types(config: Any) -> list[str]:
    """Per layer: full_attention or sliding_attention."""
    if getattr(config, "layer_types", None):
        return list(config.layer_types)
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * int(config.num_hidden_layers)


def windows(config: Any) -> list[int]:
    """Per layer, how many of the last tokens a token sees; 0 for all."""
    window = getattr(config, "sliding_window", None) or 0
    return [window if kind == "sliding_attention" else 0 for kind in _layer_types(config)]


class _Decoder:
    def __init__(self, config: Any, tensors: Tensors, precision: str) -> None:
        self.config = config
        self.precision = precision
        self._tensors = tensors
        self._eps = float(config.rms_norm_eps)
        self._gemma = config.model_type.startswith("gemma")
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_size = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        scalar = getattr(config, "query_pre_attn_scalar", None)
        self._scale = float(scalar or self._head_size) ** -0.5
        self._sinks: list[Any] = []
        self._variables: list[Any] = []

    def model(self) -> ov.Model:
        ids = _input("input_ids", [-1, -1])
        mask = _input("attention_mask", [-1, -1])
        positions = _input("position_ids", [-1, -1])
        beam = _input("beam_idx", [-1], np.int32)
        table = self._compressed(self._weight("model.embed_tokens.weight"), "int8")
        x = op.gather(table, op.convert(ids, "i32"), np.int32(0))
        if self._gemma:
            x = op.multiply(x, np.float32(self.config.hidden_size**0.5))
        self._beam = beam
        batch = op.gather(op.shape_of(ids, "i64"), np.array([0]), np.int64(0))
        empty = op.concat([batch, *(np.array([n]) for n in (self._kv_heads, 0, self._head_size))], 0)
        self._empty = op.broadcast(np.float32(0), empty)
        ropes = {kind: self._rotary(kind, positions, batch) for kind in _rope_parameters(self.config)}
        masks = {window: _mask(mask, ids, positions, window) for window in set(windows(self.config))}
        for i, (kind, window) in enumerate(zip(_layer_types(self.config), windows(self.config), strict=True)):
            x = self._layer(i, x, ropes[kind], masks[window])
        x = self._norm("model.norm", x)
        head = self._tensors("lm_head.weight")
        # The largest layer, and the one that errors of weights show in most: never below int8.
        output = table if head is None or self.config.tie_word_embeddings else self._compressed(head, "int8")
        logits = op.matmul(x, output, transpose_a=False, transpose_b=True)
        logits.output(0).set_names({"logits"})
        inputs = [ids, mask, positions, beam]
        return ov.Model([op.result(logits)], self._sinks, inputs, self._variables, "decoder")

    def _layer(self, i: int, x: Any, rope: tuple[Any, Any], mask: Any) -> Any:
        prefix = f"model.layers.{i}"
        attended = self._attention(i, self._norm(f"{prefix}.input_layernorm", x), rope, mask)
        if self._gemma:
            x = op.add(x, self._norm(f"{prefix}.post_attention_layernorm", attended))
            fed = self._mlp(i, self._norm(f"{prefix}.pre_feedforward_layernorm", x))
            return op.add(x, self._norm(f"{prefix}.post_feedforward_layernorm", fed))
        x = op.add(x, attended)
        return op.add(x, self._mlp(i, self._norm(f"{prefix}.post_attention_layernorm", x)))

    def _mlp(self, i: int, x: Any) -> Any:
        prefix = f"model.layers.{i}.mlp"
        gate = self._linear(f"{prefix}.gate_proj", x)
        activated = op.gelu(gate, "tanh") if self._gemma else op.swish(gate)
        return self._linear(
            f"{prefix}.down_proj", op.multiply(activated, self._linear(f"{prefix}.up_proj", x))
        )

    def _attention(self, i: int, x: Any, rope: tuple[Any, Any], mask: Any) -> Any:
        prefix = f"model.layers.{i}.self_attn"
        query = _rotated(self._split(prefix, "q", x, self._heads), rope, self._head_size)
        key = _rotated(self._split(prefix, "k", x, self._kv_heads), rope, self._head_size)
        value = self._split(prefix, "v", x, self._kv_heads)
        keys = self._repeated(self._cached(f"past_key_values.{i}.keypresent.{i}.key", key))
        values = self._repeated(self._cached(f"past_key_values.{i}.valuepresent.{i}.value", value))
        attended = op.scaled_dot_product_attention(
            query, keys, values, mask, op.constant(np.float32(self._scale)), causal=False
        )
        joined = op.reshape(
            op.transpose(attended, np.array([0, 2, 1, 3])),
            np.array([0, 0, self._heads * self._head_size]),
            True,
        )
        return self._linear(f"{prefix}.o_proj", joined)

    def _split(self, prefix: str, which: str, x: Any, heads: int) -> Any:
        """[B, n, hidden] -> [B, heads, n, head size], normed where the architecture does."""
        projected = self._linear(f"{prefix}.{which}_proj", x)
        split = op.reshape(projected, np.array([0, 0, heads, self._head_size]), True)
        if which != "v" and self._tensors(f"{prefix}.{which}_norm.weight") is not None:
            split = self._norm(f"{prefix}.{which}_norm", split)
        return op.transpose(split, np.array([0, 2, 1, 3]))

    def _cached(self, name: str, new: Any) -> Any:
        """What the state holds and the new behind it."""
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, self._kv_heads, -1, self._head_size])
        info.data_type = ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        past = op.gather(op.read_value(self._empty, variable), self._beam, np.int64(0))
        both = op.concat([past, new], 2)
        self._sinks.append(op.assign(both, variable))
        self._variables.append(variable)
        return both

    def _repeated(self, cached: Any) -> Any:
        """Each key-value head once for every query head that reads it; the plugins fuse this away."""
        groups = self._heads // self._kv_heads
        if groups == 1:
            return cached
        shape = op.shape_of(cached, "i64")
        batch, length = (op.gather(shape, np.array([axis]), np.int64(0)) for axis in (0, 2))
        size = np.array([self._head_size])
        spread = op.concat([batch, np.array([self._kv_heads]), np.array([groups]), length, size], 0)
        wide = op.broadcast(op.unsqueeze(cached, np.int64(2)), spread, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(wide, np.array([0, self._heads, -1, self._head_size]), True)

    def _rotary(self, kind: str, positions: Any, batch: Any) -> tuple[Any, Any]:
        """Cosines and sines of the rotary embedding. [B, 1, n, head size] each"""
        config = self.config
        parameters = _rope_parameters(config)[kind]
        if parameters.get("rope_type", "default") == "default":
            exponents = np.arange(0, self._head_size, 2, dtype=np.float32) / self._head_size
            frequencies = (1.0 / parameters["rope_theta"] ** exponents).astype(np.float32)
            factor = 1.0
        else:
            layered = {"layer_type": kind} if kind in config.rope_parameters else {}
            computed, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", **layered)
            frequencies = computed.numpy()
        ones = np.array([1])
        spread = op.broadcast(
            op.constant(frequencies.reshape(1, -1, 1)),
            op.concat([batch, ones, ones], 0),
            broadcast_spec="BIDIRECTIONAL",
        )
        angles = op.matmul(spread, op.convert(op.unsqueeze(positions, np.int64(1)), "f32"), False, False)
        angles = op.transpose(angles, np.array([0, 2, 1]))
        doubled = op.concat([angles, angles], -1)
        waves = (op.cos(doubled), op.sin(doubled))
        if factor != 1.0:
            waves = tuple(op.multiply(wave, np.float32(factor)) for wave in waves)
        return op.unsqueeze(waves[0], np.int64(1)), op.unsqueeze(waves[1], np.int64(1))

    def _norm(self, name: str, x: Any) -> Any:
        weight = self._weight(f"{name}.weight").float()
        variance = op.reduce_mean(op.power(x, np.float32(2)), np.array([-1]), True)
        scaled = op.multiply(x, op.divide(np.float32(1), op.sqrt(op.add(variance, np.float32(self._eps)))))
        return op.multiply(scaled, op.constant((weight + 1 if self._gemma else weight).numpy()))

    def _linear(self, name: str, x: Any) -> Any:
        weight = self._compressed(self._weight(f"{name}.weight"), self.precision)
        product = op.matmul(x, weight, transpose_a=False, transpose_b=True)
        product.set_friendly_name(name)
        bias = self._tensors(f"{name}.bias")
        return product if bias is None else op.add(product, op.constant(bias.float().numpy()))

    def _weight(self, name: str) -> torch.Tensor:
        found = self._tensors(name)
        if found is None:
            raise UnsupportedModelError(
                f"the checkpoint has no {name}, which {self.config.model_type} needs; use engine='transformers'"
            )
        return found

    def _compressed(self, weight: torch.Tensor, precision: str) -> Any:
        """A weight as it is stored and the arithmetic that restores it, which the plugins do inside the product."""
        if self.precision == "float32":
            return op.constant(weight.float().numpy())
        if self.precision == "bfloat16":
            bits = weight.bfloat16().view(torch.uint16).numpy()
            return op.convert(_constant(bits, weight.shape, ov.Type.bf16), "f32")
        return _int4(weight) if precision == "int4" and weight.shape[1] % GROUP == 0 else _int8(weight)


def _int8(weight: torch.Tensor) -> Any:
    """Eight bits and a scale for each output."""
    levels, scale = quantised(weight, 127)
    return op.multiply(op.convert(op.constant(levels.numpy()), "f32"), op.constant(scale.numpy()))


def _int4(weight: torch.Tensor) -> Any:
    """Four bits and a scale for each group of an output's inputs."""
    outputs, inputs = weight.shape
    levels, scale = quantised(weight.reshape(outputs, inputs // GROUP, GROUP), 7)
    nibbles = levels.view(torch.uint8).flatten() & 15
    packed = (nibbles[0::2] | (nibbles[1::2] << 4)).numpy()
    stored = op.convert(_constant(packed, levels.shape, ov.Type.i4), "f32")
    return op.reshape(op.multiply(stored, op.constant(scale.numpy())), np.array([outputs, inputs]), False)


def quantised(weight: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels -top..top over the last axis, and their scale: weight = level * scale."""
    parts = []
    for rows in torch.split(weight, 8192):  # an output layer in float32, several times over, is gigabytes
        scale = rows.float().abs().amax(-1, keepdim=True).div(top).clamp(min=torch.finfo(torch.float32).tiny)
        parts.append((rows.float().div(scale).round().to(torch.int8), scale))
    levels, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return levels, scales


def _constant(bits: np.ndarray[Any, Any], shape: Sequence[int], kind: ov.Type) -> Any:
    """A constant of a type that numpy lacks. Its memory is its own: one made from an array would only borrow it."""
    tensor = ov.Tensor(kind, list(shape))
    tensor.data.view(bits.dtype).reshape(-1)[:] = bits.reshape(-1)
    return op.constant(tensor)


def _input(name: str, shape: list[int], dtype: Any = np.int64) -> Any:
    parameter = op.parameter(shape, dtype, name)
    parameter.output(0).set_names({name})
    return parameter


def _rotated(x: Any, rope: tuple[Any, Any], size: int) -> Any:
    cos, sin = rope
    first = op.slice(x, np.array([0]), np.array([size // 2]), np.array([1]), np.array([3]))
    second = op.slice(x, np.array([size // 2]), np.array([2**62]), np.array([1]), np.array([3]))
    turned = op.concat([op.multiply(second, np.float32(-1)), first], -1)
    return op.add(op.multiply(x, cos), op.multiply(turned, sin))


def _mask(mask: Any, ids: Any, positions: Any, window: int) -> Any:
    """What each new token may not see, as -inf: later slots, slots masked out, and tokens outside the window.
    [B, 1, n, slots]"""
    zero, one = np.int64(0), np.int64(1)
    slots = op.gather(op.shape_of(mask, "i64"), np.int64(1), zero)
    new = op.gather(op.shape_of(ids, "i64"), np.int64(1), zero)
    slot = op.range(zero, slots, one, "i64")
    own = op.unsqueeze(op.range(op.subtract(slots, new), slots, one, "i64"), np.int64(1))
    seen = op.logical_and(op.less_equal(slot, own), op.unsqueeze(op.convert(mask, "boolean"), np.array([1])))
    if window:
        # A slot's position counts the slots before it that hold something.
        held = op.subtract(op.cum_sum(mask, np.int64(1)), one)
        age = op.subtract(op.unsqueeze(positions, np.int64(2)), op.unsqueeze(held, np.int64(1)))
        seen = op.logical_and(seen, op.less(age, np.int64(window)))
    barred = op.select(seen, np.float32(0), np.float32(-65504))
    return op.unsqueeze(barred, np.int64(1))
