"""Tokens per step of every method and rule, paired by prompt, with bootstrap confidence intervals.

A seeded answer under `compare` is the target's own whatever is proposed, and so is any answer at temperature 0. So the
target's answers are recorded once, in batches, and replayed: only the drafter runs, and each of its passes once for
all methods. `perfect` is a drafter that writes the recorded answer: what it loses is translation's alone. At a
temperature the rules `trie` and `paper` choose their own way through the target's law and are decoded live (`--live`).

`run` keeps every finished prompt in a JSON Lines file; the same command goes on where it stopped (a live run without
the n-grams it had met). `table` prints what is in such files, `pack` makes one small JSON file of them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import typer

from omnidraft import OmniDraft, hub, load_model
from omnidraft.backends.checkpoint import load_vocab
from omnidraft.bench import method_options
from omnidraft.control import Fixed
from omnidraft.decode import decode
from omnidraft.drafting import Drafter
from omnidraft.engine import make_options
from omnidraft.learn.record import RecordedSession
from omnidraft.ngrams import Eviction, Trie
from omnidraft.provenance import provenance
from omnidraft.sampling import Sampler, Sampling
from omnidraft.session import Session, feed
from omnidraft.spellings import Lexicon
from omnidraft.stats import Stats
from omnidraft.tasks import load_task
from omnidraft.translate import SymbolTranslator, TextTranslator, Translator
from omnidraft.types import Draft, Proposal, Rows, as_tokens
from omnidraft.verify import Compare
from omnidraft.vocab import Alignment

REPLAYED = [
    "direct:compare:nosplits", "direct:compare:splits", "ngram:compare:nosplits", "ngram:compare:splits",
    "prefill:compare:nosplits", "prefill:compare:splits", "text:compare",
]  # fmt: skip
IDEAL = "ideal"
PERFECT, KEPT = "perfect ", "kept "  # put before a method: who drafts
LAW_AWARE = [
    "prefill:trie:splits", "ngram:trie:splits", "direct:trie:splits", "prefill:paper", "ngram:paper",
    "direct:paper", "prefill:trie:nosplits", "ngram:trie:nosplits", "direct:trie:nosplits",
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One prompt by one method."""

    task: str
    prompt: int
    temperature: float
    k: int
    method: str
    tokens: int
    steps: int
    acceptance: float | None
    ngram_hits: int


class Memo(Session):
    """A drafter's session that runs each pass once, whichever method asks; keeps the likeliest tokens of a row."""

    def __init__(self, model: Any) -> None:
        self.tokens = as_tokens()
        self.seconds = 0.0
        self.rows: dict[bytes, tuple[Any, Any]] = {}
        self._width = model.vocab.width
        self._session = model.session()

    def truncate(self, length: int) -> None:
        """See `omnidraft.session.Session`."""
        del self.tokens[length:]

    def extend(self, tokens: Sequence[int], rows: int) -> Rows:
        """One row at most: that is what drafting asks for."""
        self.tokens.extend(tokens)
        if not rows:
            return np.empty((0, self._width), np.float32)
        key = self.tokens.tobytes()
        if key not in self.rows:
            row = feed(self._session, self.tokens, 1)[0]
            ids = np.argpartition(-row, 256)[:256]
            self.rows[key] = ids, row[ids]
        ids, logits = self.rows[key]
        row = np.full((1, self._width), -np.inf, np.float32)
        row[0, ids] = logits
        return row


class Perfect(Drafter):
    """Writes the recorded answer, as its tokenizer spells it."""

    answer: bytes
    prompt: int  # length, tokens

    def propose(self, context: Sequence[int], k: int) -> Any:
        """See `Drafter`."""
        alignment = self.translator.alignment
        done = len(alignment.target.decode(context[self.prompt :]))
        tokens = alignment.draft.encode_bytes(self.answer[done:])[:k]
        usable = [bool(self.translator.usable[token]) for token in tokens]
        draft = Draft(tuple(tokens[: usable.index(False)] if False in usable else tokens))
        return draft, self.translator.translate(context, draft)


class Kept(Drafter):
    """Keeps its own spelling of what was accepted, and spells the target's own token behind it.

    Drafters otherwise re-tokenise behind the last word's start, as if the text had been given to them.
    """

    _written: tuple[int, ...] = ()

    def propose(self, context: Sequence[int], k: int) -> Any:
        """See `Drafter`."""
        target, own = self.translator.alignment.target, self.translator.alignment.draft
        new = context[self.seen :]
        if self._written and not any(token in target.special_text for token in new):
            data = target.decode(new)
            for token in self._written:
                if not (own.pieces[token] and data.startswith(own.pieces[token])):
                    break
                self._context.tokens.append(token)
                data = data[len(own.pieces[token]) :]
            self._context.tokens.extend(own.encode_bytes(data))
            self.seen = len(context)
        draft, proposal = super().propose(context, k)
        self._written = draft.tokens
        return draft, proposal


class Ideal(TextTranslator):
    """Proposes the answer's own tokens, as many as the drafted bytes cover: no translation can do better."""

    answer: Sequence[int]
    prompt: int  # length, tokens

    def translate(self, context: Sequence[int], draft: Draft) -> Proposal:
        """See `Translator`."""
        room = len(self.alignment.draft.decode(draft.tokens))
        tokens: list[int] = []
        for token in self.answer[len(context) - self.prompt :]:
            room -= len(self.alignment.target.pieces[token])
            if room < 0:
                break
            tokens.append(token)
        return Proposal(tuple(tokens))


def record(
    model: Any, prompts: list[list[int]], temperature: float, max_tokens: int, seed: int
) -> list[list[int]]:
    """The target's answers, a batch at once, by transformers' own loop."""
    torch.manual_seed(seed)
    width = max(map(len, prompts))
    pad = model.vocab.eos[0]
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "repetition_penalty": 1.0}
    if temperature:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        output = model.module.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=pad,
            eos_token_id=list(model.vocab.eos), **sampling,
        )  # fmt: skip
    answers = []
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in model.vocab.eos), len(row))
        answers.append(row[:end])
    return answers


class Comparison:
    """The models, and what is carried from prompt to prompt: n-grams, by task, temperature, k and method."""

    def __init__(self, target: str, drafter: str) -> None:
        self.target = load_model(target, engine="transformers", precision="float32")
        self.drafter = load_model(drafter, engine="transformers", precision="mixed")
        self.memo = Memo(self.drafter)
        self.target_session = RecordedSession(self.target.vocab.width)
        self.states: dict[tuple[Any, ...], OmniDraft] = {}
        self.base = OmniDraft(self.target, self.drafter)

    def state(self, *key: Any) -> OmniDraft:
        """One OmniDraft for each line of the comparison, so that the n-grams of one do not help another."""
        if key not in self.states:
            self.states[key] = model = OmniDraft(self.target, self.drafter)
            model.alignment = self.base.alignment
            model.__dict__["lexicon"] = self.base.lexicon
            # Shared KV caches: a prompt is fed once for all methods. `feed` keeps what they have in common.
            model._target_session, model._draft_session = self.base._target_session, self.base._draft_session
        return self.states[key]

    def replay(
        self,
        key: tuple[Any, ...],
        method: str,
        k: int,
        prompt: list[int],
        answer: list[int],
        *,
        who: str,
    ) -> Stats:
        """Decode the recorded answer by a method; `who` drafts."""
        model = self.state(*key, method, k, who)
        strategy = make_options(**method_options("text" if method == IDEAL else method)).strategy
        rule = model._rule(strategy)
        alignment = self.base.lexicon.alignment
        translator: Translator = model._translator(strategy, alignment)
        if method == IDEAL:
            translator = ideal = Ideal(alignment)
            ideal.answer, ideal.prompt = answer, len(prompt)
        vocab = self.target.vocab
        sampler = Sampler(Sampling(seed=0), prompt, vocab.size)
        if who == PERFECT:
            drafter: Drafter = Perfect(self.memo, translator, 2**31)
            drafter.answer, drafter.prompt = vocab.decode(answer), len(prompt)  # type: ignore[attr-defined]
        else:
            kind = Kept if who == KEPT else Drafter
            drafter = kind(
                self.memo, translator, self.drafter.context_length, sampler if rule.needs_laws else None
            )
        stats = Stats()
        tokens: list[int] = []
        session = self.target_session
        session.begin(prompt, answer)
        for step in decode(
            session,
            drafter,
            prompt,
            sampler=sampler,
            rule=rule,
            control=Fixed(k),
            max_tokens=len(answer),
            ends=vocab.eos,
        ):
            stats.add(step)
            tokens += step.tokens
        if tokens != answer:
            raise RuntimeError(
                f"{method} changed the answer; decoding is broken, and its numbers mean nothing"
            )
        return stats

    def pass_over(self, key: tuple[Any, ...], method: str, k: int, answer: list[int], *, who: str) -> None:
        """A result of an earlier run: only its n-grams are missing."""
        strategy = make_options(**method_options(method)).strategy
        if strategy.method == "ngram":
            self.state(*key, method, k, who).trie("ngram", splits=strategy.splits).insert(answer)

    def live(
        self, task: str, method: str, k: int, temperature: float, prompt: str, max_tokens: int, seed: int
    ) -> Stats:
        """Decode for real."""
        model = self.state(task, temperature, method, k)
        options = method_options(method)
        return model.generate(
            prompt, **options, k=k, temperature=temperature, seed=seed, max_tokens=max_tokens
        ).stats


app = typer.Typer(add_completion=False)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="Results, one line a prompt and method.")],
    target: str = "qwen2.5-coder-0.5b",
    drafter: str = "smollm2-135m",
    data: Path = Path("../shared/data"),
    tasks: str = "mbpp,gsm8k,alpaca",
    limit: int = 20,
    max_tokens: int = 64,
    ks: Annotated[str, typer.Option("--k")] = "8,4",
    temperatures: str = "0,1",
    live: Annotated[
        str, typer.Option(help="Methods to decode live at temperature 1, or all; none replays.")
    ] = "",
) -> None:
    """Compare the methods; goes on with what `out` lacks."""
    done = read(out)[1] if out.exists() else []
    comparison = Comparison(target, drafter)
    known = {(r.task, r.prompt, r.temperature, r.k, r.method) for r in done}
    if not out.exists():
        settings = dict(target=target, drafter=drafter, max_tokens=max_tokens, limit=limit)
        out.write_text(json.dumps(provenance() | settings) + "\n")
    with out.open("a") as file:
        for result in compare(
            comparison, known, data, tasks.split(","), limit, max_tokens,
            [int(k) for k in ks.split(",")], [float(t) for t in temperatures.split(",")],
            LAW_AWARE if live == "all" else list(filter(None, live.split(","))),
        ):  # fmt: skip
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()


@app.command()
def eviction(
    target: str = "qwen2.5-coder-0.5b",
    drafter: str = "smollm2-135m",
    data: Path = Path("../shared/data"),
    task: str = "mbpp",
    limit: int = 100,
    max_tokens: int = 64,
    k: int = 4,
    texts: Annotated[str, typer.Option(help="FILE:FIELD of JSON Lines: texts to take for the answers.")] = "",
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Hits of a bounded n-gram cache against an unbounded one, over a recorded stream and its perfect drafter."""
    vocab, draft_vocab = (load_vocab(hub.pull(name), name) for name in (target, drafter))
    if texts:
        file, _, field = texts.rpartition(":")
        lines = [json.loads(line)[field] for line in Path(file).read_text().splitlines()[:limit]]
        answers = [vocab.encode_bytes(text.replace("\r\n", "\n").encode()) for text in lines]
        prompts = [[vocab.eos[0]]] * len(answers)
    else:
        model = load_model(target, engine="transformers", precision="float32")
        prompts = [model.chat([{"role": "user", "content": text}]) for text in load_task(task, data, limit)]
        answers = recorded(model, task, prompts, 0.0, max_tokens)
    lexicon = Lexicon.cached(Alignment(draft_vocab, vocab), hub.cache_root() / "lexicons")
    target_session, draft_session = RecordedSession(vocab.width), RecordedSession(draft_vocab.width)

    def hits(capacity: int | None, policy: Eviction) -> tuple[int, int]:
        """Accepted n-grams, and how many are known at the end."""
        trie = Trie(lexicon, capacity=capacity, eviction=policy)
        total = Stats()
        for prompt, answer in zip(prompts, answers, strict=True):
            perfect = Perfect(draft_session, SymbolTranslator(trie, grow=True), 2**31)
            perfect.answer, perfect.prompt = vocab.decode(answer), len(prompt)
            target_session.begin(prompt, answer)
            sampler = Sampler(Sampling(), prompt, vocab.size)
            for step in decode(
                target_session,
                perfect,
                prompt,
                sampler=sampler,
                rule=Compare(),
                k=k,
                max_tokens=len(answer),
                ends=(),
            ):
                total.add(step)
        return total.ngram_hits, len(trie)

    everything, size = hits(None, "lfu")
    rows = [{"capacity": size, "share": 1.0, "eviction": None, "hits": everything, "kept": 1.0}]
    for share in (0.5, 0.25):
        for policy in get_args(Eviction):
            some, _ = hits(round(share * size), policy)
            kept = {"capacity": round(share * size), "share": share, "eviction": policy}
            rows.append(kept | {"hits": some, "kept": some / everything})
    for row in rows:
        print(row)
    if out:
        settings = dict(
            target=target, drafter=drafter, tokens=sum(map(len, answers)), answers=len(answers), k=k
        )
        out.write_text(json.dumps({"provenance": provenance() | settings, "rows": rows}, indent=1) + "\n")


@app.command()
def pack(out: Path, files: list[Path]) -> None:
    """Put the results of several runs into one JSON file."""
    lines: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    provenances = []
    for file in files:
        born, results = read(file)
        for run in born:  # a path says nothing to anyone elsewhere
            run["argv"] = [Path(word).name if word.startswith("/") else word for word in run["argv"]]
        provenances += born
        for r in results:
            lines[r.task, r.temperature, r.k, r.method].append(r)
    keys = ("task", "temperature", "k", "method")
    rows = [
        dict(zip(keys, line, strict=True))
        | {
            name: [getattr(r, name) for r in own]
            for name in ("prompt", "tokens", "steps", "acceptance", "ngram_hits")
        }
        for line, own in lines.items()
    ]
    text = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f'{{"provenance": {json.dumps(provenances, indent=1)},\n"rows": [\n{text}\n]}}\n')


def read(file: Path) -> tuple[list[Any], list[Result]]:
    """Provenance and results of a run's file or of a packed one."""
    if file.suffix == ".json":
        record = json.loads(file.read_text())
        results = []
        for row in record["rows"]:
            lists = ("prompt", "tokens", "steps", "acceptance", "ngram_hits")
            for values in zip(*(row[name] for name in lists), strict=True):
                results.append(Result(**{**row, **dict(zip(lists, values, strict=True))}))
        return record["provenance"], results
    born, *lines = map(json.loads, file.read_text().splitlines())
    return [born], [Result(**line) for line in lines]


@app.command()
def table(files: list[Path]) -> None:
    """Print tables for each task, temperature and k, in Markdown."""
    print(
        "Tokens a step by method and rule, as `benchmarks/methods.py table` prints them. Methods are named as for\n"
        "`omnidraft bench`; `perfect` drafts the recorded answer, `perfect ideal` proposes all target tokens that its\n"
        "bytes cover, `kept` leaves accepted draft tokens in the drafter's context as they were drafted. Intervals\n"
        "are 95 %, by bootstrap over prompts."
    )
    print_tables([result for file in files for result in read(file)[1]])


def compare(
    comparison: Comparison, known: set[Any], data: Path, tasks: list[str], limit: int, max_tokens: int,
    ks: list[int], temperatures: list[float], live: list[str],
) -> Iterator[Result]:  # fmt: skip
    """Results that are not known yet, prompt by prompt."""

    def result(task: str, i: int, temperature: float, k: int, method: str, stats: Stats) -> Result:
        counts = stats.tokens, stats.steps, stats.acceptance_rate, stats.ngram_hits
        return Result(task, i, temperature, k, method, *counts)

    for task in tasks:
        texts = load_task(task, data, limit)
        if live:
            for i, text in enumerate(texts):
                for method in live:
                    if (task, i, 1.0, ks[-1], method) not in known:
                        stats = comparison.live(task, method, ks[-1], 1.0, text, max_tokens, seed=i)
                        yield result(task, i, 1.0, ks[-1], method, stats)
            continue
        prompts = [comparison.target.chat([{"role": "user", "content": text}]) for text in texts]
        for temperature in temperatures:
            answers = recorded(comparison.target, task, prompts, temperature, max_tokens)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                comparison.memo.rows.clear()
                key = task, temperature
                for k in ks:
                    for who, method in lines(temperature, last=k == ks[-1]):
                        if (task, i, temperature, k, who + method) not in known:
                            stats = comparison.replay(key, method, k, prompt, answer, who=who)
                            yield result(task, i, temperature, k, who + method, stats)
                        elif method != IDEAL:
                            comparison.pass_over(key, method, k, answer, who=who)
                print(task, temperature, i, len(comparison.memo.rows), "passes", flush=True)


def lines(temperature: float, last: bool) -> list[tuple[str, str]]:
    """Who drafts, and the method; the rarer ones for the `last` k only."""
    law_aware = LAW_AWARE if temperature == 0 and last else []
    kept = ["text:compare", "prefill:compare:splits"] if last else []
    return [
        *(("", method) for method in [*REPLAYED, *law_aware]),
        *((PERFECT, method) for method in [*REPLAYED, IDEAL]),
        *((KEPT, method) for method in kept),
    ]


def recorded(
    target: Any, task: str, prompts: list[list[int]], temperature: float, max_tokens: int
) -> list[list[int]]:
    """The target's answers, from an earlier run if there was one."""
    name = f"{target.name}-{task}-{len(prompts)}-{temperature}-{max_tokens}.json".replace("/", "_")
    path = hub.cache_root() / "recordings" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record(target, prompts, temperature, max_tokens, seed=0)))
    answers: list[list[int]] = json.loads(path.read_text())
    return answers


def print_tables(results: list[Result]) -> None:
    """A table for each task, temperature and k; intervals are 95 %, over prompts."""
    lines: dict[tuple[Any, ...], dict[str, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        lines[r.temperature, r.k, r.task][r.method][r.prompt] = r
    for (temperature, k, task), methods in sorted(lines.items()):
        print(f"\n## {task}, temperature {temperature:g}, k = {k}\n")
        print(
            "| method | prompts | acceptance | tokens a step | against direct | 95 % interval | n-gram hits a step |"
        )
        print("|---|---|---|---|---|---|---|")
        for method, own in methods.items():
            base = (PERFECT if method.startswith(PERFECT) else "") + "direct:compare:nosplits"
            shared = sorted(own.keys() & methods.get(base, own).keys())
            ratio = paired([own[i] for i in shared], [methods.get(base, own)[i] for i in shared])
            tokens, steps = (sum(getattr(own[i], name) for i in shared) for name in ("tokens", "steps"))
            rates = [rate for i in shared if (rate := own[i].acceptance) is not None]
            hits = sum(own[i].ngram_hits for i in shared) / steps
            print(
                f"| {method} | {len(shared)} | {np.mean(rates):.3f} | {tokens / steps:.2f} | {ratio[0]:.3f} "
                f"| {ratio[1]:.3f} to {ratio[2]:.3f} | {hits:.2f} |"
            )
        print_steps(methods)


def print_steps(methods: dict[str, dict[int, Result]]) -> None:
    """The comparisons that are asked about, each of a method with the one it should not fall behind."""
    rules = ["compare:nosplits", "compare:splits", "trie:nosplits", "trie:splits", "paper"]
    pairs = [
        (f"{a}:{rule}", f"{b}:{rule}")
        for rule in rules
        for a, b in (("ngram", "direct"), ("prefill", "ngram"))
    ]
    best = ["prefill:compare:splits", "prefill:trie:splits", "prefill:paper"]
    pairs += [("text:compare", other) for other in best]
    pairs += [("prefill:trie:splits", "prefill:paper"), ("perfect prefill:compare:splits", "perfect ideal")]
    print("\n| method | against | prompts | ratio of tokens a step | 95 % interval |")
    print("|---|---|---|---|---|")
    for a, b in pairs:
        if shared := sorted(methods.get(a, {}).keys() & methods.get(b, {}).keys()):
            ratio, low, high = paired([methods[a][i] for i in shared], [methods[b][i] for i in shared])
            print(f"| {a} | {b} | {len(shared)} | {ratio:.3f} | {low:.3f} to {high:.3f} |")


def paired(a: list[Result], b: list[Result], resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of tokens per step, a to b, and its interval over prompts."""
    counts = np.array([[(r.tokens, r.steps) for r in side] for side in (a, b)], float)  # [2, prompts, 2]
    draws = np.random.default_rng(0).integers(counts.shape[1], size=(resamples, counts.shape[1]))

    def ratio(rows: Any) -> Any:
        totals = counts[:, rows].sum(axis=-2)
        rates = totals[..., 0] / totals[..., 1]
        return rates[0] / rates[1]

    low, high = np.quantile(ratio(draws), [0.025, 0.975])
    return float(ratio(np.arange(counts.shape[1]))), float(low), float(high)


if __name__ == "__main__":
    app()
