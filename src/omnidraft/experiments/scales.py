"""How large an experiment is: which models, how many prompts, how many seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omnidraft.errors import OptionError


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What things take, milliseconds; for foretelling how long an experiment runs."""

    draft: float  # a draft token
    target: float  # a pass of the target
    record: float  # a token of a recorded answer, which are written in batches
    train: float  # an answer trained on


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights are trained, and how fast."""

    rank: int  # of a LoRA adapter; 0 trains all weights
    rate: float  # of AdamW


@dataclass(frozen=True, slots=True)
class Scale:
    """The models and sizes that experiments take their cells from.

    `drafter` and `targets` stand for the paper's Llama-68M and its targets of other families, `larger_drafter` for
    Llama-160M, `same_vocabulary` (drafter, target) for Llama-68M and Vicuna-7B, `scaling` for Qwen2.5 7B, 14B, 32B.
    """

    name: str
    drafter: str
    larger_drafter: str
    targets: tuple[str, ...]
    same_vocabulary: tuple[str, str]
    scaling: tuple[str, ...]
    tasks: tuple[str, ...]  # "a+b" takes prompts of both
    train: Mapping[str, int]  # task -> answers of the stream
    test: Mapping[str, int]  # task -> prompts that judge
    tokens: int  # of an answer at most
    graded_tokens: int  # of an answer whose result is checked
    prompts: int  # of the comparisons without learning, a task
    graded: int  # prompts whose results are checked, a task
    seeds: int
    k: int
    batch: int  # answers an update
    full: Weights  # how all weights are trained
    lora: Weights  # how an adapter is
    default: Weights  # how a table trains that is not about this
    precision: str  # of the target
    times: StepTimes

    @property
    def math(self) -> str:
        """The first task: the paper's GSM8K."""
        return self.tasks[0]

    @property
    def code(self) -> str:
        """The second task: the paper's MBPP and HumanEval."""
        return self.tasks[min(1, len(self.tasks) - 1)]

    def quick(self) -> Scale:
        """The same path in the least time: a few prompts of a few tokens."""
        tasks = self.tasks[:2]
        return replace(
            self, tasks=tasks, targets=self.targets[:1], scaling=self.scaling[:1],
            train=dict.fromkeys(tasks, 4), test=dict.fromkeys(tasks, 2),
            tokens=12, graded_tokens=24, prompts=1, graded=1, seeds=1, batch=2,
        )  # fmt: skip


LAPTOP = Scale(
    name="laptop",
    drafter="omnidraft-nano",
    larger_drafter="smollm2-135m",
    targets=("qwen2.5-coder-0.5b", "gemma3-270m"),
    same_vocabulary=("omnidraft-nano", "smollm2-135m"),
    scaling=("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"),
    tasks=("gsm8k", "mbpp", "alpaca", "xsum"),
    train=dict(gsm8k=160, mbpp=160, alpaca=160, xsum=160),
    test=dict(gsm8k=48, mbpp=48, alpaca=48, xsum=48),
    tokens=64,
    graded_tokens=256,
    prompts=20,
    graded=50,
    seeds=3,
    k=4,
    batch=4,
    full=Weights(0, 1e-4),
    lora=Weights(32, 1e-3),
    default=Weights(32, 1e-3),
    precision="float32",
    times=StepTimes(draft=50, target=240, record=58, train=2500),  # docs/decisions.md
)
PAPER = Scale(
    name="paper",
    drafter="JackFram/llama-68m",
    larger_drafter="JackFram/llama-160m",
    targets=("meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen2-7B-Instruct"),
    same_vocabulary=("JackFram/llama-68m", "lmsys/vicuna-7b-v1.3"),
    scaling=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-32B-Instruct"),
    tasks=("gsm8k", "mbpp+humaneval", "alpaca", "xsum"),
    train={"gsm8k": 8000, "mbpp+humaneval": 1000, "alpaca": 8000, "xsum": 4000},
    test={"gsm8k": 200, "mbpp+humaneval": 228, "alpaca": 100, "xsum": 100},
    tokens=128,
    graded_tokens=512,
    prompts=100,
    graded=200,
    seeds=3,
    k=4,
    batch=8,
    full=Weights(0, 1e-4),
    lora=Weights(32, 1e-4),
    default=Weights(0, 1e-4),
    precision="float16",
    times=StepTimes(draft=2.03, target=28, record=3.5, train=30),  # the first two are the paper's, on an A100
)
SCALES = {scale.name: scale for scale in (LAPTOP, PAPER)}


def scale_named(name: str) -> Scale:
    """A scale by name.

    Raises:
        OptionError: an unknown name.
    """
    if name not in SCALES:
        raise OptionError(f"unknown scale {name!r}; use one of {', '.join(SCALES)}")
    return SCALES[name]
