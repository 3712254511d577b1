"""`python -m services.front --config FILE`: load the checkpoint's text side, then serve."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from services.front.answers import Answers
from services.front.chat.format import load_format
from services.front.http.app import make_app
from services.front.http.front import Front
from services.front.http.observer import Observer
from services.front.http.server import HttpServer
from services.front.prompt import PromptMaker
from services.front.service import FrontService
from services.front.tokenizer import Tokenizer
from shared.checkpoint.config import ModelConfig
from shared.errors import CheckpointError
from shared.runtime.context import ServiceContext
from shared.runtime.main import service_main


def serve(context: ServiceContext) -> None:
    """The service's main function."""
    config = context.config
    context.progress("loading the tokenizer")
    vocab_size = ModelConfig.from_dir(config.model.path).vocab_size
    tokenizer = Tokenizer.load(config.model.path)
    if tokenizer.size > vocab_size:
        text = f"tokenizer.json has ids up to {tokenizer.size - 1}, but the model has only {vocab_size}"
        raise CheckpointError(f"{config.model.path}: {text}; take both files from one checkpoint")
    chat_format = load_format(config.model.path)
    maker = PromptMaker(
        tokenizer,
        chat_format,
        config.model.max_context,
        config.front.default_max_tokens,
        trust_control_tokens=config.front.trust_control_tokens,
    )

    async def run() -> None:
        labels = {"checkpoint": config.model.path.name, "chat_format": chat_format.name}
        answers = Answers(context, tokenizer, maker)
        with Observer(config) as observer:
            http = None
            if config.front.http_port is not None:
                model = config.front.model_name or config.model.path.name
                http = HttpServer(config, make_app(Front(config, answers, observer, model, int(time.time()))))
            await FrontService(context, answers, http, labels).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    sys.exit(service_main("front", __doc__, serve))
