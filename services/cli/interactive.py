"""The conversation in a terminal: line editing, history, commands. What the commands do is `Conversation`'s."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from services.cli.chat import interrupts, summary
from services.cli.conversation import Answer, Conversation
from services.cli.front_client import FrontClient
from services.cli.terminal import AnswerPrinter
from shared.config import Config
from shared.errors import PeerLost, ServiceError

HELP = """\
/clear        forget the conversation
/retry        ask the last question again
/save FILE    write the conversation as JSON
/stats        what the last answer cost
/quit         leave (so does Ctrl-D)
Ctrl-C cancels an answer. Alt-Enter starts a new line."""


def converse(settings: Config, conversation: Conversation) -> None:
    """Read questions and print answers until Ctrl-D. Raises PeerLost if the front is not there at the start."""
    client = FrontClient(settings)
    try:
        client.connect()
        print("Ctrl-C cancels an answer, Ctrl-D leaves, /help lists commands.")
        Terminal(client, conversation, settings.run_dir / "chat.history").run()
    finally:
        client.close()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Terminal:
    """One session at the terminal."""

    def __init__(self, client: FrontClient, conversation: Conversation, history: Path) -> None:
        self._client = client
        self._conversation = conversation
        self._prompt: PromptSession[str] = PromptSession(history=FileHistory(history), key_bindings=_keys())
        self._last_cost = ["nothing was asked yet"]
        self._is_connected = True
        self._commands: dict[str, Callable[[str], None]] = {
            "clear": self._clear,
            "retry": self._retry,
            "save": self._save,
            "stats": lambda _: print("\n".join(self._last_cost)),
            "help": lambda _: print(HELP),
        }

    def run(self) -> None:
        while True:
            try:
                line = self._prompt.prompt("> ").strip()
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

    def _ask(self, question: str) -> None:
        printer = AnswerPrinter(sys.stdout, sys.stderr, Answer())
        try:
            if not self._is_connected:
                self._client.connect()
                self._is_connected = True
            with interrupts() as is_interrupted:
                reply = self._client.ask(self._conversation.request(question), printer.chunk, is_interrupted)
        except ServiceError as error:
            self._is_connected = self._is_connected and not isinstance(error, PeerLost)
            printer.break_line()
            print(error.detail)
            return
        self._conversation.keep(question, printer.answer)
        self._last_cost = summary(reply)
        if reply.last.finish_reason == "abort":
            print("(cancelled)")
        print("\x1b[2m" + "\n".join(self._last_cost) + "\x1b[0m")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        print("forgotten")

    def _retry(self, _: str) -> None:
        question = self._conversation.take_back()
        if question is None:
            print("there is nothing to ask again")
        else:
            self._ask(question)

    def _save(self, argument: str) -> None:
        if not argument:
            print("/save needs a file name")
            return
        path = Path(argument).expanduser()
        try:
            path.write_text(json.dumps(self._conversation.messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            print(f"{path}: cannot write ({error.strerror})")
        else:
            print(f"{len(self._conversation.messages)} messages saved in {path}")
