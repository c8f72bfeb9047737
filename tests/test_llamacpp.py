"""The llama.cpp engine, on tiny random GGUF files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_law import corrects_by_p
from test_law_real import Remembered, p_value
from tiny_gguf import CONTEXT, tiny_module, write_gguf, write_recurrent
from toy import CORPUS, ToyModel, toy_vocab

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; `make test-full` installs it")

from omnidraft import OmniDraft, load_model
from omnidraft.backends import llamacpp
from omnidraft.backends.llamacpp import LlamaCppModel, LlamaCppSession, Settings
from omnidraft.cache import home_of
from omnidraft.errors import (
    ContextLengthError,
    DamagedFileError,
    InsufficientMemoryError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from omnidraft.session import feed

PROMPT = CORPUS[:20]
EXACT = Settings(cache_type="f32", flash_attn="off")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        "target": write_gguf(folder / "target.gguf", 60, seed=1),
        "drafter": write_gguf(folder / "drafter.gguf", 15, seed=2),
    }


@pytest.fixture(scope="module")
def target(files: dict[str, Path]) -> LlamaCppModel:
    return LlamaCppModel(files["target"], name="target", settings=EXACT)


@pytest.fixture(scope="module")
def drafter(files: dict[str, Path]) -> LlamaCppModel:
    return LlamaCppModel(files["drafter"], name="drafter", settings=EXACT)


def spread(model: LlamaCppModel, tokens: list[int]) -> float:
    """How far the last row differs over passes of 1 to 8 tokens."""
    rows = []
    for m in range(1, min(8, len(tokens)) + 1):
        session = model.session()
        if len(tokens) > m:
            feed(session, tokens[:-m], 1)
        rows.append(feed(session, tokens, m)[-1])
    return float(np.ptp(rows, axis=0).max())


def test_rows_are_those_of_torch(target: LlamaCppModel) -> None:
    module = tiny_module(60, seed=1)
    tokens = [i % 280 for i in range(0, 2000, 7)]
    whole = module(input_ids=torch.tensor([tokens])).logits[0].detach().numpy()
    session = target.session()
    for end in (3, 4, 9, 150, 285):
        rows = feed(session, tokens[:end], min(end, 100))
        np.testing.assert_allclose(rows, whole[max(0, end - 100) : end], atol=1e-3, rtol=1e-3)
    assert rows.dtype == np.float32


def test_feed_equals_a_fresh_prefill(target: LlamaCppModel) -> None:
    generator = random.Random(0)
    session = target.session()
    tokens: list[int] = []
    for i in range(1000):
        del tokens[generator.randrange(len(tokens) + 1) if generator.random() < 0.5 else len(tokens) :]
        tokens = tokens[-40:]
        tokens += [generator.randrange(target.width) for _ in range(generator.randrange(1, 6))]
        rows = generator.randrange(1, len(tokens) + 1)
        logits = feed(session, tokens, rows)
        assert session.tokens.tolist() == tokens
        if i % 20 == 19:
            fresh = feed(target.session(), tokens, rows)
            assert np.abs(logits[-1] - fresh[-1]).max() <= spread(target, tokens) + 1e-5
            np.testing.assert_allclose(logits, fresh, atol=1e-4, rtol=1e-4)


def test_rows_stay_as_they_are(target: LlamaCppModel) -> None:
    session = target.session()
    rows = feed(session, [1, 2, 3], 2)
    before = rows.copy()
    feed(session, [1, 2, 3, 4, 5], 2)
    assert np.array_equal(rows, before)


def test_a_cache_grows(target: LlamaCppModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [i % 280 for i in range(1500)]
    expected = feed(target.session(), tokens, 3)
    monkeypatch.setattr(llamacpp, "_FIRST_CONTEXT", 256)
    session = target.session()
    rooms = set()
    for end in range(20, 1501, 20):
        rows = feed(session, tokens[:end], 3)
        rooms.add(session._context.room)
    assert rooms == {256, 512, 1024, 2048}
    np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=1e-4)


def test_more_than_the_context_is_refused(files: dict[str, Path], target: LlamaCppModel) -> None:
    session = target.session()
    feed(session, [5, 6, 7], 1)
    with pytest.raises(ContextLengthError, match=f"{CONTEXT} of target"):
        session.extend([1] * CONTEXT, 1)
    np.testing.assert_allclose(feed(session, [5, 6], 1), feed(target.session(), [5, 6], 1), atol=1e-4)
    small = LlamaCppModel(files["target"], name="small", settings=Settings(n_ctx=300))
    assert small.context_length == 300
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        OmniDraft(small, None).generate("x" * 301, raw=True)
    with pytest.raises(ContextLengthError, match="n_ctx"):
        feed(small.session(), [1] * 301, 1)


@pytest.mark.parametrize("at", ["llama_decode", "llama_get_logits"])
def test_a_pass_that_is_interrupted_leaves_the_cache_as_it_was(
    target: LlamaCppModel, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    session = target.session()
    feed(session, [1, 2, 3], 1)
    expected = feed(target.session(), [1, 2, 3, 4, 5], 2)
    call = getattr(llamacpp.llama, at)

    def interrupted(*arguments: Any) -> None:
        call(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llamacpp.llama, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed(session, [1, 2, 3, 9, 9], 1)
    assert session.tokens.tolist() == [1, 2, 3]
    np.testing.assert_allclose(feed(session, [1, 2, 3, 4, 5], 2), expected, atol=1e-5)


def test_a_failed_pass_is_an_error(target: LlamaCppModel) -> None:
    session = target.session()
    feed(session, [1, 2, 3], 1)
    with pytest.raises(InsufficientMemoryError, match="invalid token"):
        session.extend([target.width + 7], 1)
    np.testing.assert_allclose(feed(session, [1, 2, 4], 1), feed(target.session(), [1, 2, 4], 1), atol=1e-4)


def answers(target: Any, drafter: Any, **options: Any) -> tuple[Any, OmniDraft]:
    model = OmniDraft(target, drafter)
    return [
        model.generate(CORPUS[start : start + 30], raw=True, max_tokens=40, **options).tokens
        for start in range(8)
    ], model


@pytest.mark.parametrize("mixed", ["both", "toy drafter", "toy target"])
@pytest.mark.parametrize("options", [{}, {"method": "prefill"}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_answers_equal_plain_decoding(
    target: LlamaCppModel, drafter: LlamaCppModel, mixed: str, options: dict[str, Any]
) -> None:
    toy = ToyModel(toy_vocab(20, order=5))
    pair = {"both": (target, drafter), "toy drafter": (target, toy), "toy target": (toy, drafter)}[mixed]
    plain, _ = answers(pair[0], None, **options | {"method": "plain"})
    drafted, model = answers(*pair, **options)
    assert drafted == plain
    assert model.stats.steps <= model.stats.tokens


def test_a_drafter_of_its_own_kind_is_accepted(target: LlamaCppModel) -> None:
    plain, _ = answers(target, None)
    drafted, model = answers(target, target)
    assert drafted == plain
    assert model.stats.tokens_per_step > 4


@pytest.fixture
def pair(target: LlamaCppModel, drafter: LlamaCppModel, monkeypatch: pytest.MonkeyPatch) -> OmniDraft:
    monkeypatch.setattr(target, "row", Remembered(target).row, raising=False)  # for the law to compare with
    return OmniDraft(target, drafter)


def test_a_thousand_answers_follow_the_target_s_law(pair: OmniDraft) -> None:
    assert p_value(pair, PROMPT, {"temperature": 1.0}, draws=1000) > 0.001


def test_a_planted_bug_fails_the_same_comparison(pair: OmniDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    corrects_by_p(monkeypatch)
    assert p_value(pair, PROMPT, {"temperature": 1.0}, draws=500) < 1e-6


def test_settings_are_checked() -> None:
    assert Settings.parse({}) == Settings()
    assert Settings.parse({"use_mmap": "false", "n_ctx": "512"}, "cpu") == Settings(
        n_ctx=512, use_mmap=False, n_gpu_layers=0
    )
    for settings, message in [
        ({"n_ctx": "-1"}, "0 or more"),
        ({"n_ctx": "many"}, "a whole number"),
        ({"use_mmap": "perhaps"}, "true or false"),
        ({"flash_attn": "maybe"}, "auto, on, off"),
        ({"cache_type": "q2"}, "f32, f16, q8_0"),
        ({"threads": "2"}, "known are n_ctx"),
    ]:
        with pytest.raises(OptionError, match=message):
            Settings.parse(settings)
    with pytest.raises(OptionError, match="GGML_CUDA"):
        llamacpp.check("auto", "cuda", {})
    with pytest.raises(OptionError, match="GGUF file as it is"):
        llamacpp.check("int8", "cpu", {})


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("2,1", 2), ("", 0), ("many", 0)])
def test_threads_are_openmp_s_or_the_cores(monkeypatch: pytest.MonkeyPatch, value: str, threads: int) -> None:
    """A list gives one number for each level of nesting; what OpenMP itself ignores is no error here either."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert Settings().threads == (threads or llamacpp._cores())


def test_the_quantised_cache_is_close(files: dict[str, Path], target: LlamaCppModel) -> None:
    small = LlamaCppModel(files["target"], name="small", settings=Settings(cache_type="q8_0", use_mmap=False))
    tokens = list(range(60))
    rows, exact = (feed(model.session(), tokens, 5).ravel() for model in (small, target))
    assert 0.999 < np.corrcoef(rows, exact)[0, 1] < 1
    off = LlamaCppModel(files["target"], name="off", settings=Settings(cache_type="q8_0", flash_attn="off"))
    with pytest.raises(OptionError, match="requires flash_attn"):
        off.session()


def test_what_cannot_run_is_refused(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(file: Path) -> LlamaCppModel:
        return LlamaCppModel(file, name=file.stem)

    with pytest.raises(UnsupportedModelError, match="unknown model architecture: 'unheard-of'"):
        loaded(write_gguf(tmp_path / "new.gguf", 5, fields={"architecture": "unheard-of"}))
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        loaded(write_recurrent(tmp_path / "mamba.gguf"))
    whole = files["target"].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    with pytest.raises(DamagedFileError, match="not within the file bounds"):
        loaded(tmp_path / "cut.gguf")
    (tmp_path / "not.gguf").write_bytes(b"x" * 100)
    with pytest.raises(DamagedFileError, match="begin with GGUF"):
        loaded(tmp_path / "not.gguf")
    monkeypatch.setattr(llamacpp, "_free_memory", lambda: 1_000_000)
    monkeypatch.setattr(llamacpp, "_load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InsufficientMemoryError, match="GB are free; choose a smaller model"):
        loaded(files["target"])


def test_what_llama_cpp_calls_recurrent_is_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for question, message in [
        ("llama_model_is_hybrid", "recurrent"),
        ("llama_model_has_encoder", "decoder-only"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(llamacpp.llama, question, lambda model: True)
            with pytest.raises(UnsupportedModelError, match=message):
                LlamaCppModel(files["target"], name="target")


def test_a_name_leads_to_the_file(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    model = load_model(str(files["target"]), engine="llamacpp", settings={"llamacpp": {"n_ctx": "256"}})
    assert isinstance(model, LlamaCppModel)
    assert (model.engine.name, model.engine.precision, model.context_length) == ("llamacpp", "all F32", 256)
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ModelNotFoundError):
        load_model("no-such", engine="llamacpp")
    with pytest.raises(UnsupportedModelError, match="no GGUF file"):
        load_model("someone/checkpoint", engine="llamacpp")
    kept = home_of("someone/repo/file.gguf") / "model.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(files["drafter"].read_bytes())
    assert load_model("someone/repo/file.gguf", engine="llamacpp").name == "someone/repo/file.gguf"


def test_nothing_reaches_the_terminal(
    files: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    feed(LlamaCppModel(files["drafter"], name="drafter").session(), [1, 2], 1)
    (tmp_path / "cut.gguf").write_bytes(files["drafter"].read_bytes()[:-1000])
    with pytest.raises(DamagedFileError):
        LlamaCppModel(tmp_path / "cut.gguf", name="cut")
    assert capfd.readouterr() == ("", "")


def test_models_and_caches_are_freed(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    for name in ("llama_free", "llama_model_free"):
        free = getattr(llamacpp.llama, name)
        monkeypatch.setattr(
            llamacpp.llama, name, lambda handle, free=free, name=name: (freed.append(name), free(handle))
        )
    session: LlamaCppSession | None = LlamaCppModel(files["drafter"], name="drafter").session()
    session = None
    assert freed == ["llama_free", "llama_model_free"], session
