"""Training a drafter on Traces: a LoRA adapter by PEFT, or all weights; its head; AdamW with the paper's settings."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnidraft.backends.loading import load_causal_lm
from omnidraft.errors import MissingExtraError, OptionError
from omnidraft.learn.head import HEADS, Examples, HeadModule, bce, examples
from omnidraft.learn.losses import Pushed, loss_named
from omnidraft.learn.traces import Trace
from omnidraft.spellings import Lexicon

Arrays = dict[str, NDArray[Any]]

_HEAD_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Training:
    """How to train.

    loss: a name of `omnidraft.learn.losses.LOSSES`. rank: of the LoRA adapter on all linear layers, 0 trains all
    weights. head: the acceptance head is trained `joint`ly on each batch, `interleaved` with updates of the drafter on
    answers from the replay buffer (the paper's algorithms 3 and 4), `only` it, or not: `off`. length: tokens of context
    a Trace is trained with at most; the prompt's beginning goes first.

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
        if self.rank < 0:
            raise OptionError(f"rank is {self.rank}; it must be 0 (all weights) or more")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise OptionError(f"learning_rate is {self.learning_rate}; it must be above 0")
        if self.batch < 1:
            raise OptionError(f"batch is {self.batch}; it must be 1 or more")


@dataclass(frozen=True, slots=True)
class Update:
    """What one step of the optimiser came to."""

    loss: float | None  # mean over positions with a teacher, nats; None where the head alone was trained
    positions: int
    skipped: bool  # the loss or its gradient was not finite: nothing was changed
    head: Update | None = None  # of the head, its positions being those with a label


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
        self._loss = loss_named(training.loss)
        self._pushed = Pushed(lexicon)
        module = load_causal_lm(folder, folder.name, torch.float32)
        if training.rank:
            module = _with_lora(module, training)
        self.module = module.eval()  # no dropout: a drafter is trained as it drafts
        output = module.get_output_embeddings()
        output.register_forward_pre_hook(self._keep_hidden)
        self._hidden: Tensor  # of the last pass
        self.head = HeadModule(output.in_features)
        self._head_optimizer = torch.optim.AdamW(self.head.parameters(), lr=_HEAD_RATE)
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
            update = replace(update, head=self._step_head(seen))
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
        return self._step(self._optimizer, self._parameters.values(), total, positions), seen

    def _update_head(self, traces: Sequence[Trace]) -> Update:
        return self._step_head([self.look(trace).examples for trace in traces])

    def _step_head(self, seen: Sequence[Examples]) -> Update:
        self._head_optimizer.zero_grad(set_to_none=True)
        terms = torch.cat([bce(self.head(one.hidden, one.log_q), one.labels) for one in seen])
        terms.sum().backward()  # type: ignore[no-untyped-call]
        return self._step(
            self._head_optimizer, list(self.head.parameters()), float(terms.detach().sum()), len(terms)
        )

    def _step(
        self, optimizer: torch.optim.Optimizer, parameters: Collection[Tensor], total: float, positions: int
    ) -> Update:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= max(positions, 1)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.training.clip))
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            optimizer.step()
        return Update(total / max(positions, 1), positions, skipped=not finite)

    def _examples(self, trace: Trace, logits: Tensor) -> Examples:
        return examples(self._hidden, logits.detach(), trace, self._pushed, self._generator)

    def _keep_hidden(self, layer: Any, given: tuple[Tensor, ...]) -> None:
        self._hidden = given[0][0].detach()

    def forget_moments(self) -> None:
        """Begin the optimisers anew: their moments belong to weights that were given up."""
        self._optimizer.state.clear()
        self._head_optimizer.state.clear()

    def logits(self, trace: Trace) -> Tensor:
        """The drafter's logits of each token of the answer. [n - prompt, V_draft]"""
        answer = len(trace.tokens) - int(trace.prompt[0])
        ids = torch.from_numpy(trace.tokens[None, :-1].astype(np.int64))
        logits: Tensor = self.module(input_ids=ids, logits_to_keep=answer, use_cache=False).logits[0]
        return logits

    def look(self, trace: Trace, *, adapted: bool = True) -> Look:
        """How the drafter would draft an answer now, or, not `adapted`, as it came."""
        trace = trace.tail(self.training.length)
        as_it_came = (
            self.module.disable_adapter if not adapted and self.training.rank else contextlib.nullcontext
        )
        with torch.no_grad(), as_it_came():
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

    def head_weights(self) -> Arrays:
        """The head, as `learn.head.Head` takes it. float32"""
        return {name: weight.detach().numpy().copy() for name, weight in self.head.state_dict().items()}

    def load_head(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Go on from this head.

        Raises:
            RuntimeError: it is another drafter's.
        """
        self.head.load_state_dict(self.head_of(weights).state_dict())

    def head_of(self, weights: Mapping[str, NDArray[Any]]) -> HeadModule:
        """A head of this drafter with these weights; errors as in `load_head`."""
        head = HeadModule(self.head.input.in_features - 1)
        head.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()})
        return head

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
        for name, parameter in self.head.named_parameters():
            yield f"head.{name}", parameter, self._head_optimizer

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
        return get_peft_model(module, lora_config(LoraConfig, training.rank))


def lora_config(kind: Any, rank: int) -> Any:
    """PEFT's configuration of our adapters. alpha = rank, so that a rank needs no rate of its own."""
    return kind(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _saved_name(name: str) -> str:
    """As PEFT writes it to a file: without the adapter's name."""
    return name.replace(".default.", ".")
