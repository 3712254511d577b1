"""Everything around the page at `/`: a browser on it, a real front, a worker of the test's own, a pretended expertd."""

from __future__ import annotations

import shutil
import socket
import time
from contextlib import ExitStack

import numpy as np
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from helpers.browser import emulate
from helpers.fake_worker import fake_service, fake_worker, make_checkpoint
from helpers.services import ROOT, running, write_config
from shared.config import load_config

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
        shape = {"moe_layers": layers, "backbone_layers": layers - 1, "experts": experts}
        shape |= {"slots_total": 9, "record_bytes": 1 << 20}
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


class Page:
    """What a person does with the page. `shape` is that of the picture whose colours are asked for."""

    shape = (3, 8)

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

    def offer_tools(self, text):
        """Write this into the settings and close them."""
        self.find("#open-settings").click()
        self.run("document.getElementById('tools').value = arguments[0]", text)
        self.find("#settings button").click()
