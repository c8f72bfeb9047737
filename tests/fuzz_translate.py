"""Coverage-guided fuzzing of vocabularies and translation (`make fuzz`): no crash, no hang, no byte in a wrong place.

Pairs of small vocabularies of every family, with shuffled ids, padding, missing bytes and duplicates; the input
decides the pair, the target's context, the steps it came in, and the drafted tokens.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import product

import atheris

with atheris.instrument_imports(include=["omnidraft"]):
    from omnidraft import ngrams, spellings, translate, types
    from omnidraft import vocab as vocabularies

from test_vocab import sentencepiece_vocab, wordpiece_vocab
from toy import toy_vocab

VOCABS = (
    lambda: toy_vocab(25, order=1),
    lambda: toy_vocab(60, order=2, padding=5),
    sentencepiece_vocab,
    wordpiece_vocab,
)


@cache
def vocab_of(which: int) -> vocabularies.Vocab:
    return VOCABS[which]()


@cache
def translators(draft: int, target: int) -> tuple[translate.Translator, ...]:
    lexicon = spellings.Lexicon.build(vocabularies.Alignment(vocab_of(draft), vocab_of(target)))
    full = ngrams.Trie(lexicon)
    full.fill()
    return (
        translate.SymbolTranslator(ngrams.Trie(lexicon, splits=False)),
        translate.SymbolTranslator(ngrams.Trie(lexicon, capacity=2), grow=True),
        translate.SymbolTranslator(full),
        translate.SymbolTranslator(full, walk=True),
        translate.TextTranslator(lexicon.alignment),
    )


def ids(provider: atheris.FuzzedDataProvider, width: int) -> list[int]:
    return provider.ConsumeIntListInRange(provider.ConsumeIntInRange(0, 12), 0, width - 1)


def one(data: bytes) -> None:
    """One input: a drafter that follows a target's context, and its drafts as proposals."""
    provider = atheris.FuzzedDataProvider(data)
    pair = provider.PickValueInList(list(product(range(len(VOCABS)), repeat=2)))
    draft, target = map(vocab_of, pair)
    context: list[int] = []
    followed = translate.DraftContext(translators(*pair)[0].alignment)
    for _ in range(provider.ConsumeIntInRange(0, 3)):
        text = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 40))
        step = target.encode_bytes(text)
        if target._complete:
            assert target.decode(step) == text
        assert target.encode_many([text]) == [step]
        step += ids(provider, target.width)
        followed.extend(step)
        context += step
    matched = {*followed.alignment.special_draft_to_target, draft.bos}
    if not followed.alignment.same:
        assert all(draft.pieces[token] or token in matched for token in followed.tokens)
    written = draft.encode_bytes(provider.ConsumeBytes(20)) + ids(provider, draft.width)
    for translator in translators(*pair):
        tokens = [token for token in written if translator.usable[token]]
        ends = next((i + 1 for i, token in enumerate(tokens) if token in translator.ends), len(tokens))
        drafted = types.Draft(tuple(tokens[:ends]))
        proposal = translator.translate(context, drafted)
        assert all(0 <= token < target.size for token in proposal.tokens)
        assert draft.decode(drafted.tokens).startswith(target.decode(proposal.tokens))
        translator.observe(proposal.tokens, proposal, len(proposal.tokens))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
