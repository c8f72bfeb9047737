"""What an experiment works with: models, vocabularies and recorded streams, each fetched once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from omnidraft import hub
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.engine import OmniDraft
from omnidraft.errors import OptionError
from omnidraft.experiments.experiment import Measured, Stream
from omnidraft.experiments.replay import Memo, Replay, by_prompt
from omnidraft.experiments.scales import Scale
from omnidraft.learn import record as recording
from omnidraft.learn.record import Recorded
from omnidraft.loading import load_model
from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.tasks import Split, load_task
from omnidraft.vocab import Alignment, Vocab

_BATCH = 16  # prompts recorded at once


class Pair:
    """A drafter for a target. The target is its vocabulary alone: recorded answers stand for its weights."""

    def __init__(self, lab: Lab, target: str, drafter: str) -> None:
        self._lab = lab
        self.target, self.drafter = target, drafter

    @cached_property
    def lexicon(self) -> Lexicon:
        """Both vocabularies in base symbols."""
        alignment = Alignment(self._lab.vocab(self.drafter), self._lab.vocab(self.target))
        return Lexicon.cached(alignment, hub.cache_root() / "lexicons")

    @property
    def model(self) -> Any:
        """The drafter with its weights, on the transformers engine."""
        return self._lab.model(self.drafter, drafts=True)

    def live(self) -> OmniDraft:
        """Both models with their weights."""
        model = OmniDraft(self._lab.model(self.target), self.model)
        model.__dict__["lexicon"] = self.lexicon  # the same tables, not read again
        return model

    def measure(
        self,
        answers: Sequence[Recorded],
        replays: dict[str, Replay],
        drafter: Any = None,
    ) -> dict[str, Measured]:
        """Every answer by every method; `drafter`: as it is adapted, if it is."""
        width = self.lexicon.alignment.draft.width
        memo = Memo(drafter.session(), width) if drafter else self._lab.memo(self.drafter)
        found: dict[str, list[Measured]] = {name: [] for name in replays}
        for one in answers:
            for name, replay in replays.items():
                found[name].append(replay.answer(one, memo, self._lab.context_length(self.drafter)))
        return {name: by_prompt(results) for name, results in found.items()}


class Lab:
    """Models and streams of a scale. `say` is told what is being done."""

    def __init__(
        self,
        scale: Scale,
        data: Path,
        *,
        say: Callable[[str], None] = lambda text: None,
        recordings: Path | None = None,
    ) -> None:
        self.scale = scale
        self.data = data
        self.say = say
        self._recordings = recordings or hub.cache_root() / "recordings"
        self._checkpoints: dict[str, CheckpointModel] = {}
        self._models: dict[tuple[str, bool], Any] = {}
        self._memos: dict[str, Memo] = {}

    def checkpoint(self, name: str) -> CheckpointModel:
        """The text side of a model: no weights."""
        if name not in self._checkpoints:
            self._checkpoints[name] = CheckpointModel(hub.pull(name), name)
        return self._checkpoints[name]

    def vocab(self, name: str) -> Vocab:
        """A model's vocabulary."""
        return self.checkpoint(name).vocab

    def context_length(self, name: str) -> int:
        """Of a model, tokens."""
        return self.checkpoint(name).context_length

    def model(self, name: str, *, drafts: bool = False) -> Any:
        """A model with its weights. One target and one drafter are held at a time."""
        if (name, drafts) not in self._models:
            self._models = {key: model for key, model in self._models.items() if key[1] != drafts}
            gc.collect()
            precision = "mixed" if drafts else self.scale.precision
            self.say(f"loading {name}")
            self._models[name, drafts] = load_model(
                name, engine="transformers", precision=precision, drafts=drafts
            )
        return self._models[name, drafts]

    def memo(self, drafter: str) -> Memo:
        """A session of a drafter as it came, which has seen what any cell asked it."""
        if drafter not in self._memos:
            self._memos[drafter] = Memo(self.model(drafter, drafts=True).session(), self.vocab(drafter).width)
        return self._memos[drafter]

    def pair(self, target: str, drafter: str) -> Pair:
        """A drafter for a target."""
        return Pair(self, target, drafter)

    def prompts(self, task: str, split: Split, count: int) -> list[str]:
        """The first prompts of a task; of "a+b" as many of each, of those that have the split."""
        parts = [part for part in task.split("+") if split == "test" or part != "humaneval"]
        each = -(-count // len(parts))
        return [text for part in parts for text in load_task(part, self.data, each, split=split)][:count]

    def stream(self, stream: Stream) -> list[Recorded]:
        """Recorded answers, from earlier runs as far as they go; what is missing is recorded now.

        Raises:
            OptionError: the task has fewer prompts.
        """
        names = [stream.target, stream.drafter, stream.task, stream.split, str(stream.tokens)]
        if stream.temperature:
            names.append(str(stream.temperature))
        path = self._recordings / f"{'-'.join(names).replace('/', '_')}.safetensors"
        done: list[Recorded] = recording.load(path)[0] if path.exists() else []
        if len(done) >= stream.answers:
            return done[: stream.answers]
        texts = self.prompts(stream.task, stream.split, stream.answers)
        if len(texts) < stream.answers:
            raise OptionError(
                f"{stream.task} has {len(texts)} prompts for its {stream.split} split and {stream.answers} are "
                "needed; get the whole data set, or name its folder with --data"
            )
        trie = Trie(self.pair(stream.target, stream.drafter).lexicon)
        trie.fill()
        target = self.model(stream.target)
        while len(done) < stream.answers:
            some = texts[len(done) : len(done) + _BATCH]
            prompts = [target.chat([{"role": "user", "content": text}]) for text in some]
            done += recording.record(
                target, trie, prompts, max_tokens=stream.tokens, batch=_BATCH, temperature=stream.temperature
            )
            recording.save(path, done, asdict(stream) | {"answers": len(done)})
            self.say(f"recorded {len(done)} of {stream.answers} answers of {stream.task}, {stream.split}")
        return done
