"""Who may come in."""

import pytest
from starlette.datastructures import Headers

from services.front.http.errors import HttpError
from services.front.http.guard import Guard

KEY = "s3cret"


def check(path="/v1/models", api_key=KEY, **headers):
    """The status of the refusal, or None."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        Guard(None, api_key, None).check(path, Headers({"host": "127.0.0.1:8000"} | named))
    except HttpError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, None),
        ({"authorization": f"bearer  {KEY} "}, None),
        ({"x_api_key": KEY}, None),
        ({}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer \u00e9"}, 401),
        ({"x_api_key": ""}, 401),
    ],
)
def test_the_key(headers, status):
    assert check(**headers) == status


def test_no_key_is_needed_where_none_is_set():
    assert check(api_key="") is None
    assert check(api_key="", authorization="Bearer whatever clients send") is None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", None), ("/health", None), ("/page/page.css", None), ("/page", 401), ("/healthy", 401), ("/metrics", 401)],
)
def test_what_needs_no_key(path, status):
    assert check(path) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", None),
        ("127.0.0.1", None),
        ("127.1.2.3:99", None),
        ("[::1]:8000", None),
        ("", None),
        ("evil.example:8000", 403),
        ("192.168.0.7:8000", 403),
        ("[::2", 403),
    ],
)
def test_without_a_key_only_names_of_this_machine_count(host, status):
    assert check(api_key="", host=host) == status


def test_with_a_key_any_name_counts():
    assert check(host="box.example:8000", x_api_key=KEY) is None


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", None),
        ("http://127.0.0.1:9000", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_sites_stay_out(origin, status):
    assert check(api_key="", origin=origin) == status
    assert check(x_api_key=KEY, origin=origin) == status
