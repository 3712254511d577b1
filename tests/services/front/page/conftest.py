"""One browser and one front for all tests of the page."""

from contextlib import ExitStack

import pytest
from helpers.browser import chromium
from helpers.page import ANSWER, Page, World


@pytest.fixture(scope="package")
def world(tmp_path_factory):
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("page"), stack)


@pytest.fixture(scope="package")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(world, driver):
    world.say(ANSWER)
    world.expertd.resize(3, 8)
    opened = Page(driver, world.url)
    opened.until(opened.is_live, "the feed")
    yield opened
    severe = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    # A refused request is what some tests are about; a broken script or policy never is.
    assert [message for message in severe if "Failed to load resource" not in message] == []
