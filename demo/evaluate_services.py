"""The held-out questions through the running services, as a client would ask them: `icebox eval demo`.

Imports no torch. The front takes answers apart, so "well-formed" says here that an answer ended by itself, and that
thinking was closed if it was on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo.questions import Question, Verdict, is_right, questions, summary, table
from services.cli.conversation import Answer
from services.cli.front_client import FrontClient
from services.cli.options import check_output, chosen_config
from services.cli.outcome import run_to_end
from services.cli.progress import counter
from services.front.tokenizer import Tokenizer
from shared.config import Config
from shared.protocol.messages import Chat


def ask(client: FrontClient, question: Question) -> Verdict:
    """Put one question, greedily; prints a wrong answer."""
    talk = question.conversation
    options = {"thinking": talk.thinking} | ({"tools": list(talk.tools)} if talk.tools else {})
    chat = Chat(json.dumps(talk.messages[:-1]), 160, temperature=0.0, options_json=json.dumps(options))
    answer = Answer()
    reply = client.ask(chat, lambda c: answer.add(c.text, c.reasoning, c.tool_calls_json), lambda: False)
    made = [call["function"] for call in json.loads(answer.tool_calls_json or "[]")]
    calls = [(call["name"], json.loads(call["arguments"])) for call in made]
    is_whole = reply.last.finish_reason in ("stop", "tool_calls") and bool(answer.reasoning) == talk.thinking
    verdict = Verdict(is_right(talk, answer.text, calls), is_whole)
    if not verdict.right:
        print(f"  wrong, {question.category}: {answer.text!r}, wanted {talk.call or talk.expected!r}", flush=True)
    return verdict


def run(config: Config, share: float) -> dict[str, list[Verdict]]:
    """Ask all, or a share of every category: verdicts by category. Prints what went wrong and the table."""
    tokenizer = Tokenizer.load(config.model.path)
    client = FrontClient(config)
    verdicts: dict[str, list[Verdict]] = {}
    try:
        client.connect()
        asked = questions(lambda text: len(tokenizer.encode([(text, False)])), share)
        with counter("asking", len(asked)) as done:
            for question in asked:
                verdicts.setdefault(question.category, []).append(ask(client, question))
                done()
    finally:
        client.close()
    print(table(verdicts))
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(prog="icebox eval", description="Ask held-out questions of the running services.")
    parser.add_argument("name", choices=("demo",), help="the set of questions")
    parser.add_argument("--config", "-c", type=Path, help="the deployment's TOML file")
    parser.add_argument("--share", type=share, default=1.0, help="of every category (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.out is not None:
        check_output(args.out)
    verdicts = run(chosen_config(args.config), args.share)
    if args.out is not None:
        args.out.write_text(json.dumps(summary(verdicts), indent=2) + "\n", encoding="utf-8")


def share(text: str) -> float:
    """Of a category, above 0. Raises what argparse turns into a usage error."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


if __name__ == "__main__":
    run_to_end(main)
