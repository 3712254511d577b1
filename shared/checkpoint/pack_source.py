"""The source side of a pack: which shards are still needed, the space they give back, and the small files beside them.

Deletes shards when told that their content is safe; decides nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shared.checkpoint.index import INDEX_NAME
from shared.checkpoint.manifest import MANIFEST_NAME
from shared.checkpoint.pack_layout import OutputFile
from shared.checkpoint.pack_state import SourceTable, sync_directory
from shared.checkpoint.safetensors_header import read_header
from shared.errors import CheckpointError


class Shards:
    """Which shards each output file takes tensors from, and which of them nothing needs any more."""

    def __init__(self, source: SourceTable, files: list[OutputFile]) -> None:
        self._source = source
        self._of = {file.name: {source.tensors[t].file for _, names in file.groups for t in names} for file in files}
        self._last_user = {shard: name for name, shards in self._of.items() for shard in shards}

    def check(self, file: OutputFile) -> None:
        """Raises CheckpointError if a shard that `file` needs is gone or not what it was when packing began."""
        for shard in self._of[file.name]:
            if not shard.exists():
                advice = "download it again and give the same command again"
                raise CheckpointError(f"{shard}: missing, and {file.name} is made of it; {advice}")
            before = {name: info for name, info in self._source.tensors.items() if info.file == shard}
            if read_header(shard) != before:
                raise CheckpointError(f"{shard}: has changed since packing began; delete the output and pack again")

    def left_of(self, file: OutputFile) -> bool:
        """Whether any shard that `file` was made from is still there."""
        return any(shard.exists() for shard in self._of[file.name])

    def last_used_by(self, file: OutputFile) -> list[Path]:
        """The shards that no later output file needs, and that are still there."""
        shards = (shard for shard in self._of[file.name] if self._last_user[shard] == file.name)
        return sorted(shard for shard in shards if shard.exists())

    def free_after(self, file: OutputFile) -> int:
        """Delete the shards that no later output file needs; the number of bytes that gave."""
        freed = 0
        for shard in self.last_used_by(file):
            target = shard.resolve()
            freed += target.stat().st_size
            # A download cache links to its blobs: the link alone holds no space.
            target.unlink()
            shard.unlink(missing_ok=True)
            sync_directory(shard.parent)
        return freed


def needed_space(files: list[OutputFile], source: Path, shards: Shards | None, out: Path) -> tuple[int, int]:
    """(bytes needed at the worst moment, bytes free), the small files of `source` included.

    `shards`, if given, are deleted on the way, which helps where they are on the same device.
    """
    small = (path for path in _small_files(source) if not (out / path.relative_to(source)).exists())
    used = worst = sum(path.stat().st_size for path in small)
    for file in files:
        used += file.nbytes - _written(out, file)
        worst = max(worst, used)
        if shards:
            used -= sum(s.stat().st_size for s in shards.last_used_by(file) if s.stat().st_dev == out.stat().st_dev)
    return worst, shutil.disk_usage(out).free


def _written(out: Path, file: OutputFile) -> int:
    sizes = [path.stat().st_size for path in (out / file.name, out / f"{file.name}.partial") if path.exists()]
    return min(file.nbytes, max(sizes, default=0))


def copy_small_files(source: Path, out: Path) -> None:
    """Configuration, tokenizer and what else lies beside the shards, except hidden files and digests of shards.

    What is no regular file, a pipe or a link that leads nowhere, has no content to copy.
    """
    for path in _small_files(source):
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _small_files(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            skipped = name.startswith(".") or name in (INDEX_NAME, MANIFEST_NAME)
            path = Path(folder) / name
            if not skipped and not name.endswith((".safetensors", ".sha256")) and os.path.isfile(path):
                yield path
