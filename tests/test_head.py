"""The acceptance head: what it learns from, what it may not change, and what it does to a draft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy import ToyModel

pytest.importorskip("peft")

import torch
from test_learn import PAIRS, steps_of, trace_of
from test_learner import FAST, PROMPTS, TARGET, make_drafter, make_traces, trainer_of

from omnidraft import OmniDraft
from omnidraft.backends.huggingface import HuggingFaceModel
from omnidraft.learn.head import Head, HeadModule, HeadTrainer, bce, examples
from omnidraft.learn.losses import Pushed
from omnidraft.learn.profile import Arrays, ProfileStore
from omnidraft.learn.traces import Trace
from omnidraft.session import feed


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    return make_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def traces(drafter: HuggingFaceModel) -> list[Trace]:
    return make_traces(drafter)


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    head = HeadModule(12).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden, log_q = torch.randn(20, 12, dtype=torch.float64), -torch.rand(20, dtype=torch.float64)
    labels = torch.rand(20, dtype=torch.float64)
    labels[::7] = torch.nan

    def loss() -> torch.Tensor:
        return bce(head(hidden, log_q), labels, weight=3.0).sum()

    loss().backward()
    with torch.no_grad():
        for _ in range(8):
            directions = [torch.randn_like(p) for p in head.parameters()]
            slope = sum(float((p.grad * d).sum()) for p, d in zip(head.parameters(), directions, strict=True))
            ends = []
            for step in (1e-5, -2e-5):
                for parameter, direction in zip(head.parameters(), directions, strict=True):
                    parameter += step * direction
                ends.append(float(loss()))
            for parameter, direction in zip(head.parameters(), directions, strict=True):
                parameter += 1e-5 * direction
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-7)


def test_the_loss_is_least_at_the_label_and_knows_its_weight() -> None:
    labels = torch.tensor([0.3, 1.0, 0.0, torch.nan])
    at = bce(torch.logit(torch.tensor([0.3, 0.999, 0.001, 0.5])), labels)
    assert len(at) == 3, "a position without a label counts"
    for chance in (0.2, 0.4):
        assert bce(torch.logit(torch.tensor([chance])), labels[:1]) > at[0]
    logits = torch.zeros(4)
    assert bce(logits, labels, weight=5.0)[2] == pytest.approx(5 * float(bce(logits, labels)[2]))
    assert bce(logits, labels, weight=5.0)[1] == pytest.approx(float(bce(logits, labels)[1]))


def test_a_head_asked_in_a_draft_says_what_the_trained_one_does() -> None:
    torch.manual_seed(1)
    module = HeadModule(24)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head = Head({name: weight.numpy() for name, weight in module.state_dict().items()}, 24)
    hidden, log_q = 5 * torch.randn(6, 24), -torch.rand(6)
    with torch.no_grad():
        expected = module(hidden, log_q).sigmoid().tolist()
    asked = [head.chance(h, q) for h, q in zip(hidden.numpy(), log_q.tolist(), strict=True)]
    assert asked == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_labels_are_what_becomes_of_a_first_drafted_token(pair: str) -> None:
    """Against decoding itself: in each step the first token drafted, and whether its bytes were accepted."""
    target, toy = PAIRS[pair]
    options = dict(max_tokens=120, method="text", k=2)
    model = OmniDraft(target, toy)
    trace, seen = trace_of(model, **options)
    start = int(trace.prompt[0])
    rows = [toy.row(trace.tokens[:j].tolist()) for j in range(start, len(trace.tokens))]
    logits = torch.from_numpy(np.stack(rows))
    found = examples(torch.zeros(len(rows), 1), logits, trace, Pushed(model.lexicon), torch.Generator())
    answer = b"".join(target.vocab.pieces[token] for token, _ in seen)
    begins = np.cumsum([0, *(len(toy.vocab.pieces[t]) for t in trace.tokens[start:])])
    outcomes = dict(zip(begins.tolist(), found.labels.tolist(), strict=False))
    checked, at = [], 0
    for step in steps_of(model, **options)[1]:
        piece = toy.vocab.pieces[step.draft.tokens[0]] if step.draft.tokens else b""
        if at in outcomes and piece and at + len(piece) <= len(answer):
            expected = answer[at:].startswith(piece)
            assert outcomes[at] == expected
            checked.append(expected)
        at += sum(len(target.vocab.pieces[token]) for token in step.tokens)
    assert len(checked) > 8
    assert len(set(checked)) == 2
    assert float(found.log_q.max()) < 0


def test_labels_of_drawn_tokens_are_the_rule_s_chances() -> None:
    """A drafter whose vocabulary is the target's: P and Q are rows, and the label is min(1, p/q)."""
    twin = ToyModel(TARGET.vocab, name="twin", seed=4)
    model = OmniDraft(TARGET, twin)
    trace, seen = trace_of(model, max_tokens=60, temperature=1.0, seed=3, method="text")
    trace = Trace(
        **{name: getattr(trace, name) for name in Trace.__slots__} | {"temperature": np.ones(1, np.float32)}
    )
    start = int(trace.prompt[0])
    rows = np.stack([twin.row(trace.tokens[:j].tolist()) for j in range(start, len(trace.tokens))])
    pushed = Pushed(model.lexicon)
    found = examples(
        torch.zeros(len(rows), 1), torch.from_numpy(rows), trace, pushed, torch.Generator().manual_seed(5)
    )
    allowed = np.where(pushed.usable.numpy(), rows, -np.inf)
    q = np.exp(allowed - allowed.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    drawn = torch.multinomial(torch.from_numpy(q), 1, generator=torch.Generator().manual_seed(5))[:, 0]
    p = np.stack([row for _, row in seen])[:, : TARGET.vocab.size].astype(np.float64)
    p = np.exp(p - p.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    expected = np.array([min(1.0, p[i, t] / q[i, t]) for i, t in enumerate(drawn.tolist())])
    kept = np.array([p[i, t] >= trace.chances[i].min() for i, t in enumerate(drawn.tolist())])
    assert kept.sum() > 20
    assert found.labels.numpy()[kept] == pytest.approx(expected[kept], abs=1e-4)
    assert 0.2 < float(found.labels.mean()) < 0.9


@pytest.mark.parametrize("head", ["joint", "interleaved", "only"])
def test_an_update_lowers_the_head_s_loss(
    drafter: HuggingFaceModel,
    traces: list[Trace],
    head: str,
) -> None:
    trainer = trainer_of(drafter, head=head)
    before, untrained = trainer.weights(), trainer.head.weights()
    for _ in range(25):
        update = trainer.update(traces[:2], traces[2:4])
        assert update.head is not None
        assert not update.head.skipped
    own = traces[2:4] if head == "interleaved" else traces[:2]
    seen = {i: trainer.look(trace).examples for i, trace in enumerate(own)}
    losses = [sum(trainer.head.losses(seen, weights).values()) for weights in (untrained, None)]
    assert losses[1] < 0.9 * losses[0]
    same = all(np.array_equal(a, b) for a, b in zip(before.values(), trainer.weights().values(), strict=True))
    assert same == (head == "only")


def test_a_joint_head_does_not_change_what_the_drafter_learns(
    drafter: HuggingFaceModel,
    traces: list[Trace],
) -> None:
    trained = []
    for head in ("off", "joint", "interleaved"):
        trainer = trainer_of(drafter, head=head)
        for _ in range(2):
            trainer.update(traces[:2])
        trained.append(trainer.weights())
    for other in trained[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(trained[0].values(), other.values(), strict=True))


def test_a_session_shows_what_the_trainer_sees(drafter: HuggingFaceModel, traces: list[Trace]) -> None:
    trainer = trainer_of(drafter)
    trainer.update(traces[:2])
    trace = traces[0]
    session = drafter.adapted(trainer.weights()).session()
    at = int(trace.prompt[0]) + 5
    row = feed(session, trace.tokens[:at].tolist(), 1)[0]
    seen = trainer.look(trace).examples
    np.testing.assert_allclose(session.hidden[0], seen.hidden[5].numpy(), atol=1e-4)
    assert np.log(np.exp(row - row.max()) / np.exp(row - row.max()).sum()).max() == pytest.approx(
        float(seen.log_q[5]), abs=1e-4
    )


def test_an_untrained_head_is_the_drafter_s_confidence() -> None:
    head = Head(HeadTrainer(8).weights(), 8)
    for q in (0.02, 0.5, 0.97):
        assert head.chance(np.arange(8, dtype=np.float32), float(np.log(q))) == pytest.approx(q, abs=1e-3)


def test_a_stream_teaches_the_head_to_stop(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    plain = OmniDraft(TARGET, None)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=1.0, profile="anna", store=store, gamma=0.6, head="interleaved", **FAST)
    options = dict(max_tokens=30, k=8)
    first = model.generate(PROMPTS[0], **options).stats
    for _ in range(5):
        for prompt in PROMPTS:
            answer = model.generate(prompt, **options)
            assert answer.tokens == plain.generate(prompt, method="plain", max_tokens=30).tokens
    assert learner.account.head_updates == learner.account.updates > 10
    with learner.paused():
        last = [model.generate(prompt, **options).stats for prompt in PROMPTS]
    assert sum(s.drafted for s in last) < 7 * sum(s.steps for s in last)
    assert np.mean([s.acceptance_rate for s in last]) > 1.2 * first.acceptance_rate
    model.close()

    again = OmniDraft(TARGET, drafter)
    kept = again.learn("off", profile="anna", store=store, gamma=0.6)
    hidden = np.linspace(-1, 1, 64, dtype=np.float32)
    assert kept.head is not None
    assert kept.head.chance(hidden, -0.5) == learner.head.chance(hidden, -0.5)
    assert [again.generate(p, **options).stats.drafted for p in PROMPTS] == [s.drafted for s in last]
    assert again.learn("off", profile="anna", store=store, gamma=1.0).stop().gamma == 1.0
    stubborn = [again.generate(p, **options).stats for p in PROMPTS]
    assert sum(s.drafted for s in stubborn) > sum(s.drafted for s in last)
    again.close()


def test_a_head_of_another_drafter_is_named_and_left_out(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(profile="anna", store=store, head="only", **FAST)
    model.generate(PROMPTS[0], max_tokens=10)
    model.close()
    wrong = {name: weight.numpy() for name, weight in HeadModule(7).state_dict().items()}
    store.save(learner._key, {"head": Arrays(wrong)})
    again = OmniDraft(TARGET, drafter)
    learner = again.learn("off", profile="anna", store=store)
    assert learner.head is None
    assert "the head does not fit a drafter of hidden size 64" in (learner.problem or "")
    assert again.generate(PROMPTS[0], max_tokens=10).tokens
    again.close()
