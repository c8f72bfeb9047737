"""What an acceptance head is worth against the best fixed k, on recorded streams, without running the target.

    python benchmarks/head.py train WORK --train GSM8K.train --answers 160
    python benchmarks/head.py draft WORK --test GSM8K.test --prompts 48
    python benchmarks/head.py costs COSTS.json
    python benchmarks/head.py score results/head.json WORK... --costs COSTS.json
    python benchmarks/head.py table results/head.json

Recordings are those that `omnidraft experiment losses` keeps in `recordings` of the cache folder. `train` trains the
drafter on a stream and three heads beside it: `only` behind the drafter as it came, `joint` on the same batches,
`interleaved` on answers drawn from those seen (a head never changes what the drafter learns, so the last two share it).
`draft` lets both drafters write ahead at every position of the test answers and asks the heads about each token. From
that `score` decodes under any policy exactly: the accepted and drafted tokens are the real ones. Time is a ledger, as
wall time on a busy machine is noise: t_draft a draft token and t_verify(m) a pass over m. `train` and `draft` stop
after `--minutes`; the same command goes on.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from omnidraft import hub
from omnidraft.backends.architectures import cache_argument
from omnidraft.backends.checkpoint import load_vocab
from omnidraft.control import Fixed
from omnidraft.curve import measure
from omnidraft.decode import decode
from omnidraft.learn import record as recording
from omnidraft.learn.head import Head, HeadTrainer
from omnidraft.learn.record import Recorded, RecordedSession
from omnidraft.learn.trainer import Trainer, Training
from omnidraft.loading import load_model
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler, Sampling
from omnidraft.spellings import Lexicon
from omnidraft.stats import Stats
from omnidraft.translate import DraftContext, TextTranslator
from omnidraft.types import Draft, Proposal
from omnidraft.verify import Compare
from omnidraft.vocab import Alignment

app = typer.Typer(add_completion=False)
LONGEST = 8
GAMMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PAPER = {"name": "paper's table 8: Llama-68M and Qwen2-7B, A100", "draft": 2.03, "verify": {"1": 26.67}}
Minutes = Annotated[float, typer.Option(help="Stop after so long; the same command goes on.")]


def _trainer(about: dict[str, Any], training: Training) -> Trainer:
    folders = [hub.pull(about[side]) for side in ("drafter", "target")]
    vocabs = [load_vocab(folder, folder.name) for folder in folders]
    lexicon = Lexicon.cached(Alignment(*vocabs), hub.cache_root() / "lexicons")
    return Trainer(folders[0], lexicon, training)


@app.command()
def train(
    work: Path,
    train: Annotated[Path, typer.Option()],
    answers: int = 160,
    seed: int = 0,
    batch: int = 4,
    minutes: Minutes = 60,
) -> None:
    """Train a drafter and its heads; `work`: a folder for what is in between."""
    begin = perf_counter()
    stream, about = recording.load(train)
    traces = [one.trace for one in stream if one.trace][:answers]
    trainer = _trainer(about, Training(head="joint", seed=seed, batch=batch))
    others = {name: HeadTrainer(trainer.module.config.hidden_size) for name in ("only", "interleaved")}
    state = _load(work) or dict(done=0, about=about, seed=seed, batch=batch, train=train.name, losses=[])
    if state["done"]:
        trainer.load(state["drafter"])
        trainer.load_optimizer(state["optimizer"])
        trainer.head.load(state["joint"])
        for name, head in others.items():
            head.load(state[name])
            head.optimizer.load_state_dict(state[f"{name}.optimizer"])
    order = random.Random(seed).sample(traces, len(traces)) if seed else traces
    while state["done"] + batch <= len(order) and perf_counter() - begin < 60 * minutes:
        fresh = order[state["done"] : state["done"] + batch]
        losses = dict(
            only=others["only"].update([trainer.look(t, adapted=False).examples for t in fresh]).loss
        )
        update = trainer.update(fresh)
        seen = random.Random(f"{seed} {state['done']}").sample(order[: state["done"] + batch], batch)
        losses["interleaved"] = others["interleaved"].update([trainer.look(t).examples for t in seen]).loss
        losses |= dict(drafter=update.loss, joint=update.head.loss if update.head else None)
        state["losses"].append(losses)
        state["done"] += batch
        print(state["done"], losses, flush=True)
    state |= dict(
        drafter=_tensors(trainer.weights()),
        optimizer=_tensors(trainer.optimizer()),
        joint=_tensors(trainer.head.weights()),
    )
    for name, head in others.items():
        state |= {name: _tensors(head.weights()), f"{name}.optimizer": head.optimizer.state_dict()}
    work.mkdir(exist_ok=True)
    torch.save(state, work / "state.part")
    (work / "state.part").replace(work / "state.pt")


def _tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _load(work: Path) -> dict[str, Any] | None:
    path = work / "state.pt"
    loaded: dict[str, Any] | None = torch.load(path, weights_only=True) if path.exists() else None
    return loaded


@app.command()
def draft(
    work: Path, test: Annotated[Path, typer.Option()], prompts: int = 48, minutes: Minutes = 60
) -> None:
    """Write ahead at every position of the test answers, with the drafter as it came and as it was trained."""
    begin = perf_counter()
    state = _load(work)
    if state is None:
        raise typer.BadParameter(f"{work} holds nothing; run train first")
    held, about = recording.load(test)
    trainer = _trainer(about, Training(seed=state["seed"]))
    trainer.load(state["drafter"])
    size = trainer.module.config.hidden_size
    heads = {name: Head(state[name], size) for name in ("only", "joint", "interleaved")}
    asked = {"base": ("only",), "trained": ("joint", "interleaved")}
    out = work / "drafts.jsonl"
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for i in range(len(done), min(prompts, len(held))):
        if perf_counter() - begin > 60 * minutes:
            break
        contexts = list(_contexts(trainer, held[i]))
        line: dict[str, Any] = dict(prompt=i, test=str(test))
        for drafter, names in asked.items():
            tokens, hidden, log_q = _write(trainer, contexts, adapted=drafter == "trained")
            chances = {"confidence": np.exp(log_q).tolist()}
            for name in names:
                chances[name] = [
                    [heads[name].chance(h, float(q)) for h, q in zip(*row, strict=True)]
                    for row in zip(hidden, log_q, strict=True)
                ]
            line[drafter] = dict(tokens=tokens.tolist(), chances=chances)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(i + 1, flush=True)


def _contexts(trainer: Trainer, one: Recorded) -> Iterator[list[int]]:
    """The drafter's context before each token of an answer."""
    context = DraftContext(trainer.lexicon.alignment)
    context.extend(one.prompt)
    for token in one.answer:
        yield list(context.tokens)
        context.extend([token])


@torch.inference_mode()
def _write(trainer: Trainer, contexts: Sequence[list[int]], *, adapted: bool) -> tuple[Any, Any, Any]:
    """Behind each context the LONGEST likeliest tokens. [n, LONGEST], hidden states [n, LONGEST, hidden], log q

    One pass over the longest context, then all rows at once: a row hides what of it is not its own, and begins with
    the tokens that it spells otherwise.
    """
    whole = contexts[-1]
    own = [_shared(context, whole) for context in contexts]
    tails = [context[shared:] for context, shared in zip(contexts, own, strict=True)]
    width = max(map(len, tails))
    pads = torch.tensor([width - len(tail) for tail in tails])
    shared = torch.tensor(own)
    fed = torch.tensor([[0] * (width - len(tail)) + tail for tail in tails])
    positions = (shared[:, None] + torch.arange(width) - pads[:, None]).clamp_min(0)
    mask = torch.cat(
        [torch.arange(len(whole)) < shared[:, None], torch.arange(width) >= pads[:, None]], 1
    ).long()
    with trainer.as_it_came(not adapted):
        cache, name = DynamicCache(), cache_argument(trainer.module.get_base_model())
        trainer.module(input_ids=torch.tensor([whole]), logits_to_keep=1, **{name: cache})
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(contexts))
        tokens, hidden, log_q = [], [], []
        for _ in range(LONGEST):
            logits = trainer.module(
                input_ids=fed,
                attention_mask=mask,
                position_ids=positions,
                **{name: cache},
                logits_to_keep=1,
            ).logits[:, -1]
            token = logits.masked_fill(~trainer.usable, -torch.inf).argmax(-1)
            tokens.append(token)
            hidden.append(trainer.hidden[:, -1])
            log_q.append(logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
            fed, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return torch.stack(tokens, 1), torch.stack(hidden, 1).numpy(), torch.stack(log_q, 1).numpy()


def _shared(context: Sequence[int], whole: Sequence[int]) -> int:
    """How many tokens two begin with alike; one less than all, so that there is one to feed."""
    alike = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(context))
    return min(alike, len(context) - 1)


@app.command()
def costs(
    out: Path, target: str = "qwen2.5-coder-0.5b", drafter: str = "smollm2-135m", engine: str = "openvino"
) -> None:
    """Measure t_draft and t_verify(m) on this machine."""
    models = [
        load_model(target, engine=engine),
        load_model(drafter, engine=engine, drafts=True),
    ]
    verify = measure(models[0], range(1, LONGEST + 2))
    record = dict(
        name=f"measured: {drafter} and {target}, {engine}, one thread",
        draft=measure(models[1], [1])[1],
        verify={str(m): ms for m, ms in verify.items()},
        provenance=provenance(),
    )
    out.write_text(json.dumps(record, indent=1) + "\n")


class _Replayed:
    """A drafter that says what was written ahead, as far as a policy lets it."""

    def __init__(
        self, translator: TextTranslator, prompt: int, length: Callable[[int], int], tokens: list[list[int]]
    ):
        """`length`: of the draft at a position of the answer."""
        self.session = SimpleNamespace(seconds=0.0)
        self.translator = translator
        self.seen = prompt
        self._prompt, self._length, self._tokens = prompt, length, tokens

    def propose(self, context: Sequence[int], k: int) -> tuple[Draft, Proposal]:
        """See `omnidraft.drafting.Drafter`."""
        at, self.seen = len(context) - self._prompt, len(context)
        written = self._tokens[at][: min(k, self._length(at))]
        ends = [i for i, token in enumerate(written) if token in self.translator.ends]
        made = Draft(tuple(written[: ends[0] + 1] if ends else written))
        return made, self.translator.translate(context, made)


@app.command()
def score(out: Path, works: list[Path], costs: Annotated[list[Path] | None, typer.Option()] = None) -> None:
    """Decode the test answers under every policy, and write what each took."""
    ledgers = [json.loads(path.read_text()) for path in costs or ()] + [PAPER]
    rows = []
    for work in works:
        state = _load(work)
        assert state is not None
        drafts = [json.loads(line) for line in (work / "drafts.jsonl").read_text().splitlines()]
        held, about = recording.load(Path(drafts[0]["test"]))
        vocabs = [load_vocab(hub.pull(about[side]), about[side]) for side in ("drafter", "target")]
        translator = TextTranslator(Alignment(*vocabs))
        for drafter, policy, setting in _policies(drafts[0]):
            results = [
                _decode(translator, vocabs[1], held[one["prompt"]], one[drafter], policy, setting)
                for one in drafts
            ]
            rows.append(
                dict(
                    task=about["task"], seed=state["seed"], answers=state["done"], drafter=drafter, policy=policy,
                    setting=setting, prompts=len(results), results=results,
                )
            )  # fmt: skip
    record = dict(provenance=provenance(), ledgers=ledgers, rows=rows)
    out.write_text(json.dumps(record) + "\n")


def _policies(draft: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    for drafter in ("base", "trained"):
        yield from ((drafter, "fixed", k) for k in range(1, LONGEST + 1))
        for name in draft[drafter]["chances"]:
            yield from ((drafter, name, gamma) for gamma in GAMMAS)


def _decode(
    translator: TextTranslator,
    target: Any,
    one: Recorded,
    drafts: dict[str, Any],
    policy: str,
    setting: float,
) -> dict[str, Any]:
    def length(at: int) -> int:
        if policy == "fixed":
            return int(setting)
        accepted = np.cumprod(drafts["chances"][policy][at])
        over = np.flatnonzero(1 - accepted > setting)
        return int(over[0]) + 1 if len(over) else LONGEST

    session = RecordedSession(target.width)
    session.begin(one.prompt, one.answer)
    writer: Any = _Replayed(translator, len(one.prompt), length, drafts["tokens"])
    stats, passes = Stats(), np.zeros(LONGEST * 4, int)
    for step in decode(
        session, writer, one.prompt, sampler=Sampler(Sampling(), one.prompt, target.size), rule=Compare(),
        control=Fixed(LONGEST), max_tokens=len(one.answer), ends=target.eos,
    ):  # fmt: skip
        stats.add(step)
        passes[len(step.proposal.tokens) + 1] += 1
    kept = {str(m): int(count) for m, count in enumerate(passes) if count}
    return dict(
        tokens=stats.tokens,
        steps=stats.steps,
        drafted=stats.drafted,
        acceptance=stats.acceptance_rate,
        passes=kept,
    )


def seconds(result: dict[str, Any], ledger: dict[str, Any]) -> float:
    """What decoding an answer takes by a ledger; a pass longer than it knows counts like its longest."""
    known = {int(m): ms for m, ms in ledger["verify"].items()}
    longest = max(known)
    passes = sum(count * known[min(int(m), longest)] for m, count in result["passes"].items())
    return float(passes + result["drafted"] * ledger["draft"]) / 1000


def _speed(row: dict[str, Any], ledger: dict[str, Any]) -> float:
    return sum(r["tokens"] for r in row["results"]) / sum(seconds(r, ledger) for r in row["results"])


@app.command()
def table(file: Path) -> None:
    """The best setting of each policy in hindsight, by each ledger; gain over the best fixed k of the same drafter."""
    record = json.loads(file.read_text())
    for ledger in record["ledgers"]:
        shown = Table(
            "task", "seed", "drafter", "policy", "setting", "acceptance", "drafted/step", "tokens/step",
            "tokens/s", "against the best fixed k", box=None, title=ledger["name"],
        )  # fmt: skip
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in record["rows"]:
            groups.setdefault((row["task"], row["seed"], row["drafter"], row["policy"]), []).append(row)
        for (task, seed, drafter, policy), own in groups.items():
            best = max(own, key=lambda row: _speed(row, ledger))
            fixed = max(groups[task, seed, drafter, "fixed"], key=lambda row: _speed(row, ledger))
            gain, low, high = gain_of(best, fixed, ledger)
            total = {name: sum(r[name] for r in best["results"]) for name in ("tokens", "steps", "drafted")}
            shown.add_row(
                task, str(seed), drafter, policy, f"{best['setting']:g}",
                f"{np.mean([r['acceptance'] for r in best['results']]):.3f}",
                f"{total['drafted'] / total['steps']:.2f}", f"{total['tokens'] / total['steps']:.2f}",
                f"{_speed(best, ledger):.1f}", f"{gain - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})",
            )  # fmt: skip
        Console(width=140).print(shown)


def gain_of(row: dict[str, Any], other: dict[str, Any], ledger: dict[str, Any]) -> tuple[float, float, float]:
    """Ratio of tokens per second, and its 95 % interval over prompts, paired."""
    times = np.array(
        [
            [seconds(o, ledger), seconds(r, ledger)]
            for r, o in zip(row["results"], other["results"], strict=True)
        ]
    )
    drawn = times[np.random.default_rng(0).integers(0, len(times), (2000, len(times)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    whole = times.sum(0)
    return float(whole[0] / whole[1]), float(low), float(high)


if __name__ == "__main__":
    app()
