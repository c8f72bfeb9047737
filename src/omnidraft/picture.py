"""A step as a picture, for the terminal and as SVG: the draft, its symbols, the proposal, what entered the answer.

All lanes stand over the same drafted text, so what is made of what is seen by what is above what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Literal
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.text import Text

from omnidraft.errors import OptionError
from omnidraft.ngrams import Trie
from omnidraft.types import Step
from omnidraft.vocab import Alignment, Vocab

if TYPE_CHECKING:
    from omnidraft.engine import OmniDraft
    from omnidraft.options import Message

Mark = Literal["", "accepted", "rejected", "unseen", "correction", "free"]
Unit = int | str  # of the drafted text: a byte, or a special token

_SIGNS = {"": "", "accepted": "✓", "rejected": "✗", "unseen": "·", "correction": "✎", "free": "+"}
_STOP, _STOP_REFUSED, _OPEN = "⊣", "⊣✗", "…"
_MEANINGS = {
    "✓": "accepted",
    "✗": "rejected",
    "·": "not looked at",
    "✎": "the target's correction",
    "+": "the target's own token where no more was proposed",
    _STOP: "STOP accepted: the token ends, though the trie goes on",
    _STOP_REFUSED: "STOP rejected: the token was to go on",
    _OPEN: "the draft ended inside the trie: the target chose",
}
_STYLES = {"accepted": "green", "rejected": "red", "unseen": "dim", "correction": "yellow", "free": "cyan"}


@dataclass(frozen=True, slots=True)
class Box:
    """A token or a symbol, and the units `start:end` of the drafted text that it stands for.

    The token that the target chose stands for none: it begins at `start`, and `end` is `start`.
    """

    label: str
    start: int
    end: int
    mark: Mark = ""
    kind: str = ""  # n-gram, split, or how the walk left the trie

    @property
    def note(self) -> str:
        """What is written beside the label: the mark's sign, in a word too where the target chose, and the kind."""
        word = self.mark if self.mark in ("correction", "free") else ""
        return " ".join(filter(None, (_SIGNS[self.mark], word, self.kind)))


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a picture: its name and whose tokens it shows."""

    name: str
    whose: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """One step, ready to be printed. `title` and `lead` (the text before the step) are for people."""

    title: str
    lead: str
    lanes: tuple[Lane, ...]
    cuts: tuple[int, ...]  # units at which some box begins or ends, ascending
    cells: tuple[int, ...]  # [len(cuts) - 1] columns that the text between two cuts takes

    @property
    def legend(self) -> list[str]:
        """What the signs used mean."""
        used = {sign for lane in self.lanes for box in lane.boxes for sign in box.note.split()}
        return [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in used]

    def edges(self, room: int) -> dict[int, int]:
        """cut -> column, when each stretch of text has `room` columns more than it needs."""
        edges, column = {0: 0}, 0
        for cut, cells in zip(self.cuts[1:], self.cells, strict=True):
            column += cells + room
            edges[cut] = column
        return edges

    def text(self) -> Text:
        """For the terminal: a line a lane, with colours that add nothing the signs do not say."""
        edges = self.edges(room=7)
        indent = max(len(lane.name) for lane in self.lanes) + 2
        out = Text().append(f"{self.title}\n", style="bold").append(f"{self.lead}\n", style="dim")
        for lane in self.lanes:
            out.append(lane.name.ljust(indent), style="dim")
            for box in lane.boxes:
                content = f"{box.label} {box.note}".rstrip()
                inner = (
                    edges[box.end] - edges[box.start] - 1 if box.end > box.start else cell_len(content) + 2
                )
                left = (inner - cell_len(content)) // 2
                padded = " " * left + content + " " * (inner - left - cell_len(content))
                out.append("│", style="dim")
                out.append(padded, style=_STYLES.get(box.mark, ""))
            out.append("│\n" if lane.boxes else "\n", style="dim")
        return out.append("   ".join(self.legend) + "\n", style="dim")


def explain(model: OmniDraft, prompt: str | Sequence[Message], **options: Any) -> Iterator[Picture]:
    """The steps of an answer as pictures, as they are decoded; options and errors as in `OmniDraft.stream`."""
    from omnidraft.options import make_options

    strategy = make_options(**options).strategy
    if model.alignment is None or model.drafter is None or strategy.method in ("plain", "lookup"):
        raise OptionError(
            "plain decoding and look-ups have no drafts to explain; choose another method, and a drafter"
        )
    options |= {"method": strategy.method, "verification": strategy.verification}  # of `auto` what is drafted
    trie = None
    if strategy.method != "text":
        trie = model.trie(strategy.method, splits=strategy.splits)
    chunks = model.stream(prompt, **options).chunks()
    answer = b""
    for number in count(1):
        known = (
            trie.snapshot() if trie is not None else None
        )  # a step's own n-grams enter the trie at its end
        chunk = next(chunks, None)
        if chunk is None or chunk.step is None:
            return
        title = f"step {number}: method {strategy.method}, verification {strategy.verification}"
        yield draw(
            chunk.step,
            model.alignment,
            trie=known,
            walk=strategy.verification == "trie",
            title=title,
            lead=f"after {_tail(answer)}" if answer else "at the start of the answer",
            names=(model.drafter.name, model.target.name),
        )
        answer += model.target.vocab.decode(chunk.step.tokens)


def draw(
    step: Step,
    alignment: Alignment,
    *,
    trie: Trie | None = None,
    walk: bool = False,
    title: str = "",
    lead: str = "",
    names: tuple[str, str] = ("drafter", "target"),
) -> Picture:
    """The picture of a step.

    `trie`: what was known when the step began; None where the text was re-tokenised. `walk`: the rule was `trie`,
    which accepts symbol by symbol. `names`: of drafter and target.
    """
    draft, target = alignment.draft, alignment.target
    written = [_units(draft, token) for token in step.draft.tokens]
    units = [unit for token in written for unit in token]
    token_spans = _spans([len(token) for token in written])
    symbols: list[int] = []
    symbol_spans: list[tuple[int, int]] = []
    splits = [False] * len(written)
    if trie is not None:  # an empty one is one
        for i, token in enumerate(step.draft.tokens):
            spelled = trie.lexicon.draft.spelling(trie.lexicon.draft.row(token))
            splits[i] = len(spelled) > 1
            widths = [len(trie.lexicon.piece(s)) for s in spelled] if splits[i] else [len(written[i])]
            symbol_spans += _spans(widths, token_spans[i][0])
            symbols += spelled
    lengths = step.proposal.lengths
    if trie is not None:
        ends = [end for _, end in _spans(list(lengths))]
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        proposed_spans = [
            (symbol_spans[a][0], symbol_spans[b - 1][1]) for a, b in zip(starts, ends, strict=True)
        ]
    else:
        widths = [len(_units(target, token)) for token in step.proposal.tokens]
        proposed_spans = [(min(a, len(units)), min(b, len(units))) for a, b in _spans(widths)]
    cuts = sorted({0, len(units)}.union(*token_spans, *symbol_spans, *proposed_spans))
    shown = _characters(units, set(cuts))

    def box(span: tuple[int, int], mark: Mark = "", kind: str = "") -> Box:
        return Box("".join(shown[slice(*span)]), *span, mark, kind)

    verdicts = _verdicts(step)
    drafted = [
        box(span, kind="split" if split else "") for span, split in zip(token_spans, splits, strict=True)
    ]
    proposed = [
        box(span, mark, "n-gram" if lengths and lengths[i] > 1 else "")
        for i, (span, mark) in enumerate(zip(proposed_spans, verdicts, strict=True))
    ]
    entered = [box(span, "accepted") for span in proposed_spans[: step.accepted]]
    for i, token in enumerate(step.tokens[step.accepted :], start=step.accepted):
        at = proposed_spans[step.accepted - 1][1] if step.accepted else 0
        mark: Mark = "free" if step.provenance(i) == "free" else "correction"
        entered.append(Box(_label(target, token), at, at, mark))
    lanes: list[Lane] = []
    if drafted:
        lanes = [Lane("draft", names[0], tuple(drafted)), Lane("proposal", names[1], tuple(proposed))]
    if trie is not None and drafted and (walk or any(splits) or any(length > 1 for length in lengths)):
        marks, kinds = _walked(step, symbols, trie) if walk else _with_tokens(step, symbols)
        spelled_out = zip(symbol_spans, marks, kinds, strict=True)
        lanes.insert(1, Lane("symbols", "both", tuple(box(*symbol) for symbol in spelled_out)))
    lanes.append(Lane("answer", names[1], tuple(entered)))
    cells = tuple(cell_len("".join(shown[a:b])) for a, b in pairwise(cuts))
    return Picture(title, lead, tuple(lanes), tuple(cuts), cells)


def visible(text: str) -> str:
    """The text with every character that prints nothing, or moves the cursor, escaped."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _verdicts(step: Step) -> list[Mark]:
    """What became of each proposed token."""
    refused = len(step.tokens) > step.accepted
    marks: list[Mark] = []
    for i in range(len(step.proposal.tokens)):
        marks.append("accepted" if i < step.accepted else "unseen")
        if i == step.accepted and refused:
            marks[i] = "rejected"
    return marks


def _with_tokens(step: Step, symbols: Sequence[int]) -> tuple[list[Mark], list[str]]:
    """What became of each symbol under a rule that knows whole tokens only."""
    marks: list[Mark] = []
    for mark, length in zip(_verdicts(step), step.proposal.lengths, strict=True):
        marks += [mark] * length
    marks += ["unseen"] * (len(symbols) - len(marks))
    return marks, [""] * len(symbols)


def _walked(step: Step, symbols: Sequence[int], trie: Trie) -> tuple[list[Mark], list[str]]:
    """What became of each symbol under the rule `trie`, and where STOP was drawn.

    A rejected symbol's residual is zero, so a correction never begins with it: how far the drafted symbols were
    accepted inside the last token is how far its spelling goes along with them.
    """
    kinds = [""] * len(symbols)
    at = 0
    for length in step.proposal.lengths[: step.accepted]:
        node = trie.find(symbols[at : at + length])
        at += length
        if node and not trie.is_leaf(node):
            kinds[at - 1] = _STOP if at < len(symbols) else _OPEN
    rejected = None
    if len(step.tokens) > step.accepted and at < len(symbols):
        token, node = step.tokens[-1], trie.root
        spelled = trie.spelling(token)
        for symbol in symbols[at:]:
            if trie.is_leaf(node):
                break
            child = trie.child(node, symbol)
            if child is None or spelled[node.depth : child.depth] != (symbol,):
                own = trie.own(node)
                if child is None and own is not None:
                    kinds[at - 1] = _STOP if token == own else _STOP_REFUSED
                else:
                    rejected = at
                break
            node, at = child, at + 1
        else:
            if not trie.is_leaf(node):
                kinds[at - 1] = _OPEN
    marks: list[Mark] = ["accepted" if i < at else "unseen" for i in range(len(symbols))]
    if rejected is not None:
        marks[rejected] = "rejected"
    return marks, kinds


def _spans(lengths: Sequence[int], start: int = 0) -> list[tuple[int, int]]:
    spans = []
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans


def _units(vocab: Vocab, token: int) -> tuple[Unit, ...]:
    return tuple(vocab.pieces[token]) or (vocab.special_text.get(token, f"<{token}>"),)


def _label(vocab: Vocab, token: int) -> str:
    return "".join(_characters(_units(vocab, token), set()))


def _characters(units: Sequence[Unit], cuts: set[int]) -> list[str]:
    """What to show for each unit: a character at its first byte; bytes of a character that is cut, one by one."""
    shown: list[str] = []
    while (at := len(shown)) < len(units):
        unit = units[at]
        if isinstance(unit, str):
            shown.append(visible(unit))
            continue
        need = 1 if unit < 0xC0 else 2 if unit < 0xE0 else 3 if unit < 0xF0 else 4
        data = bytes(b for b in units[at : at + need] if isinstance(b, int))
        try:
            char = data.decode()
        except UnicodeDecodeError:
            char = ""
        if char and not cuts & set(range(at + 1, at + need)):
            shown += ["␣" if char == " " else visible(char), *[""] * (need - 1)]
        else:
            shown.append(f"\\x{unit:02x}")
    return shown


def _tail(answer: bytes) -> str:
    text = answer[-60:].decode("utf-8", "ignore")[-30:]
    return f"…“{visible(text)}”"


# SVG

_CELL, _LINE = 8.5, 18  # px: width of a monospaced character at the font size below, height of a line
# No CSS variables: some renderers know none, and would paint everything black.
_CSS = """
.omni text { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1f2328; }
.omni .title { font-weight: bold; }
.omni .faint { font-size: 12px; fill: #57606a; }
.omni rect { fill: #f6f8fa; stroke: #57606a; stroke-width: 1; }
.omni rect.ground { fill: #ffffff; stroke: none; }
.omni rect.accepted { fill: #dbeafe; stroke: #0b5cad; stroke-width: 2; }
.omni rect.rejected { fill: #ffe8d1; stroke: #a34700; stroke-width: 2; stroke-dasharray: 6 3; }
.omni rect.unseen { stroke-dasharray: 2 3; }
.omni rect.correction, .omni rect.free { fill: #fff3b8; stroke: #6b5900; stroke-width: 3; }
@media (prefers-color-scheme: dark) {
  .omni text { fill: #e6edf3; }
  .omni .faint { fill: #a3adb8; }
  .omni rect { fill: #1c2128; stroke: #a3adb8; }
  .omni rect.ground { fill: #0d1117; }
  .omni rect.accepted { fill: #12345c; stroke: #79b8ff; }
  .omni rect.rejected { fill: #552e0c; stroke: #ffab70; }
  .omni rect.correction, .omni rect.free { fill: #433a06; stroke: #f2d95c; } }
""".strip()


def svg(pictures: Sequence[Picture]) -> str:
    """The pictures, one below the other, as one SVG for light and dark pages.

    Marks are said by sign and outline as well as by colour; `desc` says everything in text.
    """
    body: list[str] = []
    top, width = 12.0, 0.0
    for picture in pictures:
        parts, size, top = _svg_of(picture, top)
        body += parts
        width = max(width, size)
    said = "\n\n".join(picture.text().plain for picture in pictures)
    shape = f"{width:g} {top:g}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="omni" viewBox="0 0 {shape}" width="{width:g}"'
            f' height="{top:g}" role="img" xml:space="preserve">',
            f"<title>{escape('; '.join(picture.title for picture in pictures))}</title>",
            f"<desc>{escape(said)}</desc>",
            f"<style>{_CSS}</style>",
            f'<rect class="ground" width="{width:g}" height="{top:g}" rx="6"/>',
            *body,
            "</svg>\n",
        ]
    )


def _svg_of(picture: Picture, top: float) -> tuple[list[str], float, float]:
    """One picture's elements, and where its right and its lower edge are."""
    margin = 16.0
    edges = picture.edges(room=5)
    left = margin + _CELL * (max(cell_len(s) for lane in picture.lanes for s in (lane.name, lane.whose)) + 2)
    parts: list[str] = []
    right = left

    def write(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        nonlocal right
        if anchor == "start":
            right = max(right, x + _CELL * cell_len(text))
        parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    write(margin, top + _LINE, picture.title, "title")
    write(margin, top + 2 * _LINE, picture.lead, "faint")
    y = top + 2 * _LINE + 12
    for lane in picture.lanes:
        write(margin, y + 16, lane.name)
        write(margin, y + 32, lane.whose, "faint")
        for box in lane.boxes:
            x = left + _CELL * edges[box.start]
            wide = _CELL * (edges[box.end] - edges[box.start]) if box.end > box.start else 0.0
            wide = wide or _CELL * (max(cell_len(box.label), cell_len(box.note)) + 3)
            right = max(right, x + wide)
            parts.append(
                f'<rect x="{x + 2:g}" y="{y:g}" width="{wide - 4:g}" height="40" rx="5" class="{box.mark}"/>'
            )
            write(x + wide / 2, y + (17 if box.note else 25), box.label, "", "middle")
            if box.note:
                write(x + wide / 2, y + 33, box.note, "faint", "middle")
        y += 50
    for meaning in picture.legend:
        write(margin, y + 8, meaning, "faint")
        y += 16
    return parts, right + margin, y + 16
