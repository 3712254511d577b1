"""Configuration: what a file may say, and that every mistake in one is told with its file and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import (
    AUTO_BYTES,
    MAX_SOCKET_PATH,
    Config,
    default_config_path,
    gpu_ordinal,
    load_config,
    parse_bytes,
    under_honcho,
)
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = '[run]\nname = "test"\n[model]\npath = "model"\n'


@pytest.fixture
def load(tmp_path: Path):
    """Load a config from text."""

    def load(text: str) -> Config:
        path = tmp_path / "c.toml"
        path.write_text(text, encoding="utf-8")
        return load_config(path)

    return load


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_configs_of_the_project_load(path: Path) -> None:
    assert load_config(path).source == path


def test_a_minimal_file_has_defaults_and_paths_relative_to_itself(load, tmp_path: Path) -> None:
    config = load(MINIMAL)
    assert config.source == tmp_path / "c.toml"
    assert config.model.path == tmp_path / "model"
    assert (config.cache.bytes, config.cache.policy) == (AUTO_BYTES, "lfu-aged")
    assert (config.worker.device, config.reader.threads, config.front.max_queue) == ("cpu", 4, 64)


def test_a_relative_path_of_the_file_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.toml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    config = load_config("sub/c.toml")
    assert config.source == tmp_path / "sub" / "c.toml"
    assert config.model.path == tmp_path / "sub" / "model"


def test_everything_set(load) -> None:
    config = load(
        """
        [run]
        name = "big"
        dir = "/run/icebox/big"
        log_level = "debug"
        [model]
        path = "/models/v4"
        max_context = 32768
        [cache]
        bytes = "90 GB"
        policy = "lru"
        save_heat = false
        [reader]
        threads = 16
        direct = false
        verify = true
        [prefetch]
        hash_layers = false
        [worker]
        device = "cuda"
        threads = 8
        prefill_chunk = 64
        min_segment = 16
        session_bytes = "1 MiB"
        session_dir = "kept"
        session_disk_bytes = 5000
        max_queue = 1
        [front]
        max_queue = 2
        default_max_tokens = 3
        """
    )
    assert config.run_dir == Path("/run/icebox/big")
    assert config.endpoint("worker.control") == "ipc:///run/icebox/big/worker.control"
    assert config.cache.bytes == 90 * 10**9
    assert (config.worker.session_bytes, config.worker.session_disk_bytes) == (1 << 20, 5000)
    assert config.worker.session_dir == config.source.parent / "kept"
    assert (config.reader.verify, config.prefetch.hash_layers, config.worker.max_queue) == (True, False, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", "not valid TOML"),
        ("[model]", "[modell]\n[model]", r"unknown key 'modell' \(known here: cache, front, model, "),
        ("[model]", 'source = "x"\n[model]', "unknown key 'run.source'"),
        ("[run]", 'source = "x"\n[run]', "unknown key 'source'"),
        ('path = "model"', 'path = "model"\nmax_contxt = 1', "unknown key 'model.max_contxt'"),
        ('path = "model"', "", "missing key 'model.path'"),
        ('[model]\npath = "model"', "", r"missing table \[model\]"),
        ('[model]\npath = "model"', "[cache]", r"missing table \[model\]"),
        ("[run]", "cache = 3\n[run]", r"'cache' must be a table, written \[cache\]"),
        ('"test"', "7", "'run.name' must be text in quotes, not 7"),
        ('"test"', '""', "'run.name' must be 1 to 40"),
        ('"test"', '".."', "'run.name' must be 1 to 40"),
        ('"test"', '"a/b"', "'run.name' must be 1 to 40"),
        ('"test"', f'"{"x" * 41}"', "'run.name' must be 1 to 40"),
        ('"test"', '"test"\nlog_level = "loud"', "'run.log_level' must be one of debug, info, warning, error"),
        ('"test"', '"test"\ndir = 3', "'run.dir' must be a path"),
        ('"model"', "true", "'model.path' must be a path"),
        ('"model"', '""', "'model.path' must be a path"),
        ('"model"', r'"a\u0000b"', "'model.path' is not a usable path"),
        ('"model"', '"~nobody-of-that-name/x"', "'model.path' is not a usable path"),
        ('"model"', '"model"\nmax_context = 1', "'model.max_context' must be 2 to 100000000, not 1"),
        ('"model"', '"model"\nmax_context = 4096.0', r"'model.max_context' must be a whole number, not 4096\.0"),
        ('"model"', '"model"\nmax_context = true', "'model.max_context' must be a whole number, not True"),
    ],
)
def test_mistakes_name_file_and_key(load, tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(MINIMAL.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path}/c.toml: ")


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("cache", "bytes = 0", "'cache.bytes' must be a size"),
        ("cache", "bytes = -5", "'cache.bytes' must be a size"),
        ("cache", "bytes = true", "'cache.bytes' must be a size"),
        ("cache", "bytes = 1.5", "'cache.bytes' must be a size"),
        ("cache", "bytes = [1]", "'cache.bytes' must be a size"),
        ("cache", 'bytes = "64 MiX"', "'cache.bytes' must be a size"),
        ("cache", 'bytes = "99999999999 TiB"', "'cache.bytes' must be a size"),
        ("worker", 'session_bytes = "auto"', "'worker.session_bytes' must be a size such as \"64 MiB\", not 'auto'"),
        ("worker", "session_disk_bytes = -1", "'worker.session_disk_bytes' must be a size"),
        ("worker", 'session_dir = "x"\nsession_bytes = 0', "'worker.session_dir' must be left out where"),
        ("worker", 'session_dir = "x"\nsession_disk_bytes = 0', "'worker.session_dir' must be left out where"),
        ("worker", "min_segment = 0", "'worker.min_segment' must be 1 to"),
        ("cache", 'policy = "fifo"', "'cache.policy' must be one of lfu, lfu-aged, lru"),
        ("cache", "save_heat = 1", "'cache.save_heat' must be true or false"),
        ("reader", "threads = 0", "'reader.threads' must be 1 to 256"),
        ("reader", "threads = 257", "'reader.threads' must be 1 to 256"),
        ("reader", 'direct = "yes"', "'reader.direct' must be true or false"),
        ("worker", 'device = "tpu"', "'worker.device' must be cpu, cuda"),
        ("worker", 'device = "cuda:"', "'worker.device' must be cpu, cuda"),
        ("worker", 'device = "cuda:-1"', "'worker.device' must be cpu, cuda"),
        ("worker", 'device = "cpu:0"', "'worker.device' must be cpu, cuda"),
        ("worker", "threads = -1", "'worker.threads' must be 0"),
        ("worker", "threads = 1025", "'worker.threads' must be 0"),
        ("worker", "prefill_chunk = 0", "'worker.prefill_chunk' must be 1 to 65535"),
        ("worker", "prefill_chunk = 65536", "'worker.prefill_chunk' must be 1 to 65535"),
        ("worker", "max_queue = 0", "'worker.max_queue' must be 1 to"),
        ("front", "max_queue = 0", "'front.max_queue' must be 1 to"),
        ("worker", "min_segment = 1000000000000", "'worker.min_segment' must be 1 to 100000000, not 1000000000000"),
        ("front", f"request_timeout_s = {10**18}", "'front.request_timeout_s' must be 1 to 100000000"),
        ("front", f"request_timeout_s = {10**400}", "'front.request_timeout_s' has more than the 64 bits"),
        ("front", f"http_port = {-(2**63) - 1}", "'front.http_port' has more than the 64 bits"),
        ("cache", f"bytes = [1, {2**63}]", "'cache.bytes' has more than the 64 bits"),
        ("cache", f"bytes{'.x' * 3000} = 1", r"'cache.bytes' must be a size .* not \{'x': .*\.\.\."),
        ("cache", f"bytes = '{'9' * 5000} GB'", "'cache.bytes' must be a size"),
        ("front", "default_max_tokens = 0", "'front.default_max_tokens' must be 1 to"),
    ],
)
def test_values_out_of_range(load, section: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"{MINIMAL}[{section}]\n{line}\n")


@pytest.mark.parametrize(("device", "ordinal"), [("cpu", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:7", 7)])
def test_devices_and_the_gpu_they_mean(load, device: str, ordinal: int) -> None:
    config = load(f'{MINIMAL}[worker]\ndevice = "{device}"\n')
    assert (config.worker.device, gpu_ordinal(config.worker.device)) == (device, ordinal)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot read this config file \(No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"cannot read this config file \(Is a directory"):
        load_config(tmp_path)
    for content in (b'name = "\xff"', b"x = 1" + b"0" * 5000, b"x = " + b"[" * 5000):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
            load_config(tmp_path / "bad.toml")


def test_a_run_directory_too_long_for_sockets(load) -> None:
    room = MAX_SOCKET_PATH - len("/expertd.control")
    fits = "/" + "x" * (room - 1)
    assert str(load(MINIMAL.replace('"test"', f'"test"\ndir = "{fits}"')).run_dir) == fits
    with pytest.raises(ConfigError, match=r"too long for a socket path; set run\.dir"):
        load(MINIMAL.replace('"test"', f'"test"\ndir = "{fits}x"'))


def test_the_run_directory_by_default(load, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(MINIMAL)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert config.run_dir == Path("/run/user/7/icebox/test")
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert config.run_dir == Path(f"/scratch/icebox-{os.getuid()}/test")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert config.run_dir == Path(f"/scratch/icebox-{os.getuid()}/test")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONCHO_PROCESS_NAME", raising=False)
    monkeypatch.delenv("ICEBOX_CONFIG", raising=False)
    assert not under_honcho()
    assert default_config_path() == Path("configs/demo.toml")
    monkeypatch.setenv("HONCHO_PROCESS_NAME", "worker.1")
    monkeypatch.setenv("ICEBOX_CONFIG", "/etc/icebox.toml")
    assert under_honcho()
    assert default_config_path() == Path("/etc/icebox.toml")


@pytest.mark.parametrize(
    ("front", "complaint"),
    [
        ('http_host = "0.0.0.0"', r"front\.http_host = '0\.0\.0\.0' lets other machines in, so 'front\.api_key'"),
        ('http_host = "box.example"', "lets other machines in"),
        ('http_host = "::"', "lets other machines in"),
        ('api_key = "two words"', "'front.api_key' must be of printable ASCII letters"),
        ('api_key = "schlüssel"', "'front.api_key' must be of printable ASCII letters"),
        ("request_timeout_s = 0", r"'front\.request_timeout_s' must be 1 to"),
        ("max_body_bytes = 0", r"'front\.max_body_bytes' must be 1 to"),
    ],
)
def test_the_front_is_not_opened_by_mistake(load, front: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(f"{MINIMAL}[front]\nhttp_port = 0\n{front}\n")
    assert "schl" not in str(caught.value)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_ports_have_sixteen_bits(load, port: int) -> None:
    with pytest.raises(ConfigError, match=r"'front\.http_port' must be 0 to 65535"):
        load(f"{MINIMAL}[front]\nhttp_port = {port}\n")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(load, host: str) -> None:
    assert load(f'{MINIMAL}[front]\nhttp_port = 0\nhttp_host = "{host}"\n').front.api_key == ""


@pytest.mark.parametrize("front", ['http_host = "0.0.0.0"', 'http_port = 1\nhttp_host = "::"\napi_key = "k"'])
def test_other_addresses_need_a_key_or_no_port(load, front: str) -> None:
    assert load(f"{MINIMAL}[front]\n{front}\n").front.http_host


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64 MiB", 64 << 20),
        ("64mib", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("90 GB", 90 * 10**9),
        ("1 b", 1),
        ("0.1 KB", 100),
        ("9007199254740993 B", 9007199254740993),
        ("2 tib", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "1,5 GB", "1 MiB 2", "1 M", "\u0661", "inf", "1.", ".5", "0x10", "9" * 5000]
)
def test_what_is_no_size(text: str) -> None:
    assert parse_bytes(text) is None


@given(st.text())
def test_any_text_is_a_size_or_none(text: str) -> None:
    size = parse_bytes(text)
    assert size is None or size >= 0


@given(st.integers(0, 2**80), st.sampled_from(["", " B", "kib", " MiB", "GB", " TB"]))
def test_large_sizes_are_exact(number: int, unit: str) -> None:
    size = parse_bytes(f"{number}{unit}")
    assert size is not None
    assert number == 0 or size % number == 0
