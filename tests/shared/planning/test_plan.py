"""The plan: what it must come to for known machines, that it adds up, and that what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.checkpoints import tiny_checkpoint

from shared.checkpoint.config import ModelConfig
from shared.checkpoint.records import RecordLayout
from shared.checkpoint.synth_shapes import published_config
from shared.config import AUTO_BYTES, Config, PrefetchConfig, load_config
from shared.errors import CapacityError
from shared.planning import plan as plan_module
from shared.planning.expectation import StepCost, hit_rate, tokens_per_s
from shared.planning.gpu import Gpu
from shared.planning.machine import Machine, load_machine
from shared.planning.plan import make_plan, resolve_cache_bytes, state_bytes

CONFIGS = Path(__file__).parents[3] / "configs"
FULL = ModelConfig.from_published(published_config("full"))
GB = 10**9


def deployed(name: str) -> tuple[Config, Machine]:
    return load_config(CONFIGS / f"{name}.toml"), load_machine(CONFIGS / "machines" / f"{name}.toml")


def with_cache(config: Config, nbytes: int) -> Config:
    return replace(config, cache=replace(config.cache, bytes=nbytes))


def with_sessions(config: Config, nbytes: int) -> Config:
    return replace(config, worker=replace(config.worker, session_bytes=nbytes))


def test_the_spark_holds_90_gb_of_experts_beside_9_77_gb() -> None:
    config, machine = deployed("spark")
    plan = make_plan(config, FULL, machine)
    assert plan.fits
    assert plan.memory == "unified"
    assert round(plan.backbone_bytes / GB, 2) == 9.77
    assert round(plan.parts[0].nbytes / GB, 2) == 8.85
    assert (plan.cache_bytes, plan.slots, plan.slot_bytes) == (90 * GB, 6731, 13_369_344)
    assert plan.cached == pytest.approx(0.60, abs=0.01)
    assert plan.speed is not None
    assert 10 < plan.speed.low < plan.speed.high < 23
    assert make_plan(with_cache(config, AUTO_BYTES), FULL, machine).cache_bytes > 90 * GB


def test_the_h200_takes_what_its_own_memory_has() -> None:
    config, machine = deployed("h200")
    plan = make_plan(config, FULL, machine)
    assert plan.fits
    assert plan.memory == "device"
    assert 120 * GB < plan.cache_bytes < machine.gpu.memory_free  # type: ignore[union-attr]
    assert plan.cache_bytes % plan.slot_bytes == 0


@pytest.mark.parametrize("name", ["spark", "h200"])
def test_it_adds_up(name: str) -> None:
    config, machine = deployed(name)
    plan = make_plan(config, FULL, machine)
    assert plan.available == plan.reserve + plan.room + sum(part.nbytes for part in plan.parts)
    assert plan.reserve > 0
    assert plan.experts == 44 * 256


def test_kept_sessions_take_from_the_cache_where_memory_is_shared() -> None:
    config, machine = deployed("spark")
    rooms = [make_plan(with_sessions(config, nbytes), FULL, machine).room for nbytes in (0, 3 * GB)]
    assert rooms[0] - rooms[1] == 3 * GB


def test_kept_sessions_of_a_server_lie_in_the_hosts_memory() -> None:
    config, machine = deployed("h200")
    rooms = [make_plan(with_sessions(config, nbytes), FULL, machine).room for nbytes in (0, 3 * GB)]
    assert rooms[0] == rooms[1]
    (problem,) = make_plan(with_sessions(config, 7000 * GB), FULL, machine).problems
    assert problem.startswith("worker.session_bytes = 7000.00 GB exceeds the host's ")


def test_a_cache_that_does_not_fit_is_refused_with_the_size_that_does() -> None:
    config, machine = deployed("spark")
    plan = make_plan(with_cache(config, 110 * GB), FULL, machine)
    assert not plan.fits
    assert plan.problems == (f"cache.bytes = 110.00 GB does not fit; at most {plan.room / GB:.2f} GB do",)
    assert make_plan(with_cache(config, plan.room), FULL, machine).fits


def test_too_little_memory_is_refused_with_how_much_is_missing() -> None:
    config, machine = deployed("spark")
    plan = make_plan(with_cache(config, AUTO_BYTES), FULL, replace(machine, memory_available=10 * GB))
    (problem,) = plan.problems
    assert problem.startswith("10.00 GB of unified memory are too little by ")
    missing = float(problem.split(" too little by ")[1].split(" GB")[0])
    enough = replace(machine, memory_available=10 * GB + int((missing + 0.01) * GB))
    assert make_plan(with_cache(config, AUTO_BYTES), FULL, enough).fits
    short = replace(machine, memory_available=10 * GB + int((missing - 0.01) * GB))
    assert not make_plan(with_cache(config, AUTO_BYTES), FULL, short).fits


def test_a_cache_too_small_for_one_step() -> None:
    config, machine = deployed("spark")
    (problem,) = make_plan(with_cache(config, 10**6), FULL, machine).problems
    assert "cannot hold one step; set it to at least" in problem


def test_cuda_without_a_gpu() -> None:
    config, machine = deployed("spark")
    problems = make_plan(config, FULL, replace(machine, gpu=None)).problems
    assert problems == ('worker.device is "cuda", but there is no such NVIDIA GPU; set it to "cpu"',)


def test_auto_never_takes_more_than_all_experts() -> None:
    model = ModelConfig.from_published(published_config("tiny"))
    config, machine = deployed("spark")
    plan = make_plan(with_cache(config, AUTO_BYTES), model, machine)
    assert plan.slots == plan.experts == 7 * 16
    assert (plan.hits.low, plan.hits.high) == (1, 1)


def test_a_longer_context_leaves_less_for_the_cache() -> None:
    config, machine = deployed("spark")
    config = with_cache(config, AUTO_BYTES)
    longer = replace(config, model=replace(config.model, max_context=1_048_576))
    difference = make_plan(config, FULL, machine).room - make_plan(longer, FULL, machine).room
    entries, rope = 6880, 512
    assert difference == pytest.approx((1_048_576 - 131_072) * (entries + rope), rel=0.001)


def test_state_of_a_sequence() -> None:
    assert state_bytes(FULL, 1_000_000, "cuda") - state_bytes(FULL, 0, "cuda") == pytest.approx(6.88e9, rel=0.001)
    assert state_bytes(FULL, 0, "cuda") > 43 * 128 * 512 * 2
    assert state_bytes(FULL, 1_000_000, "cpu") == pytest.approx(2 * state_bytes(FULL, 1_000_000, "cuda"), rel=0.01)


def test_resolving_auto_and_fixed_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\nname = "t"\n[model]\npath = "{tiny_checkpoint()}"\n[cache]\nbytes = "auto"\n')
    config = load_config(path)
    model = ModelConfig.from_dir(config.model.path)
    everything = model.num_moe_layers * model.n_routed_experts * RecordLayout.of(model).slot_bytes
    assert resolve_cache_bytes(config, model) == everything
    assert resolve_cache_bytes(with_cache(config, 10**6), model) == 10**6
    _, machine = deployed("spark")
    monkeypatch.setattr(plan_module, "probe", lambda path, speeds, gpu: replace(machine, memory_available=10**9))
    with pytest.raises(CapacityError, match=r"c.toml: 1.00 GB of system memory are too little by"):
        resolve_cache_bytes(config, model)


def test_hit_rates_match_what_was_reported() -> None:
    for cached, reported in ((0.14, 0.50), (0.48, 0.952), (0.57, 0.975), (0.66, 0.961)):
        expected = hit_rate(cached)
        assert expected.low - 0.01 <= reported <= expected.high + 0.03
    assert (hit_rate(0).high, hit_rate(1.0).low, hit_rate(2.0).low) == (0, 1, 1)


def test_speed_is_bytes_over_bandwidth() -> None:
    cost = StepCost(dense_bytes=1000, record_bytes=10, uses=100, memory_bandwidth=1000.0, disk_bandwidth=100.0)
    everything = tokens_per_s(cost, hit_rate(1.0))
    assert everything is not None
    assert (everything.low, everything.high) == (pytest.approx(0.35), pytest.approx(0.5))
    nothing = tokens_per_s(cost, hit_rate(0.0))
    assert nothing is not None
    assert (nothing.low, nothing.high) == (pytest.approx(1 / (2 / 0.7 + 10)), pytest.approx(0.1))
    assert tokens_per_s(replace(cost, disk_bandwidth=0.0), hit_rate(1.0)) is None


def test_the_gpus_bandwidth_counts_only_where_it_computes() -> None:
    config, machine = deployed("spark")
    assert isinstance(machine.gpu, Gpu)
    on_cpu = replace(config, worker=replace(config.worker, device="cpu"))
    assert make_plan(config, FULL, machine).cost.memory_bandwidth == machine.gpu.bandwidth
    assert make_plan(on_cpu, FULL, machine).cost.memory_bandwidth == machine.memory_speed


def test_a_cpu_holds_its_dense_weights_in_float32() -> None:
    config, machine = deployed("spark")
    on_cpu = make_plan(replace(config, worker=replace(config.worker, device="cpu")), FULL, machine)
    on_gpu = make_plan(config, FULL, machine)
    per_weight = on_cpu.parts[0].nbytes / on_gpu.parts[0].nbytes
    assert 2.5 < per_weight < 4
    assert on_cpu.cost.dense_bytes > 3 * on_gpu.cost.dense_bytes


def test_hints_take_a_little_memory_and_guesses_each_gate_twice() -> None:
    config, machine = deployed("spark")
    with_hints = make_plan(config, FULL, machine)
    without = make_plan(replace(config, prefetch=PrefetchConfig(False, False)), FULL, machine)
    assert with_hints.cost.dense_bytes - without.cost.dense_bytes == 43 * 256 * 4096 * 2
    assert without.room - with_hints.room == 3 * 129280 * 6 * 2


def test_the_dspark_checkpoint_plans_too() -> None:
    published = published_config("full") | {"dspark_block_size": 5}
    published["compress_ratios"] += [0, 0]
    config, machine = deployed("spark")
    plan = make_plan(config, ModelConfig.from_published(published), machine)
    assert plan.experts == 46 * 256
