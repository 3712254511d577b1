"""`icebox chat`: a conversation in the terminal, or one question for a script."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.cache_report import speed_line, tokens_per_second
from services.cli.conversation import Answer, Conversation, Sampling
from services.cli.front_client import FrontClient, Reply
from services.cli.options import ConfigOption, chosen_config
from services.cli.terminal import AnswerPrinter, text_writer, well_formed
from services.cli.tools import read_tools
from shared.config import Config
from shared.errors import ErrorCode, ServiceError
from shared.protocol.messages import TextChunk


def chat(
    config: ConfigOption = None,
    once: Annotated[str | None, typer.Option("--once", help="Ask this, print the answer, and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=0, max=10**8, help="Longest answer; 0 is the deployment's default.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that make up this probability.")] = 1.0,
    seed: Annotated[
        int, typer.Option(min=-1, max=2**63 - 1, help="Same seed and question, same answer; -1 draws one.")
    ] = -1,
    think: Annotated[str | None, typer.Option(help="Let it reason first: on, or an effort such as high.")] = None,
    tools: Annotated[Path | None, typer.Option(help="A JSON file of tools to offer; you give their results.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Show the text itself, not its Markdown formatted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print everything as one JSON object.")] = False,
) -> None:
    """Talk with the model. Ctrl-C cancels an answer, Ctrl-D leaves."""
    settings = chosen_config(config)
    once, system, think = (text and well_formed(text) for text in (once, system, think))
    offered = [] if tools is None else read_tools(tools)
    conversation = Conversation(Sampling(max_tokens, temperature, top_p, seed, think), system, offered)
    if once is not None:
        ask_once(settings, conversation, once, plain=plain, as_json=as_json)
        return
    if as_json:
        raise ServiceError(ErrorCode.BAD_REQUEST, "--json needs --once")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ServiceError(ErrorCode.BAD_REQUEST, 'a conversation needs a terminal; use --once "question" in scripts')
    from services.cli.interactive import converse

    converse(settings, conversation, plain=plain)


def ask_once(settings: Config, conversation: Conversation, question: str, *, plain: bool, as_json: bool) -> None:
    """One answer on stdout, what it cost on stderr; Ctrl-C ends it early with exit status 130."""
    printer = AnswerPrinter(sys.stdout, sys.stderr, text_writer(sys.stdout, plain=plain), Answer())
    show = printer.chunk if not as_json else lambda c: printer.answer.add(c.text, c.reasoning, c.tool_calls_json)
    client = FrontClient(settings)
    try:
        client.connect()
        with interrupts() as is_interrupted:
            reply = client.ask(conversation.request(question), show, is_interrupted)
    finally:
        printer.end()
        client.close()
    if as_json:
        print(json.dumps(as_dict(printer.answer, reply), ensure_ascii=False))
    else:
        print("\n".join(summary(reply)), file=sys.stderr)
    if reply.last.finish_reason == "abort":
        raise typer.Exit(128 + signal.SIGINT)


def summary(reply: Reply) -> list[str]:
    """What an answer cost, as lines."""
    cache = reply.cache.line() if reply.cache else "cache: expertd's counters did not come"
    return [speed_line(reply.last), cache]


def as_dict(answer: Answer, reply: Reply) -> dict[str, object]:
    """An answer and what it cost, for programs."""
    last: TextChunk = reply.last
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "cached_tokens": last.cached_tokens,
        "ttft_s": last.ttft_s,
        "elapsed_s": last.elapsed_s,
        "tokens_per_s": tokens_per_second(last),
        "cache": asdict(reply.cache) | {"hit_rate": reply.cache.hit_rate} if reply.cache else None,
    }


@contextmanager
def interrupts() -> Iterator[_Flag]:
    """Inside the block Ctrl-C raises nothing: it sets the flag that is yielded. A second one ends the program."""
    flag = _Flag()
    previous = signal.signal(signal.SIGINT, flag.set)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)


class _Flag:
    def __init__(self) -> None:
        self._is_set = False

    def __call__(self) -> bool:
        return self._is_set

    def set(self, *_: object) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
