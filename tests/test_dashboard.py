"""The dashboard in a real browser, on a server with toy models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright")

from playwright.sync_api import Page, expect, sync_playwright
from serving import TARGET, Served, Slow, plain, served

from omnidraft import OmniDraft

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium; `make test` installs it where it may"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def up() -> Iterator[Served]:
    with served() as one:
        yield one


@pytest.fixture
def page(browser: Any, up: Served) -> Iterator[Page]:
    yield from opened(browser, up.url)


def opened(browser: Any, url: str, **options: Any) -> Iterator[Page]:
    """The page, which may ask nobody else for anything, and must not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(url)
    expect(page.locator("#target option")).to_have_count(2)
    yield page
    context.close()
    # A refusal is no fault of the page, though the console calls it one.
    assert [one for one in complaints if not one.startswith("Failed to load resource")] == []
    assert [one for one in asked if not one.startswith((url, "data:"))] == []


def ask(page: Page, text: str, tokens: int = 40) -> None:
    page.fill("#limit", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answer(page: Page) -> str:
    """What the last answer says, without the marks of what was rejected."""
    script = "a => [...a.childNodes].filter(n => n.tagName !== 'BUTTON').map(n => n.textContent).join('')"
    said: str = page.locator(".answer").last.evaluate(script)
    return said


def test_a_question_is_answered_in_colours(page: Page) -> None:
    ask(page, "the flake")
    expect(page.locator(".note").first).to_contain_text("40 tokens in")
    assert answer(page) == plain("the flake", max_tokens=40)
    kinds = set(page.locator(".answer > *").evaluate_all("all => all.map(one => one.className)"))
    assert {"direct", "ngram", "correction", "rejected"} <= kinds
    mark = page.locator(".rejected").first
    expect(mark.locator("span")).to_be_hidden()
    mark.hover()
    expect(mark.locator("span")).to_be_visible()
    expect(page.locator("#acceptance")).to_contain_text("%")
    expect(page.locator("#rows td").nth(1)).not_to_be_empty()  # an n-gram that was accepted
    page.uncheck("#colours")
    colours = page.locator(".answer > span").evaluate_all(
        "all => all.map(one => getComputedStyle(one).color)"
    )
    assert len(set(colours)) == 1


def test_numbers_change_and_nothing_jumps(page: Page) -> None:
    tiles = page.locator("dl > div, #curve, #grams, #ask")
    before = tiles.evaluate_all("all => all.map(one => JSON.stringify(one.getBoundingClientRect()))")
    expect(page.locator("#per-step")).to_contain_text("–")
    ask(page, "a stone lay by")
    expect(page.locator(".note").first).to_contain_text("tokens in")
    expect(page.locator("#per-step")).to_contain_text(".")
    expect(page.locator("#per-step-all")).to_contain_text("in all")
    assert tiles.evaluate_all("all => all.map(one => JSON.stringify(one.getBoundingClientRect()))") == before


def test_the_target_is_switched(page: Page, up: Served) -> None:
    page.select_option("#target", "other")
    ask(page, "and the lake")
    expect(page.locator(".note").first).to_contain_text("tokens in")
    assert {target.name for target in up.server.targets.loaded} == {"target", "other"}
    assert up.server.targets.get("other").counters.stats.tokens == 40


def test_a_chat_goes_on_and_begins_anew(page: Page) -> None:
    sent = []
    page.on(
        "request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None
    )
    for turn in (1, 2):
        ask(page, "the flake")
        expect(page.locator(".note").filter(has_text="tokens in")).to_have_count(turn)
    first = page.locator(".answer").first.inner_text()
    page.click("#fresh")
    expect(page.locator(".answer")).to_have_count(0)
    ask(page, "the flake")
    expect(page.locator(".note").first).to_contain_text("tokens in")
    assert page.locator(".answer").last.inner_text() == first
    assert [[message["role"] for message in body["messages"]] for body in sent] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    assert sent[1]["messages"][1]["content"] == plain("the flake", max_tokens=40)


def test_escape_stops_the_answer(browser: Any) -> None:
    with served(lambda name: OmniDraft(Slow(0.05), None), options={"method": "plain"}) as slow:
        for page in opened(browser, slow.url):
            ask(page, "the flake", 2000)
            expect(page.locator(".answer").first).not_to_be_empty()
            page.keyboard.press("Escape")
            expect(page.locator(".note").first).to_have_text("stopped")
            slow.settled(lambda: not slow.server.worker.running)


def test_a_new_conversation_knows_nothing_of_the_answer_it_ended(browser: Any) -> None:
    with served(lambda name: OmniDraft(Slow(0.05), None), options={"method": "plain"}) as slow:
        for page in opened(browser, slow.url):
            ask(page, "the flake", 2000)
            expect(page.locator(".answer").first).not_to_be_empty()
            page.click("#fresh")
            expect(page.locator("#send")).to_have_text("Send")
            with page.expect_request("**/v1/chat/completions") as sent:
                ask(page, "a stone", 2)
            assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "a stone"}]


def test_what_is_said_is_shown_and_never_run(page: Page) -> None:
    ask(page, "<img src=x onerror=alert(1)><b>the flake</b>")
    expect(page.locator(".user").first).to_have_text("<img src=x onerror=alert(1)><b>the flake</b>")
    expect(page.locator(".note").first).to_contain_text("tokens in")
    assert page.locator("#log img").count() == 0


def test_an_error_is_said(page: Page) -> None:
    ask(page, "x" * TARGET.context_length)
    expect(page.locator(".problem")).to_contain_text("shorten the prompt")


def test_light_dark_and_narrow(browser: Any, up: Served) -> None:
    backs = set()
    for scheme in ("light", "dark"):
        for page in opened(browser, up.url, color_scheme=scheme):
            backs.add(page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor"))
            if scheme == "dark":
                page.click("#theme")
                backs.add(page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor"))
            page.set_viewport_size({"width": 360, "height": 700})
            ask(page, "the flake")
            expect(page.locator(".note").first).to_contain_text("tokens in")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert len(backs) == 2


def test_a_key_is_asked_for(browser: Any) -> None:
    with served(api_key="secret") as one:
        context = browser.new_context()
        page = context.new_page()
        page.goto(one.url)
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#target option")).to_have_count(2)
        context.close()
