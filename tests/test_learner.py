"""Learning from answers: a tiny drafter of the real class learns from a toy target."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_drafter import write_drafter
from toy import ToyModel, toy_vocab

pytest.importorskip("peft")

import torch

from omnidraft import OmniDraft
from omnidraft.backends.huggingface import HuggingFaceModel
from omnidraft.errors import MissingExtraError, OptionError, ProfileError
from omnidraft.learn.adapt import adapt
from omnidraft.learn.guard import Guard
from omnidraft.learn.learner import Learner
from omnidraft.learn.profile import Arrays, ProfileStore
from omnidraft.learn.settings import Learning
from omnidraft.learn.traces import Trace
from omnidraft.learn.trainer import Look, Trainer, Training
from omnidraft.session import feed

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
PROMPTS = ["the flake", "then the lake was", "a stone", "by the water", "the bird", "in the evening"]
FAST = dict(learning_rate=2e-2, batch=2, rank=8)


def make_drafter(folder: Path) -> HuggingFaceModel:
    write_drafter(folder, context_length=256)
    return HuggingFaceModel(folder, name="tiny", precision="float32")


def make_traces(drafter: HuggingFaceModel) -> list[Trace]:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(batch=999)
    for prompt in PROMPTS:
        model.generate(prompt, max_tokens=40, method="plain")
    return list(learner._replay)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    return make_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def traces(drafter: HuggingFaceModel) -> list[Trace]:
    return make_traces(drafter)


def trainer_of(drafter: HuggingFaceModel, **training: object) -> Trainer:
    lexicon = OmniDraft(TARGET, drafter).lexicon
    return Trainer(drafter.folder, lexicon, Training(**FAST | training))


@pytest.mark.parametrize("rank", [8, 0])
def test_an_update_lowers_the_loss(drafter: HuggingFaceModel, traces: list[Trace], rank: int) -> None:
    trainer = trainer_of(drafter, rank=rank)
    losses = [trainer.update(traces[:2]).loss for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_adapted_model_is_the_trained_one(drafter: HuggingFaceModel, traces: list[Trace]) -> None:
    trainer = trainer_of(drafter)
    tokens = traces[0].tokens.tolist()
    before = feed(drafter.session(), tokens, 5)
    for _ in range(3):
        trainer.update(traces[:2])
    adapted = drafter.adapted(trainer.weights())
    with torch.no_grad():
        expected = trainer.module(input_ids=torch.tensor([tokens])).logits[0, -5:].numpy()
    np.testing.assert_allclose(feed(adapted.session(), tokens, 5), expected, atol=1e-4)
    assert abs(expected - before).max() > 0.1
    assert np.array_equal(feed(drafter.session(), tokens, 5), before), "the base was altered"


def test_an_adapter_of_another_model_is_refused(drafter: HuggingFaceModel) -> None:
    wrong = {
        f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.weight": np.zeros(shape, np.float32)
        for side, shape in (("A", (2, 99)), ("B", (16, 2)))
    }
    with pytest.raises(OptionError, match=r"layers\.0\.mlp\.up_proj does not fit tiny"):
        drafter.adapted(wrong)


def test_training_goes_on_from_saved_weights_and_moments(
    drafter: HuggingFaceModel, traces: list[Trace]
) -> None:
    first, second = trainer_of(drafter), trainer_of(drafter, seed=5)
    first.update(traces[:2])
    second.load(first.weights())
    second.load_optimizer(first.optimizer())
    assert first.update(traces[2:4]) == second.update(traces[2:4])
    for a, b in zip(first.weights().values(), second.weights().values(), strict=True):
        assert np.array_equal(a, b)


def test_a_loss_that_is_not_finite_changes_nothing(drafter: HuggingFaceModel, traces: list[Trace]) -> None:
    trainer = trainer_of(drafter)
    poisoned = Trace(**{name: np.array(getattr(traces[0], name)) for name in Trace.__slots__})
    poisoned.chances[3] = np.nan
    before = trainer.weights()
    assert trainer.update([traces[1], poisoned]).skipped
    assert all(np.array_equal(a, b) for a, b in zip(before.values(), trainer.weights().values(), strict=True))
    assert not trainer.update([traces[1]]).skipped


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}])
def test_answers_stay_those_of_plain_decoding_and_take_fewer_steps(
    drafter: HuggingFaceModel, options: dict[str, float]
) -> None:
    plain = OmniDraft(TARGET, None)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=1.0, **FAST)
    rates = []
    for _ in range(9):
        tokens, steps = 0, 0
        for prompt in PROMPTS:
            answer = model.generate(prompt, max_tokens=40, method="text", k=4, **options)
            assert answer.tokens == plain.generate(prompt, max_tokens=40, method="plain", **options).tokens
            tokens, steps = tokens + answer.stats.tokens, steps + answer.stats.steps
        rates.append(tokens / steps)
    assert learner.account.updates > 10
    assert rates[-1] > 1.2 * rates[0]
    assert learner.account.held_out == 5


def test_the_budget_is_kept(drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("omnidraft.learn.learner.perf_counter", lambda: now[0])
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=0.25, **FAST)
    update = Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda *given: now.__setitem__(0, now[0] + 5.0) or update(*given))
    for i in range(60):
        now[0] += 1.0  # an answer
        model.generate(PROMPTS[i % len(PROMPTS)], max_tokens=10)
        # The first update's length is not known beforehand.
        assert learner.account.seconds <= max(5.0, 0.25 * now[0])
    assert learner.account.updates >= 3
    assert learner.account.seconds > 0.15 * now[0]


def test_an_update_that_spoils_the_drafter_is_taken_back(
    drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=1.0, **FAST)
    learner.learning = Learning(budget=1.0, held_out=2, training=learner.learning.training)

    def answer(times: int) -> None:
        for i in range(times):
            model.generate(PROMPTS[i % len(PROMPTS)], max_tokens=30)

    answer(48)
    assert learner.account.updates >= 8
    assert learner.account.reverted == 0
    good = np.mean([learner._trainer.look(trace).agreement for trace in learner._guard.traces])
    update = Trainer.update

    def spoil(self: Trainer, *given: list[Trace]) -> object:
        done = update(self, *given)
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter += 0.5 * torch.randn_like(parameter)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", spoil)
        while not learner.account.reverted:
            answer(2)
            assert learner.account.answers < 200, "nobody noticed"
    back = np.mean([learner._trainer.look(trace).agreement for trace in learner._guard.traces])
    assert back > 0.8 * good


def test_a_profile_is_gone_on_from(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    tokens = drafter.encode(PROMPTS[0])

    def logits(learner: Learner) -> np.ndarray:
        return feed(learner.drafter.session(), tokens, 1)

    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(profile="anna", store=store, budget=1.0, **FAST)
    for prompt in PROMPTS * 2:
        model.generate(prompt, max_tokens=30)
    model.close()
    assert learner.account.updates > 2

    again = OmniDraft(TARGET, drafter)
    for _ in range(2):  # there and back again
        other = again.learn(profile="ben", store=store, **FAST)
        anna = again.learn("off", profile="anna", store=store, **FAST)
    assert np.array_equal(logits(anna), logits(learner))
    assert anna.account == learner.account
    assert len(anna._replay) == len(learner._replay)
    assert not np.array_equal(logits(other), logits(learner))
    assert np.array_equal(logits(other), feed(drafter.session(), tokens, 1))
    again.close()


def test_before_and_after_are_of_the_same_prompts_and_options(
    drafter: HuggingFaceModel, tmp_path: Path
) -> None:
    model, store = OmniDraft(TARGET, drafter), ProfileStore(tmp_path)
    learner = model.learn(profile="anna", store=store, budget=1.0, **FAST)
    stream, judges = PROMPTS[:2], PROMPTS[2:4]

    def gained(held_out: list[str], **options: Any) -> dict[str, Any]:
        found = adapt(model, learner, stream, held_out, method="text", **options)
        assert found["held_out"]["before"]["prompts"] == found["held_out"]["after"]["prompts"]
        assert len(found["curve"]) == len(stream)
        return found

    first = gained(judges, k=4, max_tokens=8)
    answers = learner.account.answers
    assert gained(judges, k=4, max_tokens=8)["held_out"]["before"] == first["held_out"]["before"]
    assert learner.account.answers == answers  # the same call: it was all done
    gained(judges[:1], k=4, max_tokens=8)
    longer = gained(judges[:1], k=4, max_tokens=16)
    assert [point["tokens"] for point in longer["curve"]] == [16, 16]
    assert longer["held_out"]["before"]["tokens"] == longer["held_out"]["after"]["tokens"] == 16
    model.close()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's own
def test_peft_loads_the_adapter(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(profile="anna", store=store, budget=1.0, **FAST)
    for prompt in PROMPTS:
        model.generate(prompt, max_tokens=30)
    model.close()
    folder = next(tmp_path.glob("*/*/anna/v*/adapter_config.json")).parent
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(drafter.folder), folder)
    tokens = drafter.encode(PROMPTS[0])
    with torch.no_grad():
        expected = loaded(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()
    np.testing.assert_allclose(feed(learner.drafter.session(), tokens, 1)[0], expected, atol=1e-4)


def test_idle_learning_waits_while_a_request_is_under_way(drafter: HuggingFaceModel) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn("idle", **FAST)
    for prompt in PROMPTS:
        model.generate(prompt, max_tokens=30)
    _wait(lambda: learner.account.updates == len(PROMPTS) // 2)  # two answers each: nothing is left to do
    trainer = learner._training()
    layers: list[float] = []
    layer = next(m for m in trainer.module.modules() if isinstance(m, torch.nn.ModuleList))[0]
    layer.register_forward_hook(lambda *_: layers.append(time.perf_counter()))
    updates = learner.account.updates
    with learner.request(drafter.encode("x")):
        learner._fresh += list(learner._replay)[:2]
        with learner._turn:
            learner._turn.notify_all()
        time.sleep(0.3)
        assert not layers
        assert learner.account.updates == updates
    _wait(lambda: learner.account.updates > updates)
    assert layers
    model.close()
    assert not any(thread.name == "omnidraft-learning" for thread in threading.enumerate())


def test_a_held_out_answer_does_not_wait_for_the_background(drafter: HuggingFaceModel) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn("idle", **FAST)
    learner._training()
    learner._guard.paused = True
    learner.account.answers = learner.learning.held_out - 1
    asking = threading.Thread(target=lambda: model.generate(PROMPTS[0], max_tokens=10), daemon=True)
    asking.start()
    asking.join(30)
    assert not asking.is_alive(), "the request waits for learning, and learning for the request"
    assert not learner._guard.paused
    model.close()


def _wait(happened) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_bad_options_are_refused(drafter: HuggingFaceModel) -> None:
    model = OmniDraft(TARGET, drafter)
    for options, message in [
        ({"when": "always"}, "unknown learn 'always'; use one of off, between, idle"),
        ({"loss": "kl"}, "unknown loss 'kl'"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": "8"}, "rank is '8'"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"length": 0}, "length is 0"),
        ({"clip": 0.0}, "clip is 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"loss": ["kl"]}, "unknown loss"),
        ({"budget": "x"}, "budget is 'x'"),
        ({"gamma": None}, "gamma is None"),
        ({"learning_rate": 0.0}, "learning_rate is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"budget": 0.0}, "budget is 0"),
        ({"speed": 3}, "unknown option speed; known are batch, budget"),
    ]:
        with pytest.raises(OptionError, match=message):
            model.learn(**options)
    with pytest.raises(OptionError, match="no drafter to learn"):
        OmniDraft(TARGET, None).learn()
    with pytest.raises(OptionError, match="drafter runs on an engine that cannot be adapted"):
        OmniDraft(TARGET, ToyModel(toy_vocab(25), name="drafter")).learn()


def test_a_profile_s_answers_are_looked_up_again_kept_private_and_forgotten(
    drafter: HuggingFaceModel, tmp_path: Path
) -> None:
    store = ProfileStore(tmp_path)

    def looked_up(when: str) -> int:
        model = OmniDraft(TARGET, drafter)
        model.learn(when, profile="me", store=store, batch=999)
        try:
            return model.generate("the flake", method="lookup", k=4, max_tokens=40).stats.lookup_tokens
        finally:
            model.close()

    first = looked_up("between")
    assert looked_up("off") > first
    info = store.find("me")
    history = info.folder / f"v{info.version:06}" / "history.safetensors"
    assert history.stat().st_mode & 0o777 == 0o600
    assert info.manifest.files["history.safetensors"].text, "it would be exported unasked"
    store.reset(info.key)
    assert looked_up("off") == first


@pytest.mark.parametrize("tokens", [[1.5], [10**6], [-2], [[1]]], ids=str)
def test_a_history_of_no_tokens_is_refused(
    drafter: HuggingFaceModel, tmp_path: Path, tokens: list[object]
) -> None:
    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    model.learn("between", profile="me", store=store)
    model.close()
    kind = np.float32 if tokens == [1.5] else np.int32
    store.save(store.find("me").key, {"history": Arrays({"tokens": np.array(tokens, kind)})})
    learner = OmniDraft(TARGET, drafter).learn("off", profile="me", store=store)
    assert learner.problem is not None
    assert "no tokens of the target" in learner.problem
    assert not learner.history.tokens


def test_learning_of_earlier_days_leaves_today_its_budget(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    for day in (1, 2):
        model = OmniDraft(TARGET, drafter)
        learner = model.learn(profile="me", store=store, budget=1.0, **FAST)
        updates = learner.account.updates
        for prompt in PROMPTS[:4]:
            model.generate(prompt, max_tokens=20)
        assert learner.account.updates > updates, f"nothing was learned on day {day}"
        learner.account.seconds += 1000
        model.close()


def test_an_answer_that_a_stop_string_ends_is_learned_from(
    drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "_affordable", lambda learner: True)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=1.0, **FAST)
    for prompt in PROMPTS[:4]:
        text = model.generate(prompt, max_tokens=30, method="plain").text
        learner._fresh.clear()
        updates = learner.account.updates
        for _ in range(FAST["batch"]):
            answer = model.generate(prompt, max_tokens=30, stop=text[5])
            assert answer.finish_reason == "stop"
            assert len(answer.text) < len(text)
        assert learner.account.updates > updates


def test_what_waits_to_be_learned_is_bounded_as_the_replay_buffer_is(drafter: HuggingFaceModel) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(batch=999)
    model.generate(PROMPTS[0], max_tokens=20)
    learner._replay.limit = 3 * learner._replay.nbytes
    for _ in range(8):
        model.generate(PROMPTS[0], max_tokens=20)
    assert len(learner._fresh) == len(learner._replay) == 3


def test_an_answer_held_out_while_the_background_judges_does_not_stop_it(
    traces: list[Trace], drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, trainer = Guard(), trainer_of(drafter)
    for trace in traces:
        guard.keep(trace, None)
    look = Trainer.look
    monkeypatch.setattr(
        Trainer, "look", lambda *given, **how: guard.keep(traces[0], None) or look(*given, **how)
    )
    assert [guard.objects(trainer) for _ in range(4)] == [False] * 4
    assert guard.agreement is not None


def test_an_answer_is_never_judged_by_what_was_measured_of_another(traces: list[Trace]) -> None:
    """Of those held out the oldest go, and their places in memory are used again."""

    class Told:
        training = Training()
        agreement = 1.0

        def look(self, trace: Trace, *, adapted: bool = True) -> Look:
            return Look(self.agreement, None)

        def weights(self) -> dict[str, object]:
            return {}

    guard, trainer = Guard(), Told()
    for agreement in (1.0, 0.0):
        trainer.agreement = agreement
        for _ in range(12):
            guard.keep(replace(traces[0]), None)
        assert not any(guard.objects(trainer) for _ in range(4)), "other answers are no worse than themselves"


def test_a_mistake_leaves_what_learns_as_it_is(drafter: HuggingFaceModel, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(profile="me", store=store, budget=1.0, **FAST)
    for options in ({"when": "always"}, {"loss": "kl"}, {"rank": 0}):
        with pytest.raises(OptionError):
            model.learn(**{"profile": "me", "store": store} | options)
    for prompt in PROMPTS[:2]:
        model.generate(prompt, max_tokens=20)
    assert model.learner is learner
    assert learner.account.updates == 1
    model.close()
    assert len(store.open(learner._key).arrays("replay")["tokens"])


def test_after_close_nothing_is_learned_until_it_is_asked_for_again(
    drafter: HuggingFaceModel, tmp_path: Path
) -> None:
    store = ProfileStore(tmp_path)
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(profile="me", store=store, budget=1.0, **FAST)
    model.close()
    for prompt in PROMPTS[:2]:
        model.generate(prompt, max_tokens=20)
    assert learner.account.answers == 0
    again = model.learn(profile="me", store=store, budget=1.0, **FAST)
    for prompt in PROMPTS[:2]:
        model.generate(prompt, max_tokens=20)
    assert again.account.updates == 1
    model.close()


def test_a_missing_library_is_named_before_anything_is_answered(
    drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = OmniDraft(TARGET, drafter)
    with pytest.raises(MissingExtraError, match=r"omnidraft\[learn\]"):
        model.learn()
    model.learn("off")


def test_a_profile_that_cannot_be_saved_is_free_for_others_all_the_same(
    drafter: HuggingFaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OmniDraft(TARGET, drafter)
    learners = [model.learn(profile=name, store=ProfileStore(tmp_path)) for name in ("anna", "ben")]

    def full(*given: object) -> None:
        raise ProfileError("the disk is full; make room")

    monkeypatch.setattr(ProfileStore, "save", full)
    with pytest.raises(ProfileError, match="full"):
        model.close()
    for learner in learners:
        with ProfileStore(tmp_path).claim(learner._key):
            pass


def test_a_full_disk_stops_neither_answers_nor_learning(
    drafter: HuggingFaceModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn("between", profile="anna", store=ProfileStore(tmp_path), budget=1.0, batch=1)
    with monkeypatch.context() as full:

        def fail(*arguments: object) -> None:
            raise ProfileError("the disk is full; make room")

        full.setattr(ProfileStore, "save", fail)
        for prompt in PROMPTS[:3]:
            assert model.generate(prompt, max_tokens=10).tokens
    updates = learner.account.updates
    assert updates >= 1
    assert "the disk is full; make room" in caplog.text
    model.close()  # there is room again
    saved = ProfileStore(tmp_path).open(ProfileStore(tmp_path).find("anna").key)
    assert saved.document("statistics")["updates"] == updates


def test_of_two_answers_that_end_at_once_one_is_learned_from(
    drafter: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OmniDraft(TARGET, drafter)
    learner = model.learn(budget=1.0, **FAST)
    update, under_way, most = Trainer.update, [], []

    def meanwhile(self: Trainer, *given: list[Trace]) -> object:
        under_way.append(1)
        most.append(len(under_way))
        if len(most) == 1:
            learner._fresh += list(learner._replay)[:2]
            other = threading.Thread(target=learner._between)
            other.start()
            other.join()
        under_way.pop()
        return update(self, *given)

    monkeypatch.setattr(Trainer, "update", meanwhile)
    monkeypatch.setattr(Learner, "_affordable", lambda learner: True)
    for prompt in PROMPTS[:2]:
        model.generate(prompt, max_tokens=20)
    assert most == [1, 1], "two updates of the same weights at once"
