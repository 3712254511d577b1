"""`python -m services.expertd --config FILE`: open the checkpoint, allocate the pool, warm it, then serve."""

from __future__ import annotations

import sys

from services.expertd.pool import Pool, slots_for
from services.expertd.service import ExpertService
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.records import ExpertRecords
from shared.checkpoint.schedule import problems
from shared.errors import CheckpointError
from shared.planning.plan import resolve_cache_bytes
from shared.runtime.context import ServiceContext
from shared.runtime.main import service_main
from shared.stats import StatsPublisher
from shared.transport.server import Server


def serve(context: ServiceContext) -> None:
    """The service's main function."""
    config = context.config
    context.progress("reading the checkpoint's headers")
    model = ModelConfig.from_dir(config.model.path)
    index = TensorIndex.open(config.model.path)
    if wrong := next(problems(index, model), None):
        raise CheckpointError(f"{config.model.path}: {wrong}; `icebox verify` lists everything")
    num_slots = slots_for(resolve_cache_bytes(config, model), model)
    context.progress(f"allocating {num_slots} slots")
    pool = Pool(num_slots, model, config.worker.device)
    service = ExpertService(context, ExpertRecords(index, model), pool, index.fingerprint)
    server = Server(
        config.endpoint("expertd"),
        context.identity,
        service.handle,
        on_peer_lost=service.peer_lost,
        status=context.pong,
    )
    stats = StatsPublisher(
        config.endpoint("expertd.stats"), context.identity, service.stats, take_picture=service.picture
    )
    stats.start()
    service.start()
    try:
        service.warm()
        server.start()
        context.ready()
        service.run()
    finally:
        server.stop()
        service.stop()
        stats.stop()
        pool.close()


if __name__ == "__main__":
    sys.exit(service_main("expertd", __doc__, serve))
