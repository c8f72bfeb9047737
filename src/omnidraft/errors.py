"""Errors a user can meet. Each message says what is wrong and, after a semicolon, how to mend it."""

import math
from numbers import Integral, Real


class OmniDraftError(Exception):
    """Base of every error raised on purpose; the command line prints it on one line and exits with 2."""


class ModelNotFoundError(OmniDraftError):
    """A model name that means nothing to us."""


class DownloadError(OmniDraftError):
    """A model could not be fetched."""


class DamagedFileError(OmniDraftError):
    """A file on disk, or just fetched, is not what it should be."""


class CacheError(OmniDraftError):
    """The cache folder cannot be written, or the disk is full."""


class MissingExtraError(OmniDraftError):
    """An optional library is not installed, or of a version that cannot be used."""

    def __init__(self, library: str, extra: str, fault: str = "is not installed") -> None:
        super().__init__(f"{library} {fault}; pip install 'omnidraft[{extra}]'")


class UnsupportedModelError(OmniDraftError):
    """A model that an engine cannot run."""


class InsufficientMemoryError(OmniDraftError):
    """A model and its KV cache do not fit in the memory that is free."""


class VocabularyError(OmniDraftError):
    """A tokenizer whose tokens cannot be turned into bytes."""


class NGramFileError(OmniDraftError):
    """A file of n-grams that is damaged, or of another pair of models."""


class ProfileError(OmniDraftError):
    """A profile that is damaged, foreign, in use elsewhere, or cannot be written."""


class OptionError(OmniDraftError):
    """An option, or a combination of options, that makes no sense."""


class ContextLengthError(OmniDraftError):
    """The prompt does not fit the target's context."""


class InvalidLogitsError(OmniDraftError):
    """A model gave NaN or infinite logits."""

    def __init__(self, model: str, position: int) -> None:
        super().__init__(
            f"{model} gave NaN or infinite logits after {position} tokens; load it in float32, or check its files "
            "(`omnidraft models --verify`)"
        )


def is_number(value: object) -> bool:
    """Whether an option's value is a finite number; True is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    """Whether an option's value is an integer; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
