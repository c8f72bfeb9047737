"""Learning from a recorded stream, as it is learned while answering; what was trained once is kept."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from omnidraft import hub
from omnidraft.drafting import Stop
from omnidraft.experiments.experiment import Cell, Measured, Stream
from omnidraft.experiments.lab import Lab, Pair
from omnidraft.experiments.replay import Replay
from omnidraft.experiments.scales import Scale, Weights
from omnidraft.learn.head import Head
from omnidraft.learn.record import Recorded
from omnidraft.learn.trainer import Trainer, Training

SHORTER = (
    "our drafters know chats, and the stream is a fiftieth of the paper's: acceptance is higher before learning, "
    "and learning adds less to it."
)
QUARTER = f"omnidraft-nano has a quarter of its parent's vocabulary, where the paper's pair shares all of it; {SHORTER}"
# At temperature 0 the paper's rule accepts what `compare` does.
DIRECT = "direct:compare:nosplits"  # the paper's SpDDM
CACHE = "ngram:compare:nosplits"  # with the paper's n-grams


@dataclass(frozen=True, slots=True)
class Learned:
    """A drafter as it is adapted, and its head, if it has one. None: as it came."""

    drafter: Any
    head: Head | None = None

    def stop(self, gamma: float) -> Stop | None:
        """What ends its drafts early."""
        return Stop(self.head.chance, gamma) if self.head else None


Watch = Callable[
    [int, Learned], None
]  # told before each update: how many answers were learned from, what came of it


def setting(
    scale: Scale,
    task: str,
    method: str,
    loss: str | None = None,
    *,
    weights: Weights | None = None,
    **more: Any,
) -> Cell:
    """A cell that learns from a task's stream, or with `loss` None does not, and decodes its test answers."""
    cell: Cell = dict(
        target=scale.targets[0], drafter=scale.drafter, task=task, train=scale.train[task], test=scale.test[task],
        tokens=scale.tokens, k=scale.k, method=method, loss=loss,
    )  # fmt: skip
    if loss:
        cell |= asdict(weights or scale.default) | dict(batch=scale.batch, seed=0)
    return cell | more


def with_head(scale: Scale, cell: Cell, head: str) -> Cell:
    """The cell with an acceptance head, trained in one of the ways of `omnidraft.learn.head`, and twice the k."""
    gamma = 0.7 if cell["task"] in (scale.math, scale.code) else 0.3  # as the paper has it
    return cell | dict(head=head, gamma=gamma, k=2 * scale.k)


def training_of(cell: Cell) -> Training:
    """How a cell trains."""
    return Training(
        loss=cell["loss"],
        learning_rate=cell["rate"],
        rank=cell["rank"],
        batch=cell["batch"],
        seed=cell["seed"],
        head=cell.get("head", "off"),
    )


def learn(
    lab: Lab, pair: Pair, answers: Sequence[Recorded], training: Training, *, watch: Watch | None = None
) -> Learned:
    """The drafter after one pass over a stream, in batches, in the order of the stream.

    LoRA adapters are kept in the cache folder by all that they depend on, and not trained again unless watched.
    """
    path = hub.cache_root() / "adapters" / f"{_digest(pair, answers, training)}.safetensors"
    if path.exists() and not watch:
        return _learned(pair, load_file(path), training)
    trainer = Trainer(pair.model.folder, pair.lexicon, training)
    traces = [one.trace for one in answers]
    drawn = random.Random(training.seed)
    for start in range(0, len(traces) - training.batch + 1, training.batch):
        if watch:
            watch(start, _learned(pair, _weights(trainer), training, trainer))
        end = start + training.batch
        seen = [trace for trace in traces[:end] if trace]
        replay = drawn.sample(seen, min(training.batch, len(seen)))  # for an interleaved head
        trainer.update([trace for trace in traces[start:end] if trace], replay)
        lab.say(f"learned from {end} of {len(traces)} answers")
    weights = _weights(trainer)
    if training.rank:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path)
    return _learned(pair, weights, training, trainer)


def shuffled(answers: Sequence[Recorded], seed: int) -> list[Recorded]:
    """A stream in another order for every seed but 0."""
    order = np.random.default_rng(seed).permutation(len(answers)) if seed else range(len(answers))
    return [answers[i] for i in order]


def learned(lab: Lab, cell: Cell) -> tuple[Learned, list[Recorded], list[Recorded]]:
    """The drafter after a cell's stream, or as it came; the stream; the test answers."""
    pair = lab.pair(cell["target"], cell["drafter"])
    size = cell["target"], cell["drafter"], cell["task"]
    train = lab.stream(Stream(*size, "train", cell["train"], cell["tokens"]))
    test = lab.stream(Stream(*size, "test", cell["test"], cell["tokens"]))
    if not cell["loss"]:
        return Learned(None), train, test
    train = shuffled(train, cell["seed"])
    return learn(lab, pair, train, training_of(cell)), train, test


def tested(lab: Lab, cell: Cell) -> Measured:
    """What a cell's test answers take after learning; the n-grams of the stream are known."""
    its, train, test = learned(lab, cell)
    pair = lab.pair(cell["target"], cell["drafter"])
    replay = Replay(pair.lexicon, cell["method"], cell["k"], stop=its.stop(cell.get("gamma", 1.0)))
    replay.know(train)
    return pair.measure(test, {"": replay}, its.drafter)[""]


_HEAD = "acceptance_head."  # before the names of a head's weights


def _weights(trainer: Trainer) -> dict[str, Any]:
    """The adapter's weights and the head's, if they are trained."""
    training = trainer.training
    adapter = trainer.weights() if training.rank and training.head != "only" else {}
    head = trainer.head.weights() if training.head != "off" else {}
    return adapter | {f"{_HEAD}{name}": weight for name, weight in head.items()}


def _learned(
    pair: Pair, weights: dict[str, Any], training: Training, trainer: Trainer | None = None
) -> Learned:
    """The drafter with these weights; with all of its own trained, it is the trainer's and changes with it."""
    drafter = pair.model
    adapter = {name: weight for name, weight in weights.items() if not name.startswith(_HEAD)}
    head = {name.removeprefix(_HEAD): weight for name, weight in weights.items() if name.startswith(_HEAD)}
    if adapter:
        drafter = drafter.adapted(adapter)
    elif trainer and training.head != "only":
        drafter = copy.copy(drafter)
        drafter.module = trainer.module
    size = drafter.config.get_text_config().hidden_size
    return Learned(drafter, Head(head, size) if head else None)


def _digest(pair: Pair, answers: Sequence[Recorded], training: Training) -> str:
    drafter = hub.weights_fingerprint(hub.pull(pair.drafter))
    what = [pair.target, drafter, asdict(training), [[one.prompt, one.answer] for one in answers]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
