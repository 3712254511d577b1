"""The page as a whole: sizes, themes, keyboard, key, and that nothing comes from elsewhere."""

import re
import time
import urllib.request
from contextlib import ExitStack

import pytest
from helpers.browser import emulate, needs_chromium
from helpers.page import ANSWER, Page, World
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.system, needs_chromium]


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1920])
def test_every_width_shows_chat_and_cache_without_scrolling_sideways(world, page, width):
    emulate(page.driver, width, 700)
    page.ask("x " * 100)
    assert page.run("return document.documentElement.scrollWidth") <= width
    for css in ("#picture", "#question", "#send", "#open-settings"):
        box = page.find(css).rect
        right, bottom = box["x"] + box["width"], box["y"] + box["height"]
        assert (box["x"] >= 0, right <= width, bottom <= 700) == (True, True, True), css


def test_themes(page):
    def light():
        colour = page.run("return getComputedStyle(document.documentElement).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    def changed_from(before):
        page.until(lambda: page.colour(0, 0) != before, "the picture follows")
        return page.colour(0, 0)

    emulate(page.driver, prefers_color_scheme="light")
    page.until(page.is_live, "the picture")
    undrawn = (0, 0, 0)
    light_cell = changed_from(undrawn)
    assert light() > 600
    emulate(page.driver, prefers_color_scheme="dark")
    dark_cell = changed_from(light_cell)
    assert light() < 200
    emulate(page.driver, prefers_color_scheme="light")
    assert changed_from(dark_cell) == light_cell
    page.find("#theme").click()
    page.find("#theme").click()
    assert page.find("#theme").text == "Theme: dark"
    assert light() < 200
    assert changed_from(light_cell) == dark_cell


def test_everything_comes_from_here_and_nothing_else_may(world, page):
    page.ask("When?")
    origins = page.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")
    assert set(origins) == {world.url}
    with urllib.request.urlopen(world.url) as response:
        policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_keyboard_reaches_everything(page):
    seen = set()
    for _ in range(20):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.add(page.run("return document.activeElement.id"))
    assert {"question", "thinking", "send", "picture", "new-chat", "open-settings", "theme", "log"} <= seen


def test_a_key_is_asked_for_and_kept_in_the_tab_only(driver, tmp_path):
    with ExitStack() as stack:
        world = World(tmp_path, stack, api_key="s3cret")
        page = Page(driver, world.url)
        page.until(lambda: page.find("#key").is_displayed(), "the question")
        page.find("#key").send_keys(Keys.ESCAPE)
        page.until(lambda: page.find("#status").text == "needs an API key", "the refusal")
        time.sleep(1.5)
        assert not page.find("#key").is_displayed(), "who declined is not asked again and again"
        page.type("When?")
        page.until(lambda: page.find("#key").is_displayed(), "the question")
        page.find("#key").send_keys("wrong", Keys.ENTER)
        page.until(lambda: page.find("#key").is_displayed() and not page.find("#key").get_attribute("value"), "again")
        page.find("#key").send_keys("s3cret", Keys.ENTER)
        page.until(page.is_live, "the feed")
        page.until(lambda: page.texts(".text") == [ANSWER], "the answer")
        kept = page.run("return [Object.values(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert kept[0] == ["s3cret"]
        assert "s3cret" not in kept[1] + kept[2] + page.driver.page_source
