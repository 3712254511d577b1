"""Parts of an answer that more than one dialect writes, in the same words. Pure."""

from __future__ import annotations

from typing import Any

from services.front.generation import Finished, TokenLogprob


def format_body(event: Finished) -> dict[str, Any]:
    """Whether an answer that was asked to be JSON is; nothing if it was not asked."""
    if event.format_error is None:
        return {}
    return {"response_format": {"valid": not event.format_error, "error": event.format_error or None}}


def token_body(token: TokenLogprob) -> dict[str, Any]:
    """The log-probability of a token, and those of the likeliest at its place."""
    top = [_likely(data, logprob) for data, logprob in token.top]
    return _likely(token.data, token.logprob) | {"top_logprobs": top}


def _likely(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
