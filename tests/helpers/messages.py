"""One example of every message, with a different value in every field."""

from __future__ import annotations

from shared.protocol import messages as m

EXAMPLES: tuple[object, ...] = (
    m.Hello(version=1, role="worker", boot_id="00ff"),
    m.Welcome(version=1, service="expertd", boot_id="00ff"),
    m.Ping(),
    m.Pong(service="front", boot_id="00ff", state="ready", detail="shard 3 of 48", pid=4711, uptime_s=1.5),
    m.ErrorReply(code="io_error", detail="layer 3: Input/output error"),
    m.Cancel(request_id=2**63),
    m.Generate(
        prompt_ids=(0, 1, 129_279),
        max_tokens=16,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        seed=7,
        stop_ids=(1, 2),
        boundaries=(2, 3),
    ),
    m.TokensGenerated(
        token_ids=(5, 6),
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        ttft_s=0.25,
        elapsed_s=0.5,
    ),
    m.OpenPool(fingerprint="abc", device="cpu"),
    m.PoolOpened(
        boot_id="00ff",
        control_handle=b"\x00c",
        slab_handle=b"s0",
        slot_bytes=4096,
        num_slots=100,
        wave_experts=25,
    ),
    m.FetchExperts(layer=42, expert_ids=(0, 17, 255), clock=2**40),
    m.ExpertsFetched(),
    m.PrefetchHint(layer=1, expert_ids=(3,)),
    m.ClosePool(),
    m.PoolClosed(),
    m.Chat(
        messages_json='[{"role":"user","content":"ü"}]',
        max_tokens=8,
        temperature=0.75,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=-1,
        options_json='{"thinking":true}',
    ),
    m.TextChunk(
        text="Hi",
        reasoning="hm",
        tool_calls_json="[]",
        finish_reason="",
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        ttft_s=0.25,
        elapsed_s=0.5,
    ),
    m.StatsSnapshot(
        service="expertd", boot_id="00ff", time_s=1000.5, values={"misses": 3.0}, labels={"policy": "lfu-aged"}
    ),
)
