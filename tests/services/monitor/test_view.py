from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.monitor.render import BAR_CELLS, bar, number, percent, render
from shared.observation.view import ABSENT, Window, make_view
from shared.protocol.messages import Pong, StatsSnapshot


def snapshot(service, time_s, boot_id="b", **values):
    named = {key.replace("__", "."): float(value) for key, value in values.items()}
    return StatsSnapshot(service, boot_id, time_s, named, {"policy": "lfu-aged"})


def expertd(time_s, uses, boot_id="b"):
    """Counters after `uses` uses: a tenth missed, a twentieth late; all of them in layer 0 of 2."""
    return snapshot(
        "expertd",
        time_s,
        boot_id,
        uses=uses,
        misses=uses / 10,
        late_hits=uses / 20,
        bytes_read=uses * 1000,
        evictions=uses / 5,
        prefetched=3,
        slots_total=10,
        slots_resident=8,
        slots_free=1,
        slots_retired=1,
        record_bytes=4096,
        moe_layers=2,
        backbone_layers=1,
        experts=16,
        heat__0=6,
        heat__1=2,
        uses__0=uses,
        misses__0=uses / 10,
        queue_demand=4,
    )


def worker(time_s, tokens):
    return snapshot(
        "worker",
        time_s,
        generated_tokens=tokens,
        prompt_tokens=2 * tokens,
        decode_seconds=tokens / 20,
        prefill_seconds=tokens / 100,
        wait_seconds=tokens / 100,
        requests_done=3,
        requests_running=1,
        cached_tokens=3000,
        session_hits=4,
        session_bytes=2048,
        session_limit_bytes=4096,
        guessed=200,
        guessed_right=150,
    )


def front(time_s, answers):
    return snapshot("front", time_s, ttft_seconds=answers * 0.5, ttft_count=answers, requests_done=answers)


def view(**windows):
    return make_view({}, windows)


def test_cache_now_and_since_the_start():
    cache = view(expertd=Window(expertd(10.0, 1000), expertd(12.0, 1400))).cache
    assert cache is not None
    assert (cache.hit_rate, cache.late_rate, cache.miss_rate) == pytest.approx((0.85, 0.05, 0.1))
    assert cache.hit_rate_total == pytest.approx(0.85)
    assert (cache.uses, cache.misses, cache.late_hits, cache.evictions) == (1400, 140, 70, 280)
    assert (cache.uses_per_s, cache.bytes_per_s, cache.evictions_per_s) == (200.0, 200_000.0, 40.0)
    assert (cache.pool_bytes, cache.queue_demand, cache.policy) == (40_960, 4, "lfu-aged")
    assert [(layer.resident, layer.experts, layer.served) for layer in cache.layers] == [(6, 16, 0.9), (2, 16, None)]
    assert [layer.served_total for layer in cache.layers] == [0.9, None]


def test_worker_now_and_since_the_start():
    shown = view(worker=Window(worker(10.0, 100), worker(12.0, 120))).worker
    assert shown is not None
    assert (shown.tokens_per_s, shown.decode_tokens_per_s, shown.decode_tokens_per_s_total) == pytest.approx(
        (10, 20, 20)
    )
    assert shown.prefill_tokens_per_s_total == pytest.approx(200.0)
    assert shown.waiting_share == pytest.approx(1 / 6)
    assert (shown.running, shown.done, shown.generated_tokens) == (1, 3, 120)
    assert (shown.guessed, shown.guesses_right) == (200, 0.75)


def test_front_now_and_since_the_start():
    shown = view(front=Window(front(0.0, 4), front(2.0, 6))).front
    assert shown is not None
    assert (shown.ttft_s, shown.ttft_s_total, shown.done) == (0.5, 0.5, 6)


@pytest.mark.parametrize(
    "old", [None, expertd(10.0, 9000, boot_id="before"), expertd(12.0, 1400)], ids=["first", "restarted", "idle"]
)
def test_without_a_difference_there_is_no_now(old):
    cache = view(expertd=Window(old, expertd(12.0, 1400))).cache
    assert cache is not None
    assert (cache.hit_rate, cache.miss_rate, cache.layers[0].served) == (None, None, None)
    assert cache.hit_rate_total == pytest.approx(0.85)


def test_absent_services_are_shown_as_such():
    pongs = {"expertd": None, "worker": Pong("worker", "b", "starting", "layer 3", 7, 2.0)}
    shown = make_view(pongs, {})
    assert [(s.name, s.state, s.detail, s.pid) for s in shown.services] == [
        ("expertd", ABSENT, "", None),
        ("worker", "starting", "layer 3", 7),
    ]
    assert (shown.cache, shown.worker, shown.front) == (None, None, None)


def drawn(shown):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(render(shown))
    return capture.get()


def test_drawing():
    pongs = {"expertd": Pong("expertd", "b", "ready", "", 7, 61.0), "worker": None}
    windows = {
        "expertd": Window(expertd(10.0, 1000), expertd(12.0, 1400)),
        "worker": Window(worker(10.0, 100), worker(12.0, 120)),
        "front": Window(front(0.0, 4), front(2.0, 6)),
    }
    text = drawn(make_view(pongs, windows))
    assert "pid 7, up 61 s" in text
    assert "not running" in text
    assert "85.0% hits, 5.0% late, 10.0% misses of 200 uses/s; reads 195.3 KiB/s" in text
    assert "10.0 tokens/s now; decode 20.0 now" in text
    assert "sessions: 3,000 tokens of 4 prompts were not read again; 2.0 KiB of 4.0 KiB kept" in text
    assert "first token after 0.50 s now" in text
    assert "8 of 10 slots hold an expert (40.0 KiB, 1 free, 1 retired), policy lfu-aged; queue 4 demand" in text
    assert "0 ▕████▌       ▏   6/16 served  90.0%" in text
    assert "MTP ▕█▌          ▏   2/16 served      -" in text


def test_idle_services_have_no_empty_figures():
    unused = {"expertd": expertd(1.0, 0), "worker": snapshot("worker", 1.0), "front": front(1.0, 0)}
    text = drawn(make_view({}, {name: Window(None, new) for name, new in unused.items()}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "worker idle" in lines
    assert "0 experts of next layers guessed" in lines
    assert "front 0 running, 0 waiting, 0 done, 0 failed, 0 cancelled, 0 refused" in lines
    assert "cache now: idle" in lines
    assert any(line.startswith("since start: 0 uses; 0 late") for line in lines)
    text = drawn(view(worker=Window(worker(12.0, 120), worker(12.0, 120))))
    assert "decode 20.0 since start; prefill 200" in text
    assert "tokens/s now; decode 20.0 since start" in text, "one request runs"


def test_text_from_services_is_not_markup():
    pongs = {"worker": Pong("worker", "b", "starting", "[red]layer[/red] [x", 7, 2.0)}
    assert "[red]layer[/red] [x" in drawn(make_view(pongs, {}))


keys = st.sampled_from(
    ["uses", "misses", "late_hits", "moe_layers", "experts", "heat.0", "slots_total", "decode_seconds"]
)
any_values = st.dictionaries(keys, st.floats(0, 40) | st.just(float("1e15")) | st.integers(0, 40).map(float))


@given(any_values, any_values, st.booleans(), st.floats(0, 10))
def test_any_numbers_can_be_shown(old, new, same, seconds):
    """Counters that lag behind each other or a service of another version draw nonsense at worst."""
    new = new | {"moe_layers": min(new.get("moe_layers", 0), 40)}
    window = Window(StatsSnapshot("x", "b", 0.0, old, {}), StatsSnapshot("x", "b" if same else "c", seconds, new, {}))
    shown = make_view({"x": None}, dict.fromkeys(("expertd", "worker", "front"), window))
    assert asdict(shown)["cache"] is not None
    assert drawn(shown)


@given(st.floats(-1, 2))
def test_bars_have_one_width(share):
    assert len(bar(share)) == BAR_CELLS + 2


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0.00"), (9.876, "9.88"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers(value, text):
    assert number(value) == text


def test_shares():
    assert (percent(None), percent(0.5)) == ("-", "50.0%")
    assert (bar(0.0), bar(1.0)) == ("▕" + " " * BAR_CELLS + "▏", "▕" + "█" * BAR_CELLS + "▏")
