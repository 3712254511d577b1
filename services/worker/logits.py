"""`icebox logits`: teacher-forced logits of a checkpoint, in one process, to compare with recorded ones.

Owns the command's arguments and files. Needs no service: experts are read by this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from services.worker.experts import ExpertProvider
from services.worker.local_experts import LocalExperts
from services.worker.model import Model, Progress
from shared.checkpoint.config import ModelConfig
from shared.checkpoint.index import TensorIndex
from shared.checkpoint.schedule import problems
from shared.errors import CheckpointError, ExitCode, IceboxError

DESCRIPTION = (
    "Write what a checkpoint gives for a text: after each token, the logits of the next one. To compare with another "
    "machine, version or program. Runs in one process and needs no service."
)


class InputError(IceboxError):
    """An argument or a token file that cannot be used; the message names it."""

    exit_code = ExitCode.USAGE


class OutputError(IceboxError):
    """The output file could not be written, for a reason that showed only then."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `chunk` 0 takes the prefill whole."""

    checkpoint: Path
    tokens: Path
    prefill: int
    out: Path
    exact: bool
    chunk: int
    cache_mb: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; every expected failure is one line on stderr."""
    try:
        run(parse(arguments))
    except IceboxError as error:
        print(f"icebox logits: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return ExitCode.OK


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="icebox logits", description=DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="directory with config.json and the safetensors files")
    parser.add_argument("--tokens", type=Path, required=True, help="JSON file: a plain list of token ids")
    parser.add_argument("--prefill", type=int, required=True, metavar="N", help="ids taken in before the first row")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="safetensors file: `logits`, float32 [1 + ids - N, vocabulary]; a row after N ids and after each further",
    )
    parser.add_argument("--exact", action="store_true", help="float32 without simulated quantisation of activations")
    parser.add_argument("--chunk", type=int, default=0, metavar="C", help="prefill in chunks of C ids (whole)")
    parser.add_argument("--cache-mb", type=int, default=1024, metavar="M", help="memory for experts, MB (%(default)s)")
    return Options(**vars(parser.parse_args(arguments)))


def run(options: Options) -> None:
    """Read, compute, write; what can be refused is refused before the weights are read.

    Raises:
        InputError: an argument, the token file or the place of the output file.
        CheckpointError: the checkpoint.
        OutputError: the disk is full, say.
    """
    config = ModelConfig.from_dir(options.checkpoint)
    ids = read_ids(options.tokens, config)
    _check(options, len(ids))
    index = TensorIndex.open(options.checkpoint)
    if problem := next(problems(index, config), None):
        raise CheckpointError(f"{options.checkpoint}: {problem}")
    model = Model.load(index, config, len(ids), exact=options.exact, progress=_progress())
    experts = LocalExperts(index, config, options.cache_mb << 20)
    logits = teacher_forced(model, experts, ids, options.prefill, options.chunk or options.prefill)
    _write(options.out, save({"logits": logits}))


def teacher_forced(model: Model, experts: ExpertProvider, ids: Sequence[int], prefill: int, chunk: int) -> torch.Tensor:
    """float32 [1 + len(ids) - prefill, vocab]: a row after the first `prefill` ids and after each further one."""
    state = model.new_state(len(ids))
    logits = torch.empty(1 + len(ids) - prefill, model.config.vocab_size)
    for begin in range(0, prefill, chunk):
        logits[0] = model.forward(state, ids[begin : min(begin + chunk, prefill)], experts)
    for row, token in enumerate(ids[prefill:], 1):
        logits[row] = model.forward(state, [token], experts)
    return logits


def read_ids(path: Path, config: ModelConfig) -> list[int]:
    """The token ids in a JSON file. Raises InputError if it is anything but ids of this model that fit its context."""
    try:
        ids = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot read the token ids ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); expected a list of token ids like [0, 17, 4]") from error
    if not isinstance(ids, list) or not ids:
        raise InputError(f"{path}: expected a list of at least one token id like [0, 17, 4]")
    for place, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < config.vocab_size:
            raise InputError(
                f"{path}: entry {place} is {json.dumps(value)[:40]}; ids are whole numbers from 0 to "
                f"{config.vocab_size - 1}"
            )
    if len(ids) > config.max_position_embeddings:
        raise InputError(f"{path}: {len(ids)} ids, but the model takes {config.max_position_embeddings} at most")
    return ids


def _check(options: Options, num_ids: int) -> None:
    if not 1 <= options.prefill <= num_ids:
        raise InputError(f"--prefill must be from 1 to {num_ids}, the ids in {options.tokens}, not {options.prefill}")
    if options.chunk < 0:
        raise InputError(f"--chunk must be at least 1 id, not {options.chunk}")
    if options.cache_mb < 0:
        raise InputError(f"--cache-mb must be at least 0, not {options.cache_mb}")
    if options.out.is_dir():
        raise InputError(f"{options.out}: is a directory; --out names a file")
    if not os.access(options.out.parent, os.W_OK):
        raise InputError(f"{options.out}: directory {options.out.parent} does not exist or cannot be written")


def _write(path: Path, data: bytes) -> None:
    """All of the file or nothing of it: a reader never finds half of one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot write ({error.strerror})") from error


def _progress() -> Progress:
    """To a person's terminal only: scripts get errors and nothing else."""
    if not sys.stderr.isatty():
        return lambda text, done, total: None
    return lambda text, done, total: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
