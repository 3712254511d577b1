"""`python -m services.front --config FILE`: load the checkpoint's text side, then serve."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from services.front.chat.format import load_format
from services.front.prompt import PromptMaker
from services.front.service import Answers, FrontService
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
    maker = PromptMaker(tokenizer, chat_format, config.model.max_context, config.front.default_max_tokens)

    async def run() -> None:
        labels = {"checkpoint": config.model.path.name, "chat_format": chat_format.name}
        await FrontService(context, Answers(context, tokenizer, maker), labels).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    sys.exit(service_main("front", __doc__, serve))
