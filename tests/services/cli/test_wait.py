from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.progress import describe
from services.cli.wait import PATIENCE_S, SILENCE_S, Watch
from shared.config import Config, ModelSection, RunConfig
from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.messages import Pong

CONFIG = Config(Path("c.toml"), RunConfig("x", Path("/run/x")), ModelSection(Path("m")))


def pong(name, state="ready", detail=""):
    return Pong(name, "b", state, detail, 1, 1.0)


def answers(expertd=None, worker=None, front=None):
    return {"expertd": expertd, "worker": worker, "front": front}


READY = answers(pong("expertd"), pong("worker"), pong("front"))


def test_tells_changes_once_and_ends_when_all_are_ready():
    watch = Watch(CONFIG, 0.0, 60.0)
    loading = answers(pong("expertd", "starting", "3 of 9 files"))
    assert list(map(describe, watch.look(loading, 1.0))) == ["expertd: starting, 3 of 9 files"]
    assert watch.look(loading, 2.0) == []
    assert not watch.all_ready
    assert list(map(describe, watch.look(READY, 3.0))) == ["expertd: ready", "worker: ready", "front: ready"]
    assert watch.all_ready


def test_an_ended_service_is_fatal():
    watch = Watch(CONFIG, 0.0, 60.0)
    watch.look(answers(pong("expertd"), pong("worker", "starting", "layer 2")), 1.0)
    with pytest.raises(PeerLost, match=r"worker has ended \(it was worker: starting, layer 2\)"):
        watch.look(answers(pong("expertd")), 2.0)


def test_a_stopping_service_is_fatal():
    with pytest.raises(PeerLost, match="front is stopping"):
        Watch(CONFIG, 0.0, 60.0).look(answers(front=pong("front", "draining")), 1.0)


def test_silence_is_fatal_long_before_the_limit():
    watch = Watch(CONFIG, 100.0, 600.0)
    watch.look(answers(), 100.0 + SILENCE_S)
    with pytest.raises(PeerLost, match=r"no service answers in /run/x; start them with .* \(c\.toml\)"):
        watch.look(answers(), 100.1 + SILENCE_S)


def test_silence_of_some_is_not():
    watch = Watch(CONFIG, 0.0, 600.0)
    for second in range(0, 300, 5):
        watch.look(answers(pong("expertd")), float(second))


def test_the_limit_names_what_is_missing():
    watch = Watch(CONFIG, 0.0, 30.0)
    some = answers(replace(pong("expertd", "starting"), detail="file 3"), None, pong("front"))
    watch.look(some, 30.0)
    with pytest.raises(
        ServiceError, match=r"not ready within 30 s: expertd: starting, file 3; worker \(--timeout"
    ) as caught:
        watch.look(some, 30.1)
    assert caught.value.code is ErrorCode.TIMEOUT


def test_that_nobody_answers_is_said_once_and_soon():
    watch = Watch(CONFIG, 100.0, 600.0)
    assert [watch.is_alone(100.0 + PATIENCE_S + late) for late in (-0.1, 0.1, 0.2)] == [False, True, False]
    watch = Watch(CONFIG, 100.0, 600.0)
    watch.look(answers(pong("expertd", "starting")), 100.0)
    assert not watch.is_alone(110.0)
