"""The commands as processes, against a real front, a worker of the test's own and a pretended expertd."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from helpers.fake_worker import doomed_worker, fake_service, fake_worker, make_checkpoint, saying, until
from helpers.icebox import ROOT, icebox, on_terminal
from helpers.services import running, write_config

from services.cli.app import COMMANDS
from services.front.tokenizer import Tokenizer
from shared.config import load_config

ANSWER = "The tide turns at noon."
# The line editor is at work: it has switched bracketed paste on.
PROMPT = r"\x1b\[\?2004h[^\n]*>"


class Expertd:
    """Counters that move while an answer runs."""

    def __init__(self):
        self.uses = 0.0

    def values(self):
        return {"uses": self.uses, "misses": self.uses / 4, "late_hits": 0.0, "evictions": 1.0, "bytes_read": self.uses}


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    checkpoint = make_checkpoint(folder / "model")
    shutil.copytree(ROOT / "demo" / "checkpoint" / "encoding", checkpoint / "encoding")  # how tools are described
    return write_config(folder / "c.toml", checkpoint, model={"max_context": 4096})


@pytest.fixture(scope="module")
def tokenizer(config_path):
    return Tokenizer.load(load_config(config_path).model.path)


@pytest.fixture(scope="module")
def expertd():
    return Expertd()


@pytest.fixture(scope="module")
def only_worker(config_path, tokenizer, expertd):
    """Everything runs; the worker's script is each test's business."""
    config = load_config(config_path)
    with ExitStack() as stack:
        stack.enter_context(fake_service(config, "expertd", lambda: ("ready", ""), expertd.values))
        stack.enter_context(fake_service(config, "worker", lambda: ("ready", "")))
        worker = stack.enter_context(fake_worker(config, saying(ANSWER, tokenizer)))
        stack.enter_context(running(config_path, "front"))
        yield worker


@pytest.fixture
def worker(only_worker, tokenizer):
    only_worker.script, only_worker.num_cancelled = saying(ANSWER, tokenizer), 0
    only_worker.begun.clear()
    return only_worker


class Endless:
    """Says "a" until it is cancelled; `begun` is set after the first."""

    def __init__(self, tokenizer):
        self.token = tokenizer.encode([("a", False)])[0]
        self.begun = threading.Event()

    def __call__(self, _generate):
        yield self.token
        self.begun.set()
        while True:
            time.sleep(0.005)
            yield self.token


@pytest.fixture
def nothing_runs(tmp_path):
    return write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))


# --- one question ------------------------------------------------------------------------------------------------


def test_once_prints_the_answer_and_what_it_cost(config_path, worker, expertd, tokenizer):
    def script(generate):
        expertd.uses += 400
        return saying(ANSWER, tokenizer)(generate)

    worker.script = script
    run = icebox("chat", "--once", "When?", "--seed", "7", "--max-tokens", "99", config=config_path)
    assert (run.returncode, run.stdout) == (0, ANSWER + "\n"), run.stderr
    speed, cache = run.stderr.splitlines()
    assert re.fullmatch(r"\d+ tokens in .* s \(.* tokens/s, .* ended by stop", speed)
    assert cache == "cache: 300 hits (75.0%), 0 late hits, 100 misses, 0 evictions, 400 B read"
    assert (worker.begun[0].seed, worker.begun[0].max_tokens) == (7, 99)


def test_once_as_json(config_path, worker, tokenizer):
    worker.script = saying("Hm.</think>Noon.", tokenizer)
    run = icebox("chat", "--once", "When?", "--think", "on", "--json", config=config_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["text"], result["reasoning"], result["finish_reason"]) == ("Noon.", "Hm.", "stop")
    assert result["completion_tokens"] == len(tokenizer.encode([("Hm.</think>Noon.", True)]))
    assert result["cache"]["misses"] == 0
    assert run.stderr == ""


def test_once_without_expertd_says_so(tmp_path, tokenizer):
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"))
    with fake_worker(load_config(path), saying(ANSWER, tokenizer)), running(path, "front"):
        run = icebox("chat", "--once", "When?", config=path)
    assert (run.returncode, run.stdout) == (0, ANSWER + "\n")
    assert "expertd's counters did not come" in run.stderr


def test_once_is_ended_by_an_interrupt(config_path, worker, tokenizer):
    worker.script = Endless(tokenizer)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "chat", "--once", "x", "--config", str(config_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.script.begun.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert set(out.strip()) == {"a"}
    assert "ended by abort" in err
    assert "Traceback" not in err
    until(lambda: worker.num_cancelled == 1, "the worker is told")


def test_once_with_a_worker_that_dies(nothing_runs):
    """What came is kept, the error stands on a line of its own, and the exit status says what happened."""
    load_config(nothing_runs).run_dir.mkdir(mode=0o700)
    with doomed_worker(nothing_runs) as doomed, running(nothing_runs, "front"):
        command = [sys.executable, "-m", "services.cli", "chat", "--once", "x", "--config", str(nothing_runs)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            said = process.stdout.read(1)
            doomed.kill()
            rest, errors = process.communicate(timeout=10)
    assert process.returncode == 69
    assert (said + rest).endswith("\n")
    assert errors == "icebox: the worker went away while this request ran; it is not repeated\n"


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["chat", "--once", "x " * 5000], 2, "tokens, but model.max_context = 4096"),
        (["chat", "--once", "x", "--think", "more"], 2, "reasoning_effort 'more' is not one of"),
        (["chat", "--once", "x", "--max-tokens", "-1"], 2, "Invalid value for '--max-tokens'"),
        (["chat", "--once", "x", "--max-tokens", "1" + 30 * "0"], 2, "Invalid value for '--max-tokens'"),
        (["chat", "--once", "x", "--seed", "1" + 30 * "0"], 2, "Invalid value for '--seed'"),
        (["chat", "--once", "x", "--seed", "-2"], 2, "Invalid value for '--seed'"),
        (["chat", "--once", "x", "--think", "\udcff"], 2, "is not one of"),
        (["chat"], 2, "a conversation needs a terminal"),
        (["chat", "--json"], 2, "--json needs --once"),
    ],
)
def test_refused_questions(config_path, worker, arguments, code, complaint):
    run = icebox(*arguments, config=config_path)
    assert run.returncode == code, run.stderr
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["chat", "--once", "x"], 69, "the front does not answer in"),
        (["status"], 1, ""),
        (["wait", "--timeout", "0.3"], 69, "no service answers in"),
    ],
)
def test_nothing_runs(nothing_runs, arguments, code, complaint):
    run = icebox(*arguments, config=nothing_runs)
    assert (run.returncode, complaint in run.stderr) == (code, True), run.stderr
    assert len(run.stderr.splitlines()) <= 1


@pytest.mark.parametrize("command", ["chat", "wait", "status", "up", "monitor"])
def test_a_missing_config_is_named(tmp_path, command):
    run = icebox(command, config=tmp_path / "none.toml")
    assert run.returncode == 78
    assert run.stderr == f"icebox: {tmp_path / 'none.toml'}: cannot read this config file (No such file or directory)\n"


@pytest.mark.parametrize("command", ["status", "up"])
def test_without_a_config_it_is_said_how_to_name_one(tmp_path, monkeypatch, command):
    monkeypatch.setenv("ICEBOX_CONFIG", str(tmp_path / "none.toml"))
    run = icebox(command)
    complaint = f"{tmp_path / 'none.toml'}: no such config file; name one with --config or $ICEBOX_CONFIG"
    assert (run.returncode, run.stderr) == (78, f"icebox: {complaint}\n")


def test_wait_says_for_what_it_waits(nothing_runs):
    run = icebox("wait", "--timeout", "1.5", config=nothing_runs)
    waiting, end = run.stderr.splitlines()
    assert waiting == f"waiting for the services in {load_config(nothing_runs).run_dir}"
    assert "no service answers in" in end


# --- state -------------------------------------------------------------------------------------------------------


def test_status_and_wait_when_all_are_ready(config_path, worker):
    run = icebox("status", config=config_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert [line.split()[:2] for line in run.stdout.splitlines()] == [
        [n, "ready"] for n in ("expertd", "worker", "front")
    ]
    result = json.loads(icebox("status", "--json", config=config_path).stdout)
    assert result["ready"] is True
    assert set(result["services"]["front"]) == {
        "boot_id",
        "state",
        "detail",
        "pid",
        "uptime_s",
        "done_bytes",
        "total_bytes",
    }
    run = icebox("wait", config=config_path)
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr.splitlines() == ["expertd: ready", "worker: ready", "front: ready"]


def test_wait_shows_progress_and_fails_when_a_service_ends(nothing_runs):
    config = load_config(nothing_runs)
    state = ["starting", "1 of 2 files"]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "wait", "--config", str(nothing_runs)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    with fake_service(config, "expertd", lambda: (state[0], state[1])):
        assert process.stderr.readline() == "expertd: starting, 1 of 2 files\n"
        state[1] = "2 of 2 files"
        assert process.stderr.readline() == "expertd: starting, 2 of 2 files\n"
    last = process.stderr.read()
    assert process.wait(10) == 69
    assert "expertd has ended (it was expertd: starting, 2 of 2 files)" in last
    process.stderr.close()


def test_up_refuses_a_missing_model(tmp_path):
    path = write_config(tmp_path / "c.toml", tmp_path / "nowhere")
    run = icebox("up", config=path)
    assert (run.returncode, "nowhere" in run.stderr) == (78, True), run.stderr


# --- the program itself ------------------------------------------------------------------------------------------


def test_every_command_has_help():
    whole = icebox("--help").stdout
    for command in COMMANDS:
        assert command in whole


def test_the_version():
    assert re.fullmatch(r"icebox \d+\.\d+\.\d+\n", icebox("--version").stdout)


def test_unknown_commands_and_options_are_usage_errors():
    assert icebox("nonsense").returncode == 2
    assert icebox("status", "--nonsense").returncode == 2


def test_logits_passes_everything_on(tmp_path):
    """Options, --help and the exit status are the program's own."""
    assert "--prefill N" in icebox("logits", "--help").stdout
    run = icebox("logits", str(tmp_path), "--tokens", "no.json", "--prefill", "1", "--out", "x.safetensors")
    assert (run.returncode != 0, "Traceback" in run.stderr, bool(run.stderr)) == (True, False, True)


@pytest.mark.parametrize(("command", "needed"), [("chat", set()), ("status", set()), ("wait", {"rich.live"})])
def test_a_command_imports_what_it_needs_and_no_more(command, needed):
    code = f"import sys, services.cli.{command}; print(sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "tokenizers", "prompt_toolkit", "rich.live", "uvloop"}
    assert heavy & set(eval(run.stdout)) <= needed


# --- the conversation --------------------------------------------------------------------------------------------


def say(terminal, line, *expected):
    """Type a line, see what is expected, in this order, and the prompt again."""
    terminal.type(line + "\r")
    for pattern in (*expected, PROMPT):
        terminal.expect(pattern)


def leave(terminal):
    terminal.type("\x04")
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.shown


def last_prompt(worker):
    return b"".join(map(worker.tokenizer.token_bytes, worker.begun[-1].prompt_ids)).decode()


def test_a_conversation(config_path, worker, tmp_path):
    with on_terminal("chat", "--config", str(config_path), "--seed", "1") as terminal:
        terminal.expect("/help lists commands")
        terminal.expect(PROMPT)
        say(terminal, "first question", re.escape(ANSWER), "ended by stop", "cache: ")
        say(terminal, "second", re.escape(ANSWER))
        prompt = last_prompt(worker)
        assert prompt.count("<｜User｜>") == 2
        assert f"</think>{ANSWER}<｜end▁of▁sentence｜>" in prompt
        say(terminal, "/retry", re.escape(ANSWER))
        assert last_prompt(worker) == prompt
        say(terminal, f"/save {tmp_path / 'c.json'}", "4 messages saved")
        assert [m["role"] for m in json.loads((tmp_path / "c.json").read_text())] == ["user", "assistant"] * 2
        say(terminal, "/save /nowhere/c.json", "/nowhere/c.json: cannot write")
        say(terminal, "/nonsense", "there is no /nonsense")
        terminal.type("/hel\t")
        terminal.expect("/help")
        say(terminal, "", "forget the conversation")
        say(terminal, f"/save {tmp_path / 'c.json'}", "4 messages saved")
        say(terminal, f"/save {config_path}", "is there already")
        say(
            terminal,
            "/stats",
            "ended by stop",
            "session: 3 answers",
            "session's cache: ",
            r"context: \d+ of 4,096 tokens",
        )
        say(terminal, "/help", "forget the conversation")
        say(terminal, "/clear", "forgotten")
        say(terminal, "/retry", "nothing to ask again")
        say(terminal, "third", re.escape(ANSWER))
        assert last_prompt(worker).count("<｜User｜>") == 1
        leave(terminal)


CALL = """<|DSML|tool_calls>
<|DSML|invoke name="weather">
<|DSML|parameter name="city" string="true">Oslo</|DSML|parameter>
</|DSML|invoke>
</|DSML|tool_calls>""".replace("|", "\uff5c")


def test_tools_ask_the_person_for_their_results(config_path, worker, tokenizer, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {}}}]))

    def script(_generate):
        is_called = any(word in last_prompt(worker) for word in ("cold", "did not run"))
        return saying(ANSWER if is_called else CALL, tokenizer)(_generate)

    worker.script = script
    with on_terminal("chat", "--config", str(config_path), "--tools", str(tools)) as terminal:
        terminal.expect(PROMPT)
        terminal.type("warm?\r")
        terminal.expect(r'-> weather\(city="Oslo"\)')
        terminal.expect(r'result of weather\(city="Oslo"\)')
        terminal.expect(PROMPT.replace(">", "="))
        say(terminal, "cold", re.escape(ANSWER))
        assert "<tool_result>cold</tool_result>" in last_prompt(worker)
        say(terminal, "/clear", "forgotten")
        terminal.type("warm?\r")
        terminal.expect("result of")
        terminal.expect(PROMPT.replace(">", "="))
        say(terminal, "\x03", "declined")
        say(terminal, "and now?", re.escape(ANSWER))
        assert "did not run this call.</tool_result>" in last_prompt(worker)
        leave(terminal)


def test_a_file_of_tools_that_is_none(config_path, tmp_path):
    run = icebox("chat", "--once", "x", "--tools", str(tmp_path / "none.json"), config=config_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "none.json: cannot read it" in run.stderr


def test_markdown_and_plain_text(config_path, worker, tokenizer):
    worker.script = saying("Some **bold** words.\n\n- one\n- two\n", tokenizer)
    with on_terminal("chat", "--config", str(config_path)) as terminal:
        terminal.expect(PROMPT)
        say(terminal, "x", r"Some \x1b\[1mbold\x1b\[0m words\.", r"\x1b\[[0-9;]*m • \x1b\[0mone")
        leave(terminal)
    with on_terminal("chat", "--config", str(config_path), "--plain") as terminal:
        terminal.expect(PROMPT)
        say(terminal, "x", r"Some \*\*bold\*\* words\.\r\n\r\n- one")
        leave(terminal)


def test_pasted_lines_are_one_question_and_found_again_next_time(config_path, worker, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with on_terminal("chat", "--config", str(config_path)) as terminal:
        terminal.expect(PROMPT)
        say(terminal, "\x1b[200~one\ntwo\x1b[201~", re.escape(ANSWER))
        assert "<｜User｜>one\ntwo<｜Assistant｜>" in last_prompt(worker)
        leave(terminal)
    assert (tmp_path / "icebox" / "chat_history").stat().st_mode & 0o777 == 0o600
    with on_terminal("chat", "--config", str(config_path)) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[A")
        terminal.expect("two")
        say(terminal, "", re.escape(ANSWER))
        assert "<｜User｜>one\ntwo<｜Assistant｜>" in last_prompt(worker)
        leave(terminal)


def test_bytes_that_are_no_text(config_path, worker, tmp_path):
    """What can be read of them is asked, and the conversation goes on."""
    with on_terminal("chat", "--config", str(config_path), "--system", "s\udcff") as terminal:
        terminal.expect(PROMPT)
        terminal.type(b"h\xffx\r")
        terminal.expect(re.escape(ANSWER))
        terminal.expect(PROMPT)
        assert "s\ufffd<｜User｜>h\ufffdx<｜Assistant｜>" in last_prompt(worker)
        say(terminal, f"\x1b[200~/save {tmp_path}/a\x00b\x1b[201~", "cannot write")
        say(terminal, f"/save {tmp_path}/c.json", "3 messages saved")
        leave(terminal)
    run = icebox("chat", "--once", "h\udcffx", config=config_path)
    assert (run.returncode, run.stdout) == (0, ANSWER + "\n"), run.stderr
    assert "<｜User｜>h\ufffdx<｜Assistant｜>" in last_prompt(worker)


def test_a_history_that_cannot_be_kept(config_path, worker, tmp_path, monkeypatch):
    (tmp_path / "icebox").write_text("a file in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with on_terminal("chat", "--config", str(config_path)) as terminal:
        terminal.expect("questions are not kept for next time")
        terminal.expect(PROMPT)
        say(terminal, "x", re.escape(ANSWER))
        leave(terminal)


def test_ctrl_c_cancels_the_answer_and_not_the_program(config_path, worker, tokenizer):
    with on_terminal("chat", "--config", str(config_path)) as terminal:
        terminal.expect(PROMPT)
        worker.script = Endless(tokenizer)
        terminal.type("go on\r")
        terminal.expect("aaa")
        terminal.type("\x03")
        terminal.expect(r"\(cancelled\)")
        until(lambda: worker.num_cancelled == 1, "the worker is told")
        terminal.expect(PROMPT)
        terminal.type("half a line\x03")
        terminal.expect(PROMPT)
        worker.script = saying(ANSWER, tokenizer)
        say(terminal, "again", re.escape(ANSWER))
        assert "half a line" not in last_prompt(worker)
        terminal.type("\x1b[A")
        terminal.expect("again")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        leave(terminal)


def test_a_conversation_outlives_errors_and_the_front(nothing_runs, tokenizer):
    config = load_config(nothing_runs)
    with fake_worker(config, saying(ANSWER, tokenizer)) as worker, running(nothing_runs, "front") as services:
        with on_terminal("chat", "--config", str(nothing_runs)) as terminal:
            terminal.expect(PROMPT)
            say(terminal, "x " * 600, r"model\.max_context = 512")
            say(terminal, "short", re.escape(ANSWER))
            services.kill("front")
            say(terminal, "anyone?", "went away|does not answer in")
            services.start("front")
            services.wait_ready("front")
            say(terminal, "/retry", re.escape(ANSWER))
            assert last_prompt(worker).endswith("<｜User｜>anyone?<｜Assistant｜></think>")
            assert "short" in last_prompt(worker)
            terminal.type("/quit\r")
            assert terminal.ends() == 0
        assert "Traceback" not in terminal.shown
