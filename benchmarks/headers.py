"""Opening a full-size checkpoint: 69,187 tensors in 46 sparse files, seconds and memory.

`python -m benchmarks.headers`. The files have the real shapes and headers and no data, so only the parsing counts. It
runs in a fresh process, so that the peak memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import save, show

_MEASURE = """
import json, resource, sys, time
started = time.perf_counter()
from shared.checkpoint.index import TensorIndex
index = TensorIndex.open(sys.argv[1])
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"tensors": len(index.tensors), "seconds": seconds, "peak_bytes": peak}))
"""
