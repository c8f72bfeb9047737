"""Pictures of the dashboard for docs/serving.md, taken of a server that answers.

omnidraft serve --target qwen2.5-coder-0.5b --learn idle --port 8000
python docs/screenshots.py http://127.0.0.1:8000
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

PICTURES = Path(__file__).with_name("pictures")
QUESTIONS = (
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Now write a test for it.",
)


def main(url: str) -> None:
    """Ask, and take the page in light, in dark, and on a narrow screen."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.goto(url)
        page.fill("#limit", "160")
        for turn, question in enumerate(QUESTIONS, start=1):
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            done = page.locator(".note").filter(has_text="tokens in")
            expect(done).to_have_count(turn, timeout=300_000)
        page.wait_for_timeout(1500)  # for the status that is asked for each second
        page.screenshot(path=PICTURES / "dashboard-light.png")
        page.click("#theme")
        page.screenshot(path=PICTURES / "dashboard-dark.png")
        browser.close()


main(sys.argv[1])
