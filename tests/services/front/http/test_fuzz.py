"""A smaller helping of benchmarks/front_fuzz, with other seeds."""

import asyncio
import json
import random

from benchmarks.front_fuzz import GOOD, application, fuzz_bodies, fuzzed_body, measure_frames, post

NUM_BODIES = 1_000
NUM_FRAMES = 2_000


def test_fuzzed_bodies_are_answered_or_refused(tmp_path):
    async def run():
        with application(tmp_path) as (app, answers):
            statuses = await fuzz_bodies(app, NUM_BODIES, seed=7)
            assert answers.gauges["requests_running"] + answers.gauges["requests_waiting"] == 0
            assert len(asyncio.all_tasks()) == 1
            return statuses

    statuses = asyncio.run(run())
    assert sum(statuses.values()) == NUM_BODIES
    assert min(statuses[200], statuses[400]) > NUM_BODIES / 10, "both kinds are tried"


def test_what_the_fuzzer_starts_from_is_good(tmp_path):
    async def run():
        with application(tmp_path) as (app, _):
            return [await post(app, path, fuzzless(body)) for path, body in GOOD]

    answers = asyncio.run(run())
    assert [status for status, _ in answers] == [200] * len(GOOD), answers


def fuzzless(body):
    return json.dumps(body).encode()


def test_the_fuzzer_repeats_itself():
    assert fuzzed_body(random.Random(5)) == fuzzed_body(random.Random(5))


def test_fuzzed_frames_disturb_nobody(tmp_path):
    figures = measure_frames(tmp_path, NUM_FRAMES, seed=7)
    assert figures["replies"] > NUM_FRAMES / 10
    assert figures["grown_mib_after_first_fifth"] < 16
