from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.learn.losses import LOSSES, Pushed, loss_named
from omnidraft.learn.replay import Replay, pack, unpack
from omnidraft.learn.traces import KEPT, Trace, Tracer
from omnidraft.types import Step

torch = pytest.importorskip("torch")

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
# The other way round: draft tokens that the target lacks must be taken apart.
PAIRS = {
    "smaller": (TARGET, DRAFTER),
    "merging": (
        ToyModel(toy_vocab(20, order=2, padding=5), name="target", seed=1),
        ToyModel(toy_vocab(60, order=3), name="drafter", seed=2),
    ),
}
PROMPT = "the flake"


def steps_of(model: OmniDraft, **options: object) -> tuple[list[int], list[Step]]:
    tokens = model.prompt_tokens(PROMPT)
    stream = model.stream(PROMPT, **options)
    return tokens, [chunk.step for chunk in stream.chunks() if chunk.step]


def trace_of(model: OmniDraft, **options: object) -> tuple[Trace, list[tuple[int, np.ndarray]]]:
    """The trace of an answer, and each token of it with its row."""
    prompt, steps = steps_of(model, **options)
    tracer = Tracer(model.trie("prefill"), prompt)
    seen = []
    for step in steps:
        tracer.add(step)
        seen += list(zip(step.tokens, step.rows, strict=False))
    trace = tracer.trace()
    assert trace is not None
    return trace, seen


def laws_by_hand(model: OmniDraft, seen: list[tuple[int, np.ndarray]]) -> dict[int, dict[int, float]]:
    """byte offset in the answer -> the law of the next base symbol there, summed over all target tokens."""
    trie, vocab = model.trie("prefill"), model.target.vocab
    spellings = {id: trie.spelling(id) for id in range(vocab.size)}
    token_of = model.lexicon.token_of
    laws: dict[int, dict[int, float]] = {}
    at = 0
    going_on: dict[int, float] = {}
    stop = 1.0
    for token, row in seen:
        p = np.exp(row[: vocab.size].astype(np.float64))
        p /= p.sum()
        path: tuple[int, ...] = ()
        for symbol in (*spellings[token], None):
            law: dict[int, float] = {}
            ended = reached = 0.0
            for id, spelling in spellings.items():
                if spelling[: len(path)] != path or (path and not spelling):
                    continue
                reached += p[id]
                if len(spelling) > len(path):
                    law[spelling[len(path)]] = law.get(spelling[len(path)], 0) + p[id]
                else:
                    ended += p[id]
            law = {s: chance / reached for s, chance in law.items()}
            if symbol is None:
                going_on, stop = law, ended / reached
                break
            if not path:
                law = {s: going_on.get(s, 0) + stop * law.get(s, 0) for s in law.keys() | going_on.keys()}
            laws[at] = law
            path += (symbol,)
            at += len(vocab.pieces[token_of[symbol]])
    return laws


@pytest.mark.parametrize("pair", PAIRS)
def test_teachers_are_the_target_s_law_pushed_forward(pair: str) -> None:
    target, drafter = PAIRS[pair]
    model = OmniDraft(target, drafter)
    trace, seen = trace_of(model, max_tokens=60, temperature=1.0, seed=3, method="text")
    laws = laws_by_hand(model, seen)
    begins = np.cumsum([0, *(len(drafter.vocab.pieces[token]) for token in trace.tokens)])
    start = begins[trace.prompt[0]]
    depths = set()
    for position, (low, high, depth), symbols, chances in zip(
        trace.positions, trace.nodes, trace.symbols, trace.chances, strict=True
    ):
        table = model.lexicon.draft
        row = table.row(int(trace.tokens[position]))
        assert low <= row < high or depth == 0
        before = table.spelling(row)[:depth]
        at = int(begins[position] - start) + sum(len(model.lexicon.piece(s)) for s in before)
        depths.add(int(depth))
        expected = laws[at]
        known = symbols >= 0
        assert known.sum() == min(KEPT, len(expected))
        assert chances[known] == pytest.approx([expected[s] for s in symbols[known].tolist()], abs=1e-6)
        assert chances[known].min() >= sorted(expected.values())[-known.sum()] - 1e-6, "not the likeliest"
    assert len(trace.positions) > 30
    assert (max(depths) > 0) == (pair == "merging")
    assert (len(trace.ngram_positions) > 4) == (pair == "smaller")


def test_a_teacher_one_position_off_is_noticed() -> None:
    """The commonest fault of online distillation: the row of the next token laid beside this one."""
    model = OmniDraft(TARGET, DRAFTER)
    trace, _ = trace_of(model, max_tokens=60, method="text")
    table = model.lexicon.draft

    def right(shift: int) -> float:
        """How often the teacher's likeliest symbol is what the greedy answer goes on with."""
        firsts = [table.spelling(table.row(int(t)))[0] for t in np.roll(trace.tokens, shift)[trace.positions]]
        return float(np.mean(trace.symbols[range(len(firsts)), trace.chances.argmax(1)] == firsts))

    assert right(0) > 0.8
    assert max(right(1), right(-1)) < 0.4


def test_steps_of_any_method_give_the_same_trace() -> None:
    traces = []
    for options in ({"method": "plain"}, {"method": "text"}, {"method": "ngram", "k": 7}):
        trace, _ = trace_of(OmniDraft(TARGET, DRAFTER), max_tokens=60, **options)
        traces.append(trace)
    for other in traces[1:]:
        assert all(
            np.array_equal(a, b)
            for a, b in zip(pack([traces[0]]).values(), pack([other]).values(), strict=True)
        )


def test_same_vocabularies_teach_every_token() -> None:
    twin = ToyModel(TARGET.vocab, name="twin", seed=4)
    trace, seen = trace_of(OmniDraft(TARGET, twin), max_tokens=60)
    assert int(trace.skipped[0]) == 0
    assert len(trace.positions) == len(seen) == len(trace.tokens) - trace.prompt[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_equal_finite_differences(name: str, pair: str) -> None:
    target, drafter = PAIRS[pair]
    model = OmniDraft(target, drafter)
    trace, _ = trace_of(model, max_tokens=40, temperature=1.0, seed=3, method="text")
    pushed = Pushed(model.lexicon)
    generator = torch.Generator().manual_seed(0)
    shape = (len(trace.tokens) - int(trace.prompt[0]), drafter.vocab.width)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = loss_named(name)
    loss(logits, trace, pushed).sum().backward()
    assert logits.grad is not None
    for _ in range(8):
        direction = torch.randn(shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ahead, behind = (loss(logits + s * direction, trace, pushed).sum() for s in (1e-5, -1e-5))
        slope = float((logits.grad * direction).sum())
        assert slope == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["pushforward", "pushforward-reverse"])
def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn(name: str) -> None:
    twin = ToyModel(TARGET.vocab, name="twin", seed=1)
    model = OmniDraft(TARGET, twin)
    trace, seen = trace_of(model, max_tokens=40)
    rows = np.stack([row for _, row in seen]).astype(np.float64)
    rows[:, TARGET.vocab.size :] = -np.inf
    terms = loss_named(name)(torch.from_numpy(rows), trace, Pushed(model.lexicon))
    # A teacher keeps its likeliest entries: what is left of both laws is equal too.
    assert float(terms.abs().max()) < 1e-4


def test_replay_is_bounded_in_bytes_and_survives_a_file(tmp_path: Path) -> None:
    model = OmniDraft(TARGET, DRAFTER)
    traces = [trace_of(model, max_tokens=n, seed=n, temperature=1.0)[0] for n in range(10, 30)]
    replay = Replay(limit=traces[-1].nbytes * 4, traces=traces)
    assert 1 < len(replay) < len(traces)
    assert replay.nbytes <= replay.limit
    assert replay[len(replay) - 1] is traces[-1]
    for kept in (list(replay), []):
        again = unpack(pack(kept))
        assert len(again) == len(kept)
        for a, b in zip(again, kept, strict=True):
            assert all(
                np.array_equal(x, y) for x, y in zip(pack([a]).values(), pack([b]).values(), strict=True)
            )


def test_unknown_loss_is_refused() -> None:
    from omnidraft.errors import OptionError

    with pytest.raises(OptionError, match="unknown loss 'kl'; use one of pushforward"):
        loss_named("kl")
