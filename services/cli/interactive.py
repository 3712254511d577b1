"""The conversation in a terminal: line editing, history, commands. What the commands do is `Conversation`'s."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from services.cli.cache_report import SessionCost
from services.cli.chat import interrupts, summary
from services.cli.conversation import Answer, Conversation
from services.cli.front_client import FrontClient, Reply
from services.cli.outcome import text_of
from services.cli.terminal import AnswerPrinter, harmless, text_writer, well_formed
from services.cli.tools import DECLINED, call_text
from shared.config import Config, state_dir
from shared.errors import IceboxError, PeerLost
from shared.protocol.messages import Chat

HELP = """\
/clear        forget the conversation
/retry        ask the last question again
/save FILE    write the conversation as JSON
/stats        what the last answer and this chat cost
/quit         leave (so does Ctrl-D)
Ctrl-C cancels an answer. Alt-Enter starts a new line; pasted lines stay together. Up finds earlier questions."""


def converse(settings: Config, conversation: Conversation, *, plain: bool) -> None:
    """Read questions and print answers until Ctrl-D. Raises PeerLost if the front is not there at the start."""
    client = FrontClient(settings)
    try:
        client.connect()
        print("Ctrl-C cancels an answer, Ctrl-D leaves, /help lists commands.")
        Terminal(client, conversation, settings.model.max_context, plain=plain).run()
    finally:
        client.close()


def _history() -> History:
    """Earlier questions, in a file that only its owner reads; of this chat alone if there can be no file."""
    try:
        path = state_dir() / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except (OSError, RuntimeError) as error:
        print(f"questions are not kept for next time: {error}")
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Terminal:
    """One session at the terminal."""

    def __init__(self, client: FrontClient, conversation: Conversation, max_context: int, *, plain: bool) -> None:
        self._client = client
        self._conversation = conversation
        self._is_plain = plain
        self._commands: dict[str, Callable[[str], None]] = {
            "clear": self._clear,
            "retry": self._retry,
            "save": self._save,
            "stats": self._stats,
            "help": lambda _: print(HELP),
        }
        words = WordCompleter([f"/{name}" for name in (*self._commands, "quit")], sentence=True)
        self._questions: PromptSession[str] = PromptSession(
            history=_history(), key_bindings=_keys(), completer=words, complete_while_typing=False
        )
        self._results: PromptSession[str] = PromptSession(key_bindings=_keys())
        self._last_cost = ["nothing was answered yet"]
        self._cost = SessionCost(max_context)
        self._unanswered: str | None = None
        self._saved: set[Path] = set()
        self._is_connected = True

    def run(self) -> None:
        while True:
            try:
                line = well_formed(self._questions.prompt("> ")).strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line[1:])
            elif line:
                self._ask(line)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            print(f"there is no /{name}; /help lists the commands")
        else:
            command(argument.strip())

    # --- asking --------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        """One question, and further requests for as long as the model calls tools and their results are given."""
        answer = self._answer(question)
        self._unanswered = question if answer is None else None
        while answer is not None and answer.tool_calls:
            if not self._give_results(answer.tool_calls):
                return
            answer = self._answer(None)

    def _answer(self, question: str | None) -> Answer | None:
        """Show an answer and make it part of the conversation; None if it failed."""
        printer = AnswerPrinter(sys.stdout, sys.stderr, text_writer(sys.stdout, plain=self._is_plain), Answer())
        try:
            reply = self._exchange(self._conversation.request(question), printer)
        except IceboxError as error:
            self._is_connected = self._is_connected and not isinstance(error, PeerLost)
            print(text_of(error))
            return None
        self._conversation.keep(question, printer.answer)
        self._last_cost = summary(reply)
        self._cost.add(reply.last, reply.cache)
        if reply.last.finish_reason == "abort":
            print("(cancelled)")
        print("\x1b[2m" + "\n".join(self._last_cost) + "\x1b[0m")
        return printer.answer

    def _exchange(self, chat: Chat, printer: AnswerPrinter) -> Reply:
        if not self._is_connected:
            self._client.connect()
            self._is_connected = True
        try:
            with interrupts() as is_interrupted:
                return self._client.ask(chat, printer.chunk, is_interrupted)
        finally:
            printer.end()

    def _give_results(self, calls: Sequence[dict[str, Any]]) -> bool:
        """Ask for the result of each call; once one is declined so are the rest. Whether all were given."""
        is_given = True
        for call in calls:
            result = self._ask_result(call) if is_given else None
            is_given = result is not None
            self._conversation.add_result(call, DECLINED if result is None else result)
        return is_given

    def _ask_result(self, call: dict[str, Any]) -> str | None:
        print(f"What is the result of {harmless(call_text(call))}? (Ctrl-C declines)")
        try:
            return well_formed(self._results.prompt("= "))
        except (KeyboardInterrupt, EOFError):
            print("declined; the model learns of it with your next question")
            return None

    # --- commands ------------------------------------------------------------------------------------------------

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._unanswered = None
        print("forgotten")

    def _retry(self, _: str) -> None:
        question = self._unanswered or self._conversation.take_back()
        if question is None:
            print("there is nothing to ask again")
        else:
            self._ask(question)

    def _stats(self, _: str) -> None:
        print("\n".join([*self._last_cost, *self._cost.lines()]))

    def _save(self, argument: str) -> None:
        """Overwrites only what this chat saved."""
        if not argument:
            print("/save needs a file name")
            return
        path = Path(argument)
        text = json.dumps(self._conversation.messages, ensure_ascii=False, indent=2) + "\n"
        try:
            path = path.expanduser().absolute()
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            print(f"{path} is there already; choose another name")
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{path}: cannot write ({getattr(error, 'strerror', None) or error})")
        else:
            self._saved.add(path)
            print(f"{len(self._conversation.messages)} messages saved in {path}")
