from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from test_cli import call, run
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft, align, loading
from omnidraft.align import report
from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.errors import NGramFileError, OmniDraftError, OptionError
from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.vocab import Alignment

SMALL, LARGE = toy_vocab(25, order=1), toy_vocab(60, order=2, padding=5)
TEXT = "the flake fell in the lake, and a bird stood on the stone\n"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path_factory.mktemp("home")))


def test_the_counts_are_those_of_the_tables_and_of_the_text() -> None:
    said = report(SMALL, LARGE, text=TEXT)
    pair = Alignment(SMALL, LARGE)
    trie = Trie(Lexicon.build(pair))
    trie.fill()
    assert said.shared == sum(bool(piece) and piece in LARGE.id_of for piece in SMALL.pieces)
    assert said.shared + said.respelled + said.dropped + len(said.specials) == said.draft_vocabulary
    assert said.specials == {"<bos>": "<bos>", "<eos>": "<eos>", "<sep>": "<sep>"}
    assert said.ngrams == len(trie) > 0
    assert said.trie_bytes == trie.lexicon.nbytes + trie.nbytes
    assert not said.same
    text = said.text
    tokens = LARGE.encode_bytes(TEXT.encode())
    assert text.target_tokens == len(tokens)
    assert text.base == sum(LARGE.pieces[token] in SMALL.id_of for token in tokens)
    assert text.ngrams == len(tokens) - text.base > 0
    assert (text.draft_tokens, text.direct) == (len(SMALL.encode_bytes(TEXT.encode())),) * 2
    assert text.splits == text.unusable == text.unreachable == text.unspelled_bytes == 0
    assert said.verdict.startswith("good: 100.0% of this text's draft tokens cross directly; prefill adds")


def test_the_other_way_round_needs_splits() -> None:
    said = report(LARGE, SMALL, text=TEXT)
    assert said.respelled > 0
    assert said.text.splits > 0
    assert said.text.direct + said.text.splits == said.text.draft_tokens
    assert said.ngrams == 0
    assert said.verdict.startswith("fair: ")


def test_one_table_needs_no_translation() -> None:
    said = report(SMALL, toy_vocab(25, order=1))
    assert said.same
    assert said.verdict == "the same vocabulary: nothing to translate"


def test_a_text_that_does_not_cross_is_called_poor() -> None:
    text = align.TextReport(100, 0, 50, 20, 10, 20, 50, 20, 20, 10)
    assert align._verdict(False, text).startswith("poor: only 60.0% of this text crosses")


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabs = {DEFAULT_DRAFTER: SMALL, "qwen2.5-coder-0.5b": LARGE}
    monkeypatch.setattr(align, "load_vocab", lambda name: vocabs[name])


def test_the_command_prints_a_table_or_one_object(
    toys: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    call("align", "-t", "qwen2.5-coder-0.5b", "--text", str(file), "--json")
    record = json.loads(capsys.readouterr().out)
    assert set(record) == set(align.Report.__slots__)
    expected = asdict(report(SMALL, LARGE, text=TEXT))
    changing = {"seconds", "drafter", "target", "built"}
    assert {k: v for k, v in record.items() if k not in changing} == {
        k: v for k, v in expected.items() if k not in changing
    }
    call("align", "-t", "qwen2.5-coder-0.5b")
    shown = capsys.readouterr().out
    assert "one target token each" in shown
    assert "n-grams" in shown
    assert "our own sample" in shown


def test_a_bad_text_file_is_an_error_that_names_the_cure(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (latin, r"not UTF-8 text \(byte 3\)"),
        (empty, "is empty"),
    ):
        with pytest.raises(OptionError, match=f"{message}.*; "):
            align.read_text(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["align", "--text", "/nowhere.txt"], "No such file"),
        (["align", "--drafter", "nope"], "no model called 'nope'"),
        (["explain", "--method", "plain", "hi"], "no drafts to explain"),
        (["explain", "--step", "0", "hi"], "step is 0"),
        (["explain", "--svg", "/nowhere/a.svg", "hi"], "cannot be written"),
        (["explain", "--method", "text", "--verification", "trie", "hi"], "cannot be verified"),
        (["explain", ""], "prompt is empty"),
    ],
)
def test_mistakes_of_the_commands_cost_no_loading(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(align, "load_vocab", forbidden)
    monkeypatch.setattr(loading, "load_model", forbidden)
    with pytest.raises(OmniDraftError, match=f"{message}.*; "):
        call(arguments[0], "-t", "qwen2.5-coder-0.5b", *arguments[1:])


def test_explain_prints_steps_and_writes_their_svg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"qwen2.5-coder-0.5b": ToyModel(LARGE, seed=1), DEFAULT_DRAFTER: ToyModel(SMALL, seed=2)}
    monkeypatch.setattr(loading, "load_model", lambda name, **options: models[name])
    explain = ["explain", "-t", "qwen2.5-coder-0.5b", "--max-tokens", "12", "the flake"]
    call(*explain)
    every = capsys.readouterr().out
    assert every.count("verification compare") > 1
    file = tmp_path / "step.svg"
    call(*explain, "--step", "2", "--svg", str(file))
    shown = capsys.readouterr().out
    assert shown in every
    assert shown.startswith("step 2: ")
    assert "step 2: " in file.read_text()
    with pytest.raises(OptionError, match="and step 99 was asked for; "):
        call(*explain, "--step", "99")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file of n-grams, some of them with texts that a terminal must not be given."""
    model = OmniDraft(ToyModel(LARGE, name="target", seed=1), ToyModel(SMALL, name="[red]drafter", seed=2))
    model.generate("the flake", method="ngram", max_tokens=40)
    path = tmp_path / "kept.json"
    model.save_ngrams(path)
    record = json.loads(path.read_text())
    assert record["entries"]
    nasty = {
        "token": 1,
        "text": "\x1b[31m[bold]x\n",
        "symbols": ["\x1b[", "31m[bold]x\n"],
        "uses": 99,
        "recency": 9,
    }
    record["entries"].append(nasty)
    path.write_text(json.dumps(record))
    return path


def test_ngrams_are_shown_escaped_and_most_used_first(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("ngrams", "show", str(kept), "--limit", "1")
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("[red]drafter drafting for target: ")
    assert "'\\x1b[31m[bold]x\\n'" in lines[2]
    assert "'\\x1b[' '31m[bold]x\\n'" in lines[2]
    assert "99" in lines[2]
    assert "more; --limit shows them" in lines[3]
    assert "\x1b" not in shown


def test_ngrams_are_exported_as_csv_and_as_json_lines(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = json.loads(kept.read_text())["entries"]
    wanted = [{name: entry[name] for name in ("token", "text", "symbols", "uses")} for entry in entries]
    lines, table = tmp_path / "out.jsonl", tmp_path / "out.csv"
    call("ngrams", "export", str(kept), str(lines))
    call("ngrams", "export", str(kept), str(table))
    assert [json.loads(line) for line in lines.read_text().split("\n") if line] == wanted
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [
        {
            "token": int(r["token"]),
            "text": r["text"],
            "symbols": json.loads(r["symbols"]),
            "uses": int(r["uses"]),
        }
        for r in rows
    ] == wanted
    assert f"{len(wanted)} n-grams to" in capsys.readouterr().out
    with pytest.raises(OptionError, match="exists; add --force"):
        call("ngrams", "export", str(kept), str(lines))
    lines.write_text("old")
    call("ngrams", "export", str(kept), str(lines), "--force")
    assert lines.read_text() != "old"
    with pytest.raises(OptionError, match="is the n-gram file itself; "):
        call("ngrams", "export", str(kept), str(kept), "--force")


def test_a_damaged_ngram_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    file.write_text("{")
    done = run("ngrams", "show", str(file))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert "not a whole n-gram file; " in done.stderr
    with pytest.raises(NGramFileError, match="does not exist; "):
        call("ngrams", "export", str(tmp_path / "none"), "out.csv")
