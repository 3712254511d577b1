"""Every message that crosses a process boundary, in one table.

A message is a frozen dataclass with an integer tag; on the wire it is the msgpack array `[tag, field, ...]`.
Tags are never reused or reordered; new fields go last, with a default. Expert bytes never travel: they stay in
shared slots. Ranges: 1-15 every service, 16-31 worker, 32-47 expertd, 48-63 front, 64- stats.
"""

from __future__ import annotations

from shared.protocol.codec import check_registry, message

PROTOCOL_VERSION = 2

# --- every service ---------------------------------------------------------------------------------------------


@message(1, reply="Welcome")
class Hello:
    """First message of a connection: who speaks, and which protocol."""

    version: int
    role: str
    boot_id: str


@message(2)
class Welcome:
    """The service's identity; a changed `boot_id` means that it restarted and everything it shared is gone."""

    version: int
    service: str
    boot_id: str


@message(3, reply="Pong")
class Ping:
    """Are you there, and in which state? Answered by the control thread, so long steps never look like death."""


@message(4)
class Pong:
    """Life-cycle state, what the service is doing at start, and a one-line fatal error if it has one.

    While it reads something long, `done_bytes` of `total_bytes` say how far it is; else both are 0.
    """

    service: str
    boot_id: str
    state: str
    detail: str
    pid: int
    uptime_s: float
    done_bytes: int = 0
    total_bytes: int = 0


@message(5)
class ErrorReply:
    """The final reply of a request that failed; `code` is an `ErrorCode` value."""

    code: str
    detail: str


@message(6, one_way=True)
class Cancel:
    """End the request with this id early. Idempotent; the request still gets its own final reply."""

    request_id: int


# --- worker ----------------------------------------------------------------------------------------------------


@message(16, reply="TokensGenerated")
class Generate:
    """Continue `prompt_ids`; answered by a stream of `TokensGenerated`, the last one with a finish reason.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; seed -1 draws one. `top_logprobs` -1 is off; n asks
    for each token's log-probability and those of the n likeliest ids. `boundaries` are rising positions in the prompt
    where earlier or later requests of the same conversation are likely to end or part from this one: they are where
    the worker may cut the prompt, and reuse what it kept.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = -1
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int = -1
    boundaries: tuple[int, ...] = ()


@message(17)
class TokensGenerated:
    """New tokens of one sequence. `finish_reason` is "" until the last: stop, length or abort.

    The counts are cumulative for the request; `cached_tokens` of the prompt were kept from before and not computed
    again. Times are seconds since the worker accepted it. Log-probabilities are those of the unfiltered softmax at
    temperature 1: one per token, and `top_ids` / `top_logprobs` n per token.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float
    elapsed_s: float
    logprobs: tuple[float, ...] = ()
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# --- expertd ---------------------------------------------------------------------------------------------------


@message(32, reply="PoolOpened")
class OpenPool:
    """Map the slot pool; at most one worker at a time holds it. `fingerprint` names the worker's checkpoint."""

    fingerprint: str
    device: str


@message(33)
class PoolOpened:
    """Where the control block and the slots are, once; afterwards only slot numbers matter.

    `slab_handle` and `control_handle` are opaque to everyone but shared.memory. Slot s of the pool begins at
    `s * slot_bytes` of the slab. One look-up may have at most `wave_experts` experts, and the worker may ask for one
    look-up ahead.
    """

    boot_id: str
    control_handle: bytes
    slab_handle: bytes
    slot_bytes: int
    num_slots: int
    wave_experts: int


@message(34, reply="ExpertsFetched")
class FetchExperts:
    """Read these experts of one MoE layer and keep them until the worker's clock passes `clock`.

    They are what a look-up missed; `held_slots` are the slots of those it found. Until the answer comes the worker
    touches no other slot, so all others may be reused at once. With `is_ahead` the experts belong to the next look-up:
    the worker goes on, and may touch any slot.
    """

    layer: int
    expert_ids: tuple[int, ...]
    clock: int
    held_slots: tuple[int, ...] = ()
    is_ahead: bool = False


@message(35)
class ExpertsFetched:
    """All of them are in the slot table now."""


@message(36, one_way=True)
class PrefetchHint:
    """These experts will be wanted soon; read them when no demand is waiting.

    A guess (`is_guess`) is read only while the disk is idle, and the next one takes the place of what is not yet begun.
    """

    layer: int
    expert_ids: tuple[int, ...]
    is_guess: bool = False


@message(37, reply="PoolClosed")
class ClosePool:
    """The worker has dropped its mappings."""


@message(38)
class PoolClosed:
    """Acknowledges `ClosePool`."""


# --- front -----------------------------------------------------------------------------------------------------


@message(48, reply="TextChunk")
class Chat:
    """Answer a conversation; a stream of `TextChunk`, the last one with a finish reason.

    `messages_json` is a JSON list of OpenAI-style messages, `options_json` a JSON object with what the chat format
    knows besides them (thinking, reasoning_effort, tools). The front checks both.
    """

    messages_json: str
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = -1
    options_json: str = "{}"


@message(49)
class TextChunk:
    """New text of one answer: `reasoning` and `text` are deltas, `tool_calls_json` comes with the last chunk."""

    text: str
    reasoning: str
    tool_calls_json: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float
    elapsed_s: float


# --- stats -----------------------------------------------------------------------------------------------------


@message(64, one_way=True)
class StatsSnapshot:
    """Cumulative counters and gauges of one service; rates are the reader's business, lost snapshots harmless.

    `picture` is expertd's alone: one byte an expert, layer by layer, 128 if it is resident plus 0 to 127 for its heat.
    """

    service: str
    boot_id: str
    time_s: float
    values: dict[str, float]
    labels: dict[str, str]
    picture: bytes = b""


check_registry()
