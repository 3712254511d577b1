"""`python -m services.worker --config FILE`: load the dense weights, open expertd's pool, generate."""

from __future__ import annotations

import sys

import torch

from services.worker.engine import Engine
from services.worker.model import Model
from services.worker.service import WorkerService
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.runtime.service import ServiceContext, main_of
from shared.stats import StatsPublisher
from shared.transport.server import Server


def run(context: ServiceContext) -> None:
    config = context.config
    torch.set_num_threads(config.worker.threads or torch.get_num_threads())
    model_config = ModelConfig.from_dir(config.model.path)
    index = TensorIndex.open(config.model.path)
    model = Model.load(index, model_config, torch.device(config.worker.device), progress=context.progress)
    engine = Engine(
        model, min(config.model.max_context, model_config.max_position_embeddings), config.worker.prefill_chunk
    )
    service = WorkerService(context, engine, index.fingerprint)
    ...


if __name__ == "__main__":
    sys.exit(main_of("worker", run))
