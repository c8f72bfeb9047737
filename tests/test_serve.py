"""The server as its clients see it: OpenAI's own client, on a loopback port."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

import openai
from serving import DRAFTER, GREEDY, TARGET, Served, plain, served
from tiny_models import save_tokenizer, tiny_config
from toy import ToyModel

from omnidraft import OmniDraft
from omnidraft.backends.checkpoint import CheckpointModel
from omnidraft.errors import OptionError
from omnidraft.serve.tools import ToolReader
from omnidraft.session import feed


@pytest.fixture(scope="module")
def up() -> Iterator[Served]:
    with served() as one:
        yield one


def chat(up: Served, text: str = "the flake", **options: Any) -> Any:
    return up.openai.chat.completions.create(
        **{"model": "target", "messages": [{"role": "user", "content": text}], "max_tokens": 30}
        | GREEDY
        | options
    )


def test_a_chat_is_answered_as_plain_decoding_would(up: Served) -> None:
    answer = chat(up)
    assert answer.choices[0].message.content == plain("the flake", max_tokens=30)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == (
        "chat.completion",
        "target",
        "length",
    )
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(TARGET.encode("the flake")), 30)
    assert usage.total_tokens == usage.prompt_tokens + 30
    assert usage.omnidraft["steps"] < 30


def test_a_stream_says_the_same(up: Served) -> None:
    chunks = list(
        chat(
            up,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"omnidraft": {"steps": True}},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain("the flake", max_tokens=30)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 30
    steps = [chunk.omnidraft for chunk in chunks if getattr(chunk, "omnidraft", None)]
    assert "".join(piece["text"] for step in steps for piece in step["pieces"]) == text
    sources = {piece["source"] for step in steps for piece in step["pieces"]}
    assert (
        {"direct", "ngram", "correction", "free"}
        <= sources
        <= {"direct", "ngram", "split", "correction", "free"}
    )
    assert sum(step["tokens"] for step in steps) == 30
    assert len(steps) == chunks[-1].usage.omnidraft["steps"]
    for step in steps:
        assert bool(step["rejected"]) == (step["accepted"] < step["drafted"])


def test_a_seeded_draw_is_the_librarys(up: Served) -> None:
    options: dict[str, Any] = dict(temperature=1.0, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.3)
    answer = chat(up, seed=5, n=2, **options)
    for choice in answer.choices:
        assert choice.message.content == plain("the flake", max_tokens=30, seed=5 + choice.index, **options)
    assert answer.usage.prompt_tokens == len(TARGET.encode("the flake"))
    assert answer.usage.completion_tokens == 60


def test_any_integer_is_a_seed(up: Served) -> None:
    for seed in (-1, -(1 << 63), (1 << 63) - 1):
        first, again = (chat(up, seed=seed, temperature=1.0).choices[0].message.content for _ in range(2))
        assert first == again, seed


def test_biased_logits(up: Served) -> None:
    said = chat(up).choices[0].message.content
    first = TARGET.encode(said)[0]
    for seed in (None, 3):
        for value in (-100, 100):
            biased = chat(up, seed=seed, logit_bias={str(first): value}, logprobs=True).choices[0]
            pieces = [bytes(one.bytes) for one in biased.logprobs.content]
            assert {piece == TARGET.vocab.pieces[first] for piece in pieces} == {value > 0}


def test_sampling_without_a_seed_differs(up: Served) -> None:
    assert len({chat(up, temperature=1.0).choices[0].message.content for _ in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(up: Served, stream: bool) -> None:
    whole = plain("the flake", max_tokens=30)
    stop = whole[40:44]
    answer = chat(up, stop=[stop], stream=stream)
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].message.content == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_that_never_comes_holds_nothing_back(up: Served) -> None:
    whole = plain("the flake", max_tokens=30)
    answer = chat(up, stop=[whole[-3:] + "never"])
    assert answer.choices[0].message.content == whole


def test_logprobs_are_the_targets_own(up: Served) -> None:
    answer = chat(up, logprobs=True, top_logprobs=3, max_tokens=8, temperature=0.5, seed=1)
    context = TARGET.encode("the flake")
    session = TARGET.session()
    ids = {TARGET.vocab.pieces[id]: id for id in range(TARGET.vocab.size)}
    assert len(answer.choices[0].logprobs.content) == 8
    for one in answer.choices[0].logprobs.content:
        row = feed(session, context, 1)[0][: TARGET.vocab.size].astype(np.float64)
        law = row - np.log(np.exp(row).sum())
        token = ids[bytes(one.bytes)]
        assert one.logprob == pytest.approx(law[token])
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(np.sort(law)[::-1][:3].tolist())
        context.append(token)
    streamed = list(chat(up, logprobs=True, max_tokens=8, temperature=0.5, seed=1, stream=True))
    tokens = [one.token for c in streamed if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert tokens == [one.token for one in answer.choices[0].logprobs.content]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "stone",
                "schema": {
                    "type": "object",
                    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
                    "required": ["size"],
                    "additionalProperties": False,
                },
            },
        },
    ],
)
def test_json(up: Served, response_format: dict[str, Any]) -> None:
    answer = chat(up, response_format=response_format, max_tokens=200, temperature=1.0, seed=2)
    if answer.choices[0].finish_reason == "stop":
        document = json.loads(answer.choices[0].message.content)
        if response_format["type"] == "json_schema":
            assert document["size"] in range(100)
        assert isinstance(document, dict)
    else:
        assert response_format["type"] == "json_object"
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_completions(up: Served) -> None:
    create = up.openai.completions.create
    prompts = ["the flake", "a stone"]
    answer = create(model="target", prompt=prompts, max_tokens=9, n=2, seed=3, temperature=0.7, logprobs=2)
    texts = [choice.text for choice in answer.choices]
    assert texts == [
        plain(text, raw=True, max_tokens=9, seed=seed, temperature=0.7) for text in prompts for seed in (3, 4)
    ]
    assert answer.choices[0].logprobs.tokens == [
        t for t in answer.choices[0].logprobs.tokens if t in texts[0]
    ]
    assert answer.usage.prompt_tokens == sum(len(TARGET.encode(text)) for text in prompts)
    tokens = create(model="target", prompt=TARGET.encode("the flake"), max_tokens=9, temperature=0)
    assert tokens.choices[0].text == plain("the flake", raw=True, max_tokens=9)
    stream = create(model="target", prompt="the flake", max_tokens=9, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == tokens.choices[0].text


def test_targets_are_loaded_on_demand_and_share_the_drafter() -> None:
    asked = []

    def load(name: str) -> OmniDraft:
        asked.append(name)
        return OmniDraft(ToyModel(TARGET.vocab, name=name, seed=len(asked)), DRAFTER)

    with served(load) as up:
        assert asked == ["target"]
        first, second = chat(up), chat(up, model="other")
        assert asked == ["target", "other"]
        assert first.choices[0].message.content != second.choices[0].message.content
        assert second.model == "other"
        assert [model.id for model in up.openai.models.list()] == ["target", "other"]
        assert up.openai.models.retrieve("other").id == "other"


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "nope"}, 404, "there is no model 'nope' here; there are target, other"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "empty"),
        (
            {
                "messages": [  # which toy's template has no words for
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                        ],
                    }
                ]
            },
            400,
            "empty",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"logit_bias": {"7": 101}}, 400, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, 400, "token 99999999 is none of target's"),
        ({"repetition_penalty": 1e-45}, 400, "repetition_penalty"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 17}, 400, "n: "),
        ({"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, 400, "lacks its json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "king"}}}},
            400,
            "the schema is refused|the grammar is refused",
        ),
        ({"stop": [""]}, 400, "stop"),
        ({"omnidraft": {"stpes": True}}, 400, "omnidraft.stpes"),
        ({"messages": [{"role": "user", "content": "x" * 20000}]}, 400, "holds 4096 here; shorten"),
    ],
    ids=str,
)
def test_bad_requests(up: Served, change: dict[str, Any], status: int, message: str) -> None:
    refused = up.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 3} | change,
    )
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 5000],
)
def test_bodies_that_are_no_request(up: Served, body: bytes) -> None:
    refused = up.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], 5, [[-1]]])
def test_prompts_that_are_none(up: Served, prompt: object) -> None:
    refused = up.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
    assert refused.status_code == 400
    assert re.match("(the )?prompt( is empty|[.0-9]*: )", refused.json()["error"]["message"]), refused.text


def test_openais_client_knows_the_errors(up: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(up, model="nope")
    with pytest.raises(openai.BadRequestError, match="holds 4096") as refused:
        chat(up, "x" * 20000, max_tokens=3)
    assert refused.value.code == "context_length_exceeded"


def test_metrics_count_what_was_shown() -> None:
    with served() as up:
        answer = chat(up, max_tokens=40)
        page = up.http.get("/metrics").text
        values = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line[0] != "#"
        }

        def value(name: str, **labels: str) -> float:
            shown = ",".join(f'{k}="{v}"' for k, v in sorted(({"model_name": "target"} | labels).items()))
            return values[f"{name}{{{shown}}}"]

        assert value("vllm:generation_tokens_total") == 40
        assert value("vllm:prompt_tokens_total") == answer.usage.prompt_tokens
        assert value("omnidraft_steps_total") == answer.usage.omnidraft["steps"]
        accepted = value("vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < accepted < value("vllm:spec_decode_num_draft_tokens_total")
        assert accepted + answer.usage.omnidraft["steps"] - (accepted == 40) == 40
        per_position = [
            number
            for name, number in values.items()
            if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")
        ]
        assert sum(per_position) == accepted
        assert per_position == sorted(per_position, reverse=True)
        assert value("vllm:request_success_total", finished_reason="length") == 1
        assert value("vllm:e2e_request_latency_seconds_count") == 1
        assert value("omnidraft_ngram_hits_total") > 0

        status = up.http.get("/v1/omnidraft/status").json()
        target, other = status["targets"]
        assert target["counters"]["tokens"] == 40
        assert target["counters"]["accepted"] == accepted
        assert target["ngrams"]["entries"] == len(target["ngrams"]["newest"]) > 0
        assert not other["loaded"]
        assert status["drafter"]["name"] == "drafter"
        assert up.http.get("/health").text == "ok"
        assert up.http.get("/ready").json()["ready"]
        assert "OmniDraft" in up.http.get("/").text


def test_tool_calls_are_read() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> <tool_call>{oops</tool_call>'
    for size in (1, 3, 7, len(text)):
        reader = ToolReader()
        shown = "".join(reader.feed(text[i : i + size]) for i in range(0, len(text), size))
        rest, calls = reader.end()
        assert shown == "Let me see.\n"
        assert rest.strip() == "<tool_call>{oops</tool_call>"
        assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}]
    reader = ToolReader()
    reader.feed(
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    )  # as some models write them
    assert reader.end()[1][0]["function"]["arguments"] == '{"a": 1}'
    reader = ToolReader()
    assert reader.feed("a <tool_") == "a "
    assert reader.feed("b") == "<tool_b"
    assert reader.end() == ("", [])


CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Caller(ToyModel):
    """Says CALL, whatever it is asked."""

    told: Any = None

    def chat(self, messages: Any, tools: Any = None) -> list[int]:
        self.told = messages, tools
        return self.encode("?")

    def row(self, context: Any) -> Any:
        said = len(self.vocab.decode(context).partition(b"?")[2])
        row = np.zeros(self.vocab.width, np.float32)
        row[self.vocab.eos[0] if said >= len(CALL) else self.vocab.id_of[CALL[said].encode()]] = 9
        return row


def test_tools_reach_the_template_and_calls_come_back() -> None:
    target = Caller(TARGET.vocab, name="target")
    with served(lambda name: OmniDraft(target, DRAFTER)) as up:
        made = {"name": "add", "arguments": '{"a": 2}'}
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": made}]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ]
        answer = chat(up, messages=messages, tools=[ADD], max_tokens=200)
        read = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
        assert target.told == (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "assistant", "content": "", "tool_calls": [read]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ],
            [ADD],
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        chunks = [c.choices[0] for c in chat(up, messages=messages, tools=[ADD], max_tokens=200, stream=True)]
        assert "".join(c.delta.content or "" for c in chunks) == "Let me see."
        [call] = [one for c in chunks for one in c.delta.tool_calls or ()]
        assert call.function.name == "add"
        assert chunks[-1].finish_reason == "tool_calls"
        for without in ({}, {"tools": [ADD], "tool_choice": "none"}):
            assert chat(up, max_tokens=200, **without).choices[0].message.content == CALL
            assert target.told[1] is None


def test_a_checkpoints_template_is_told_of_tools(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls %}[{{ call.function.arguments.a + 1 }}]{% endfor %};{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    tiny_config("Llama").save_pretrained(tmp_path)
    model = CheckpointModel(tmp_path, "tiny")
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    told = model.chat([{"role": "assistant", "content": "", "tool_calls": [call]}], [ADD])
    assert model.vocab.decode(told) == b"<add>assistant: [3];"
    assert model.vocab.decode(model.chat([{"role": "user", "content": "x"}])) == b"user: x;"
    call["function"]["arguments"] = "no object"
    with pytest.raises(OptionError, match="chat template refuses these messages"):
        model.chat([{"role": "assistant", "content": "", "tool_calls": [call]}], [ADD])
