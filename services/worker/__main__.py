"""`python -m services.worker --config FILE`: load the dense weights, map expertd's pool, then generate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from services.worker.engine import Engine
from services.worker.model import Model
from services.worker.service import WorkerService
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.config import load_config
from shared.errors import ConfigError, IceboxError
from shared.runtime.context import ServiceContext
from shared.runtime.service import run_service
from shared.stats import StatsPublisher
from shared.transport.server import Server


def serve(context: ServiceContext) -> None:
    """The service's main function."""
    config, worker = context.config, context.config.worker
    if worker.device != "cpu":
        raise ConfigError(f'{config.source}: worker.device = "{worker.device}" is not in this version; set it to "cpu"')
    if worker.threads:
        torch.set_num_threads(worker.threads)
    context.progress("reading the checkpoint's headers")
    model_config = ModelConfig.from_dir(config.model.path)
    index = TensorIndex.open(config.model.path)
    max_context = min(config.model.max_context, model_config.max_position_embeddings)
    model = Model.load(index, model_config, max_context, progress=context.progress)
    service = WorkerService(context, Engine(model, max_context, worker.prefill_chunk), index.fingerprint)
    server = Server(config.endpoint("worker"), context.identity, service.handle, status=context.pong)
    stats = StatsPublisher(config.endpoint("worker.stats"), context.identity, service.stats)
    server.start()
    stats.start()
    try:
        service.run()
    finally:
        stats.stop()
        server.stop(drain_s=0.5)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    try:
        config = load_config(parser.parse_args().config)
    except IceboxError as error:
        print(f"worker: {error}", file=sys.stderr)
        return error.exit_code
    return run_service("worker", config, serve)


if __name__ == "__main__":
    sys.exit(main())
