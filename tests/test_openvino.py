"""The OpenVINO engine on tiny random models: against torch, under the loop, and what it refuses."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_law_real import ALPHA, Remembered, p_value
from ties import assert_equal_but_for_ties
from tiny_architectures import checkpoint
from tiny_models import random_walk
from transformers import AutoModelForCausalLM

from omnidraft import OmniDraft, hub, load, load_model, loading
from omnidraft.errors import (
    CacheError,
    DamagedFileError,
    InsufficientMemoryError,
    MissingExtraError,
    OptionError,
    UnsupportedModelError,
)
from omnidraft.sampling import Sampling
from omnidraft.session import Model, feed

pytest.importorskip("openvino")
from omnidraft.backends import openvino_convert, openvino_graph

ARCHITECTURES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3")
TOKENS = [(i * 37) % 250 for i in range(40)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of our own, for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("OMNIDRAFT_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def folders(home: Path) -> dict[str, Path]:
    return {name: checkpoint(home / name, name) for name in (*ARCHITECTURES, "gpt2")}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    return {
        name: load_model(str(folders[name]), engine="openvino", precision="float32") for name in ARCHITECTURES
    }


@pytest.fixture(scope="module")
def small(home: Path) -> Model:
    """A drafter of another vocabulary, int8."""
    return load_model(str(checkpoint(home / "small", "llama", merges=25, order=1, seed=2)), engine="openvino")


def torch_rows(folder: Path, tokens: list[int]) -> np.ndarray:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_torch_s_in_one_pass_or_several(name: str, models, folders) -> None:  # type: ignore[no-untyped-def]
    whole = torch_rows(folders[name], TOKENS)
    session = models[name].session()
    for end in (13, 14, 20, 40):
        np.testing.assert_allclose(feed(session, TOKENS[:end], 1)[0], whole[end - 1], atol=2e-4)
    np.testing.assert_allclose(feed(models[name].session(), TOKENS, 40), whole, atol=2e-4)
    assert session.extend([1, 2], rows=0).size == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_feed_equals_a_fresh_prefill_and_memory_is_bounded(name: str, models) -> None:  # type: ignore[no-untyped-def]
    sessions = []

    def new_session():  # type: ignore[no-untyped-def]
        sessions.append(models[name].session())
        return sessions[-1]

    random_walk(new_session, operations=1000 if name == "llama" else 300, vocab=250, longest=40)
    walked = sessions[0]
    assert all(len(cache.data) * walked._block <= 2 * (40 + 16) + walked._block for cache in walked._caches)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_row_depends_on_its_context_alone(precision: str, folders) -> None:  # type: ignore[no-untyped-def]
    """To the last bit where activations are rounded: the least difference would be rounded to a large one there."""
    model = load_model(str(folders["qwen3"]), engine="openvino", precision=precision)
    tolerance = 0 if model.sizes else 1e-4  # type: ignore[attr-defined]
    plain, other = model.session(), model.session()
    plain.extend(TOKENS[:10], 1)
    other.extend(TOKENS[:13], 1)
    for end in range(11, 31):
        row = plain.extend(TOKENS[end - 1 : end], 1)[0]
        proposal = [(7 * end + i) % 250 for i in range(end % 9)]
        other.truncate(end - 1)
        rows = other.extend([*TOKENS[end - 1 : end], *proposal], 1 + len(proposal))
        np.testing.assert_allclose(rows[0], row, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("precision", "top"), [("int8", 127), ("int4", 7)])
def test_weights_are_rounded_as_they_say(precision: str, top: int, folders, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The engine with compressed weights against torch with the weights those stand for."""
    module = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 2:
                grouped = precision == "int4" and "layers" in name
                shaped = weight.reshape(len(weight), -1, 64) if grouped else weight
                levels, scale = openvino_graph.quantised(shaped, top if grouped else 127)
                assert int(levels.abs().max()) == (top if grouped else 127)
                weight.copy_((levels * scale).reshape(weight.shape))
        expected = module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    exact = {"openvino": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}}  # activations as they are, on any CPU
    model = load_model(str(folders["qwen3"]), engine="openvino", precision=precision, settings=exact)
    np.testing.assert_allclose(feed(model.session(), TOKENS, 40), expected, atol=2e-3)
    rounding = np.abs(expected - torch_rows(folders["qwen3"], TOKENS)).max()
    assert rounding > 0.01
    usual = load_model(str(folders["qwen3"]), engine="openvino", precision=precision)
    assert np.abs(feed(usual.session(), TOKENS, 40) - expected).max() < 2 * rounding


def test_hidden_states_are_those_before_the_output_layer(models, folders) -> None:  # type: ignore[no-untyped-def]
    session = models["llama"].session()
    rows = feed(session, TOKENS, 3)
    module = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    assert session.hidden.shape == (3, 64)
    output = module.get_output_embeddings().weight.detach().numpy()
    np.testing.assert_allclose(session.hidden @ output.T, rows, atol=1e-4)


def test_an_adapter_does_what_it_does_in_torch(folders: dict[str, Path]) -> None:
    where = dict(engine="openvino", precision="float32")
    ours = load_model(str(folders["qwen3"]), **where)  # type: ignore[arg-type]
    theirs = load_model(str(folders["qwen3"]), engine="transformers", precision="float32")
    generator = np.random.default_rng(0)
    adapter = {}
    for name, layer in theirs.module.named_modules():  # type: ignore[attr-defined]
        if name.endswith("_proj"):
            shapes = {"A": (4, layer.in_features), "B": (layer.out_features, 4)}
            for which, shape in shapes.items():
                matrix = generator.standard_normal(shape, np.float32)
                adapter[f"base_model.model.{name}.lora_{which}.weight"] = matrix
    before = feed(ours.session(), TOKENS, 3)
    for scale in (0.1, 0.2):
        adapted, same = (model.adapted(adapter, scale).session() for model in (ours, theirs))  # type: ignore[attr-defined]
        rows, expected = (feed(session, TOKENS, 3) for session in (adapted, same))
        np.testing.assert_allclose(rows, expected, atol=2e-4)
        np.testing.assert_allclose(adapted.hidden, same.hidden, atol=2e-4)  # what a head reads
        assert np.abs(rows - before).max() > 0.1
    assert np.array_equal(before, feed(ours.session(), TOKENS, 3))
    for wrong in ({}, {name: matrix for name, matrix in adapter.items() if "q_proj" in name}):
        with pytest.raises(OptionError, match="does not fit"):
            ours.adapted(wrong)  # type: ignore[attr-defined]


@pytest.mark.parametrize("engines", ["openvino", "openvino, torch drafts", "torch, openvino drafts"])
def test_answers_equal_plain_decoding(engines: str, models, folders, home, small) -> None:  # type: ignore[no-untyped-def]
    target, drafter = models["gemma3"], small
    if engines == "openvino, torch drafts":
        drafter = load_model(str(home / "small"), engine="transformers")
    if engines == "torch, openvino drafts":
        target = load_model(str(folders["gemma3"]), engine="transformers", precision="float32")
    model, plain = OmniDraft(target, drafter), OmniDraft(target, None)
    for sampling in (Sampling(seed=0), Sampling(temperature=1.0, seed=3)):
        for prompt in ("the flake fell", "a stone lay by the water, and", "then"):
            options = dict(temperature=sampling.temperature, seed=sampling.seed, max_tokens=30)
            expected = plain.generate(prompt, **options)  # type: ignore[arg-type]
            answer = model.generate(prompt, method="text", k=3, **options)  # type: ignore[arg-type]
            context = model.prompt_tokens(prompt)
            assert_equal_but_for_ties(target, context, expected.tokens, answer.tokens, sampling)


class WithRows(Remembered):
    """Runs as the engine does, and knows the row of any context beside."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.session = model.session  # type: ignore[assignment]


@pytest.mark.parametrize("draws", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_answers_drawn_follow_the_target_s_law(draws: int, models, small) -> None:  # type: ignore[no-untyped-def]
    pair = OmniDraft(WithRows(models["qwen2"]), small)  # type: ignore[arg-type]
    assert p_value(pair, "the flake", {"temperature": 0.3}, draws=draws) > ALPHA


def test_a_model_is_converted_once_and_anew_when_its_files_change(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(home / "changing", "llama")
    before = feed(load_model(str(folder), engine="openvino").session(), TOKENS, 1)
    (converted,) = home.glob("models/changing-*/openvino-int8")
    manifest = json.loads((converted / "omnidraft.json").read_text())
    assert manifest["precision"] == "int8"
    assert manifest["source"] == str(folder)
    with monkeypatch.context() as patch:
        patch.delattr(openvino_graph, "build")
        again = feed(load_model(str(folder), engine="openvino").session(), TOKENS, 1)
    assert np.array_equal(before, again)
    checkpoint(folder, "llama", seed=7)
    assert not np.allclose(before, feed(load_model(str(folder), engine="openvino").session(), TOKENS, 1))


def test_folders_of_one_name_in_two_places_each_keep_their_conversion(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, place in enumerate(("here", "there")):
        checkpoint(tmp_path / place / "model", "llama", seed=seed)
        monkeypatch.chdir(tmp_path / place)
        load_model("./model", engine="openvino")
    monkeypatch.delattr(openvino_graph, "build")  # from now on nothing is converted
    for place in ("here", "there"):
        monkeypatch.chdir(tmp_path / place)
        for name in ("./model", str(tmp_path / place / "model"), "../" + place + "/model"):
            load_model(name, engine="openvino")


def test_the_conversion_of_a_folder_is_listed_and_can_be_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(home / "places" / "listed", "llama")
    monkeypatch.chdir(folder.parent)
    load_model("./listed", engine="openvino")
    (info,) = [info for info in hub.list_models() if info.name == str(folder.resolve())]
    assert info.size > 0
    assert hub.remove("./listed") == info.size
    assert not info.path.parent.exists()
    assert (folder / "model.safetensors").is_file()


def test_the_conversion_of_a_gguf_file_is_removed_with_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_hub import write_gguf

    (home / "ggufs").mkdir()
    write_gguf(home / "ggufs" / "tiny.gguf", "qwen2")
    monkeypatch.chdir(home / "ggufs")
    before = set(home.glob("models/*"))
    load_model("./tiny.gguf", engine="openvino")
    (kept,) = set(home.glob("models/*")) - before
    assert sorted(path.name for path in kept.iterdir()) == ["checkpoint", "openvino-int8"]
    hub.remove("./tiny.gguf")
    assert not kept.exists()


def test_a_conversion_that_lost_its_weights_is_made_anew(home: Path) -> None:
    folder = checkpoint(home / "losing", "llama")
    before = feed(load_model(str(folder), engine="openvino").session(), TOKENS, 1)
    (weights,) = home.glob("models/losing-*/openvino-int8/openvino_model.bin")
    weights.unlink()
    assert np.array_equal(before, feed(load_model(str(folder), engine="openvino").session(), TOKENS, 1))


def test_a_disk_that_fills_up_while_converting_is_named_and_emptied(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(home / "filling", "llama")

    def save(model: object, file: Path, **options: object) -> None:
        file.with_suffix(".bin").write_bytes(b"half")
        raise RuntimeError("basic_ios::clear: iostream error")

    with monkeypatch.context() as patch:
        patch.setattr(openvino_convert.ov, "save_model", save)
        with pytest.raises(CacheError, match=r"iostream error.*; make room"):
            load_model(str(folder), engine="openvino")
    (kept,) = home.glob("models/filling-*")
    assert not list(kept.iterdir())


def test_weights_saved_in_shards_and_then_as_one_file(home: Path) -> None:
    """The index of the first save stays behind; transformers takes the one file, and so must we."""
    folder = checkpoint(home / "shards", "llama")
    module = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1

    def row() -> np.ndarray:
        model = load_model(str(folder), engine="openvino", precision="float32")
        return feed(model.session(), TOKENS, 1)[0]

    np.testing.assert_allclose(row(), torch_rows(folder, TOKENS)[-1], atol=2e-4)
    checkpoint(folder, "llama", seed=3)
    np.testing.assert_allclose(row(), torch_rows(folder, TOKENS)[-1], atol=2e-4)


def test_an_exported_folder_is_used_as_it_is(models, home: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("llama", "gemma3"):
        (folder,) = home.glob(f"models/{name}-*/openvino-float32")
        exported = home / f"exported-{name}"
        exported.mkdir()
        for file in folder.iterdir():
            if file.name != "omnidraft.json":  # as other tools would have written it
                (exported / file.name).symlink_to(file)
        model = load_model(str(exported))
        assert (model.engine.name, model.engine.precision) == ("openvino", "as exported")
        session = model.session()
        feed(session, [*TOKENS[:20], 9, 9], 1)
        expected = feed(models[name].session(), TOKENS, 3)
        np.testing.assert_allclose(feed(session, TOKENS, 3), expected, atol=2e-4)
        with pytest.raises(OptionError, match="exported already"):
            load_model(str(exported), precision="int8")
    (exported / "openvino_model.bin").unlink()
    with pytest.raises(DamagedFileError, match=r"no openvino_model\.bin"):
        load_model(str(exported))


def test_auto_says_which_engine_and_why(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(str(folders["qwen2"]), str(folders["llama"]))
    assert model.engines["target"]["name"] == "openvino"
    assert model.engines["target"]["precision"] == "int8"
    fallen_back = load_model(str(folders["gpt2"]))
    assert fallen_back.engine.name == "transformers"
    assert "architecture gpt2" in fallen_back.engine.reason
    assert load_model(str(folders["llama"]), precision="float16").engine.name == "transformers"
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "omnidraft.backends.openvino")
    without = load_model(str(folders["llama"]))
    assert without.engine.name == "transformers"
    assert "omnidraft[openvino]" in without.engine.reason


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "float16"}, OptionError, "float16"),
        ({"device": "cuda"}, OptionError, "runs on the CPU"),
        ({"settings": {"openvino": {"FROB": "1"}}}, OptionError, "FROB=1"),
        ({"settings": {"vroom": {}}}, OptionError, "vroom"),
        ({}, UnsupportedModelError, "architecture gpt2"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message: str, folders) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message) as raised:
        load_model(str(folders["gpt2"]), engine="openvino", **options)
    assert ";" in str(raised.value), "the cure is missing"


def test_too_little_memory_is_said_before_the_work(folders, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(openvino_convert, "_available_memory", lambda: 1000)
    monkeypatch.delattr(openvino_graph, "build")
    with pytest.raises(InsufficientMemoryError, match="GB are available; close"):
        load_model(str(folders["mistral"]), engine="openvino", precision="bfloat16")


def test_a_missing_extra_is_named(folders, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "omnidraft.backends.openvino")
    with pytest.raises(MissingExtraError, match=r"omnidraft\[openvino\]"):
        load_model(str(folders["llama"]), engine="openvino")


def test_a_library_that_is_too_old_or_broken_does_not_end_auto(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older llama-cpp-python, which lacks names that the engine reads."""
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", types.ModuleType("llama_cpp.llama_cpp"))
    monkeypatch.delitem(sys.modules, "omnidraft.backends.llamacpp", raising=False)
    assert load_model(str(folders["llama"])).engine.name == "openvino"
    assert "omnidraft[llamacpp]" in load_model(str(folders["gpt2"])).engine.reason
    with pytest.raises(MissingExtraError, match=r"cannot be used \(.*pip install 'omnidraft\[llamacpp\]'"):
        load_model(str(folders["llama"]), engine="llamacpp")


def test_settings_reach_the_engine(folders) -> None:  # type: ignore[no-untyped-def]
    settings = {"openvino": {"KV_CACHE_PRECISION": "u8", "INFERENCE_NUM_THREADS": "1"}}
    model = load_model(str(folders["llama"]), engine="openvino", settings=settings)
    assert model.compiled.get_property("INFERENCE_NUM_THREADS") == 1  # type: ignore[attr-defined]
    usual = feed(load_model(str(folders["llama"]), engine="openvino").session(), TOKENS, 3)
    rounding = np.abs(feed(model.session(), TOKENS, 3) - usual).max()
    assert 0 < rounding < usual.std()
    assert loading.ENGINES[1] == "openvino"
