"""What requests may say, in OpenAI's words, and as options of ours."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omnidraft.serve.errors import ApiError

_Text = Annotated[str, Field(max_length=1 << 24)]
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)]


class Part(BaseModel):
    """A part of a message's content. Only text can be read here."""

    type: Literal["text"]
    text: _Text


class Function(BaseModel):
    """The function that a tool call names; `arguments` is JSON in a string."""

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call that the assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class FunctionDefinition(BaseModel):
    """A function the model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool the model may call; it reaches the model through its chat template."""

    type: Literal["function"]
    function: FunctionDefinition


class Schema(BaseModel):
    """A named JSON schema."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema that the answer is a document of."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise ApiError(
                400, "response_format json_schema lacks its json_schema", param="response_format.json_schema"
            )
        return self.json_schema.schema_


class StreamOptions(BaseModel):
    """What a stream holds beside text."""

    include_usage: bool = False


class Extras(BaseModel):
    """Ours. `steps`: each chunk of a stream says where its text came from; `learn`: false keeps this answer out of
    learning."""

    model_config = ConfigDict(extra="forbid")
    steps: bool = False
    learn: bool = True


class _Request(BaseModel):
    """What both endpoints take. Fields that are not known are passed over, as OpenAI's own servers do with theirs."""

    model: Annotated[str, Field(max_length=1024)] = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=1 << 31)] = None
    n: Annotated[int | None, Field(ge=1, le=16)] = 1
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int | None, Field(ge=-1, le=1 << 31)] = 0
    min_p: Annotated[float | None, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=10, allow_inf_nan=False)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    logit_bias: Annotated[dict[_Id, _Bias], Field(max_length=1024)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = None
    user: str | None = None
    omnidraft: Extras = Field(default_factory=Extras)

    def sampling(self, choice: int) -> dict[str, Any]:
        """The options of one of the `n` answers; each has its own seed."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        plain: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": max(self.top_k or 0, 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "seed": None if self.seed is None else (self.seed + choice) % (1 << 64),
        }
        return plain | {"stop": tuple(stop)}

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=1 << 31)] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice can be none or auto here; to force a form, use response_format")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """See `_Request.limit`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """How many likeliest tokens at each position; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates know them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


_Ids = Annotated[list[_Id], Field(min_length=1)]


class CompletionRequest(_Request):
    """The body of /v1/completions."""

    prompt: _Text | _Ids | Annotated[list[_Text | _Ids], Field(min_length=1, max_length=16)]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: Literal[False] | None = False
    suffix: Literal[""] | None = None
    best_of: Annotated[int | None, Field(ge=1, le=1)] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def logprobs_wanted(self) -> int | None:
        """See `ChatRequest.logprobs_wanted`."""
        return self.logprobs
