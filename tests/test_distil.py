"""Drafters made from larger models: the trimmed vocabulary, training, resuming, packing, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from toy import toy_tokenizer

import omnidraft
from omnidraft import catalog, hub
from omnidraft.distil.recipe import Recipe, read_recipe
from omnidraft.distil.text import Document, pack, read_documents
from omnidraft.distil.trim import choose_tokens, first_pieces, trimmed
from omnidraft.errors import DamagedFileError, OmniDraftError, OptionError, UnsupportedModelError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WORDS = ["def", "add(a,", "b):\n", "", "return", "a", "+", "b\n"]
TOY: dict[str, Any] = json.loads(toy_tokenizer(40).to_str())
SIZE = 270  # tokens kept of it


def text(lines: int = 300) -> str:
    """Text that repeats itself, with some chance in it."""
    draw = np.random.default_rng(0)
    return "\n".join(f"the answer to {n} + {n} is {2 * n}" for n in draw.integers(0, 50, lines))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_models import save, tiny_config, tiny_module

    return save(tiny_module(tiny_config("Llama", num_hidden_layers=5)), tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "plain.txt").write_text(text())
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {n}?"},
                {"role": "assistant", "content": str(2 * n)},
            ]
        }
        for n in range(100)
    ]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def recipe(parent: str, **changes: Any) -> Recipe:
    own = dict(parent=parent, layers=3, trim=SIZE, steps=12, length=32, batch=4, learning_rate=5e-3, warmup=2)
    return Recipe(**own | changes)


@pytest.fixture(scope="module")
def built(parent: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omnidraft.distil.train import build_drafter

    return build_drafter(
        recipe(parent, teacher=0.5), [corpus], tmp_path_factory.mktemp("built") / "out", save_every=0
    )


def weights(folder: Path) -> dict[str, Any]:
    state = torch.load(folder / "training" / "state.pt", weights_only=True)
    return dict(state["weights"])


# --- the vocabulary ---


def toy_kept(size: int = SIZE) -> list[int]:
    return choose_tokens(TOY, Counter(toy_tokenizer(40).encode(text()).ids), size)


@settings(deadline=None, max_examples=60)
@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_a_trimmed_tokenizer_spells_every_text(written: str) -> None:
    smaller = Tokenizer.from_str(json.dumps(trimmed(TOY, toy_kept())))
    assert smaller.decode(smaller.encode(written).ids, skip_special_tokens=False) == toy_tokenizer(40).decode(
        toy_tokenizer(40).encode(written).ids, skip_special_tokens=False
    )


def test_frequent_tokens_are_kept_and_what_they_are_merged_from() -> None:
    whole, kept = toy_tokenizer(40), toy_kept()
    assert len(kept) == SIZE == len(set(kept))
    smaller = Tokenizer.from_str(json.dumps(trimmed(TOY, kept)))
    assert smaller.get_vocab_size() == SIZE
    counts = Counter(whole.encode(text()).ids)
    assert counts.most_common(1)[0][0] in kept
    for special in TOY["added_tokens"]:
        assert smaller.encode(special["content"]).ids == [kept.index(special["id"])]


def test_a_token_that_is_gone_counts_for_its_first_piece() -> None:
    whole, kept = toy_tokenizer(40), toy_kept()
    pieces = first_pieces(TOY, kept)
    for token, piece in enumerate(pieces):
        name = str(whole.id_to_token(token))
        assert name.startswith(str(whole.id_to_token(kept[piece])))
        assert (name == whole.id_to_token(kept[piece])) == (token in kept)


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="between"):
        choose_tokens(TOY, Counter(), 3)
    with pytest.raises(OptionError, match="byte-level BPE"):
        choose_tokens(TOY | {"model": {"type": "Unigram"}}, Counter(), 300)


# --- training ---


def test_the_loss_falls_and_acceptance_rises(parent: str, tmp_path: Path) -> None:
    from omnidraft.distil.train import Progress, build_drafter

    for name, lines in (("text", 300), ("judge", 20)):
        (tmp_path / f"{name}.txt").write_text(text(lines))
    seen: list[Progress] = []
    build_drafter(
        recipe(parent, steps=60, learning_rate=1e-2),
        [tmp_path / "text.txt"],
        tmp_path / "out",
        judge=[tmp_path / "judge.txt"],
        save_every=0,
        on_progress=seen.append,
    )
    assert seen[-1].loss < seen[0].loss - 1
    assert seen[-1].acceptance > seen[0].acceptance + 0.2
    assert seen[-1].tokens_per_step > seen[0].tokens_per_step + 0.3


def test_a_folder_says_what_it_was_made_of(built: Path) -> None:
    log = [json.loads(line) for line in (built / "training" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(1, 13))
    facts = json.loads((built / "drafter.json").read_text())
    assert facts["recipe"]["layers"] == [0, 2, 4]
    assert len(facts["kept"]) == SIZE
    assert facts["provenance"]["versions"]["torch"]


def test_a_killed_training_goes_on_to_the_same_weights(
    built: Path, parent: str, corpus: Path, tmp_path: Path
) -> None:
    from omnidraft.distil.train import build_drafter

    out = tmp_path / "out"
    program = (
        "import sys, time; from pathlib import Path; from omnidraft.distil.recipe import Recipe\n"
        "from omnidraft.distil.train import build_drafter\n"
        f"build_drafter({recipe(parent, teacher=0.5)!r}, [Path({str(corpus)!r})], Path({str(out)!r}), save_every=0,\n"
        "    on_progress=lambda progress: time.sleep(0.2))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        log = out / "training" / "log.jsonl"
        while not (log.is_file() and len(log.read_text().splitlines()) >= 4):
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    seen: list[int] = []
    build_drafter(
        recipe(parent, teacher=0.5),
        [corpus],
        out,
        resume=True,
        on_progress=lambda progress: seen.append(progress.step),
    )
    assert seen == [12]
    mine, theirs = weights(out), weights(built)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_training_that_is_over_can_be_made_longer_on_other_text(
    built: Path, parent: str, corpus: Path, tmp_path: Path
) -> None:
    from omnidraft.distil.train import build_drafter

    longer = tmp_path / "longer"
    shutil.copytree(built, longer)
    (tmp_path / "more.txt").write_text(text(400))
    build_drafter(recipe(parent, teacher=0.5, steps=20), [corpus, tmp_path / "more.txt"], longer, resume=True)
    about, before = (json.loads((folder / "drafter.json").read_text()) for folder in (longer, built))
    assert (before["step"], about["step"]) == (12, 20)
    assert about["kept"] == before["kept"]
    assert not all(torch.equal(weights(longer)[name], weight) for name, weight in weights(built).items())


def test_only_layers_norms_and_the_translator_are_trained(built: Path, parent: str) -> None:
    from transformers import AutoModelForCausalLM

    assert not any("embed" in name or "lm_head" in name for name in weights(built))
    drafter = AutoModelForCausalLM.from_pretrained(built, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32)
    kept = json.loads((built / "drafter.json").read_text())["kept"]
    expected = whole.get_input_embeddings().weight[kept]
    torch.testing.assert_close(drafter.get_input_embeddings().weight, expected, atol=5e-3, rtol=1e-2)
    assert drafter.config.vocab_size == SIZE
    assert len(drafter.model.layers) == 3


@pytest.mark.parametrize("engine", ["transformers", "openvino"])
def test_what_was_built_drafts(
    built: Path, parent: str, engine: str, tmp_path: Path, monkeypatch: Any
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    model = omnidraft.load(parent, str(built), engine="transformers", drafter_engine=engine)
    options: dict[str, Any] = dict(max_tokens=24, temperature=0.0)
    answer = model.generate("the answer", method="text", **options)
    assert str(answer) == str(model.generate("the answer", method="plain", **options))
    assert answer.stats.proposing_steps > 0


def test_the_parents_rows_are_asked_for_once(parent: str, tmp_path: Path) -> None:
    from omnidraft.distil.student import load_parent
    from omnidraft.distil.teacher import TeacherRows

    model, kept = load_parent(Path(parent), parent), toy_kept()
    tokens = torch.randint(SIZE, (2, 8))
    rows = TeacherRows(tmp_path, model, TOY, kept, (2, 8))
    first = rows.rows([0, 1], tokens)
    model.forward = None  # not to be called again
    again = TeacherRows(tmp_path, model, TOY, kept, (2, 8)).rows([1, 0], tokens.flip(0))
    assert torch.equal(first[0], again[0].flip(0))
    assert torch.equal(first[1], again[1].flip(0))


def test_rows_of_tokens_that_are_gone_are_pushed_forward(parent: str, tmp_path: Path) -> None:
    from omnidraft.distil.student import load_parent
    from omnidraft.distil.teacher import TeacherRows

    model, kept = load_parent(Path(parent), parent), toy_kept()
    tokens = torch.randint(SIZE, (1, 8))
    symbols, chances = TeacherRows(tmp_path, model, TOY, kept, (1, 8)).rows([0], tokens)
    law = torch.softmax(model(torch.tensor(kept)[tokens]).logits, -1)
    pieces = first_pieces(TOY, kept)
    for position in range(8):
        for symbol, chance in zip(symbols[0, position].tolist(), chances[0, position].tolist(), strict=True):
            expected = law[0, position, np.flatnonzero(pieces == symbol)].sum().item()
            assert chance == pytest.approx(expected, abs=1e-3)


def test_the_sparse_divergence_of_whole_rows_is_the_divergence() -> None:
    from omnidraft.distil.teacher import sparse_divergence

    torch.manual_seed(0)
    logits, p = torch.randn(5, 16), torch.softmax(torch.randn(5, 16), -1)
    whole = (p * (p.log() - torch.log_softmax(logits, -1))).sum(-1)
    symbols = torch.arange(16).expand(5, 16)
    torch.testing.assert_close(sparse_divergence(logits, symbols, p), whole, atol=1e-4, rtol=1e-4)
    best = p.topk(4)
    part = sparse_divergence(logits, best.indices, best.values)
    assert ((part >= 0) & (part <= whole + 1e-4)).all()  # what is taken together cannot tell more


class _Knows:
    """A student whose likeliest token is the text's, but after every third."""

    translator = torch.nn.Linear(1, 1)

    def hidden(self, tokens: Any) -> Any:
        right = torch.nn.functional.one_hot(tokens.roll(-1, 1), 10).float()
        right[:, 2::3] *= -1
        return right

    def logits(self, hidden: Any) -> Any:
        return hidden


def test_acceptance_is_that_of_a_greedy_drafter() -> None:
    from omnidraft.distil.train import judged

    acceptance, per_step = judged(_Knows(), [(list(range(1, 10)) * 10, 3)])  # type: ignore[arg-type]
    assert acceptance == pytest.approx(2 / 3, abs=0.02)
    assert per_step == pytest.approx(1 + (0 + 2 + 1) / 3, abs=0.05)


# --- the shipped form ---


@pytest.fixture
def shipped(built: Path, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from omnidraft.packed import pack_drafter

    file = tmp_path / "toy.safetensors"
    pack_drafter(built, file)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    known = catalog.ShippedDrafter(parent=parent, file=str(file), upstream="toy", licence="MIT")
    monkeypatch.setitem(catalog.SHIPPED_DRAFTERS, "toy-nano", known)
    return file


def test_a_shipped_drafter_is_a_known_model(shipped: Path, built: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = hub.pull("toy-nano")
    tokens = torch.arange(20)[None]
    made, unpacked = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (built, folder)
    )
    with torch.no_grad():
        one, other = made(tokens).logits, unpacked(tokens).logits
    assert (one - other).std() < 0.03 * one.std()
    for name in ("tokenizer.json", "config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((built / name).read_text())
    assert hub.verify("toy-nano")
    assert [info.on_disk for info in hub.list_models() if info.name == "toy-nano"] == [True]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert (hub.pull("toy-nano") / "model.safetensors").stat().st_mtime_ns == before


def double_a_norm(shipped: Path) -> Any:
    """A newer version of the shipped file, of the very same size, as an upgrade of the package brings it."""
    from safetensors.torch import load_file, safe_open, save_file

    size = shipped.stat().st_size
    with safe_open(shipped, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(shipped)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, shipped, metadata=about)
    assert shipped.stat().st_size == size
    return tensors["model.norm.weight"].bfloat16()


def test_another_version_of_a_shipped_drafter_replaces_it(shipped: Path) -> None:
    from safetensors.torch import load_file

    folder = hub.pull("toy-nano")
    norm = double_a_norm(shipped)
    hub.pull("toy-nano")
    assert load_file(folder / "model.safetensors")["model.norm.weight"].eq(norm).all()


def test_another_version_of_a_shipped_drafter_replaces_its_conversion_too(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    from omnidraft import load_model

    def row() -> Any:
        return load_model("toy-nano", engine="openvino").session().extend([*range(20)], 1)

    old = row()
    assert np.array_equal(row(), old)
    double_a_norm(shipped)
    new = row()
    assert not np.allclose(new, old)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "empty"))
    assert np.array_equal(row(), new), "as one that never saw the old version has it"


def test_a_shipped_drafter_is_unpacked_by_one_process_only(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would delete the checkpoint that the first has begun to read."""
    home = hub.pull("toy-nano").parent
    shutil.move(home, tmp_path / "aside")
    monkeypatch.setattr("omnidraft.packed.unpack_drafter", lambda *arguments: pytest.fail("a second time"))
    found: list[Path] = []
    with filelock.FileLock(tmp_path / "home" / "locks" / f"{home.name}.lock", thread_local=False):
        waiter = threading.Thread(target=lambda: found.append(hub.resolve("toy-nano")))
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive()
        shutil.move(tmp_path / "aside", home)
    waiter.join(10)
    assert found == [home / "checkpoint"]


def test_a_damaged_shipped_drafter_is_refused(shipped: Path) -> None:
    shipped.write_bytes(shipped.read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match="install omnidraft anew"):
        hub.pull("toy-nano")


def test_our_own_drafter_is_what_its_record_says() -> None:
    from safetensors import safe_open

    root = Path(__file__).parents[1]
    record = json.loads((root / "results" / "nano_training.json").read_text())
    file = root / "src" / "omnidraft" / catalog.SHIPPED_DRAFTERS["omnidraft-nano"].file
    assert file.stat().st_size < 14_000_000
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        assert json.loads(opened.metadata()["drafter"])["step"] == record["step"] == record["log"][-1]["step"]
        assert len(opened.get_tensor("kept")) == record["vocabulary"] == record["recipe"]["trim"]
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    assert len(layers) == len(record["recipe"]["layers"])
    assert not any("embed_tokens" in name for name in names)


# --- text ---


def test_documents(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("One.")
    (tmp_path / "b.jsonl").write_text('{"text": "Two."}\n\n{"text": "Three."}\n')
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [one.text for one in read_documents([tmp_path])] == ["One.", "Two.", "Three."]
    twice = [Document("x"), Document("x")]
    assert twice[0].held_out == twice[1].held_out


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}', "line 1"),
        ("a.jsonl", b'{"text": "x"}\nnot json', "line 2"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', "assistant"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.txt", b" ", "no text"),
    ],
)
def test_text_that_is_none_is_refused(tmp_path: Path, name: str, contents: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(OptionError, match=message):
        read_documents([tmp_path / name])


def test_too_little_text_is_refused() -> None:
    with pytest.raises(OptionError, match="fewer than one sequence"):
        pack([[1, 2, 3]], 8, 0)


# --- what is refused ---


@pytest.mark.parametrize(
    "changes",
    [
        dict(steps=0),
        dict(minutes=1.0),
        dict(steps=None),
        dict(layers=()),
        dict(layers=(0, -1)),
        dict(batch=0),
        dict(length=1.5),
        dict(learning_rate=0),
        dict(teacher=2),
        dict(trim=True),
    ],
)
def test_a_bad_recipe_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        recipe("x", **changes)


def test_layers_are_chosen_evenly_or_by_name() -> None:
    assert recipe("x", layers=4).chosen_layers(30) == [0, 10, 19, 29]
    assert recipe("x", layers=1).chosen_layers(30) == [0]
    assert recipe("x", layers=(0, 3)).chosen_layers(4) == [0, 3]
    for layers in (5, (3, 1), (0, 4)):
        with pytest.raises(OptionError, match="layers is"):
            recipe("x", layers=layers).chosen_layers(4)


def test_a_recipe_file(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("layers = [0, 2]\nsteps = 3\n")
    assert Recipe(**read_recipe(file)).layers == (0, 2)
    file.write_text("speed = 3\n")
    with pytest.raises(OptionError, match="speed"):
        read_recipe(file)
    with pytest.raises(OptionError, match="not a recipe"):
        read_recipe(tmp_path / "missing.toml")


def test_our_own_recipe_is_one() -> None:
    Recipe(**read_recipe(Path(__file__).parents[1] / "recipes" / "nano.toml"))


def test_a_folder_that_is_taken_or_foreign_is_refused(
    built: Path, parent: str, corpus: Path, tmp_path: Path
) -> None:
    from omnidraft.distil.train import build_drafter

    with pytest.raises(OptionError, match="add --resume"):
        build_drafter(recipe(parent), [corpus], built)
    with pytest.raises(OptionError, match="begun with batch"):
        build_drafter(recipe(parent, teacher=0.5, batch=8), [corpus], built, resume=True)
    with pytest.raises(OptionError, match="nothing to resume"):
        build_drafter(recipe(parent), [corpus], tmp_path / "new", resume=True)
    with pytest.raises(OptionError, match="not an empty folder"):
        build_drafter(recipe(parent), [corpus], corpus)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        (dict(layers=40), None, "layers is 40"),
        (dict(trim=3), None, "trim is 3"),
        (dict(parent="no-such-parent"), None, "no model called"),
        ({}, "so little", "name a target"),
    ],
)
def test_what_was_refused_leaves_the_folder_free(
    parent: str, corpus: Path, tmp_path: Path, changes: dict[str, Any], words: str | None, message: str
) -> None:
    """After a mistake is mended the same command begins; nothing was begun that could be resumed."""
    from omnidraft.distil.train import build_drafter

    text = corpus
    if words:
        text = tmp_path / "little.txt"
        text.write_text(words)
    out = tmp_path / "out"
    with pytest.raises(OmniDraftError, match=message):
        build_drafter(recipe(**dict(parent=parent) | changes), [text], out)
    assert not out.exists()
    out.mkdir()  # an empty folder may be there before
    with pytest.raises(OmniDraftError, match=message):
        build_drafter(recipe(**dict(parent=parent) | changes), [text], out)
    assert not list(out.iterdir())
    build_drafter(recipe(parent, steps=1), [corpus], out)


def test_killed_between_its_files_a_finished_drafter_is_written_whole(
    parent: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnidraft.distil.student import Student
    from omnidraft.distil.train import build_drafter

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Student, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            build_drafter(recipe(parent, steps=2), [corpus], out)
    build_drafter(recipe(parent, steps=2), [corpus], out, resume=True)
    assert json.loads((out / "drafter.json").read_text())["step"] == 2
    assert (out / "model.safetensors").is_file()


def test_killed_while_its_configuration_is_written_training_goes_on(
    parent: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    from omnidraft.distil.train import build_drafter

    out = tmp_path / "out"

    def killed(self: GenerationConfig, folder: Path) -> None:
        (folder / "config.json").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GenerationConfig, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            build_drafter(recipe(parent, steps=2), [corpus], out)
    build_drafter(recipe(parent, steps=2), [corpus], out, resume=True)
    assert not (out / "unfinished").exists()
    assert hub.resolve(str(out)) == out


def test_a_folder_named_like_a_file_of_text_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "notes.md").mkdir()
    (tmp_path / "notes.md" / "a.jsonl").write_text(
        '{"text": "one"}\n', encoding="utf-8-sig"
    )  # as Windows does
    (tmp_path / "b.txt").write_text("two", encoding="utf-8-sig")
    assert [one.text for one in read_documents([tmp_path])] == ["two", "one"]


def test_a_parent_without_plain_layers_is_refused(corpus: Path, tmp_path: Path) -> None:
    from tiny import write_tiny

    from omnidraft.distil.train import build_drafter

    gpt2 = write_tiny(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="plain stack"):
        build_drafter(recipe(str(gpt2)), [corpus], tmp_path / "out")


def test_the_command(parent: str, corpus: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    cli = importlib.import_module("omnidraft.cli")

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["omnidraft", "drafter", "build", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0)

    file = tmp_path / "r.toml"
    file.write_text(f"trim = {SIZE}\nlength = 16\nminutes = 100\nbatch = 2\n")
    common = ("--recipe", str(file), "--from", parent, "--text", str(corpus), "--out", str(tmp_path / "out"))
    assert run(*common, "--layers", "1,x") == 2
    assert "layers is '1,x'" in capsys.readouterr().err
    assert run(*common, "--layers", "0,1", "--steps", "2") == 0
    assert "held out: acceptance" in capsys.readouterr().out
    assert run(*common, "--layers", "0,1", "--steps", "3", "--resume") == 0
    assert "step 3" in capsys.readouterr().out
