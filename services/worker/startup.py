"""Puts the worker together: dense weights, kept sessions, engine, sockets."""

from __future__ import annotations

from contextlib import closing

import torch

from services.worker.engine import Engine
from services.worker.model import Model
from services.worker.service import WorkerService
from services.worker.sessions import SessionDisk, SessionStore, session_root
from services.worker.warm_up import compile_ahead, warm_up_engine
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.config import Config, WorkerConfig, gpu_ordinal
from shared.errors import ConfigError
from shared.runtime.context import ServiceContext
from shared.stats import StatsPublisher
from shared.transport.server import Server


def start(context: ServiceContext) -> None:
    """Load, serve, and return when the context stops. Raises CheckpointError, ConfigError, LockedError."""
    config, worker = context.config, context.config.worker
    device = _device(context.config)
    if worker.threads:
        torch.set_num_threads(worker.threads)
    context.progress("reading the checkpoint's headers")
    model_config = ModelConfig.from_dir(config.model.path)
    index = TensorIndex.open(config.model.path)
    max_context = min(config.model.max_context, model_config.max_position_embeddings)
    with closing(_sessions(worker, index)) as sessions:
        model = Model.load(index, model_config, max_context, device=device, progress=context.progress)
        engine = Engine(model, max_context, worker.prefill_chunk, worker.min_segment, sessions, config.prefetch)
        if device.type == "cuda":
            compile_ahead(lambda: warm_up_engine(engine), context.progress)
        _serve(context, WorkerService(context, engine, index.fingerprint))


def _serve(context: ServiceContext, service: WorkerService) -> None:
    server = Server(context.config.endpoint("worker"), context.identity, service.handle, status=context.pong)
    stats = StatsPublisher(context.config.endpoint("worker.stats"), context.identity, service.stats)
    server.start()
    stats.start()
    try:
        service.run()
    finally:
        stats.stop()
        server.stop(drain_s=0.5)


def _device(config: Config) -> torch.device:
    """Where this thread computes from now on. Raises ConfigError if torch does not find that GPU."""
    if config.worker.device == "cpu":
        return torch.device("cpu")
    ordinal, count = gpu_ordinal(config.worker.device), torch.cuda.device_count()
    if ordinal >= count:
        raise ConfigError(
            f'{config.source}: worker.device = "{config.worker.device}", but torch {torch.__version__} finds {count} '
            'GPUs; see `nvidia-smi`, or set it to "cpu"'
        )
    device = torch.device("cuda", ordinal)
    torch.cuda.set_device(device)  # kernels are launched on the thread's current GPU
    return device


def _sessions(worker: WorkerConfig, index: TensorIndex) -> SessionStore:
    """Raises ConfigError or LockedError if worker.session_dir cannot be used."""
    disk = SessionDisk(worker.session_dir, worker.session_disk_bytes) if worker.session_dir else None
    return SessionStore(worker.session_bytes, session_root(index, worker.device), disk)
