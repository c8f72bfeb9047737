"""Learning from a recorded stream, as it is learned while answering; what was trained once is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from omnidraft import hub
from omnidraft.backends.huggingface import HuggingFaceSession
from omnidraft.experiments.experiment import Cell, Measured, Stream
from omnidraft.experiments.lab import Lab, Pair
from omnidraft.experiments.replay import Replay, by_prompt
from omnidraft.experiments.scales import Scale
from omnidraft.learn.record import Recorded
from omnidraft.learn.trainer import Trainer, Training
from omnidraft.session import Session

PAPER_CACHE = "ngram:compare:nosplits"  # at temperature 0 the paper's rule accepts what `compare` does
DIRECT = "direct:compare:nosplits"  # the paper's SpDDM
Watch = Callable[[int, Session], None]  # told, before each update, how many answers were learned from


def setting(scale: Scale, task: str, loss: str | None, *, target: str = "", **more: Any) -> Cell:
    """A cell of an experiment that learns from a task's stream, or with `loss` None does not."""
    target = target or scale.targets[0]
    cell = dict(
        target=target, drafter=scale.drafter, task=task, train=scale.train[task], test=scale.test[task],
        tokens=scale.tokens, k=scale.k, loss=loss,
    )  # fmt: skip
    if loss:
        cell |= dict(rate=scale.rate, rank=scale.rank, batch=scale.batch, seed=0)
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
) -> Session:
    """A session of the drafter after one pass over a stream, in batches, in the order of the stream.

    LoRA adapters are kept in the cache folder by all that they depend on, and not trained again unless watched.
    """
    path = hub.cache_root() / "adapters" / f"{_digest(pair, answers, training)}.safetensors"
    if path.exists() and not watch:
        known: Session = pair.model.adapted(load_file(path)).session()
        return known
    trainer = Trainer(pair.model.folder, pair.lexicon, training)
    traces = [one.trace for one in answers]
    for start in range(0, len(traces) - training.batch + 1, training.batch):
        if watch:
            watch(start, _session(pair, trainer))
        update = trainer.update([trace for trace in traces[start : start + training.batch] if trace])
        lab.say(f"learned from {start + training.batch} of {len(traces)} answers, loss {update.loss:.3f}")
    if training.rank:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(trainer.weights(), path)
    return _session(pair, trainer)


def shuffled(answers: Sequence[Recorded], seed: int) -> list[Recorded]:
    """A stream in another order for every seed but 0."""
    order = np.random.default_rng(seed).permutation(len(answers)) if seed else range(len(answers))
    return [answers[i] for i in order]


def learned(lab: Lab, cell: Cell) -> tuple[Session, list[Recorded], list[Recorded]]:
    """The drafter after a cell's stream, or as it came, with the stream and the test answers."""
    pair = lab.pair(cell["target"], cell["drafter"])
    size = cell["target"], cell["drafter"], cell["task"]
    train = lab.stream(Stream(*size, "train", cell["train"], cell["tokens"]))
    test = lab.stream(Stream(*size, "test", cell["test"], cell["tokens"]))
    if not cell["loss"]:
        return pair.model.session(), train, test
    train = shuffled(train, cell["seed"])
    return learn(lab, pair, train, training_of(cell)), train, test


def tested(lab: Lab, cell: Cell, methods: dict[str, tuple[str, int]]) -> Measured:
    """The test answers by each method (name -> method and k) after learning; n-grams of the stream are known."""
    session, train, test = learned(lab, cell)
    pair = lab.pair(cell["target"], cell["drafter"])
    replays = {name: Replay(pair.lexicon, method, k) for name, (method, k) in methods.items()}
    for replay in replays.values():
        replay.know(train)
    return dict(pair.measure(test, replays, session))


def watched(
    lab: Lab, pair: Pair, answers: Sequence[Recorded], training: Training, method: str, k: int, count: int
) -> Measured:
    """The first `count` answers of every batch, decoded before they are learned from; `at` is where each stands."""
    replay = Replay(pair.lexicon, method, k)
    results: list[Measured] = []

    def watch(start: int, session: Session) -> None:
        own = answers[start : start + count]
        found = pair.measure(own, {"": replay}, session)[""]
        results.extend(
            dict(zip(found, values, strict=True)) | {"at": start + i}
            for i, values in enumerate(zip(*found.values(), strict=True))
        )
        replay.know(answers[start : start + training.batch])

    learn(lab, pair, answers, training, watch=watch)
    return by_prompt(results)


def _session(pair: Pair, trainer: Trainer) -> Session:
    if trainer.training.rank:
        session: Session = pair.model.adapted(trainer.weights()).session()
        return session
    return HuggingFaceSession(trainer.module)


def _digest(pair: Pair, answers: Sequence[Recorded], training: Training) -> str:
    drafter = hub.weights_fingerprint(hub.pull(pair.drafter))
    what = [pair.target, drafter, asdict(training), [[one.prompt, one.answer] for one in answers]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
