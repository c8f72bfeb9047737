"""GGUF to a transformers checkpoint: weights dequantised once, and the tokenizer the model was trained with.

transformers reads the weights rightly. Its GGUF tokenizers are only nearly right (5.24, and differently so in
each version), so what we know better about a family is put straight here.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft.errors import DamagedFileError

# The GGUF token type of a row that no text leads to.
_UNUSED = 5
# A chat model ends its turn with one of these; one that was trained on plain text as well may end with
# <|endoftext|>. A GGUF names a single EOS where the upstream generation_config lists several.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the file's `tokenizer.ggml.pre`: (normalizer, pre-tokenizer) of upstream's tokenizer.json. transformers
# gives smollm GPT-2's splitting, which glues digits together, and leaves out Qwen's NFC.
_PIPELINES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "smollm": (
        None,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**_BYTE_LEVEL, "use_regex": True},
            ],
        },
    ),
    "qwen2": (
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _QWEN2_SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**_BYTE_LEVEL, "use_regex": False},
            ],
        },
    ),
}


@dataclass(frozen=True)
class Gguf:
    """What a GGUF file says of itself."""

    parameters: int
    name: str
    licence: str
    context_length: int
    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    bos: str | None
    eos: str | None
    unknown: str | None
    padding: str | None
    add_bos: bool
    chat_template: str | None


def read_gguf(file: Path) -> Gguf:
    """Read a GGUF file's header.

    Raises:
        DamagedFileError: it is no GGUF file, is cut short, or holds no tokenizer.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if "merges" not in name}
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        architecture = fields["general.architecture"]
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        context_length = int(fields[f"{architecture}.context_length"])
    except Exception as error:  # what the library raises depends on the byte that is wrong
        raise DamagedFileError(
            f"{file} cannot be read as a GGUF model with a tokenizer ({error}); fetch or export it again"
        ) from error

    def token(role: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else None

    return Gguf(
        parameters=parameters,
        name=fields.get("general.name", file.stem),
        licence=fields.get("general.license", "unknown"),
        context_length=context_length,
        pre_tokenizer=fields.get("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        token_types=fields.get("tokenizer.ggml.token_type", [1] * len(tokens)),
        bos=token("bos"),
        eos=token("eos"),
        unknown=token("unknown"),
        padding=token("padding"),
        # llama.cpp's own default where the file is silent: yes for SentencePiece, no for byte-level BPE.
        add_bos=fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama"),
        chat_template=fields.get("tokenizer.chat_template"),
    )


def convert_gguf(file: Path, folder: Path) -> None:
    """Write `file` as a checkpoint into the existing, empty `folder`.

    The weights are stored as bfloat16: half the size of float32, the type that upstream publishes, so that
    `precision="auto"` loads it without a cast. Rounding a dequantised 4-bit weight to 8 bits of mantissa moves it
    by a small part of what the quantisation already did. float16 would be closer still, but a model loaded as
    stored would then compute in float16, where Gemma overflows.

    Raises:
        DamagedFileError: the file cannot be read as a model.
    """
    import torch
    import transformers

    facts = read_gguf(file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # Versions that know GgufConfig keep the weights packed unless told otherwise; older ones always unpack.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)}
        if hasattr(transformers, "GgufConfig")
        else {}
    )
    with _quiet(transformers):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **source, **unpack, dtype=torch.bfloat16, trust_remote_code=False
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
        except Exception as error:
            raise DamagedFileError(
                f"transformers cannot read {file} ({error}); "
                "it is cut short, or of a kind that transformers does not know"
            ) from error
        # A fresh one: what transformers derives from the config is marked so, and derived anew on loading.
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=_ends(facts),
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(folder)
        _repaired(tokenizer, facts).save_pretrained(folder)


def _ends(facts: Gguf) -> list[int]:
    """Ids that end an answer, the file's own EOS first."""
    names = dict.fromkeys([facts.eos, *(_ENDS if facts.chat_template else ())])
    return [facts.tokens.index(name) for name in names if name in facts.tokens]


def _repaired(tokenizer: Any, facts: Gguf) -> Any:
    """The tokenizer of `facts`, with the vocabulary, merges and decoder of `tokenizer`."""
    import tokenizers
    import transformers

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if facts.pre_tokenizer in _PIPELINES:
        state["normalizer"], state["pre_tokenizer"] = _PIPELINES[facts.pre_tokenizer]
    # Whether a BOS comes first differs between versions of transformers; the file decides.
    bos_first = {"SpecialToken": {"id": facts.bos, "type_id": 0}}
    state["post_processor"] = facts.bos and {
        "type": "TemplateProcessing",
        "single": [*([bos_first] if facts.add_bos else []), {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            facts.bos: {"id": facts.bos, "ids": [facts.tokens.index(facts.bos)], "tokens": [facts.bos]}
        },
    }
    # Rows that only pad the embedding ("[PAD151665]") are no text, and upstream's vocabulary has no names for
    # them; left in, their names would pass for bytes.
    for token, kind in zip(facts.tokens, facts.token_types, strict=True):
        if kind == _UNUSED and token.startswith("[PAD"):
            state["model"]["vocab"].pop(token, None)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(state)),
        bos_token=facts.bos,
        eos_token=facts.eos,
        unk_token=facts.unknown,
        pad_token=facts.padding,
        add_bos_token=facts.add_bos,
        chat_template=facts.chat_template,
        model_max_length=facts.context_length,
        clean_up_tokenization_spaces=False,
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars, which would run into ours; one of them heeds no setting."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
