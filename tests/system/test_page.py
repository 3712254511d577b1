"""The page at `/` in a real browser: a real front, a worker of the test's own, and a pretended expertd."""

import json
import re
import shutil
import socket
import time
import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.browser import chromium, emulate, needs_chromium
from helpers.fake_worker import fake_service, fake_worker, make_checkpoint, until
from helpers.services import ROOT, running, write_config
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from shared.config import load_config

pytestmark = [pytest.mark.system, needs_chromium]

ANSWER = "The tide turns at noon."
RESIDENT = 128


class Expertd:
    """A cache of the test's own: cells as `StatsSnapshot.picture` has them, and the counters beside it."""

    def __init__(self, layers=3, experts=8):
        self.resize(layers, experts)

    def resize(self, layers, experts):
        self.cells = np.zeros((layers, experts), np.uint8)
        self.counters = {"uses": 0.0, "misses": 0.0, "late_hits": 0.0, "evictions": 0.0, "bytes_read": 0.0}

    def values(self):
        layers, experts = self.cells.shape
        shape = {"moe_layers": layers, "experts": experts, "slots_total": 9, "record_bytes": 1 << 20}
        resident = {"slots_resident": int((self.cells >= RESIDENT).sum())}
        return {key: float(value) for key, value in (self.counters | shape | resident).items()}

    def picture(self):
        return self.cells.tobytes()


def free_port():
    """A port that stays the same when the front starts again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class World:
    """Everything behind the page."""

    def __init__(self, folder, stack, **front):
        """One answer at a time, so that others have to wait for it."""
        checkpoint = make_checkpoint(folder / "model")
        shutil.copytree(ROOT / "demo" / "checkpoint" / "encoding", checkpoint / "encoding")  # how tools are described
        front = {"http_port": free_port(), "model_name": "test-model"} | front
        sections = {"model": {"max_context": 4096}, "worker": {"max_queue": 1}, "front": front}
        path = write_config(folder / "c.toml", checkpoint, **sections)
        self.config, self.stack, self.expertd = load_config(path), stack, Expertd()
        self.expertd_life = stack.enter_context(ExitStack())
        self.start_expertd()
        self.worker = stack.enter_context(fake_worker(self.config, lambda generate: self.script(generate)))
        self.say(ANSWER)
        self.services = stack.enter_context(running(path, "front"))
        self.url = (self.config.run_dir / "front.http").read_text().strip()

    def start_expertd(self):
        service = fake_service(
            self.config, "expertd", lambda: ("ready", ""), lambda: self.expertd.values(), lambda: self.expertd.picture()
        )
        self.expertd_life.enter_context(service)

    def say(self, text, pause_s=0.0):
        ids = self.worker.tokenizer.encode([(text, True)])

        def script(_generate):
            for token in ids:
                time.sleep(pause_s)
                yield token

        self.script = script

    def babble(self):
        """An answer without an end."""
        token = self.worker.tokenizer.encode([("a", False)])[0]

        def script(_generate):
            while True:
                time.sleep(0.005)
                yield token

        self.script = script

    def prompt(self):
        """What the worker was asked last."""
        return b"".join(map(self.worker.tokenizer.token_bytes, self.worker.begun[-1].prompt_ids)).decode()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("page"), stack)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


class Page:
    """What a person does with the page."""

    def __init__(self, driver, url):
        self.driver = driver
        emulate(driver)
        driver.get(url)
        driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        driver.get(url)

    def find(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def texts(self, css):
        return [found.text for found in self.driver.find_elements(By.CSS_SELECTOR, css)]

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def until(self, condition, what):
        """Wait for what the page does by itself; the condition may fail meanwhile."""
        WebDriverWait(self.driver, 20, 0.02).until(lambda _: condition(), what)

    def type(self, text):
        self.find("#question").send_keys(text, Keys.ENTER)

    def ask(self, question):
        """Ask, and wait for the answer's end; its text."""
        before = len(self.texts("article.assistant footer > span"))
        self.type(question)
        self.until(lambda: len(self.texts("article.assistant footer > span")) > before, "an answer")
        return self.texts("article.assistant")[-1]

    def is_live(self):
        return self.find("#status").text == "live"

    def colour(self, layer, expert):
        """The colour in the middle of a cell of the picture, as (red, green, blue)."""
        self.watch_colour(layer, expert)
        return self.colours()[-1]

    def watch_colour(self, layer, expert):
        """From now on the page notes that colour, again and again, for `colours`."""
        self.run(
            """const canvas = document.getElementById("picture"), context = canvas.getContext("2d");
            const [layer, expert, layers, experts] = arguments, gutter = 26 * devicePixelRatio;
            const look = () => {
              const x = gutter + (expert + 0.4) * (canvas.width - gutter) / experts;
              const y = (layer + 0.4) * canvas.height / layers;
              window.colours.push([...context.getImageData(x, y, 1, 1).data.slice(0, 3)]);
            };
            clearInterval(window.watching);
            window.colours = [];
            window.watching = setInterval(look, 10);
            look();""",
            layer,
            expert,
            *self.shape,
        )

    def colours(self):
        return list(map(tuple, self.run("return window.colours")))

    shape = (3, 8)


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


# --- chat --------------------------------------------------------------------------------------------------------


def test_an_answer_and_what_it_cost(world, page):
    world.say(ANSWER, pause_s=0.01)
    assert page.find("#model").text == "test-model"
    answer = page.ask("When?")
    assert answer.startswith(ANSWER)
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s", answer)
    assert page.texts(".user") == ["When?"]
    assert "<｜User｜>When?<｜Assistant｜></think>" in world.prompt()
    page.ask("And then?")
    assert f"</think>{ANSWER}<｜end▁of▁sentence｜><｜User｜>And then?" in world.prompt()
    page.find("#new-chat").click()
    page.ask("Once more?")
    assert world.prompt().count("<｜User｜>") == 1


def test_text_is_text_whatever_it_says(world, page):
    gone = "document.title='gone'"
    attack = f'<img src=x onerror="{gone}"><script>{gone}</script> [l](javascript:{gone}) **a <b>x</b>**'
    world.say(attack)
    page.ask(attack)
    assert page.texts(".text") == [attack.replace("**", "")]
    assert page.texts(".text strong") == ["a <b>x</b>"]
    assert page.texts(".user") == [attack]
    assert page.run("return document.querySelectorAll('#log :is(img, script, b, a, iframe)').length") == 0
    assert page.driver.title == "Icebox"


def test_reasoning_is_folded(world, page):
    world.say("Hm, noon.</think>At noon.")
    page.find("#thinking").click()
    answer = page.ask("When?")
    assert world.prompt().endswith("<｜Assistant｜><think>")
    assert answer.startswith("Thought for ")
    assert page.texts(".text") == ["At noon."]
    assert not page.find(".reasoning div").is_displayed()
    page.find(".reasoning summary").click()
    assert page.find(".reasoning div").text == "Hm, noon."


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop(world, page, way):
    world.babble()
    before = world.worker.num_cancelled
    page.type("Go on.")
    page.until(lambda: "aaa" in page.find(".text").text, "the beginning")
    if way == "button":
        page.find("#stop").click()
    else:
        page.find("#question").send_keys(Keys.ESCAPE)
    until(lambda: world.worker.num_cancelled == before + 1, "the worker is told")
    page.until(lambda: "stopped" in page.texts("article.assistant")[-1], "the end")
    world.say(ANSWER)
    assert page.ask("When?").startswith(ANSWER)
    assert re.search(r"</think>a+<｜end▁of▁sentence｜><｜User｜>When", world.prompt())


def test_an_error_is_shown_and_the_question_can_be_asked_again(world, page):
    page.run("document.getElementById('question').value = 'x '.repeat(9000)")
    page.type("")
    page.until(lambda: "model.max_context" in page.find("[role=alert] span").text, "the complaint")
    assert page.ask("When?").startswith(ANSWER)
    assert world.prompt().count("<｜User｜>") == 1, "the refused question is left out"

    page.find("#new-chat").click()
    world.babble()
    page.type("x")
    page.until(lambda: page.find("#stop").is_displayed(), "the answer")
    page.find("#stop").click()
    world.say(ANSWER)
    page.until(lambda: page.texts(".again"), "the offer")
    page.find(".again").click()
    page.until(lambda: page.texts(".text")[-1:] == [ANSWER], "the answer")
    assert len(page.texts("article.assistant")) == 1


def test_a_place_in_the_queue(world, page):
    world.babble()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    with urllib.request.urlopen(f"{world.url}/v1/chat/completions", body) as other:
        assert other.readline()
        world.say(ANSWER)
        page.type("When?")
        page.until(lambda: page.find(".waiting").text == "waiting for 1 other request", "the place")
    page.until(lambda: page.texts(".text") == [ANSWER], "the answer")


def test_the_front_goes_and_comes_back(world, page):
    world.babble()
    page.type("Go on.")
    page.until(lambda: "aaa" in page.find(".text").text, "the beginning")
    assert world.services.terminate("front") == 0
    page.until(lambda: page.find("#status").text == "connection lost, trying again", "the loss")
    page.until(lambda: page.texts("[role=alert]"), "the complaint")
    world.services.start("front")
    world.services.wait_ready("front")
    page.until(page.is_live, "the feed")
    world.say(ANSWER)
    page.find("[role=alert] button").click()
    page.until(lambda: page.texts(".text") == [ANSWER], "the answer")


def test_the_field_grows_with_what_is_written(page):
    field = page.find("#question")
    one = field.size["height"]
    field.send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
    assert one * 1.3 < field.size["height"] < one * 2.5
    field.send_keys(Keys.ENTER)
    page.until(lambda: page.texts(".user") == ["a\nb"], "the question")
    assert field.size["height"] == one


CALL = """<|DSML|tool_calls>
<|DSML|invoke name="weather">
<|DSML|parameter name="city" string="true">Oslo</|DSML|parameter>
</|DSML|invoke>
</|DSML|tool_calls>""".replace("|", "\uff5c")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def offer_tools(page, text):
    page.find("#open-settings").click()
    page.run("document.getElementById('tools').value = arguments[0]", text)
    page.find("#settings button").click()


def test_tools(world, page):
    offer_tools(page, "[{}]")
    assert page.find("#settings-error").text == "Tools: tool 0 has no function.name"
    page.run("document.getElementById('settings').close()")
    offer_tools(page, json.dumps([TOOL]))
    world.say(CALL)
    page.ask("Warm?")
    assert page.find(".call code").text == 'weather(city="Oslo")'
    world.say(ANSWER)
    page.find(".call textarea").send_keys("cold", Keys.ENTER)
    page.until(lambda: page.texts(".text")[-1] == ANSWER, "the answer")
    assert "<tool_result>cold</tool_result>" in world.prompt()
    assert page.texts(".result") == ["cold"]

    world.say(CALL)
    page.ask("And in Bergen?")
    world.say(ANSWER)
    page.ask("Never mind.")
    assert "did not run this call.</tool_result>" in world.prompt()


def test_markdown_in_pieces_is_markdown_at_once(page):
    """Random documents in random pieces, rendered after each: the same nodes as all at once, and no word lost."""
    problems = page.driver.execute_async_script(
        """const done = arguments[0];
        import("/page/markdown.js").then(({ MarkdownView }) => {
          let seed = 7;
          const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
          const parts = "word |\\n|\\n\\n|# |- |1. |> |```|~~~py\\n|**|*|`|    |---|<b>".split("|");
          const show = (pieces, each) => {
            const parent = document.createElement("div"), view = new MarkdownView(parent);
            for (const piece of pieces) { view.append(piece); if (each) view.render(); }
            view.render();
            return parent;
          };
          const problems = [];
          for (let round = 0; round < 500; round++) {
            const text = Array.from({ length: random(40) }, () => parts[random(parts.length)]).join("");
            const pieces = [];
            for (let i = 0; i < text.length; ) pieces.push(text.slice(i, (i += 1 + random(5))));
            const [grown, whole] = [show(pieces, true), show([text], false)];
            if (grown.innerHTML !== whole.innerHTML) problems.push([text, grown.innerHTML, whole.innerHTML]);
            const count = (words) => words.split("word").length;
            if (count(whole.textContent) !== count(text)) problems.push([text, whole.textContent]);
          }
          done(problems);
        });"""
    )
    assert problems == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("## Head *it*", "<h3>Head <em>it</em></h3>"),
        ("- a\n- b\n  c\n\n2. d", '<ul><li>a</li><li>b\nc</li></ul><ol start="2"><li>d</li></ol>'),
        ("```py\n# x\n\n**y**\n```\nz", "<pre><small>py</small><code># x\n\n**y**</code></pre><p>z</p>"),
        ("2 * 3 * 4 and **a*b** `**`", "<p>2 * 3 * 4 and <strong>a*b</strong> <code>**</code></p>"),
        ("> a\n> b\n\n---", "<blockquote>a\nb</blockquote><hr>"),
        ("x **open", "<p>x **open</p>"),
    ],
)
def test_markdown(page, text, html):
    shown = page.driver.execute_async_script(
        """const [text, done] = arguments;
        import("/page/markdown.js").then(({ MarkdownView }) => {
          const parent = document.createElement("div"), view = new MarkdownView(parent);
          view.append(text); view.render(); done(parent.innerHTML);
        });""",
        text,
    )
    assert shown == html


# --- the picture -------------------------------------------------------------------------------------------------


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
    world.expertd.cells[0, 1] = RESIDENT + 64
    page.until(lambda: page.find("#picture").get_attribute("aria-label").startswith("1 of 24"), "the picture")
    page.find("#picture").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find("#readout").text == "Layer 0, expert 1: in memory, heat 50 of 100"
    page.find("#picture").send_keys(Keys.ARROW_DOWN)
    assert page.find("#readout").text == "Layer 1, expert 1: on disk, heat 0 of 100"


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
    world.expertd.cells[2, 7] = RESIDENT
    world.start_expertd()
    page.until(page.is_live, "the feed")
    page.until(lambda: page.find("#picture").get_attribute("aria-label").startswith("1 of 24"), "the picture")


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


# --- the page ----------------------------------------------------------------------------------------------------


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

    emulate(page.driver, prefers_color_scheme="dark")
    assert light() < 200
    dark_cell = page.colour(0, 0)
    emulate(page.driver, prefers_color_scheme="light")
    assert light() > 600
    page.until(lambda: page.colour(0, 0) != dark_cell, "the picture follows")
    page.find("#theme").click()
    page.find("#theme").click()
    assert page.find("#theme").text == "Theme: dark"
    assert light() < 200
    page.until(lambda: page.colour(0, 0) == dark_cell, "the picture follows")


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
        page.find("#key").send_keys("wrong", Keys.ENTER)
        page.until(lambda: page.find("#key").is_displayed() and not page.find("#key").get_attribute("value"), "again")
        page.find("#key").send_keys("s3cret", Keys.ENTER)
        page.until(page.is_live, "the feed")
        assert page.ask("When?").startswith(ANSWER)
        kept = page.run("return [Object.values(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert kept[0] == ["s3cret"]
        assert "s3cret" not in kept[1] + kept[2] + page.driver.page_source


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
