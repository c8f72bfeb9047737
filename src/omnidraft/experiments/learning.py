"""Learning from a recorded stream, as it is learned while answering; what was trained once is kept."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from omnidraft import hub
from omnidraft.experiments.experiment import Cell, Measured, Stream
from omnidraft.experiments.lab import Lab, Pair
from omnidraft.experiments.replay import Replay
from omnidraft.experiments.scales import Scale, Weights
from omnidraft.learn.record import Recorded
from omnidraft.learn.trainer import Trainer, Training

# At temperature 0 the paper's rule accepts what `compare` does.
DIRECT = "direct:compare:nosplits"  # the paper's SpDDM
CACHE = "ngram:compare:nosplits"  # with the paper's n-grams
Watch = Callable[
    [int, Any], None
]  # told, before each update, how many answers were learned from, and the drafter


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
    cell = dict(
        target=scale.targets[0], drafter=scale.drafter, task=task, train=scale.train[task], test=scale.test[task],
        tokens=scale.tokens, k=scale.k, method=method, loss=loss,
    )  # fmt: skip
    if loss:
        cell |= asdict(weights or scale.default) | dict(batch=scale.batch, seed=0)
    return cell | more


def training_of(cell: Cell) -> Training:
    """How a cell trains."""
    return Training(
        loss=cell["loss"],
        learning_rate=cell["rate"],
        rank=cell["rank"],
        batch=cell["batch"],
        seed=cell["seed"],
    )


def learn(
    lab: Lab, pair: Pair, answers: Sequence[Recorded], training: Training, *, watch: Watch | None = None
) -> Any:
    """The drafter after one pass over a stream, in batches, in the order of the stream.

    LoRA adapters are kept in the cache folder by all that they depend on, and not trained again unless watched.
    """
    path = hub.cache_root() / "adapters" / f"{_digest(pair, answers, training)}.safetensors"
    if path.exists() and not watch:
        return pair.model.adapted(load_file(path))
    trainer = Trainer(pair.model.folder, pair.lexicon, training)
    traces = [one.trace for one in answers]
    for start in range(0, len(traces) - training.batch + 1, training.batch):
        if watch:
            watch(start, _drafter(pair, trainer))
        update = trainer.update([trace for trace in traces[start : start + training.batch] if trace])
        lab.say(f"learned from {start + training.batch} of {len(traces)} answers, loss {update.loss:.3f}")
    if training.rank:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(trainer.weights(), path)
    return _drafter(pair, trainer)


def shuffled(answers: Sequence[Recorded], seed: int) -> list[Recorded]:
    """A stream in another order for every seed but 0."""
    order = np.random.default_rng(seed).permutation(len(answers)) if seed else range(len(answers))
    return [answers[i] for i in order]


def learned(lab: Lab, cell: Cell) -> tuple[Any, list[Recorded], list[Recorded]]:
    """The drafter after a cell's stream, or as it came; the stream; the test answers."""
    pair = lab.pair(cell["target"], cell["drafter"])
    size = cell["target"], cell["drafter"], cell["task"]
    train = lab.stream(Stream(*size, "train", cell["train"], cell["tokens"]))
    test = lab.stream(Stream(*size, "test", cell["test"], cell["tokens"]))
    if not cell["loss"]:
        return pair.model, train, test
    train = shuffled(train, cell["seed"])
    return learn(lab, pair, train, training_of(cell)), train, test


def tested(lab: Lab, cell: Cell) -> Measured:
    """What a cell's test answers take after learning; the n-grams of the stream are known."""
    drafter, train, test = learned(lab, cell)
    pair = lab.pair(cell["target"], cell["drafter"])
    replay = Replay(pair.lexicon, cell["method"], cell["k"])
    replay.know(train)
    return pair.measure(test, {"": replay}, drafter)[""]


def _drafter(pair: Pair, trainer: Trainer) -> Any:
    if trainer.training.rank:
        return pair.model.adapted(trainer.weights())
    drafter = copy.copy(pair.model)
    drafter.module = trainer.module  # not a copy: it changes with the next update
    return drafter


def _digest(pair: Pair, answers: Sequence[Recorded], training: Training) -> str:
    drafter = hub.weights_fingerprint(hub.pull(pair.drafter))
    what = [pair.target, drafter, asdict(training), [[one.prompt, one.answer] for one in answers]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
