"""The chat on the page: answers, reasoning, tools, stopping, errors, and what becomes of the conversation."""

import json
import re
import urllib.request

import pytest
from helpers.browser import needs_chromium
from helpers.fake_worker import until
from helpers.page import ANSWER
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.system, needs_chromium]


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
        while b'"a"' not in other.readline():
            pass  # the worker has not begun with it, and would begin with the next script
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


def test_a_call_that_is_cut_off_is_dropped(world, page):
    page.offer_tools(json.dumps([TOOL]))
    world.say(CALL.split("lo<")[0])
    page.ask("Warm?")
    assert page.texts(".call") == []
    world.say(ANSWER)
    page.ask("And now?")
    assert page.texts(".text")[-1] == ANSWER


def test_tools(world, page):
    page.offer_tools("[{}]")
    assert page.find("#settings-error").text == "Tools: tool 0 has no function.name"
    page.run("document.getElementById('settings').close()")
    page.offer_tools(json.dumps([TOOL]))
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
