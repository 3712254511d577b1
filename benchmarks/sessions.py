"""The first token of a long conversation with and without what was kept of it, on the demo model.

`python -m benchmarks.sessions [--turns N]`. Two sets of services answer the same conversation in turns, so that a
machine that changes its speed changes both. The answers must be the same; the figure is the time from a request's
arrival at the front to its first token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import save, show
from services.cli.conversation import Answer, Conversation, Sampling
from services.cli.front_client import FrontClient
from shared.protocol.messages import TextChunk
from tests.helpers.services import ROOT, Stack, running, write_config

QUESTION = (
    "Here is note {number} of a long day. The train left the station at {number} o'clock and the river was high. "
    "Anna counted {number} boats and wrote the number down, then she walked home along the old wall and read a book "
    "about the stars until it was dark. What is {number} + {number}?"
)
# The turns at the end that the ratio is taken of.
LAST = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt's tokens, how many of them were kept, and the seconds to the first token without and with that."""

    prompt_tokens: int
    cached_tokens: int
    ttft_off_s: float
    ttft_on_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=25)
    turns = measure(parser.parse_args().turns)
    last = turns[-LAST:]
    off, on = (statistics.median(seconds) for seconds in ([t.ttft_off_s for t in last], [t.ttft_on_s for t in last]))
    end = turns[-1]
    show(
        "First token of a long conversation",
        {
            "turns": f"{len(turns)}, measured at the last {len(last)}",
            "last prompt": f"{end.prompt_tokens} tokens, {end.cached_tokens} kept",
            "without reuse": f"{1000 * off:.0f} ms",
            "with reuse": f"{1000 * on:.0f} ms",
            "speed-up": f"{off / on:.1f} x",
        },
    )
    fields = ("prompt_tokens", "cached_tokens", "ttft_off_s", "ttft_on_s")
    columns = {name: [getattr(turn, name) for turn in turns] for name in fields}
    save("sessions", {"speed_up": off / on, "load_average": os.getloadavg(), **columns})


def measure(turns: int) -> list[Turn]:
    """A conversation, every question asked of both."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        off = _client(stack, Path(directory) / "off", session_bytes=0)
        on = _client(stack, Path(directory) / "on", session_bytes="256 MiB")
        conversation, measured = Conversation(Sampling(max_tokens=16, temperature=0.0)), []
        for number in range(1, turns + 1):
            question = QUESTION.format(number=number)
            answer, unaided = _ask(off, conversation, question)
            same, aided = _ask(on, conversation, question)
            assert same == answer, "the two must say the same"
            conversation.keep(question, answer)
            measured.append(Turn(aided.prompt_tokens, aided.cached_tokens, unaided.ttft_s, aided.ttft_s))
        return measured


def _client(stack: ExitStack, directory: Path, session_bytes: object) -> FrontClient:
    """A client of services of its own, with the demo's settings and all experts resident."""
    directory.mkdir()
    config = write_config(
        directory / "icebox.toml",
        ROOT / "demo" / "checkpoint",
        model={"max_context": 4096},
        cache={"bytes": "16 MiB"},
        worker={"prefill_chunk": 512, "min_segment": 32, "session_bytes": session_bytes},
    )
    services: Stack = stack.enter_context(running(config))
    client = FrontClient(services.config)
    stack.callback(client.close)
    client.connect()
    return client


def _ask(client: FrontClient, conversation: Conversation, question: str) -> tuple[Answer, TextChunk]:
    answer = Answer()
    reply = client.ask(
        conversation.request(question), lambda c: answer.add(c.text, c.reasoning, c.tool_calls_json), lambda: False
    )
    return answer, reply.last


if __name__ == "__main__":
    main()
