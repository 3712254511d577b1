"""Memory for O_DIRECT: what a drive reads into and writes from.

A transfer is one piece for each run of adjoining physical pages. Pages of 4 KiB make 512 pieces of 2 MiB, each to be
pinned, queued and moved alone; a huge page makes one (in a virtual machine that was half of the time of every read).
"""

from __future__ import annotations

import contextlib
import mmap


def io_buffer(nbytes: int) -> memoryview:
    """Writable anonymous memory, zeroed, page-aligned, in huge pages where the kernel has them and `nbytes` fills some.

    It goes with its last view. Raises OSError if it cannot be had.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A private page that a forked child shares may be copied away from under a transfer (open(2), O_DIRECT).
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
