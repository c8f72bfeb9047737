"""The command that serves: serve."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from omnidraft.catalog import DEFAULT_DRAFTER
from omnidraft.cli.common import engines, err
from omnidraft.cli.options import (
    Device,
    DrafterEngine,
    DrafterName,
    DrafterPrecision,
    Engine,
    K,
    MethodName,
    Precision,
    Settings,
    Splits,
    Verification,
)
from omnidraft.errors import MissingExtraError, OptionError


def serve(
    targets: Annotated[
        list[str],
        typer.Option("--target", "-t", help="A model to serve; may be repeated, the first is the default."),
    ],
    drafter: DrafterName = DEFAULT_DRAFTER,
    host: Annotated[
        str, typer.Option(help="Another than a loopback address needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        str, typer.Option(envvar="OMNIDRAFT_API_KEY", help="What requests must show.", show_default=False)
    ] = "",
    learn: Annotated[str, typer.Option(help="When the drafter learns: off, between or idle.")] = "off",
    profile: Annotated[str | None, typer.Option(help="What it learns into, and drafts by.")] = None,
    method: MethodName = "auto",
    verification: Verification = "auto",
    splits: Splits = None,
    k: K = None,
    slots: Annotated[int, typer.Option(help="Answers under way at once.")] = 4,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are told to come back.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds of a request, waiting included.")] = 600.0,
    body_limit: Annotated[int, typer.Option(help="Bytes of a request.")] = 4 << 20,
    context_limit: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer, if fewer than the target's.")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what is asked.")] = False,
    engine: Engine = "auto",
    drafter_engine: DrafterEngine = "auto",
    precision: Precision = "auto",
    drafter_precision: DrafterPrecision = "auto",
    device: Device = "auto",
    settings: Settings = None,
) -> None:
    """Serve targets to OpenAI's clients, with a dashboard; Ctrl-C stops, and saves what was learned."""
    try:
        from omnidraft.serve.app import run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "fastapi", "serve") from error
    from omnidraft import loading
    from omnidraft.serve.settings import Settings as Serving

    alone = method in ("plain", "lookup")
    if alone and learn != "off":
        raise OptionError(
            f"method {method} has no drafter to learn; leave --learn out, or choose another method"
        )
    where = engines(engine, drafter_engine, precision, drafter_precision, device, settings)
    options: dict[str, Any] = dict(method=method, verification=verification, splits=splits, k=k)
    serving = Serving(
        targets=tuple(dict.fromkeys(targets)),
        host=host,
        port=port,
        api_key=api_key,
        slots=slots,
        queue=queue,
        timeout=timeout,
        body_limit=body_limit,
        context_limit=context_limit,
        learn=learn,
        profile=profile,
        log_prompts=log_prompts,
        options=options,
    )
    drafters: list[Any] = []  # one for all targets, once it is loaded

    def load(name: str) -> Any:
        own = None if alone else (drafters or [drafter])[0]
        model = loading.load(name, own, **where)
        if learn != "off" and drafter_engine == "auto" and not hasattr(model.drafter, "adapted"):
            # Any drafter can learn there.
            model = loading.load(model.target, drafter, **where | {"drafter_engine": "transformers"})
        if learn != "off":
            model.learn(learn)  # if it cannot learn that is said now, rather than to the first client
            model.release(None)
            model.follow(None)
        drafters[:] = [model.drafter]
        return model

    def started(url: str) -> None:
        err.print(f"{', '.join(serving.targets)} at {url}/v1 (dashboard: {url}/); Ctrl-C stops", style="dim")

    run(serving, load, started=started)
