"""The OpenVINO engine: int8 and int4 weights on a CPU."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import openvino as ov
from openvino import opset13 as op

from omnidraft import hub
from omnidraft.backends import openvino_graph as graph
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.backends.openvino_convert import MODEL, converted, is_ours, require_memory
from omnidraft.errors import OptionError, UnsupportedModelError
from omnidraft.session import Engine, Session
from omnidraft.types import Rows, as_tokens

PRECISIONS = ("auto", *graph.PRECISIONS)
AS_EXPORTED = "as exported"
_SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",  # one stream of requests, which uses all cores
    "ENABLE_CPU_PINNING": "NO",  # a pinned thread waits for whoever else runs on its core
    # Keys and values in 8 bits, OpenVINO's own choice, round a token's row by what was in the pass beside it.
    "KV_CACHE_PRECISION": "f32",
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
    if not (folder / MODEL).is_file():
        precision = "int8" if precision == "auto" else precision
        text = CheckpointModel(folder, name).config.get_text_config()
        folder = converted(name, folder, text, precision)
    elif precision != "auto":
        raise OptionError(f"{name} is exported already; leave the precision out, or export it anew")
    else:
        precision = AS_EXPORTED
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
        self._inputs = model.inputs
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
            self._compact()

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
        kept = np.frombuffer(self._slots, np.int64)
        for state in self._request.query_state():
            state.state = ov.Tensor(np.ascontiguousarray(state.state.data[:, :, kept]))
        self._used = len(kept)
        self._slots = array("q", range(self._used))
        self._mask[:] = 0
        self._mask[0, : self._used] = 1


class OpenVinoModel(CheckpointModel):
    """A folder with an OpenVINO model; see `omnidraft.session.Model`.

    Raises:
        UnsupportedModelError: a model without state, or whose output layer cannot be found.
        MemoryShortageError: the weights do not fit.
        VocabularyError: no tokenizer, or one whose tokens do not spell bytes.
    """

    def __init__(self, folder: Path, *, name: str, precision: str, settings: Mapping[str, str]) -> None:
        super().__init__(folder, name)
        # The engine lays the weights out anew, beside the file's pages.
        require_memory(2 * (folder / MODEL).with_suffix(".bin").stat().st_size, f"loading {name}")
        self.engine = Engine("openvino", precision, "cpu")
        self._settings = {**_SETTINGS, **settings}
        # By position ids alone can a slot be left out; a window that counts slots counts the forgotten ones too.
        own_graph = is_ours(folder)
        self._compile(ov.Core().read_model(folder / MODEL))
        self.maskable = "position_ids" in self.inputs and (
            own_graph or not any(graph.windows(self.config.get_text_config()))
        )

    def session(self) -> OpenVinoSession:
        """A new, empty KV cache."""
        return OpenVinoSession(self)

    def _compile(self, model: ov.Model) -> None:
        _cut(model, self.name)
        self.compiled = ov.Core().compile_model(model, "CPU", self._settings)
        self.inputs = [port.any_name for port in self.compiled.inputs]


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
