"""The OpenVINO engine: int8 and int4 weights on a CPU."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from omnidraft import hub
from omnidraft.backends import openvino_graph as graph
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.backends.openvino_convert import MODEL, converted, require_memory
from omnidraft.errors import OptionError, UnsupportedModelError
from omnidraft.session import Engine, Session
from omnidraft.types import Rows, as_tokens

PRECISIONS = ("auto", *graph.PRECISIONS)
AS_EXPORTED = "as exported"
SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",  # one stream of requests, which uses all cores
    "ENABLE_CPU_PINNING": "NO",  # a pinned thread waits for whoever else runs on its core
    # Keys and values in 8 bits, OpenVINO's own choice, round a token's row by what was in the pass beside it.
    "KV_CACHE_PRECISION": "f32",
    # A CPU with AMX would compute in bfloat16, which rounds more and is slower, for it rules out what comes next.
    "INFERENCE_PRECISION_HINT": "f32",
    # With VNNI, activations in 8 bits, a scale for so many: integer products, whose cost hardly grows from 1 to 8 tokens.
    # Of the groups of an int4 weight too (`openvino_graph`): with larger ones its products are slow.
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

    The cache is the request's state, of which each token has a slot. To cut its end off would mean to copy all of
    it; so forgotten tokens stay where they are, masked out, until there are many.
    """

    def __init__(self, model: OpenVinoModel) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self._request = model.compiled.create_infer_request()
        self._adapter = model.adapter  # the request only borrows it
        for name, matrix in self._adapter.items():
            self._request.set_tensor(name, ov.Tensor(matrix, shared_memory=True))
        self._inputs = [name for name in model.inputs if name not in model.adapter]
        self._maskable = model.maskable
        self._slots = array("q")  # of each token
        self._used = 0  # slots, those of forgotten tokens included
        self._mask = np.zeros((1, 1024), np.int64)  # 1 where a slot holds a token

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        forgotten = self._slots[length:]
        del self.tokens[length:], self._slots[length:]
        self._mask[0, forgotten] = 0
        if not self._slots:
            self._request.reset_state()
            self._used = 0
        elif self._used - len(self._slots) > (max(64, len(self._slots) // 4) if self._maskable else 0):
            try:
                self._compact()
            except BaseException:
                self.truncate(0)  # some layers may have been cut already, others not
                raise

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """Append tokens in one pass; return the logits after the last `rows` of them. [rows, V] float32"""
        start = perf_counter()
        try:
            return self._pass(tokens, rows)
        except BaseException:
            # A Ctrl-C in the middle of a pass: whether its tokens are in the state cannot be known.
            self.truncate(0)
            raise
        finally:
            self.seconds += perf_counter() - start

    @property
    def hidden(self) -> Rows:
        """What the output layer was given for the last pass's rows. [rows, hidden size] float32"""
        return np.array(self._request.get_tensor("hidden").data[0])

    def _pass(self, tokens: Sequence[int], rows: int) -> Rows:
        count, held = len(tokens), len(self.tokens)
        end = self._used + count
        if end > self._mask.shape[1]:
            grown = np.zeros((1, 2 * end), np.int64)
            grown[:, : self._used] = self._mask[:, : self._used]
            self._mask = grown
        self._mask[0, self._used : end] = 1
        inputs = {
            "input_ids": np.array(tokens, np.int64)[None],
            "attention_mask": self._mask[:, :end],
            "position_ids": np.arange(held, held + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "rows": np.array([max(rows, 1)], np.int64),
        }
        outputs = self._request.infer(
            {name: inputs[name] for name in self._inputs}, share_inputs=True, share_outputs=True
        )
        self.tokens.extend(tokens)
        self._slots.extend(range(self._used, end))
        self._used = end
        if not rows:
            return np.empty((0, 0), np.float32)
        return np.array(
            outputs["logits"][0], np.float32
        )  # the engine's own memory holds them until the next pass

    def _compact(self) -> None:
        """Keep only the slots that hold tokens."""
        kept = np.array(self._slots)
        for state in self._request.query_state():
            state.state = ov.Tensor(np.ascontiguousarray(state.state.data[:, :, kept]))
        self._used = len(kept)
        self._slots = array("q", range(self._used))
        self._mask[:] = 0
        self._mask[0, : self._used] = 1


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
        self.inputs = [port.any_name for port in self.compiled.inputs]
        # By position ids alone can a slot be left out; a window that counts slots counts the forgotten ones too.
        self.maskable = "position_ids" in self.inputs and not (exported and any(graph.windows(text)))
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
        twin.inputs = [port.any_name for port in twin.compiled.inputs]
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
        _cut(model, self.name)
        if rank:
            graph.take_adapter(model, rank)
        return ov.Core().compile_model(model, "CPU", self._settings)


def _cut(model: ov.Model, name: str) -> None:
    """Let only the last `rows` positions, a new input, reach the output layer, and give what reaches it as `hidden`.

    Raises:
        UnsupportedModelError: a model without state, or no product before its logits.
    """
    if not model.get_variables():
        raise UnsupportedModelError(
            f"{name} was exported without its KV cache as state; export it with "
            "`optimum-cli export openvino --task text-generation-with-past`"
        )
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
    last = op.slice(node.input_value(0), start, np.array([2**62]), np.array([1]), np.array([1]))
    node.input(0).replace_source_output(last.output(0))
    last.output(0).set_names({"hidden"})
    model.add_parameters([rows])
    model.add_results([op.result(last)])
    model.validate_nodes_and_infer_types()
