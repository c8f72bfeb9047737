"""The OpenVINO engine: int8 and int4 weights on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op
from openvino._offline_transformations import paged_attention_transformation

from omnidraft import hub
from omnidraft.backends import openvino_graph as graph
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.backends.openvino_convert import MODEL, converted, require_memory
from omnidraft.errors import OptionError, UnsupportedModelError
from omnidraft.session import Engine, Session
from omnidraft.types import Rows, as_tokens

PRECISIONS = ("auto", *graph.PRECISIONS)
AS_EXPORTED = "as exported"
_KEY_CACHE, _WINDOW = 3, 10  # inputs of OpenVINO's paged attention
# Where activations are rounded, short passes are filled up to one of these sizes with tokens that are forgotten again.
# That costs a tenth from one to the next, and a pass of another size than the one before a fifth more. And attention
# adds up in another order for a single token than for several, which the rounding makes a visible difference of.
_SIZES = (2, 4, 8, 12, 16)
_PATIENCE = 4  # passes that the next smaller size would have done for, until it is taken
SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",  # one stream of requests, which uses all cores
    "ENABLE_CPU_PINNING": "NO",  # a pinned thread waits for whoever else runs on its core
    # Keys and values in 8 bits, OpenVINO's own choice, round a token's row by what was in the pass beside it.
    "KV_CACHE_PRECISION": "f32",
    # A CPU with AMX would compute in bfloat16, which rounds more and is slower, for it rules out what comes next.
    "INFERENCE_PRECISION_HINT": "f32",
    # With VNNI, activations in 8 bits, a scale for so many: integer products, whose cost hardly grows from 1 to 8
    # tokens. The groups of int4 weights (`openvino_graph`) are as large: with larger ones here their products are slow.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(graph.GROUP),
}


def check(precision: str, device: str, settings: Mapping[str, str]) -> None:
    """Refuse what `load` would, before anything is fetched.

    Raises:
        OptionError: an unknown precision or setting, or a device other than the CPU.
    """
    if precision not in PRECISIONS:
        raise OptionError(
            f"engine openvino has no precision {precision!r}; use one of {', '.join(PRECISIONS)}"
        )
    if device not in ("auto", "cpu"):
        raise OptionError(
            f"engine openvino runs on the CPU, not on {device!r}; use device 'cpu' or another engine"
        )
    try:
        nothing = op.parameter([1], np.float32)
        ov.Core().compile_model(ov.Model([op.result(op.relu(nothing))], [nothing]), "CPU", dict(settings))
    except RuntimeError as error:
        given = ", ".join(f"{name}={value}" for name, value in settings.items())
        raise OptionError(
            f"OpenVINO refuses the settings {given} ({str(error).strip().splitlines()[-1]}); "
            "see its documentation of the CPU's properties"
        ) from error


def load(
    name: str, *, precision: str, device: str, drafts: bool, settings: Mapping[str, str]
) -> OpenVinoModel:
    """The model of that name, converted on first use; `auto` is int8. A folder with an OpenVINO model is used as it is.

    Raises:
        OptionError: as in `check`; or a precision for a folder that is already exported.
        UnsupportedModelError: an architecture that cannot be converted, or an exported model without state.
        OmniDraftError: as in `hub.pull` and `openvino_convert.converted`.
    """
    check(precision, device, settings)
    folder = hub.pull(name)
    exported = (folder / MODEL).is_file()
    if exported and precision != "auto":
        raise OptionError(f"{name} is exported already; leave the precision out, or export it anew")
    if precision == "auto":
        precision = AS_EXPORTED if exported else "int8"
    return OpenVinoModel(folder, name=name, precision=precision, settings=settings)


class OpenVinoSession(Session):
    """One KV cache of an OpenVINO model; see `omnidraft.session.Session`.

    The cache is ours: blocks of memory that the engine's paged attention writes to and reads, as far as each pass tells
    it. So tokens are forgotten by telling it of fewer.
    """

    def __init__(self, model: OpenVinoModel) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._request = model.compiled.create_infer_request()
        self._adapter = model.adapter  # the request only borrows it
        for name, matrix in self._adapter.items():
            self._request.set_tensor(name, ov.Tensor(matrix, shared_memory=True))
        self._ports = [port for port in model.compiled.inputs if "_cache." in port.any_name]
        self._caches: list[ov.Tensor] = []  # of each port; lent to the request
        self._block = _block_size(self._ports)
        self._blocks = 0
        self._sizes = model.sizes
        self._size = 0  # of the last pass
        self._roomy = 0  # passes in a row that were larger than they had to be
        self._answered = slice(0)  # the last pass's rows, of those that the engine computed

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32"""
        start = perf_counter()
        try:
            return self._pass(tokens, rows)
        finally:
            self.seconds += perf_counter() - start

    @property
    def hidden(self) -> Rows:
        """What the output layer was given for the last pass's rows. [rows, hidden size] float32"""
        hidden = self._request.get_tensor("hidden").data
        return np.array(hidden.reshape(-1, hidden.shape[-1])[self._answered])

    def _pass(self, tokens: Sequence[int], rows: int) -> Rows:
        count, held = len(tokens), len(self.tokens)
        size = self._size_for(count)
        computed = size if self._sizes else max(rows, 1)  # another number would be another shape
        self._reserve(held + size)
        inputs = {
            "input_ids": np.array([*tokens, *[tokens[-1]] * (size - count)], np.int64),
            "position_ids": np.arange(held, held + size, dtype=np.int64),
            "rows": np.array([computed], np.int64),
            "past_lens": np.array([held], np.int32),
            "subsequence_begins": np.array([0, size], np.int32),
            "block_indices": np.arange(self._blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, self._blocks], np.int32),
            "max_context_len": np.array(held + size, np.int32),
        }
        outputs = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        self.tokens.extend(tokens)
        last = computed - (size - count)
        self._answered = slice(last - rows, last)
        if not rows:
            return np.empty((0, 0), np.float32)
        logits = outputs["logits"]
        # A copy: the engine's own memory holds them until the next pass.
        return np.array(logits.reshape(-1, logits.shape[-1])[self._answered], np.float32)

    def _size_for(self, count: int) -> int:
        """The tokens of a pass over `count`, filling included: the last pass's where that is about as good."""
        fitting = [size for size in self._sizes if size >= count]
        if self._size in fitting[1:2] and self._roomy < _PATIENCE:
            self._roomy += 1
        else:
            self._roomy = 0
            self._size = fitting[0] if fitting else count
        return self._size

    def _reserve(self, tokens: int) -> None:
        """Have blocks for so many tokens, and in them what is held."""
        blocks = -(-tokens // self._block)
        if blocks <= self._blocks:
            return
        self._blocks = max(blocks, 2 * self._blocks)
        earlier, self._caches = self._caches, []
        for i, port in enumerate(self._ports):
            shape = [self._blocks, *(size.get_length() for size in list(port.partial_shape)[1:])]
            cache = ov.Tensor(port.element_type, shape)
            cache.data.view(np.uint8)[:] = 0  # what is masked out is read all the same, and must be a number
            if earlier:
                held = list(earlier[i].shape)
                earlier[i].copy_to(ov.Tensor(cache, [0] * len(held), held))
            self._request.set_tensor(port.any_name, cache)
            self._caches.append(cache)


class OpenVinoModel(CheckpointModel):
    """A checkpoint converted, or a folder with an OpenVINO model; see `omnidraft.session.Model`.

    Raises:
        UnsupportedModelError: an architecture that cannot be converted.
        UnsupportedModelError: a model without state, or whose output layer cannot be found.
        InsufficientMemoryError: the weights do not fit.
        VocabularyError: no tokenizer, or one whose tokens do not spell bytes.
    """

    def __init__(self, folder: Path, *, name: str, precision: str, settings: Mapping[str, str]) -> None:
        super().__init__(folder, name)
        self.engine = Engine("openvino", precision, "cpu")
        self.adapter: dict[str, NDArray[np.float32]] = {}  # input -> matrix
        self._settings = {**SETTINGS, **settings}
        text = self.config.get_text_config()
        exported = precision == AS_EXPORTED
        self.graph = (folder if exported else converted(name, folder, text, precision)) / MODEL
        # The engine lays the weights out anew, beside the file's pages.
        require_memory(2 * self.graph.with_suffix(".bin").stat().st_size, f"loading {name}")
        self.compiled = self._compile(rank=0)
        self.sizes = _SIZES if _rounds_activations(self._settings) else ()
        self._adaptable: dict[int, ov.CompiledModel] = {}  # by rank

    def session(self) -> OpenVinoSession:
        """A new, empty KV cache."""
        return OpenVinoSession(self)

    def adapted(self, adapter: Mapping[str, NDArray[Any]], scale: float = 1.0) -> OpenVinoModel:
        """This model with a LoRA adapter: another Model over the same weights, which stay as they are.

        The first adapter of a rank compiles a graph that takes one; another is only bound to it.

        `adapter`: matrices by PEFT's names, `...NAME.lora_A.weight` [rank, in] and `...NAME.lora_B.weight`
        [out, rank]; `scale`: alpha / rank.

        Raises:
            OptionError: the adapter is of another model, or this one was exported by other tools.
        """
        matrices = {
            name.removeprefix("base_model.model.").removesuffix(".weight"): np.ascontiguousarray(
                matrix * np.float32(scale) if ".lora_B." in name else matrix, np.float32
            )
            for name, matrix in adapter.items()
        }
        rank = next((len(matrix) for name, matrix in matrices.items() if name.endswith(".lora_A")), 0)
        if rank not in self._adaptable:
            self._adaptable[rank] = self._compile(rank)
        twin = copy.copy(self)
        twin.compiled = self._adaptable[rank]
        expected = {
            port.any_name: list(port.shape) for port in twin.compiled.inputs if ".lora_" in port.any_name
        }
        given = {name: list(matrix.shape) for name, matrix in matrices.items()}
        if not rank or given != expected:
            raise OptionError(f"the adapter does not fit {self.name}; choose the adapter of this drafter")
        twin.adapter = matrices
        return twin

    def _compile(self, rank: int) -> ov.CompiledModel:
        """The graph, ready to run; with inputs for an adapter of this rank, if any."""
        model = ov.Core().read_model(self.graph)
        _page(model, self.name, graph.windows(self.config.get_text_config()))
        _cut(model, self.name)
        if rank:
            graph.take_adapter(model, rank)
        return ov.Core().compile_model(model, "CPU", self._settings)


def _page(model: ov.Model, name: str, windows: Sequence[int]) -> None:
    """Let the KV cache be memory of ours, in blocks, instead of the request's state (vLLM's paged attention).

    `windows`: per layer, how many of the last tokens a token sees; 0 for all.

    Raises:
        UnsupportedModelError: a model without state, or whose attention is not found.
    """
    if not model.get_variables():
        raise UnsupportedModelError(
            f"{name} was exported without its KV cache as state; export it with "
            "`optimum-cli export openvino --task text-generation-with-past`"
        )
    for parameter in model.get_parameters():
        parameter.set_friendly_name(parameter.output(0).any_name)  # by which the transformation knows them
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"OpenVINO cannot page the attention of {name} ({str(error).strip().splitlines()[-1]}); "
            "export it with optimum-cli, or use engine='transformers'"
        ) from error
    for parameter in list(model.get_parameters()):
        if not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)
        elif parameter.get_friendly_name() in ("input_ids", "position_ids"):
            parameter.set_partial_shape(ov.PartialShape([-1]))
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            layer = int(node.input_value(_KEY_CACHE).get_node().get_friendly_name().rpartition(".")[2])
            node.input(_WINDOW).replace_source_output(op.constant(np.int32(windows[layer])).output(0))
    model.validate_nodes_and_infer_types()


def _cut(model: ov.Model, name: str) -> None:
    """Let only the last `rows` positions, a new input, reach the output layer, and give what reaches it as `hidden`.

    Raises:
        UnsupportedModelError: no product before its logits.
    """
    node = model.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise UnsupportedModelError(
                f"{name} has no output layer before its logits; export it with optimum-cli"
            )
        node = node.input_value(0).get_node()
    rows = op.parameter([1], np.int64, "rows")
    rows.output(0).set_names({"rows"})
    start = op.multiply(rows, np.array([-1]))
    last = op.slice(node.input_value(0), start, np.array([2**62]), np.array([1]), np.array([0]))
    node.input(0).replace_source_output(last.output(0))
    last.output(0).set_names({"hidden"})
    model.add_parameters([rows])
    model.add_results([op.result(last)])
    model.validate_nodes_and_infer_types()


def _block_size(ports: Sequence[Any]) -> int:
    """Tokens in a block of the caches: [blocks, heads, tokens, head size]; with 8 bits keys have scales among them."""
    values = next(port for port in ports if port.any_name.startswith("value_cache."))
    size: int = list(values.partial_shape)[2].get_length()
    return size


def _rounds_activations(settings: Mapping[str, str]) -> bool:
    """Whether a product with int8 weights rounds its other side too, on this machine: asked of a small one."""
    generator = np.random.default_rng(0)
    levels, given = generator.integers(-127, 128, (64, 64), np.int8), generator.random((1, 64), np.float32)
    x = op.parameter([-1, 64], np.float32)
    weight = op.multiply(op.convert(op.constant(levels), "f32"), op.constant(np.ones((64, 1), np.float32)))
    product = op.matmul(x, weight, transpose_a=False, transpose_b=True)
    compiled = ov.Core().compile_model(ov.Model([op.result(product)], [x]), "CPU", dict(settings))
    exact = given @ levels.T.astype(np.float32)
    return bool(np.abs(compiled(given)[0] - exact).max() > 1e-4 * np.abs(exact).max())
