"""`python -m services.worker --config FILE`: load the dense weights, map expertd's pool, then generate."""

from __future__ import annotations

import sys

from shared.runtime.context import ServiceContext
from shared.runtime.main import service_main


def serve(context: ServiceContext) -> None:
    """The service's main function. torch takes seconds to import: by now pings and signals are answered."""
    context.progress("importing torch")
    from services.worker.startup import start

    start(context)


if __name__ == "__main__":
    sys.exit(service_main("worker", __doc__, serve))
