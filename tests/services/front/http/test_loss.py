"""The worker dies while answers stream: every stream says so in its dialect's words, and ends."""

import json

import httpx2
import pytest
from helpers.fake_worker import doomed_worker, make_checkpoint
from helpers.front import url_of
from helpers.services import running, write_config

from shared.config import load_config

HELLO = [{"role": "user", "content": "Hello"}]
LOST = "the worker went away while this request ran; it is not repeated"
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 400},
    "/v1/messages": {"model": "any", "max_tokens": 400, "messages": HELLO},
    "/v1/responses": {"input": "Hello"},
}
# How the last event of each dialect names the error.
ERRORS = {
    "/v1/chat/completions": lambda last: last["error"]["message"],
    "/v1/completions": lambda last: last["error"]["message"],
    "/v1/messages": lambda last: last["type"] == "error" and last["error"]["message"],
    "/v1/responses": lambda last: last["type"] == "response.failed" and last["response"]["error"]["message"],
}


@pytest.fixture
def config_path(tmp_path):
    path = write_config(tmp_path / "c.toml", make_checkpoint(tmp_path / "model"), front={"http_port": 0})
    load_config(path).run_dir.mkdir(mode=0o700)
    return path


def test_every_stream_says_that_the_worker_is_lost(config_path):
    with doomed_worker(config_path) as doomed, running(config_path, "front") as stack, httpx2.Client() as client:
        streams = {
            path: client.send(
                client.build_request("POST", url_of(stack) + path, json=body | {"stream": True}), stream=True
            )
            for path, body in BODIES.items()
        }
        lines = {path: stream.iter_lines() for path, stream in streams.items()}
        for path in BODIES:
            assert streams[path].status_code == 200
            next(line for line in lines[path] if '"delta":' in line or '"text":"' in line)
        doomed.kill()
        for path in BODIES:
            data = [line.removeprefix("data: ") for line in lines[path] if line.startswith("data: ")]
            assert ERRORS[path](json.loads([line for line in data if line != "[DONE]"][-1])) == LOST
            streams[path].close()
