"""The page at / in a headless Chromium, over fake workers: `make test-page`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor
from serving import Served, served

from minivllm.config import ServerConfig

pytestmark = pytest.mark.browser


@contextlib.asynccontextmanager
async def opened(server: Served, **context: Any) -> AsyncIterator[Any]:
    """The page in a browser; in the end it must have had no error and asked no other server."""
    from playwright.async_api import async_playwright  # here: only this target installs it

    faults: list[str] = []
    urls: list[str] = []
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program is not None, "the test of the page needs chromium on the path"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=60_000
        )
        page = await browser.new_page(**context)
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        await page.goto(server.url + "/")
        yield page
        await browser.close()
    assert faults == []
    assert all(url.startswith((server.url, "data:")) for url in urls)


async def test_a_person_chats(embedded_dir: Path) -> None:
    """The reply is what the API answers, the next message goes with the conversation, and the
    tiles tell what happened."""
    from playwright.async_api import expect

    async def shorten(route: Any) -> None:
        await route.continue_(post_data=route.request.post_data_json | {"max_tokens": 40})

    async with served(embedded_dir) as server, opened(server) as page:
        await page.route("**/chat/completions", shorten)
        models = (await server.client.get("/v1/models")).json()
        await expect(page.get_by_role("heading")).to_have_text(models["data"][0]["id"])
        await expect(page.get_by_role("status")).to_have_text("ok")
        messages: list[dict[str, str]] = []
        for text in ("Hi", "And then?"):
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": 40}
            answer = await server.post("/v1/chat/completions", **body)
            content = answer.json()["choices"][0]["message"]["content"]
            await page.get_by_label("Message").fill(text)
            await page.get_by_label("Message").press("Enter")
            await expect(page.get_by_role("button", name="Send")).to_be_visible()
            shown = page.locator("#log .assistant").last
            await expect(shown).to_have_text(content)
            messages.append({"role": "assistant", "content": await shown.text_content()})
        assert await page.locator("#log p").count() == 4
        await expect(page.locator("#rate")).to_have_text("0.0")
        await expect(page.locator("#running")).to_have_text("0")
        await expect(page.locator("#hits")).not_to_have_text("–")
        assert await page.locator("#kv").text_content() == "0.0 %"
        await page.get_by_role("button", name="Reset").click()
        assert await page.locator("#log p").count() == 0


async def test_a_reply_is_stopped(embedded_dir: Path) -> None:
    """A reply grows while it is made; Stop ends its request, and what had come stays."""
    from playwright.async_api import expect

    executor = FakeExecutor(delay_s=0.05)
    async with (
        served(embedded_dir, executor=executor, max_model_len=2048) as server,
        opened(server) as page,
    ):
        await page.get_by_label("Message").fill("Hi")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator("#running")).to_have_text("1")
        shown = page.locator("#log .assistant")
        first = await shown.text_content()
        await page.wait_for_function(
            "length => document.querySelector('#log .assistant').textContent.length > length",
            arg=len(first),
        )
        await page.get_by_role("button", name="Stop").click()
        await server.until_idle()
        last = await shown.text_content()
        assert last.startswith(first)
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await expect(page.locator("#running")).to_have_text("0")
        assert await shown.text_content() == last


async def test_a_key_is_asked_for(embedded_dir: Path) -> None:
    """Where the server wants a key the page asks for it, and a wrong one again."""
    from playwright.async_api import expect

    config = ServerConfig(api_key=["secret"])
    async with served(embedded_dir, config, max_model_len=64) as server, opened(server) as page:
        key = page.get_by_label("API key")
        await key.fill("wrong")
        await key.press("Enter")
        await expect(key).to_be_visible()
        await key.fill("secret")
        await key.press("Enter")
        await expect(key).to_be_hidden()
        await page.get_by_label("Message").fill("Hi")
        await page.get_by_label("Message").press("Enter")
        await expect(page.locator("#log .assistant")).not_to_be_empty()


async def test_an_error_is_told(embedded_dir: Path) -> None:
    """A message that the server refuses is told why, and is there to be changed."""
    from playwright.async_api import expect

    async with served(embedded_dir, max_model_len=64) as server, opened(server) as page:
        text = "much too long " * 100
        await page.get_by_label("Message").fill(text)
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_role("alert")).to_contain_text("64 tokens")
        await expect(page.get_by_label("Message")).to_have_value(text.strip())
        assert await page.locator("#log .user").count() == 0


async def test_light_and_dark_and_narrow(embedded_dir: Path) -> None:
    """The page follows the reader's colours, with text that stands out, and fits a telephone."""
    script = """() => {
        const {backgroundColor, color} = getComputedStyle(document.body);
        return [backgroundColor, color, document.documentElement.scrollWidth];
    }"""
    sizes = {"width": 320, "height": 600}
    async with served(embedded_dir) as server:
        async with opened(server, color_scheme="light", viewport=sizes) as page:
            assert await page.evaluate(script) == ["rgb(255, 255, 255)", "rgb(27, 31, 36)", 320]
        async with opened(server, color_scheme="dark", viewport=sizes) as page:
            assert await page.evaluate(script) == ["rgb(22, 24, 28)", "rgb(230, 232, 235)", 320]
