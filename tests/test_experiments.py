"""Experiments run whole, with tiny models; what they are made of says what it should."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("peft")

from tiny import describe
from tiny_architectures import checkpoint
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft, cli
from omnidraft.errors import OptionError
from omnidraft.experiments import experiment as experiments
from omnidraft.experiments import learning, live, statistics
from omnidraft.experiments.claims import more_tokens
from omnidraft.experiments.draw import draw
from omnidraft.experiments.experiment import Stream, all_cells
from omnidraft.experiments.grading import last_number, right
from omnidraft.experiments.hubdata import SETS
from omnidraft.experiments.lab import Lab
from omnidraft.experiments.learning import CACHE
from omnidraft.experiments.render import page
from omnidraft.experiments.replay import Memo, Replay, by_prompt
from omnidraft.experiments.results import Results
from omnidraft.experiments.runner import foretold, run
from omnidraft.experiments.sandbox import passes
from omnidraft.experiments.scales import LAPTOP, PAPER, SCALES, Scale
from omnidraft.experiments.steptimes import Costs, speedup
from omnidraft.learn.record import Recorded

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
NAMES = experiments.names(FOLDER)
WORDS = "the lake was in the evening by the water then a stone and the bird were there"
TASKS = {
    "gsm8k_train.jsonl": lambda i, text: {"question": text, "answer": f"#### {i}"},
    "gsm8k_test.jsonl": lambda i, text: {"question": text, "answer": f"#### {i}"},
    "mbpp.jsonl": lambda i, text: {
        "text": text, "code": f"def f():\n    return {i}", "task_id": 500 + i, "test_list": [f"assert f() == {i}"]
    },
    "humaneval.jsonl": lambda i, text: {
        "task_id": f"HumanEval/{i}", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the scale's models are tiny ones of the true families."""
    home = tmp_path_factory.mktemp("home")
    kinds = {
        "omnidraft-nano": "llama", "smollm2-135m": "llama", "qwen2.5-coder-0.5b": "qwen2",
        "qwen2.5-coder-1.5b": "qwen2", "gemma3-270m": "gemma3",
    }  # fmt: skip
    for order, (name, kind) in enumerate(kinds.items()):
        folder = home / "models" / name / "checkpoint"
        vocabulary = int(order > 1)  # both of Qwen's have the same
        checkpoint(folder, kind, merges=25 + 20 * vocabulary, order=vocabulary, seed=order)
        describe(folder, name)
    return home


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for file, row in TASKS.items():
        rows = [row(i, " ".join(WORDS.split()[i % 7 : 5 + i % 11])) for i in range(20)]
        (folder / file).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


@pytest.fixture
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["omnidraft", "experiment", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


# These only differ from others in their settings.
LIKE_OTHERS = {
    "table3",
    "table5",
    "table6",
    "table11",
    "table12",
    "losses",
    "heads",
    "figure2",
    "figure6",
    "figure8",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LIKE_OTHERS else name for name in NAMES]
)
def test_an_experiment_runs_quickly_and_keeps_nothing(
    name: str, at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command(monkeypatch, name, "--quick", "--folder", FOLDER, "--data", tasks)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.startswith("## ")
    assert "|" in said.out
    assert not re.search(r"\bnan\b", said.out)
    assert not list(at_home.iterdir())


def test_finished_cells_are_kept_and_not_run_again(
    at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = experiments.load(FOLDER, "figure9")
    scale = replace(LAPTOP.quick(), tasks=("gsm8k", "mbpp"), train={"gsm8k": 4, "mbpp": 4})
    cells = all_cells(found, scale, 1)
    assert len(cells) == 2
    path = at_home / "results" / "figure9.json"
    lab = Lab(scale, tasks)
    run(found, lab, cells[:1], Results(path))
    before = path.read_text()
    calls: list[Any] = []
    run(found, lab, cells, Results(path), on_cell=lambda cell, seconds: calls.append(cell))
    assert calls == cells[1:]
    results = Results(path)
    assert [cell["setting"] for cell in results.cells] == cells
    assert results.cells[0] == json.loads(before)["cells"][0]
    assert {"argv", "git", "machine"} <= results.provenances[results.cells[1]["provenance"]].keys()
    # Without --resume the command does not touch what is there.
    assert command(monkeypatch, "figure9", "--folder", FOLDER, "--data", tasks) == 2
    assert "has 2 finished cells; add --resume" in capsys.readouterr().err
    path.write_text(before[:-20])
    assert command(monkeypatch, "figure9", "--resume", "--folder", FOLDER, "--data", tasks) == 2
    assert "does not hold an experiment's results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table0", "--folder", FOLDER), "unknown experiment 'table0'; use one of"),
        (("list", "--folder", "nowhere"), "nowhere does not exist; experiments are files of the repository"),
        (("figure9", "--folder", FOLDER, "--scale", "desk"), "unknown scale 'desk'; use one of laptop, paper"),
        (("figure9", "--folder", FOLDER, "--seeds", "0"), "seeds is 0; it must be 1 or more"),
        (("figure9", "--folder", FOLDER, "--prompts", "0"), "prompts is 0; it must be 1 or more"),
        (("figure9", "--folder", FOLDER, "--only", "size=3"), "--only size=3 is not KEY=VALUE with a key of"),
        (("figure9", "--folder", FOLDER, "--only", "task=none"), "no cell is left by --only task=none"),
        (("figure9", "--folder", FOLDER, "--dry-run", "--step-times", "1,2"), "step-times is '1,2'; give four"),
        (("figure9", "--folder", FOLDER, "--data", "nowhere"), "which does not exist; pass its folder with --data"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: tuple[object, ...],
    message: str,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1]
    assert said[-1].startswith("error: ")


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_tells_what_and_how_long(
    name: str,
    scale: Scale,
    at_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, name, "--scale", scale.name, "--dry-run", "--folder", FOLDER) == 0
    told = capsys.readouterr().out
    found = experiments.load(FOLDER, name)
    cells = all_cells(found, scale, scale.seeds)
    pairs = [(found, cell) for cell in cells]
    assert told.count("\nrun ") == len(cells)
    assert f"scale {scale.name}: {len(cells)} cells" in told
    assert len({json.dumps(cell) for cell in cells}) == len(cells), "two cells of one setting"
    slower = replace(scale.times, draft=2 * scale.times.draft, target=2 * scale.times.target)
    slower = replace(slower, record=2 * scale.times.record, train=2 * scale.times.train)
    assert foretold(pairs, scale.times) <= foretold(pairs, slower) <= 2 * foretold(pairs, scale.times)


def test_the_page_of_results_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs" / "results.md").read_text() == page(Path("experiments"), Path("results")), (
        "run `omnidraft experiment render`"
    )


# --- recorded, then replayed ---


TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)


@pytest.mark.parametrize("k", [3, 6])
@pytest.mark.parametrize(
    "method", ["text:compare", CACHE, "prefill:compare:splits", "prefill:trie", "ngram:paper"]
)
def test_a_replayed_answer_takes_the_steps_it_takes_live(method: str, k: int) -> None:
    model = OmniDraft(TARGET, DRAFTER)
    prompts = [" ".join(WORDS.split()[i : i + 3]) for i in range(8)]
    lived = list(live.answers(model, prompts, method, k=k, max_tokens=40))
    replay, memo = Replay(model.lexicon, method, k), Memo(DRAFTER.session(), DRAFTER.vocab.width)
    for prompt, (tokens, _, took) in zip(prompts, lived, strict=True):
        recorded = Recorded(model.prompt_tokens(prompt), list(tokens), None)
        replayed = replay.answer(recorded, memo)
        assert replayed == {name: took[name] for name in replayed}
    took = by_prompt([took for *_, took in lived])
    assert sum(took["steps"]) < 0.95 * sum(took["tokens"]), "little was accepted: the test says little"


def test_a_stream_is_recorded_once_and_gone_on_with(
    at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(LAPTOP, tasks, recordings=at_home)
    stream = Stream("qwen2.5-coder-0.5b", "smollm2-135m", "mbpp+humaneval", "test", 3, 8)
    first = lab.stream(stream)
    longer = lab.stream(replace(stream, answers=5))
    assert [one.answer for one in longer[:3]] == [one.answer for one in first]
    assert all(one.trace for one in longer)
    assert len(list(at_home.iterdir())) == 1
    monkeypatch.setattr(lab, "model", None)  # what is recorded needs no target
    assert [one.answer for one in lab.stream(replace(stream, answers=4))] == [
        one.answer for one in longer[:4]
    ]
    sampled = Lab(LAPTOP, tasks, recordings=at_home).stream(replace(stream, temperature=1.0))
    assert [one.answer for one in sampled] != [one.answer for one in first]
    with pytest.raises(OptionError, match="has 31 prompts for its test split and 400 are needed"):
        lab.stream(replace(stream, answers=400))


def test_a_task_of_two_takes_as_many_of_each(tasks: Path) -> None:
    lab = Lab(LAPTOP, tasks)
    both = lab.prompts("mbpp+humaneval", "test", 6)
    assert both == lab.prompts("mbpp", "test", 3) + lab.prompts("humaneval", "test", 3)
    assert lab.prompts("mbpp+humaneval", "train", 4) == lab.prompts("mbpp", "train", 4)


@pytest.mark.parametrize("weights", [LAPTOP.lora, LAPTOP.full], ids=["lora", "full"])
def test_learning_changes_the_drafter_and_is_kept(
    weights: Any, at_home: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = replace(LAPTOP.quick(), train={"gsm8k": 4}, test={"gsm8k": 2})
    lab = Lab(scale, tasks)
    cell = learning.setting(scale, "gsm8k", "text", "pushforward", weights=replace(weights, rate=0.05))
    its, train, test = learning.learned(lab, cell)
    context = list(test[0].trace.tokens[:5]) if test[0].trace else []
    before = lab.model(scale.drafter, drafts=True).session().extend(context, 1)
    after = its.drafter.session().extend(context, 1)
    assert abs(after - before).max() > 1e-3
    if weights.rank:  # an adapter is on disk, and the second time nothing is trained
        monkeypatch.setattr(learning, "Trainer", None)
        again = learning.learned(Lab(scale, tasks), cell)[0].drafter.session().extend(context, 1)
        assert abs(again - after).max() < 1e-6
    assert learning.shuffled(train, 0) == train
    assert sorted(one.prompt for one in learning.shuffled(train, 1)) == sorted(one.prompt for one in train)


def test_the_paper_s_scale_runs_with_tiny_models(
    home: Path,
    at_home: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it but the weights: its settings, half precision, all weights trained."""
    drafter, target = (
        home / "models" / name / "checkpoint" for name in ("smollm2-135m", "qwen2.5-coder-0.5b")
    )
    words = (
        "--scale",
        "paper",
        "--quick",
        "--drafter",
        drafter,
        "--target",
        target,
        "--folder",
        FOLDER,
        "--data",
        tasks,
    )
    assert command(monkeypatch, "table6", *words) == 0, capsys.readouterr().err
    assert set(PAPER.train) == set(PAPER.test) == set(PAPER.tasks)


@pytest.mark.full
@pytest.mark.parametrize(("target", "kind"), [("llama3", "llama"), ("qwen2.5", "qwen2")])
def test_the_paper_s_families_meet(
    target: str, kind: str, tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Real tokenizers, the true architectures with random weights: Llama-2's drafter, other families' targets."""
    from real_tokenizers import folder_of
    from tiny_architectures import random_checkpoint

    pair = [
        random_checkpoint(tmp_path / name, shape, folder_of(name))
        for name, shape in (("llama2", "llama"), (target, kind))
    ]
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    words = (
        "--scale",
        "paper",
        "--quick",
        "--drafter",
        pair[0],
        "--target",
        pair[1],
        "--folder",
        FOLDER,
        "--data",
        tasks,
    )
    assert command(monkeypatch, "table1", *words) == 0, capsys.readouterr().err


def test_data_sets_come_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(repository: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((repository, configuration, split))
        return [{"text": f"{split}\u2028", "task_id": 11, "test_list": ["assert True"]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert command(monkeypatch, "data", "--data", tmp_path) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETS)
    assert len((tmp_path / "mbpp.jsonl").read_text().split("\n")) == 5
    assert Lab(PAPER, tmp_path).prompts("mbpp", "test", 9)[0].startswith("prompt")
    before = len(asked)
    assert command(monkeypatch, "data", "--data", tmp_path) == 0
    assert len(asked) == before, "what is there is not fetched again"
    (tmp_path / "xsum_test.jsonl").unlink()
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    assert command(monkeypatch, "data", "--data", tmp_path) == 2
    assert "EdinburghNLP/xsum cannot be fetched" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert command(monkeypatch, "data", "--data", tmp_path) == 2
    assert "pip install 'omnidraft[paper]'" in capsys.readouterr().err


# --- numbers ---

EVEN = dict(
    tokens=[40] * 30,
    steps=[10 + i % 3 for i in range(30)],
    acceptance=[0.5] * 29 + [None],
    ngram_hits=[0] * 30,
)
FASTER = EVEN | dict(steps=[8 + i % 3 for i in range(30)])


def test_intervals_hold_the_value_and_shrink_with_prompts() -> None:
    steps = statistics.tokens_per_step([EVEN])
    assert steps.value == pytest.approx(40 / 11)
    assert steps.low < steps.value < steps.high
    few = statistics.tokens_per_step([{name: values[:6] for name, values in EVEN.items()}])
    assert few.high - few.low > steps.high - steps.low
    assert statistics.acceptance([EVEN]).value == pytest.approx(0.5)
    # Seeds are no more prompts: what they did to one goes together.
    assert statistics.tokens_per_step([EVEN] * 3) == pytest.approx(steps)
    paired = statistics.ratio([FASTER], [EVEN])
    assert paired.low > 1
    assert statistics.ratio([EVEN], [EVEN]) == (1, 1, 1)


def test_speedup_is_what_steps_and_drafts_cost() -> None:
    its = Costs({1: 10.0, 5: 14.0}, draft=1.0)
    run = dict(tokens=[30], steps=[10], proposed=[40], drafted=[50])
    assert its.of(run) == [10 * 14 + 50]
    assert speedup([run], its).value == pytest.approx(30 * 10 / 190)


def test_a_claim_is_judged_by_its_interval(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    claim = more_tokens("", dict(row="new"), dict(row="old"))

    def add(row: str, task: str, seed: int, measured: dict[str, Any]) -> None:
        results.add(dict(row=row, target="t", task=task, seed=seed), measured, 0, {})

    assert claim.judge(results) is None
    add("new", "a", 0, FASTER)
    assert claim.judge(results) is None
    add("old", "a", 0, EVEN)
    add("new", "b", 0, EVEN)  # measured on one side only: does not count
    verdict, said = claim.judge(results) or ("", "")
    assert verdict == "confirmed"
    assert "prompts: 30, seeds: 1" in said
    assert (more_tokens("", dict(row="old"), dict(row="new")).judge(results) or ("",))[0] == "refuted"
    assert (more_tokens("", dict(row="old"), dict(row="old")).judge(results) or ("",))[0] == "undecided"
    for row, measured in (("new", FASTER), ("old", EVEN)):
        add(row, "a", 1, measured)
    assert "seeds: 2" in (claim.judge(results) or ("", ""))[1]


def cell_of(results: Results, measured: dict[str, Any], **setting: Any) -> None:
    plain = dict(target="t", task="mbpp", train=8, test=len(measured["tokens"]), tokens=40, k=4)
    results.add(plain | setting, measured, 0, {})


def test_drafters_and_sizes_are_never_mixed(tmp_path: Path) -> None:
    """A file may hold cells of several drafters: the scale's has changed, or the command named another."""
    results = Results(tmp_path / "losses.json")
    few = {name: values[:6] for name, values in EVEN.items()}
    for drafter, better in (("one", FASTER), ("two", EVEN)):
        learned = dict(drafter=drafter, rank=4, rate=0.1, batch=4, seed=0)
        for loss, measured in (("pushforward", better), ("hybrid", EVEN)):
            cell_of(results, few, loss=loss, **learned)  # a run with --prompts 6, before
            cell_of(results, measured, loss=loss, **learned)
    lines = page(FOLDER, tmp_path).splitlines()
    claims = [line.split(" | ") for line in lines if "Push-forward KL beats" in line]
    assert [(claim[1], claim[3]) for claim in claims] == [("confirmed", "one, t"), ("undecided", "two, t")]
    assert all("prompts: 30, seeds: 1" in claim[2] for claim in claims)
    assert sum(line.startswith("**Drafter ") for line in lines) == 2
    rows = [line.split(" | ") for line in lines if line.startswith("| t | mbpp | 8 |")]
    assert [row[3] for row in rows] == ["pushforward", "hybrid"] * 2
    assert {(row[6], row[7]) for row in rows} == {("1", "30")}  # seeds, prompts


def test_prompts_are_paired_where_one_side_has_more_of_them(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    cell_of(results, FASTER, row="new")
    cell_of(results, {name: values[:6] for name, values in EVEN.items()}, row="old")
    verdict, said = more_tokens("", dict(row="new"), dict(row="old")).judge(results) or ("", "")
    assert (verdict, "prompts: 6, seeds: 1" in said) == ("confirmed", True)


def test_a_larger_drafter_is_judged_before_and_after_learning(tmp_path: Path) -> None:
    results = Results(tmp_path / "table3.json")
    for size, measured in (("small", EVEN), ("larger", FASTER)):
        cell_of(results, EVEN, size=size, loss=None)
        for seed in (0, 1):
            cell_of(results, measured, size=size, loss="hybrid", seed=seed)
    [claim] = experiments.load(FOLDER, "table3").claims
    verdict, said = claim.judge(results) or ("", "")
    assert (verdict, "prompts: 60, seeds: 2" in said) == ("confirmed", True)


# --- pictures ---


def test_pictures_for_light_and_for_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = experiments.load(FOLDER, "figure9")
    results = Results(tmp_path / "figure9.json")
    assert draw(experiments.load(FOLDER, "table1"), results, tmp_path / "table1.svg") == []
    for task in ("gsm8k", "mbpp"):
        measured = dict(tokens=[10, 20, 30], ngrams=[3, 5, 6], exponents=[0.7])
        results.add(dict(target="t", task=task), measured, 0, {})
    light, dark = draw(found, results, tmp_path / "figure9.svg")
    assert [light.name, dark.name] == ["figure9-light.svg", "figure9-dark.svg"]
    for file, colours in ((light, ("#0072b2", "#d55e00")), (dark, ("#56b4e9", "#e69f00"))):
        text = file.read_text()
        assert all(colour in text for colour in colours)
        assert "gsm8k, t" in text
    again = light.read_bytes()
    assert draw(found, results, tmp_path / "figure9.svg")[0].read_bytes() == again


# --- grading ---


@pytest.mark.parametrize(
    ("program", "ends_well"),
    [
        ("assert sorted([2, 1]) == [1, 2]", True),
        ("import re, math, collections", True),
        ("assert 1 == 2", False),
        ("while True: pass", False),
        ("x = bytearray(2 << 30)", False),
        ("open('big', 'wb').write(bytes(2 << 20))", False),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", False),
        ("raise SystemExit(0)\nassert False", True),
    ],
)
def test_programs_run_within_limits(program: str, ends_well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnidraft.experiments.sandbox._SECONDS", 4)
    assert passes(program) == ends_well


def test_a_program_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert passes("import os; assert 'SECRET' not in os.environ and not os.listdir('.')")


def test_answers_are_graded() -> None:
    assert last_number("It costs $1,250.50 in all.") == 1250.5
    assert last_number("none") is None
    assert right("gsm8k", {"answer": "so 4\n#### 18"}, "The answer is 18.")
    assert not right("gsm8k", {"answer": "#### 18"}, "The answer is 81.")
    row = {"test_list": ["assert twice(2) == 4"]}
    assert right("mbpp", row, "Here:\n```python\ndef twice(x):\n    return 2 * x\n```\nIt doubles.")
    assert not right("mbpp", row, "```python\ndef twice(x):\n    return x\n```")
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    assert c(1) == 2\n"}
    assert right("humaneval", row, "```python\n    return x + 1\n```")
    assert right("humaneval", row, "```python\ndef f(x):\n    return x + 1\n```")
    assert not right("humaneval", row, "")
    with pytest.raises(OptionError, match="cannot be checked"):
        right("xsum", {}, "")
