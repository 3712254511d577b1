"""The picture of the cache and what stands around it."""

import time

import numpy as np
import pytest
from helpers.browser import emulate, needs_chromium
from helpers.page import RESIDENT, Page
from helpers.services import ROOT, running, write_config
from selenium.webdriver.common.keys import Keys

from shared.config import load_config

pytestmark = [pytest.mark.system, needs_chromium]


def is_warm(colour):
    red, _, blue = colour
    return red > blue + 20


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_picture_shows_residency_heat_reads_and_evictions(world, page, motion):
    emulate(page.driver, prefers_reduced_motion=motion)
    cells = world.expertd.cells
    absent = page.colour(0, 0)
    cells[2, 3] = RESIDENT
    page.watch_colour(1, 2)
    cells[1, 2] = RESIDENT + 127
    page.until(lambda: any(map(is_warm, page.colours())), "the flash of a read")
    page.until(lambda: not is_warm(page.colours()[-1]), "its end")
    time.sleep(1.0)
    hot, cold = page.colour(1, 2), page.colour(2, 3)
    assert sum(hot) < sum(cold) < sum(absent), "on a light ground heat is dark"
    page.watch_colour(1, 2)
    cells[1, 2] = 127
    page.until(lambda: any(map(is_warm, page.colours())), "the flash of an eviction")
    page.until(lambda: page.colours()[-1] == absent, "its end")
    assert page.colour(0, 0) == absent


def test_a_cell_says_what_it_is(world, page):
    world.expertd.cells[0, 1:4] = RESIDENT + 64  # so many as no other test leaves behind, whose picture may come first
    page.until(lambda: page.find("#picture").get_attribute("aria-label").startswith("3 of 24"), "the picture")
    page.find("#picture").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find("#readout").text == "Layer 0, expert 1: in memory, heat 50 of 100"
    page.find("#picture").send_keys(Keys.ARROW_DOWN)
    assert page.find("#readout").text == "Layer 1, expert 1: on disk, heat 0 of 100"
    page.find("#picture").send_keys(Keys.ARROW_DOWN)
    assert page.find("#readout").text == "MTP, expert 1: on disk, heat 0 of 100"


def test_rates_and_totals(world, page):
    def go_on():
        counters = world.expertd.counters
        counters["uses"] += 100
        counters["misses"] += 20
        counters["late_hits"] += 5
        counters["bytes_read"] += 1 << 20
        return page.find("#hit-rate").text == "75.0 %" and page.find("#read-rate").text.endswith("MiB/s")

    page.until(go_on, "rates")
    assert dict(zip(page.texts("#totals dt"), page.texts("#totals dd"), strict=True))["pool"] == "9 slots, 9.0 MiB"


def test_expertd_goes_and_comes_back(world, page):
    world.expertd_life.close()
    page.until(lambda: "silent" in page.find("#status").text, "the silence")
    world.expertd.cells[2, 4:] = RESIDENT
    world.start_expertd()
    page.until(page.is_live, "the feed")
    page.until(lambda: page.find("#picture").get_attribute("aria-label").startswith("4 of 24"), "the picture")


def test_the_published_models_picture_stays_smooth(world, page):
    """43 layers of 256 experts, all of which change at once, again and again."""
    world.expertd.resize(43, 256)
    rng = np.random.default_rng(0)
    page.until(lambda: "43 layers" in page.find("#picture").get_attribute("aria-label"), "the picture")
    page.run("window.drawn = 0; (function next() { window.drawn++; requestAnimationFrame(next) })()")
    began = time.monotonic()
    while time.monotonic() < began + 2.0:
        world.expertd.cells[:] = rng.integers(0, 256, (43, 256))
        time.sleep(0.25)
    per_second = page.run("return window.drawn") / (time.monotonic() - began)
    assert per_second > 5  # 60 on a quiet machine; the least that still looks alive


def test_the_real_cache_moves(driver, tmp_path):
    """Browser, front, worker and expertd on the demo: an answer comes and its experts move in."""
    settings = {"cache": {"bytes": "4 MiB"}, "front": {"http_port": 0}, "model": {"max_context": 4096}}
    path = write_config(tmp_path / "c.toml", ROOT / "demo" / "checkpoint", **settings)
    with running(path):
        page = Page(driver, (load_config(path).run_dir / "front.http").read_text().strip())
        page.until(page.is_live, "the feed")
        assert page.find("#picture").get_attribute("aria-label").startswith("0 of 192")
        page.find("#open-settings").click()
        page.run("document.getElementById('temperature').value = 0")
        page.find("#settings button").click()
        answer = page.ask("What is 37 + 45?")
        assert "82" in answer
        page.until(lambda: int(page.find("#picture").get_attribute("aria-label").split()[0]) > 20, "the experts")
        page.until(lambda: page.find("#hit-rate").text != "-", "the hit rate")
