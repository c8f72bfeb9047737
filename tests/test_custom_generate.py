"""`custom_generate` inside transformers' own `generate`, on a tiny Llama and a blurred copy of it as drafter."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import blurred, save, save_tokenizer, tiny_config, tiny_module
from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import DynamicCache

import omnidraft
from omnidraft.errors import ContextLengthError, OptionError


@pytest.fixture(scope="module")
def target() -> Any:
    module = tiny_module(tiny_config("Llama", max_position_embeddings=200))
    module.generation_config.pad_token_id = 0
    return module


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    drafter = blurred(tiny_module(tiny_config("Llama")))
    folder = save(drafter, tmp_path_factory.mktemp("drafter"))
    loaded = omnidraft.load_model(folder, engine="transformers", precision="float32")
    return omnidraft.custom_generate(loaded, tokenizer=tokenizer, k=3)


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    return tokenizer("the flake fell in the lake", return_tensors="pt", return_token_type_ids=False)


GREEDY = [
    dict(max_new_tokens=40),
    dict(max_length=30),
    dict(max_new_tokens=40, repetition_penalty=1.3),
    dict(max_new_tokens=40, no_repeat_ngram_size=2),
    dict(max_new_tokens=40, min_new_tokens=38, eos_token_id=[5, 70, 71, 200]),
    dict(max_new_tokens=40, eos_token_id=list(range(0, 250, 9))),
    dict(max_new_tokens=40, suppress_tokens=list(range(0, 250, 2))),
    dict(max_new_tokens=40, num_return_sequences=1, max_time=600.0, use_cache=False),
]


@pytest.mark.parametrize("options", GREEDY)
def test_greedy_answers_equal_generate_s(target, fast, inputs, options: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    expected = target.generate(**inputs, do_sample=False, **options)
    assert torch.equal(target.generate(**inputs, do_sample=False, **options, custom_generate=fast), expected)


def test_its_own_processors_and_criteria_are_honoured(target, fast, inputs, tokenizer) -> None:  # type: ignore[no-untyped-def]
    seen: dict[str, list[list[int]]] = {"theirs": [], "ours": []}

    def run(who: str, **options: Any) -> torch.Tensor:
        class Watch(transformers.LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                seen[who].append(input_ids[0].tolist())
                scores = scores.clone()
                scores[:, input_ids[0, -1]] = -float("inf")  # nothing twice in a row
                return scores

        class AfterTwelve(transformers.StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                return torch.tensor([input_ids.shape[1] >= inputs.input_ids.shape[1] + 12])

        return target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=40,
            logits_processor=LogitsProcessorList([Watch()]),
            stopping_criteria=StoppingCriteriaList([AfterTwelve()]),
            **options,
        )

    expected = run("theirs")
    assert torch.equal(run("ours", custom_generate=fast), expected)
    assert expected.shape[1] == inputs.input_ids.shape[1] + 12
    # A step draws to its end before the criteria are asked about its tokens.
    assert seen["ours"][: len(seen["theirs"])] == seen["theirs"]
    assert len(seen["ours"]) <= len(seen["theirs"]) + 3

    text = tokenizer.decode(target.generate(**inputs, do_sample=False, max_new_tokens=40)[0, -25:-20])
    stops = StoppingCriteriaList([StopStringCriteria(tokenizer, [text])])
    options = dict(do_sample=False, max_new_tokens=40, stopping_criteria=stops)
    expected = target.generate(**inputs, **options)
    assert expected.shape[1] < inputs.input_ids.shape[1] + 40
    assert torch.equal(target.generate(**inputs, **options, custom_generate=fast), expected)


class Recorder(transformers.generation.BaseStreamer):
    def __init__(self) -> None:
        self.put_in: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_in.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamers_get_what_generate_puts_in(target, fast, inputs, tokenizer) -> None:  # type: ignore[no-untyped-def]
    theirs, ours = Recorder(), Recorder()
    options = dict(do_sample=False, max_new_tokens=20)
    target.generate(**inputs, **options, streamer=theirs)
    target.generate(**inputs, **options, streamer=ours, custom_generate=fast)
    assert ours.put_in == theirs.put_in
    assert ours.ended
    texts = []
    for method in ({}, {"custom_generate": fast}):
        reader = transformers.TextIteratorStreamer(tokenizer, timeout=60)
        thread = threading.Thread(
            target=target.generate, kwargs=dict(**inputs, **options, **method, streamer=reader)
        )
        thread.start()
        texts.append("".join(reader))
        thread.join()
    assert texts[0] == texts[1]


def test_text_streamer_prints_the_same(target, fast, inputs, tokenizer, capsys) -> None:  # type: ignore[no-untyped-def]
    printed = []
    for method in ({}, {"custom_generate": fast}):
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
        target.generate(**inputs, do_sample=False, max_new_tokens=20, streamer=streamer, **method)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


SAMPLED = dict(do_sample=True, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, max_new_tokens=20)


def test_sampled_answers_repeat_and_do_not_depend_on_the_drafter(target, fast, inputs, tokenizer) -> None:  # type: ignore[no-untyped-def]
    def run(method: Any, seed: int) -> list[int]:
        torch.manual_seed(seed)
        return target.generate(**inputs, **SAMPLED, custom_generate=method)[0].tolist()

    other = omnidraft.custom_generate(fast._drafter, tokenizer=tokenizer, method="plain")
    answers = [run(fast, seed) for seed in range(4)]
    assert answers == [run(other, seed) for seed in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4


def test_sampled_tokens_follow_generate_s_law(target, fast, inputs) -> None:  # type: ignore[no-untyped-def]
    from scipy import stats

    options = SAMPLED | dict(max_new_tokens=2, temperature=0.5, top_k=4)
    torch.manual_seed(0)
    rows = {name: tensor.repeat(3000, 1) for name, tensor in inputs.items()}
    theirs = [tuple(ids) for ids in target.generate(**rows, **options)[:, -2:].tolist()]
    ours = [
        tuple(target.generate(**inputs, **options, custom_generate=fast)[0, -2:].tolist()) for _ in range(250)
    ]
    outcomes = [outcome for outcome in {*theirs, *ours} if theirs.count(outcome) + ours.count(outcome) >= 40]
    table = [[answers.count(outcome) for outcome in outcomes] for answers in (theirs, ours)]
    assert len(outcomes) > 3
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_the_output_object_of_generate(target, fast, inputs) -> None:  # type: ignore[no-untyped-def]
    options = dict(do_sample=False, max_new_tokens=10, return_dict_in_generate=True)
    output = target.generate(**inputs, **options, custom_generate=fast)
    assert torch.equal(output.sequences, target.generate(**inputs, **options).sequences)


def test_the_model_is_not_altered(target, fast, inputs) -> None:  # type: ignore[no-untyped-def]
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    kinds = [(name, type(module)) for name, module in target.named_modules()]
    config = target.generation_config.to_dict()
    trainable = [weight.requires_grad for weight in target.parameters()]
    target.generate(**inputs, **SAMPLED, custom_generate=fast)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())
    assert kinds == [(name, type(module)) for name, module in target.named_modules()]
    assert config == target.generation_config.to_dict()
    assert trainable == [weight.requires_grad for weight in target.parameters()]


def test_weights_that_change_between_calls_change_the_answer(fast, inputs) -> None:  # type: ignore[no-untyped-def]
    module = tiny_module(tiny_config("Llama"))
    options = dict(do_sample=False, max_new_tokens=20, pad_token_id=0)
    before = module.generate(**inputs, **options, custom_generate=fast)
    blurred(module, share=1.0)
    after = module.generate(**inputs, **options, custom_generate=fast)
    assert torch.equal(after, module.generate(**inputs, **options))
    assert not torch.equal(before, after)


REFUSED = [
    (dict(num_beams=2), "beams"),
    (dict(num_return_sequences=2, do_sample=True), "several returned sequences"),
    (dict(prompt_lookup_num_tokens=3), "assistants"),
    (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
    (dict(cache_implementation="static"), "KV cache"),
    (dict(cache=DynamicCache()), "KV cache"),
    (dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1]])), "padding"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_honoured_is_named(
    target, fast, inputs, options: dict[str, Any], message: str
) -> None:  # type: ignore[no-untyped-def]
    given = {**inputs, "max_new_tokens": 5, **options}
    if "attention_mask" in options:
        given["attention_mask"] = torch.ones_like(inputs.input_ids)
        given["attention_mask"][0, 0] = 0
    with pytest.raises(OptionError, match=message):
        target.generate(**given, custom_generate=fast)


def test_batches_long_prompts_and_wrong_options_are_named(target, fast, inputs, tokenizer) -> None:  # type: ignore[no-untyped-def]
    batch = {name: tensor.repeat(2, 1) for name, tensor in inputs.items()}
    with pytest.raises(OptionError, match="batch of 2"):
        target.generate(**batch, max_new_tokens=5, custom_generate=fast)
    with pytest.raises(ContextLengthError, match="200"):
        target.generate(torch.ones(1, 200, dtype=torch.long), max_new_tokens=5, custom_generate=fast)
    with pytest.raises(OptionError, match="temperature"):
        omnidraft.custom_generate("smollm2-135m", temperature=1.0)
    with pytest.raises(OptionError, match="k is 0"):
        omnidraft.custom_generate("smollm2-135m", k=0)
    nameless = omnidraft.custom_generate(fast._drafter)
    with pytest.raises(OptionError, match="tokenizer"):
        target.generate(**inputs, max_new_tokens=5, custom_generate=nameless)


def test_an_answer_ends_with_the_context(target, fast) -> None:  # type: ignore[no-untyped-def]
    prompt = torch.ones(1, 190, dtype=torch.long)
    answer = target.generate(prompt, max_length=200, custom_generate=fast, do_sample=False)
    assert answer.shape == (1, 200)


@pytest.mark.models
def test_real_models_answer_as_generate_does(drafter) -> None:  # type: ignore[no-untyped-def]
    folder: Path = omnidraft.hub.resolve("qwen2.5-coder-0.5b")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    fast = omnidraft.custom_generate(drafter)
    inputs = tokenizer("def add(a, b):\n    return", return_tensors="pt")
    options = dict(do_sample=False, max_new_tokens=12)
    expected = module.generate(**inputs, **options)
    assert torch.equal(module.generate(**inputs, **options, custom_generate=fast), expected)
