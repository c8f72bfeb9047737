"""GGUF to a transformers checkpoint: weights dequantised once, and the tokenizer the model was trained with.

transformers reads the weights rightly. Its GGUF tokenizers are only nearly right (5.24, and differently so in
each version), so the tokenizer is built here.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnidraft.errors import DamagedFileError
from omnidraft.gguf_file import read_gguf
from omnidraft.gguf_tokenizer import build_tokenizer


def convert_gguf(file: Path, folder: Path) -> None:
    """Write `file` as a checkpoint into the existing, empty `folder`.

    The weights are stored as bfloat16: half the size of float32, the type that upstream publishes, so that
    `precision="auto"` loads it without a cast. Rounding a dequantised 4-bit weight to 8 bits of mantissa moves it
    by a small part of what the quantisation already did. float16 would be closer still, but a model loaded as
    stored would then compute in float16, where Gemma overflows.

    Raises:
        DamagedFileError: the file cannot be read as a model.
        VocabularyError: its tokenizer is of a kind that we cannot build.
    """
    import torch
    import transformers

    facts = read_gguf(file)
    tokenizer = build_tokenizer(facts, file.name)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # Versions that know GgufConfig keep the weights packed unless told otherwise; older ones always unpack.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)}
        if hasattr(transformers, "GgufConfig")
        else {}
    )
    with _quiet(transformers):
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                **source, **unpack, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
            )
        except Exception as error:
            raise DamagedFileError(
                f"transformers cannot read {file} ({error}); "
                "it is cut short, or of a kind that transformers does not know"
            ) from error
        if absent := sorted(report["missing_keys"]):  # which transformers has made up at random
            raise DamagedFileError(
                f"{file} lacks {len(absent)} of its weights, {absent[0]} among them; fetch it again, or, if it is one "
                "part of several, join them with `llama-gguf-split --merge`"
            )
        # A fresh one: what transformers derives from the config is marked so, and derived anew on loading.
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=facts.ends,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=facts.bos,
            eos_token=facts.eos,
            unk_token=facts.unknown,
            pad_token=facts.padding,
            add_bos_token=facts.add_bos,
            chat_template=facts.chat_template,
            model_max_length=facts.context_length,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


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
