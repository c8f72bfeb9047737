"""How well two vocabularies meet, said before a model is loaded: what `omnidraft align` reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from omnidraft import demo, hub
from omnidraft.errors import MissingExtraError, OptionError
from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.vocab import Alignment, Vocab

# The verdict's thresholds, as shares of a text's tokens.
GOOD = 0.95  # of both sides' tokens that cross somehow: at least this is good,
POOR = 0.80  # and less than this is poor
DIRECT = 0.80  # of draft tokens that are one target token each: what "good" asks too

_CODE = '''
class Stack:
    """A stack of anything; the last pushed is the first popped."""

    def __init__(self, items=()):
        self._items = list(items)

    def pop(self):
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()


counts = {word: text.count(word) for word in sorted(set(text.split())) if len(word) > 3}
for i, (word, n) in enumerate(counts.items(), start=1):
    print(f"{i:>4}. {word:<12} {n / len(counts):.1%}")
'''
SAMPLE = "\n\n".join((*demo.PROMPTS, _CODE))


@dataclass(frozen=True, slots=True)
class TextReport:
    """What becomes of one text's tokens. Each side's three counts add up to its tokens."""

    bytes: int
    unspelled_bytes: int  # that the drafter has no token for
    draft_tokens: int
    direct: int  # one target token each
    splits: int  # several target tokens each
    unusable: int  # can never be drafted
    target_tokens: int
    base: int  # one draft token each
    ngrams: int  # several draft tokens each
    unreachable: int  # can only be the target's own correction or free token


@dataclass(frozen=True, slots=True)
class Report:
    """A pair of vocabularies. Sizes count tokens, without ids that only pad the logits."""

    drafter: str
    target: str
    draft_vocabulary: int
    target_vocabulary: int
    same: bool  # one and the same table
    shared: int  # draft tokens that are one target token, byte for byte
    respelled: int  # draft tokens that are several target tokens
    dropped: int  # draft tokens with bytes that the target's tokens cannot spell; never drafted
    specials: dict[str, str]  # the drafter's special tokens -> the target's
    text: TextReport
    ngrams: int  # in the prefilled trie
    trie_bytes: int  # memory of the prefilled trie
    seconds: float  # until the prefilled trie was ready
    built: bool  # in these seconds; False: it was read from the cache folder
    verdict: str


def load_vocab(name: str) -> Vocab:
    """The vocabulary of a model by name; the model is fetched on first use, and its weights are not read.

    Raises:
        OmniDraftError: the subclass says what is wrong with the name or the files.
    """
    try:
        from omnidraft.backends import checkpoint
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "transformers", "hf") from error
    return checkpoint.load_vocab(hub.pull(name), name)


def read_text(path: Path) -> str:
    """A text to measure on.

    Raises:
        OptionError: the file cannot be read, is empty, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read ({error.strerror or error}); name a file of UTF-8 text"
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it, or name another file"
        ) from error
    if not text:
        raise OptionError(f"{path} is empty; name a file with some text")
    return text


def report(
    draft: Vocab,
    target: Vocab,
    *,
    drafter_name: str = "drafter",
    target_name: str = "target",
    text: str = SAMPLE,
) -> Report:
    """How two vocabularies meet, and what becomes of `text`."""
    start = perf_counter()
    alignment = Alignment(draft, target)
    folder = hub.cache_root() / "lexicons"
    built = not Lexicon.file(alignment, folder).exists()
    lexicon = Lexicon.cached(alignment, folder)
    trie = Trie(lexicon)
    trie.fill()
    seconds = perf_counter() - start
    of_text = _measure(lexicon, text.encode("utf-8", "surrogateescape"))
    spelled = set(lexicon.draft.ids.tolist())
    return Report(
        drafter=drafter_name,
        target=target_name,
        draft_vocabulary=draft.size,
        target_vocabulary=target.size,
        same=alignment.same,
        shared=alignment.shared,
        respelled=int(np.count_nonzero(lexicon.draft.split)),
        dropped=sum(bool(piece) and id not in spelled for id, piece in enumerate(draft.pieces)),
        specials={
            _name(draft, id): _name(target, other) for id, other in alignment.special_draft_to_target.items()
        },
        text=of_text,
        ngrams=len(trie),
        trie_bytes=lexicon.nbytes + trie.nbytes,
        seconds=seconds,
        built=built,
        verdict=_verdict(alignment.same, of_text),
    )


def _measure(lexicon: Lexicon, data: bytes) -> TextReport:
    draft, target = lexicon.alignment.draft, lexicon.alignment.target
    draft_tokens, target_tokens = draft.encode_bytes(data), target.encode_bytes(data)
    mapped = lexicon.alignment.draft_to_target
    draft_rows = [lexicon.draft.row(token) for token in draft_tokens]
    target_rows = [lexicon.target.row(token) for token in target_tokens]
    lengths = np.diff(lexicon.target.offsets)
    direct = sum(mapped[token] >= 0 for token in draft_tokens)
    unusable = sum(row < 0 for row in draft_rows)
    base = sum(row >= 0 and lengths[row] == 1 for row in target_rows)
    unreachable = sum(row < 0 for row in target_rows)
    return TextReport(
        bytes=len(data),
        unspelled_bytes=len(data) - len(draft.decode(draft_tokens)),
        draft_tokens=len(draft_tokens),
        direct=direct,
        splits=len(draft_tokens) - direct - unusable,
        unusable=unusable,
        target_tokens=len(target_tokens),
        base=int(base),
        ngrams=int(len(target_tokens) - base - unreachable),
        unreachable=unreachable,
    )


def _verdict(same: bool, text: TextReport) -> str:
    if same:
        return "the same vocabulary: nothing to translate"
    direct = share(text.direct, text.draft_tokens)
    crossing = min(
        share(text.direct + text.splits, text.draft_tokens),
        share(text.base + text.ngrams, text.target_tokens),
    )
    gain = (
        f"prefill adds the {share(text.ngrams, text.target_tokens):.1%} of its target tokens that are n-grams"
    )
    if crossing < POOR:
        return (
            f"poor: only {crossing:.1%} of this text crosses, so little can be accepted; "
            "choose a drafter whose tokenizer knows such text"
        )
    if crossing >= GOOD and direct >= DIRECT:
        return f"good: {direct:.1%} of this text's draft tokens cross directly; {gain}"
    return (
        f"fair: {direct:.1%} of this text's draft tokens cross directly, with splits {crossing:.1%}; {gain}"
    )


def share(part: int, whole: int) -> float:
    """`part / whole`, and 0 of nothing."""
    return part / whole if whole else 0.0


def _name(vocab: Vocab, special: int) -> str:
    return vocab.special_text.get(special) or vocab.pieces[special].decode("utf-8", "backslashreplace")
