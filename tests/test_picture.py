from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft
from omnidraft.errors import OptionError
from omnidraft.ngrams import Trie
from omnidraft.picture import Picture, draw, explain, svg, visible
from omnidraft.spellings import Lexicon
from omnidraft.types import Draft, Proposal, Step
from omnidraft.vocab import Alignment

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)
PAIR = Alignment(DRAFTER.vocab, TARGET.vocab)
LEXICON = Lexicon.build(PAIR)
MODEL = OmniDraft(TARGET, DRAFTER)
STRATEGIES = [
    ("text", "compare"),
    *((m, v) for m in ("direct", "ngram", "prefill") for v in ("compare", "trie", "paper")),
]


def filled() -> Trie:
    trie = Trie(LEXICON)
    trie.fill()
    return trie


def lane(picture: Picture, name: str):  # type: ignore[no-untyped-def]
    return next(lane for lane in picture.lanes if lane.name == name)


def step(draft: list[int], proposal: list[int], lengths: list[int], tokens: list[int], accepted: int) -> Step:
    return Step(
        Draft(tuple(draft)),
        Proposal(tuple(proposal), tuple(lengths)),
        tuple(tokens),
        accepted,
        rows=np.empty((0, 0)),
        draft_seconds=0,
        verify_seconds=0,
        seconds=0,
    )


@pytest.mark.parametrize(("method", "verification"), STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_step_of_every_strategy_can_be_drawn(
    method: str, verification: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []

    def recorded(step: Step, *arguments, **named) -> Picture:  # type: ignore[no-untyped-def]
        steps.append(step)
        return draw(step, *arguments, **named)

    monkeypatch.setattr("omnidraft.picture.draw", recorded)
    options = dict(method=method, verification=verification, temperature=temperature, seed=1, max_tokens=24)
    for prompt in ("the flake", "日本 🙂 the"):
        for drawn in explain(MODEL, prompt, k=6, **options):
            said = steps.pop()
            assert [box.mark for box in lane(drawn, "answer").boxes] == [
                {"drafted": "accepted"}.get(said.provenance(i), said.provenance(i))
                for i in range(len(said.tokens))
            ]
            if said.draft.tokens:
                length = drawn.cuts[-1]
                for name in ("draft", *(["symbols"] if len(drawn.lanes) == 4 else [])):
                    boxes = lane(drawn, name).boxes
                    assert (boxes[0].start, boxes[-1].end) == (0, length)
                    assert all(a.end == b.start for a, b in pairwise(boxes))
                assert len(lane(drawn, "proposal").boxes) == len(said.proposal.tokens)
            root = ET.fromstring(svg([drawn]))
            assert drawn.title in "".join(root.itertext())
            assert "\x1b" not in drawn.text().plain


def test_the_walk_says_of_each_symbol_what_the_rule_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the rule itself: how many symbols it took, where it drew STOP."""
    from omnidraft import verify

    taken: list[tuple[int, list[int]]] = []
    real_take = verify._Walk.take

    def take(self, symbol, q):  # type: ignore[no-untyped-def]
        accepted, stops = taken[-1]
        position, depth = self._accepted, self._node.depth
        stopping = self._trie.child(self._node, symbol) is None
        went_on = real_take(self, symbol, q)
        if stopping and self._accepted > position and depth:
            stops.append(accepted - 1)
        # A symbol is accepted unless its own draw, not the end of the answer after STOP, ended the walk.
        settled = self._accepted - position - stopping
        if went_on or settled > 0:
            taken[-1] = (accepted + 1, stops)
        return went_on

    real_call = verify.Walk.__call__

    def call(self, rows, draft, proposal, sampler, ends):  # type: ignore[no-untyped-def]
        taken.append((0, []))
        return real_call(self, rows, draft, proposal, sampler, ends)

    monkeypatch.setattr(verify._Walk, "take", take)
    monkeypatch.setattr(verify.Walk, "__call__", call)
    seen: Counter[str] = Counter()
    for method in ("prefill", "ngram", "direct"):
        model = OmniDraft(TARGET, DRAFTER)
        for seed in range(12):
            options = dict(method=method, verification="trie", temperature=1.2, seed=seed, max_tokens=40)
            for drawn in explain(model, "the flake", k=6, **options):
                if len(drawn.lanes) == 1:
                    continue
                boxes = lane(drawn, "symbols").boxes
                accepted, stops = taken[-1]
                assert sum(box.mark == "accepted" for box in boxes) == accepted
                assert [i for i, box in enumerate(boxes) if box.kind == "⊣"] == stops
                seen.update(box.kind or box.mark for box in boxes)
    assert {"accepted", "rejected", "unseen", "⊣", "⊣✗", "…"} <= seen.keys()


def test_an_ngram_and_a_split_are_named() -> None:
    trie = filled()
    token = next(
        int(i)
        for row, i in enumerate(LEXICON.target.ids)
        if not LEXICON.target.split[row] and len(LEXICON.target.spelling(row)) == 3
    )
    symbols = LEXICON.target.spelling(LEXICON.target.row(token))
    draft = [PAIR.draft.id_of[LEXICON.piece(symbol)] for symbol in symbols]
    other = TARGET.vocab.id_of[b"x"]
    drawn = draw(step(draft, [token], [3], [other], 0), PAIR, trie=trie)
    (box,) = lane(drawn, "proposal").boxes
    assert (box.kind, box.mark) == ("n-gram", "rejected")
    assert [box.mark for box in lane(drawn, "symbols").boxes] == ["rejected"] * 3
    assert "x ✎ correction" in drawn.text().plain
    back = Alignment(TARGET.vocab, DRAFTER.vocab)  # a drafter with tokens that its target lacks
    lexicon = Lexicon.build(back)
    split = int(lexicon.draft.ids[np.flatnonzero(lexicon.draft.split)[0]])
    drawn = draw(step([split], [], [], [DRAFTER.vocab.id_of[b"x"]], 0), back, trie=Trie(lexicon))
    assert [box.kind for box in lane(drawn, "draft").boxes] == ["split"]
    assert len(lane(drawn, "symbols").boxes) > 1


def test_a_character_cut_in_two_is_shown_in_bytes_and_a_special_token_by_name() -> None:
    data = "é\n\x1b[31m".encode()
    draft = DRAFTER.vocab.encode_bytes(data)
    special = DRAFTER.vocab.specials["<eos>"]
    drawn = draw(step([*draft, special], [], [], [TARGET.vocab.specials["<eos>"]], 0), PAIR)
    labels = [box.label for box in lane(drawn, "draft").boxes]
    assert labels[:4] == ["\\xc3", "\\xa9", "\\n", "\\x1b"]
    assert labels[-1] == "<eos>"
    assert [box.label for box in lane(drawn, "answer").boxes] == ["<eos>"]


def test_visible_escapes_what_prints_nothing() -> None:
    assert visible("a\x1b\n\u202e\u200b\ud800é ") == "a\\x1b\\n\\u202e\\u200b\\ud800é "


def test_the_svg_says_marks_without_colour_and_escapes_text() -> None:
    draft = DRAFTER.vocab.encode_bytes(b"<&>")
    proposal = TARGET.vocab.encode_bytes(b"<&>")
    drawn = draw(step(draft, proposal, [1] * 3, [proposal[0], proposal[0]], 1), PAIR, title="<a & b>")
    source = svg([drawn, drawn])
    root = ET.fromstring(source)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("<a & b>") == 2
    assert {"✓", "✗", "·", "✎ correction"} <= set(texts)
    assert "prefers-color-scheme: dark" in source
    assert "stroke-dasharray" in source


def test_plain_decoding_has_nothing_to_explain() -> None:
    for model, options in ((OmniDraft(TARGET, None), {}), (OmniDraft(TARGET, DRAFTER), {"method": "plain"})):
        with pytest.raises(OptionError, match="no drafts to explain; "):
            next(explain(model, "the flake", **options))
