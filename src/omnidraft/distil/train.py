"""`build_drafter`: text in, a drafter's folder out; stopped at any moment, it goes on where it was."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from omnidraft import hub
from omnidraft.distil.recipe import Recipe
from omnidraft.distil.student import Student, load_parent, load_tokenizer, write_text_files
from omnidraft.distil.teacher import TeacherRows, sparse_divergence
from omnidraft.distil.text import Document, encode, pack, read_documents
from omnidraft.errors import OmniDraftError, OptionError
from omnidraft.provenance import provenance

DRAFTED = 4  # tokens a step, of which the judged tokens per step speak
_FITTED = 16_384  # tokens that the first translator is solved for on
_JUDGED = 96  # held-out documents at most
_JUDGED_LENGTH = 384  # tokens of each


@dataclass(frozen=True)
class Progress:
    """Where training stands. `loss` since the last report; the rest on held-out text, in the drafter's tokens."""

    step: int
    tokens: int  # trained on
    seconds: float  # of training
    share: float  # of the whole that is done
    loss: float
    acceptance: float  # tokens that are the drafter's likeliest
    tokens_per_step: float  # by drafts of DRAFTED tokens


def build_drafter(
    recipe: Recipe,
    text: Sequence[Path],
    out: Path,
    *,
    judge: Sequence[Path] = (),
    resume: bool = False,
    device: str = "auto",
    save_every: float = 120.0,  # seconds
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Make a drafter of the recipe's parent from `text` in the folder `out`, and return that folder.

    It is a checkpoint like any other from the first save on; `out/training` holds what resuming needs and a
    log. `judge`: a target's answers on which acceptance is measured; without any, a fiftieth of the text is.

    Raises:
        OptionError: text that cannot be read or is too short, a folder that is taken, or one to resume that is
            of another recipe.
        OmniDraftError: as for `hub.pull`.
    """
    work = out / "training"
    settings = {name: value for name, value in asdict(recipe).items() if name not in ("steps", "minutes")}
    settings = json.loads(json.dumps(settings))
    with _claimed(out, work, settings, resume):
        documents = read_documents(text)
        judges = read_documents(judge) if judge else [one for one in documents if one.held_out]
        if not judges:
            raise OptionError(
                "the text is too short to hold some of it out; name a target's answers to judge by"
            )
        folder = hub.pull(recipe.parent)
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        torch.manual_seed(recipe.seed)
        parent = load_parent(folder, recipe.parent, device)
        layers = recipe.chosen_layers(len(parent.get_decoder().layers))
        trained = [one for one in documents if not one.held_out]
        kept = _vocabulary(folder, out, work, trained, recipe.trim)
        tokenizer = load_tokenizer(out)
        sequences = pack([encode(tokenizer, one)[0] for one in trained], recipe.length, recipe.seed)
        exam = [encode(tokenizer, one) for one in judges[:_JUDGED]]
        student = Student(parent, layers, kept)
        teacher = None
        if taught := round(recipe.teacher * len(sequences)):
            contents = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            digest = hashlib.blake2b(sequences[:taught].tobytes(), digest_size=8).hexdigest()
            rows = work / f"rows-{digest}"  # resumed on other text, other rows are needed
            rows.mkdir(exist_ok=True)
            teacher = TeacherRows(rows, parent, contents, kept, (taught, recipe.length))
        run = _Training(recipe, student, teacher, sequences, work)
    if not run.step:
        student.fit(parent, kept, run.batches(_FITTED))
    facts = {
        "recipe": asdict(recipe) | {"layers": layers},
        "text": [_described(path) for path in text],
        "sequences": len(sequences),
        "kept": kept,
        "provenance": provenance(),
    }

    def save() -> None:
        student.save(out)
        _write_json(out / "drafter.json", facts | {"step": run.step, "seconds": run.seconds})
        run.save()  # last: what was killed before is done again when resumed

    for loss in run.steps(save_every):
        acceptance, per_step = judged(student, exam)
        progress = Progress(
            step=run.step,
            tokens=run.step * recipe.batch * recipe.length,
            seconds=run.seconds,
            share=run.share,
            loss=loss,
            acceptance=acceptance,
            tokens_per_step=per_step,
        )
        with (work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(progress)) + "\n")
        save()
        on_progress(progress)
    return out


@contextlib.contextmanager
def _claimed(out: Path, work: Path, settings: dict[str, Any], resume: bool) -> Iterator[None]:
    """Take the folder, or find in it what is to be resumed. One that was taken is free again if the block refuses."""
    file = work / "settings.json"
    if file.is_file():
        if not resume:
            raise OptionError(f"{out} holds a drafter in the making; add --resume, or choose another folder")
        begun = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name in settings if begun.get(name) != settings[name]]:
            raise OptionError(
                f"{out} was begun with {changed[0]} {begun.get(changed[0])!r}, not {settings[changed[0]]!r}; "
                "resume with the same recipe, or choose another folder"
            )
        yield
        return
    if resume:
        raise OptionError(f"{out} holds nothing to resume; leave --resume out to begin")
    there = out.exists()
    if there and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} is not an empty folder; choose another")
    work.mkdir(parents=True)
    _write_json(file, settings)
    try:
        yield
    except OmniDraftError:
        shutil.rmtree(work)
        for written in out.iterdir():
            written.unlink()
        if not there:
            out.rmdir()
        raise


def _vocabulary(
    folder: Path, out: Path, work: Path, documents: Sequence[Document], trim: int | None
) -> list[int] | None:
    """The tokens kept, written down so that resuming keeps the same."""
    file = work / "kept.json"
    if not file.is_file():
        texts = (one.text or "\n".join(message["content"] for message in one.messages) for one in documents)
        _write_json(file, write_text_files(folder, out, texts, trim))
    kept: list[int] | None = json.loads(file.read_text(encoding="utf-8"))
    return kept


def _described(path: Path) -> dict[str, Any]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {"name": path.name, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _write_json(file: Path, contents: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(contents) + "\n", encoding="utf-8")
    os.replace(part, file)


class _Training:
    """The student's optimiser and how far it is."""

    def __init__(
        self,
        recipe: Recipe,
        student: Student,
        teacher: TeacherRows | None,
        sequences: NDArray[np.int32],  # [sequences, length]
        work: Path,
    ) -> None:
        self.step = 0
        self.seconds = 0.0
        self._recipe = recipe
        self._student = student
        self._teacher = teacher
        self._sequences = sequences
        self._file = work / "state.pt"
        self._named = {name: one for name, one in student.named_parameters() if one.requires_grad}
        self._weights = list(self._named.values())
        # Norms' weights are not to decay towards zero.
        groups = [
            {"params": [weight for weight in self._weights if weight.dim() > 1], "weight_decay": 0.01},
            {"params": [weight for weight in self._weights if weight.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        if self._file.is_file():
            self._load()

    @property
    def share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        if self._recipe.steps is not None:
            return min(self.step / self._recipe.steps, 1.0)
        return min(self.seconds / (60 * (self._recipe.minutes or 1)), 1.0)

    def steps(self, save_every: float) -> Iterator[float]:
        """Train to the end; hands over after each `save_every` seconds, and at the end, the mean loss since then."""
        losses: list[float] = []
        last = self.seconds
        while self.share < 1:
            start = perf_counter()
            losses.append(self._one_step())
            self.step += 1
            self.seconds += perf_counter() - start
            if self.share >= 1 or self.seconds - last >= save_every:
                last = self.seconds
                yield sum(losses) / len(losses)
                losses = []

    def save(self) -> None:
        """Write down all that going on needs, at once or not at all."""
        part = self._file.with_suffix(".part")
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "weights": self._named,
            "optimiser": self._optimiser.state_dict(),
        }
        with part.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, self._file)

    def _load(self) -> None:
        device = self._weights[0].device
        state = torch.load(self._file, map_location=device, weights_only=True)
        with torch.no_grad():
            for name, weight in self._named.items():
                weight.copy_(state["weights"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _one_step(self) -> float:
        recipe = self._recipe
        indices = self._batch(self.step)
        tokens = self._tokens(indices)
        rising = min(1.0, (self.step + 1) / (recipe.warmup + 1))
        rate = recipe.learning_rate * rising * (1 + math.cos(math.pi * self.share)) / 2
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        with _half_precision(tokens.device):
            hidden = self._student.hidden(tokens)
        loss = self._loss(hidden, tokens, indices)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(loss.detach())

    def batches(self, tokens: int) -> Iterator[Tensor]:
        """The sequences of the first steps, about so many tokens of them."""
        for step in range(max(tokens // (self._recipe.batch * self._recipe.length), 1)):
            yield self._tokens(self._batch(step))

    def _tokens(self, indices: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._sequences[indices].astype(np.int64)).to(self._weights[0].device)

    def _batch(self, step: int) -> list[int]:
        """The sequences of a step: each epoch has all of them once, in an order of its own."""
        count, size = len(self._sequences), self._recipe.batch
        chosen = []
        for at in range(step * size, (step + 1) * size):
            epoch, i = divmod(at, count)
            chosen.append(int(_order(self._recipe.seed, epoch, count)[i]))
        return chosen

    def _loss(self, hidden: Tensor, tokens: Tensor, indices: Sequence[int]) -> Tensor:
        """Mean over all positions: the text's NLL, and where there are the parent's rows, KL to them, half each."""
        with _half_precision(tokens.device):
            logits = self._student.logits(hidden[:, :-1])
        nll = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        taught = [i for i, index in enumerate(indices) if self._teacher and index < len(self._teacher)]
        if not (self._teacher and taught):
            return nll
        symbols, chances = self._teacher.rows([indices[i] for i in taught], tokens[taught])
        divergence = sparse_divergence(
            logits[taught].float().flatten(0, 1), symbols[:, :-1].flatten(0, 1), chances[:, :-1].flatten(0, 1)
        )
        share = len(taught) / len(indices)
        return nll * (1 - share / 2) + divergence.mean() * (share / 2)


@functools.lru_cache(2)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _half_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where the device computes in it, float32 elsewhere."""
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = "avx512_bf16" in _cpu_flags()
    return torch.autocast(device.type, torch.bfloat16) if able else contextlib.nullcontext()


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@torch.no_grad()
def judged(
    student: Student,
    exam: Sequence[tuple[Sequence[int], int]],  # tokens, and from where on a drafter would write them
) -> tuple[float, float]:
    """How a greedy drafter would fare on texts: the share of tokens that are its likeliest, and tokens per step.

    A step accepts a draft of DRAFTED tokens up to the first that is not the text's, and one token more; it begins
    anywhere with equal chance.
    """
    hits, total, accepted, begun = 0, 0, 0.0, 0
    for tokens, start in exam:
        ids = torch.tensor([tokens[:_JUDGED_LENGTH]], device=student.translator.weight.device)
        if ids.shape[1] <= start:
            continue
        likeliest = student.logits(student.hidden(ids)[0, start - 1 : -1]).argmax(-1)
        hit = (likeliest == ids[0, start:]).cpu().numpy().astype(np.int64)
        hits, total = hits + int(hit.sum()), total + len(hit)
        run = np.ones(max(len(hit) - DRAFTED + 1, 0), np.int64)
        for ahead in range(DRAFTED):
            run *= hit[ahead : ahead + len(run)]
            accepted += int(run.sum())
        begun += len(run)
    return hits / max(total, 1), 1 + accepted / max(begun, 1)
