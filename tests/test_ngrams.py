"""The trie: spellings, membership, eviction, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import CORPUS, ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.errors import NGramFileError, OptionError
from omnidraft.ngram_files import read_ngrams
from omnidraft.ngrams import Trie
from omnidraft.options import make_options
from omnidraft.spellings import Lexicon
from omnidraft.translate import SymbolTranslator
from omnidraft.types import Draft
from omnidraft.vocab import Alignment

DRAFT, TARGET = toy_vocab(25, order=1), toy_vocab(60, order=2, padding=5)
LEXICON = Lexicon.build(Alignment(DRAFT, TARGET))
SPLITTING = Lexicon.build(Alignment(TARGET, DRAFT))  # here the drafter knows more words


def ngrams(lexicon: Lexicon, *, splits: bool = True) -> list[int]:
    """The target tokens that are n-grams, in order of id."""
    full, base = Trie(lexicon, splits=splits), Trie(lexicon, splits=splits)
    full.fill()
    return sorted({*full.tokens(full.root).tolist()} - {*base.tokens(base.root).tolist()})


@pytest.mark.parametrize("lexicon", [LEXICON, SPLITTING])
def test_spellings_spell_the_bytes_in_symbols_that_both_have(lexicon: Lexicon) -> None:
    for side, vocab in ((lexicon.draft, lexicon.alignment.draft), (lexicon.target, lexicon.alignment.target)):
        spelled = set()
        for row, id in enumerate(side.ids.tolist()):
            symbols = side.spelling(row)
            special = id in vocab.special_text
            assert special or b"".join(map(lexicon.piece, symbols)) == vocab.pieces[id]
            assert side.row(id) == row
            spelled.add(id)
        text = {id for id, piece in enumerate(vocab.pieces) if piece}
        assert text <= spelled  # all 256 bytes are in both
    assert all(symbol in lexicon.alignment.draft_to_target for symbol in lexicon.token_of.tolist())


def test_n_grams_are_the_drafter_s_own_spelling() -> None:
    for token in ngrams(LEXICON):
        symbols = LEXICON.target.spelling(LEXICON.target.row(token))
        assert len(symbols) > 1
        assert [LEXICON.piece(s) for s in symbols] == [
            DRAFT.pieces[t] for t in DRAFT.encode_bytes(TARGET.pieces[token])
        ]


def test_splits_take_apart_what_the_target_lacks() -> None:
    lacking = [
        id for id, to in enumerate(SPLITTING.alignment.draft_to_target) if to < 0 and TARGET.pieces[id]
    ]
    assert lacking
    assert not SPLITTING.usable(splits=False)[lacking].any()
    assert SPLITTING.usable(splits=True)[lacking].all()
    translator = SymbolTranslator(Trie(SPLITTING))
    for token in lacking:
        assert DRAFT.decode(translator.translate([], Draft((token,))).tokens) == TARGET.pieces[token]


@given(
    st.lists(st.sampled_from([id for id, piece in enumerate(TARGET.pieces) if piece]), max_size=6),
    st.booleans(),
)
def test_proposals_spell_the_draft(tokens: list[int], walk: bool) -> None:
    trie = Trie(SPLITTING)
    trie.fill()
    proposal = SymbolTranslator(trie, walk=walk).translate([], Draft(tuple(tokens)))
    assert TARGET.decode(tokens).startswith(DRAFT.decode(proposal.tokens))
    assert walk or TARGET.decode(tokens) == DRAFT.decode(proposal.tokens)
    assert len(proposal.lengths) == len(proposal.tokens)


def test_the_longest_known_n_gram_is_proposed() -> None:
    trie = Trie(LEXICON)
    translator = SymbolTranslator(trie, grow=True)
    word = max(ngrams(LEXICON), key=lambda token: len(TARGET.pieces[token]))
    draft = Draft(tuple(DRAFT.encode_bytes(TARGET.pieces[word])))
    before = translator.translate([], draft)
    assert len(before.tokens) == len(draft.tokens) > 1
    assert set(before.lengths) == {1}
    translator.observe([word], before, 0)
    after = translator.translate([], draft)
    assert after.tokens == (word,)
    assert after.lengths == (len(draft.tokens),)
    translator.observe(after.tokens, after, 1)
    assert trie.uses == {word: 1}


def test_nodes_know_their_masses_and_branches() -> None:
    trie = Trie(LEXICON)
    trie.fill()
    everything = set(trie.tokens(trie.root).tolist())

    def visit(node, symbols):  # type: ignore[no-untyped-def]
        below = [
            t for t in everything if LEXICON.target.spelling(LEXICON.target.row(t))[: node.depth] == symbols
        ]
        assert sorted(trie.tokens(node).tolist()) == sorted(below)
        own = [t for t in below if len(LEXICON.target.spelling(LEXICON.target.row(t))) == node.depth]
        assert trie.own(node) == (own[0] if own else None)
        children, tokens, branch = trie.branches(node)
        led_to = [set(tokens[branch == i].tolist()) for i in range(len(children) + 1)]
        outside = set(range(TARGET.size)) - everything if node.depth == 0 else set()
        assert led_to.pop() == {*own, *outside}
        assert trie.is_leaf(node) == (not len(children))
        for symbol in range(len(LEXICON.token_of)):
            child = trie.child(node, symbol)
            assert (child is not None) == (symbol in children)
            if child:
                assert led_to[children.tolist().index(symbol)] == set(trie.tokens(child).tolist())
            if child and node.depth < 3:
                visit(child, (*symbols, symbol))

    visit(trie.root, ())


@pytest.mark.parametrize(("eviction", "kept"), [("lfu", {0, 3}), ("lru", {2, 3})])
def test_eviction_by_accepted_uses(eviction: str, kept: set[int]) -> None:
    tokens = ngrams(LEXICON)[:4]
    trie = Trie(LEXICON, capacity=3, eviction=eviction)  # type: ignore[arg-type]
    trie.insert(tokens[:3])
    for token, uses in zip(tokens[:3], (3, 1, 1), strict=True):
        for _ in range(uses):
            trie.use(token)
    trie.capacity = 2
    trie.insert(tokens[3:])
    assert trie.uses.keys() == {tokens[i] for i in kept} if eviction == "lru" else len(trie.uses) == 2
    assert len(trie) == len(trie.uses) == 2
    assert tokens[0] in trie.uses if eviction == "lfu" else tokens[0] not in trie.uses


def test_capacity_is_never_exceeded() -> None:
    for eviction in ("lfu", "lru"):
        trie = Trie(LEXICON, capacity=5, eviction=eviction)  # type: ignore[arg-type]
        for token in ngrams(LEXICON):
            trie.insert([token])
            trie.use(token)
            assert len(trie) <= 5
    nothing = Trie(LEXICON, capacity=0)
    nothing.insert(ngrams(LEXICON))
    assert len(nothing) == 0


def test_a_file_carries_n_grams_and_uses_on(tmp_path: Path) -> None:
    tokens = ngrams(LEXICON)[:5]
    trie = Trie(LEXICON)
    trie.insert(tokens)
    trie.use(tokens[3])
    trie.save(tmp_path / "ngrams.json", drafter="little", target="large")
    again = Trie(LEXICON)
    again.load(tmp_path / "ngrams.json")
    assert list(again.uses.items()) == list(trie.uses.items())  # recency too
    assert len(again) == 5
    entry = read_ngrams(tmp_path / "ngrams.json")["entries"][0]
    assert "".join(entry["symbols"]) == entry["text"]
    assert entry["uses"] == 1


def test_files_of_others_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ngrams.json"
    trie = Trie(LEXICON)
    trie.insert(ngrams(LEXICON))
    trie.save(path, drafter="little", target="large")
    before = path.read_text()
    with pytest.raises(NGramFileError, match=r"little.*large"):
        Trie(SPLITTING).load(path)
    record = json.loads(before)
    wrong = [record | {"format": "x"}]
    for name, value in (("token", -3), ("token", "5"), ("uses", 1.5), ("recency", None)):
        wrong.append(record | {"entries": [record["entries"][0] | {name: value}]})
    for damage in (before[:-40], "[]", "{}", *map(json.dumps, wrong), "\0"):
        path.write_text(damage)
        with pytest.raises(NGramFileError, match="whole"):
            Trie(LEXICON).load(path)
    path.write_text(json.dumps(record | {"version": 99}))
    with pytest.raises(NGramFileError, match="newer"):
        Trie(LEXICON).load(path)
    with pytest.raises(NGramFileError, match="exist"):
        Trie(LEXICON).load(tmp_path / "none.json")


def test_a_large_lexicon_is_kept_and_a_damaged_one_built_again(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from omnidraft import spellings as module

    monkeypatch.setattr(module, "_WORTH_KEEPING", 10)
    built = Lexicon.cached(LEXICON.alignment, tmp_path)
    [file] = tmp_path.iterdir()
    monkeypatch.setattr(Lexicon, "build", None)  # from here on it has to be read
    read = Lexicon.cached(LEXICON.alignment, tmp_path)
    for name in ("ids", "offsets", "symbols", "split"):
        assert np.array_equal(getattr(built.target, name), getattr(read.target, name))
        assert np.array_equal(getattr(built.draft, name), getattr(read.draft, name))
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:100])
    assert np.array_equal(Lexicon.cached(LEXICON.alignment, tmp_path).target.ids, built.target.ids)


TARGET_MODEL = ToyModel(TARGET, name="target", seed=1)
DRAFTER_MODEL = ToyModel(toy_vocab(12, order=1), name="drafter", seed=2, scale=0.3)


def test_n_grams_are_learnt_while_decoding_and_help() -> None:
    prompts = ["the flake fell", "then the lake", "a stone lay by the water", "the evening came"] * 2
    steps = {}
    for method in ("direct", "ngram", "prefill"):
        model = OmniDraft(TARGET_MODEL, DRAFTER_MODEL)
        for prompt in prompts:
            model.generate(prompt, method=method, k=4, max_tokens=40)
        steps[method] = model.stats.steps
        assert (model.stats.ngram_hits > 0) == (method != "direct")
    assert steps["prefill"] < steps["direct"]
    assert steps["ngram"] < steps["direct"]


def test_an_answer_s_n_grams_are_saved_and_loaded(tmp_path: Path) -> None:
    model = OmniDraft(TARGET_MODEL, DRAFTER_MODEL)
    model.generate("the flake fell", method="ngram", k=4, max_tokens=40)
    model.save_ngrams(tmp_path / "n.json")
    other = OmniDraft(TARGET_MODEL, DRAFTER_MODEL)
    other.load_ngrams(tmp_path / "n.json")
    assert other.trie("ngram").uses == model.trie("ngram").uses != {}


def test_equal_tables_need_no_translation() -> None:
    same = ToyModel(toy_vocab(60, order=2), name="same", seed=2)  # other padding, the same table
    assert Alignment(same.vocab, TARGET).same
    assert not Alignment(DRAFT, TARGET).same
    shuffled = toy_vocab(60, order=3)
    assert shuffled.size == TARGET.size
    assert not Alignment(shuffled, TARGET).same  # of equal size, but different
    plain = OmniDraft(TARGET_MODEL, None).generate(CORPUS[:40], max_tokens=40)
    for method in ("direct", "text", "prefill"):
        answer = OmniDraft(TARGET_MODEL, same).generate(CORPUS[:40], method=method, max_tokens=40)
        assert answer.tokens == plain.tokens
        assert answer.stats.steps < answer.stats.tokens


@pytest.mark.parametrize(
    "options",
    [
        {"method": "text", "verification": "trie"},
        {"method": "text", "verification": "paper"},
        {"method": "auto", "verification": "trie"},
        {"method": "plain", "verification": "paper"},
        {"method": "ngram", "verification": "paper", "splits": True},
        {"method": "text", "splits": True},
        {"verification": "never"},
        {"method": "ngrams"},
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        OmniDraft(TARGET_MODEL, DRAFTER_MODEL).generate("x", **options)


@pytest.mark.parametrize("verification", ["compare", "trie", "paper"])
@pytest.mark.parametrize("method", ["direct", "ngram", "prefill"])
def test_every_pair_of_method_and_rule_is_greedy_in_the_limit(method: str, verification: str) -> None:
    plain = OmniDraft(TARGET_MODEL, None).generate("the flake", max_tokens=50)
    for k in (1, 4, 9):
        answer = OmniDraft(TARGET_MODEL, DRAFTER_MODEL).generate(
            "the flake", method=method, verification=verification, k=k, max_tokens=50
        )
        assert answer.tokens == plain.tokens
        assert answer.stats.acceptance_rate is not None
        assert answer.stats.acceptance_rate <= 1


def test_auto_keeps_a_seeded_answer_plain_decoding_s_own() -> None:
    def chosen(**options: object) -> tuple[str, str, bool]:
        strategy = make_options(**options).strategy
        return strategy.method, strategy.verification, strategy.splits

    assert chosen() == chosen(temperature=1.0, seed=3) == ("text", "compare", False)
    assert chosen(temperature=1.0) == ("prefill", "trie", True)
    assert chosen(temperature=1.0, verification="compare") == ("text", "compare", False)
    assert chosen(temperature=1.0, method="ngram") == ("ngram", "trie", True)
    assert chosen(temperature=1.0, method="direct") == ("direct", "trie", False)
    assert chosen(method="prefill") == ("prefill", "compare", True)
    assert chosen(method="prefill", verification="paper") == ("prefill", "paper", False)
    assert chosen(method="prefill", verification="trie", splits=False) == ("prefill", "trie", False)


def test_a_lexicon_that_cannot_be_kept_is_built_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from omnidraft import spellings

    monkeypatch.setattr(spellings, "_WORTH_KEEPING", 0)
    (tmp_path / "file").write_text("mine")
    for _ in range(2):
        assert len(Lexicon.cached(LEXICON.alignment, tmp_path / "file").target.ids)
    assert "cannot be written (File exists): it will be built again" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
