"""Training a drafter on Traces: a LoRA adapter by PEFT, or all weights; its head; AdamW with the paper's settings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnidraft.backends.loading import load_causal_lm
from omnidraft.errors import MissingExtraError, OptionError, is_count, is_number
from omnidraft.learn.head import HEADS, Examples, HeadTrainer, examples
from omnidraft.learn.losses import Pushed, loss_named
from omnidraft.learn.traces import Trace
from omnidraft.learn.updates import Update, take
from omnidraft.spellings import Lexicon

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Training:
    """How to train.

    loss: a name of `omnidraft.learn.losses.LOSSES`. rank: of the LoRA adapter on all linear layers; 0 trains all
    weights, which a `Trainer` can and `OmniDraft.learn` refuses. head: the acceptance head is trained `joint`ly on each
    batch, `interleaved` with updates of the drafter on answers from the replay buffer (the paper's algorithms 3 and 4),
    `only` it, or not: `off`. length: tokens of context a Trace is trained with at most; the prompt's beginning goes
    first.

    Raises:
        OptionError: a value outside its range.
    """

    loss: str = "pushforward"
    rank: int = 32
    head: str = "off"
    learning_rate: float = 1e-3  # measured (docs/decisions.md); the paper has 1e-4 for longer streams
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm
    batch: int = 4  # Traces an update
    length: int = 512  # tokens
    seed: int = 0

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if self.head not in HEADS:
            raise OptionError(f"unknown head {self.head!r}; use one of {', '.join(HEADS)}")
        for name, least in (("rank", 0), ("batch", 1), ("length", 1), ("seed", 0)):
            value = getattr(self, name)
            if not (is_count(value) and value >= least):
                raise OptionError(f"{name} is {value!r}; it must be an integer, {least} or more")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0):
                raise OptionError(f"{name} is {value!r}; it must be a number above 0")
        if not (is_number(self.weight_decay) and self.weight_decay >= 0):
            raise OptionError(f"weight_decay is {self.weight_decay!r}; it must be a number, 0 or more")


@dataclass(frozen=True, slots=True)
class Look:
    """How an answer would be drafted: the share of its tokens that are the likeliest, and what the head sees."""

    agreement: float
    examples: Examples


class Trainer:
    """A drafter's weights in float32, for training only; what comes out is an adapter for the model that drafts."""

    def __init__(
        self, folder: Path, lexicon: Lexicon, training: Training, *, gate: Callable[[], None] | None = None
    ) -> None:
        """`folder`: the drafter's checkpoint. `gate` is called before every layer, forward and back: where training
        in the background waits while something more urgent runs.

        Raises:
            MissingExtraError: PEFT is not there.
        """
        self.training = training
        self.lexicon = lexicon
        self._loss = loss_named(training.loss)
        self._pushed = Pushed(lexicon)
        module = load_causal_lm(folder, folder.name, torch.float32)
        if training.rank:
            module = _with_lora(module, training)
        self.module = module.eval()  # no dropout: a drafter is trained as it drafts
        output = module.get_output_embeddings()
        output.register_forward_pre_hook(self._keep_hidden)
        self.hidden: Tensor  # what the output layer was given in the last pass
        self.head = HeadTrainer(output.in_features, training.clip)
        self._generator = torch.Generator().manual_seed(training.seed)
        if gate:
            _put_before_layers(module, gate)
        self._parameters = {
            name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=training.learning_rate, weight_decay=training.weight_decay
        )

    def update(self, traces: Sequence[Trace], replay: Sequence[Trace] = ()) -> Update:
        """One step on a batch of Traces, of the drafter, the head or both; all positions with a teacher weigh the same.

        `replay`: the batch of an `interleaved` head; the same one if empty.
        """
        head = self.training.head
        if head == "only":
            return Update(None, 0, skipped=False, head=self._update_head(traces))
        update, seen = self._update_drafter(traces)
        if head == "joint":
            update = replace(update, head=self.head.update(seen))
        elif head == "interleaved":
            update = replace(update, head=self._update_head(replay or traces))
        return update

    def _update_drafter(self, traces: Sequence[Trace]) -> tuple[Update, list[Examples]]:
        self._optimizer.zero_grad(set_to_none=True)
        total, positions = 0.0, 0
        seen: list[Examples] = []
        for trace in traces:
            trace = trace.tail(self.training.length)
            logits = self.logits(trace)
            terms = self._loss(logits, trace, self._pushed)
            terms.sum().backward()  # type: ignore[no-untyped-call]
            total += float(terms.detach().sum())
            positions += len(terms)
            if self.training.head == "joint":
                seen.append(self._examples(trace, logits))
        parameters = list(self._parameters.values())
        return take(self._optimizer, parameters, total, positions, self.training.clip), seen

    def _update_head(self, traces: Sequence[Trace]) -> Update:
        return self.head.update([self.look(trace).examples for trace in traces])

    def _examples(self, trace: Trace, logits: Tensor) -> Examples:
        return examples(self.hidden[0], logits.detach(), trace, self._pushed, self._generator)

    def _keep_hidden(self, layer: Any, given: tuple[Tensor, ...]) -> None:
        self.hidden = given[0].detach()

    def forget_moments(self) -> None:
        """Begin the optimisers anew: their moments belong to weights that were given up."""
        self._optimizer.state.clear()
        self.head.optimizer.state.clear()

    def as_it_came(self, wanted: bool = True) -> AbstractContextManager[None]:
        """The drafter without its adapter meanwhile, if `wanted` and if it has one."""
        disabled: AbstractContextManager[None] = (
            self.module.disable_adapter() if wanted and self.training.rank else contextlib.nullcontext()
        )
        return disabled

    @property
    def usable(self) -> Tensor:
        """[V_draft] which tokens can be drafted."""
        return self._pushed.usable

    def logits(self, trace: Trace) -> Tensor:
        """The drafter's logits of each token of the answer. [n - prompt, V_draft]"""
        answer = len(trace.tokens) - int(trace.prompt[0])
        ids = torch.from_numpy(trace.tokens[None, :-1].astype(np.int64))
        logits: Tensor = self.module(input_ids=ids, logits_to_keep=answer, use_cache=False).logits[0]
        return logits

    def look(self, trace: Trace, *, adapted: bool = True) -> Look:
        """How the drafter would draft an answer now, or, not `adapted`, as it came."""
        trace = trace.tail(self.training.length)
        with torch.no_grad(), self.as_it_came(not adapted):
            logits = self.logits(trace)
        own = logits.argmax(-1).numpy() == trace.tokens[int(trace.prompt[0]) :]
        return Look(float(own.mean()), self._examples(trace, logits))

    def weights(self) -> Arrays:
        """The adapter, by PEFT's own names; or all weights. float32"""
        return {
            _saved_name(name): parameter.detach().numpy().copy()
            for name, parameter in self._parameters.items()
        }

    def load(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Go on from these weights.

        Raises:
            KeyError, RuntimeError: they are of another drafter or rank.
        """
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(np.asarray(weights[_saved_name(name)])))

    def optimizer(self) -> Arrays:
        """AdamW's state: two moments a weight, and how many steps it has taken; the head's too."""
        state: Arrays = {}
        for name, parameter, optimizer in self._optimized():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = value.numpy().copy()
        return state

    def _optimized(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.optim.Optimizer]]:
        for name, parameter in self._parameters.items():
            yield _saved_name(name), parameter, self._optimizer
        for name, parameter in self.head.module.named_parameters():
            yield f"head.{name}", parameter, self.head.optimizer

    def load_optimizer(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the state of `optimizer`; errors as in `load`."""
        for name, parameter, optimizer in self._optimized():
            own = {key: f"{name}.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(entry in state for entry in own.values()):
                optimizer.state[parameter] = {
                    key: torch.from_numpy(np.array(state[entry])) for key, entry in own.items()
                }


def adapter_document(drafter: str, rank: int) -> dict[str, Any]:
    """adapter_config.json, by which PEFT loads an adapter of ours."""
    from peft import LoraConfig

    config = lora_config(LoraConfig, rank).to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()} | {
        "base_model_name_or_path": drafter,
        "peft_type": "LORA",
    }


def _put_before_layers(module: Any, gate: Callable[[], None]) -> None:
    def on_the_way_back(layer: Any, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gate())

    for layer in next(child for child in module.modules() if isinstance(child, torch.nn.ModuleList)):
        layer.register_forward_pre_hook(lambda layer, given: gate())
        layer.register_forward_hook(on_the_way_back)


def _with_lora(module: Any, training: Training) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "peft", "learn") from error
    torch.manual_seed(training.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of what transformers is to remove
        warnings.filterwarnings(
            "ignore", "fan_in_fan_out"
        )  # it finds out itself that GPT-2's layers are transposed
        return get_peft_model(module, lora_config(LoraConfig, training.rank))


def lora_config(kind: Any, rank: int) -> Any:
    """PEFT's configuration of our adapters. alpha = rank, so that a rank needs no rate of its own."""
    return kind(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _saved_name(name: str) -> str:
    """As PEFT writes it to a file: without the adapter's name."""
    return name.replace(".default.", ".")
