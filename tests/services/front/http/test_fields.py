import math

import pytest

from services.front.chat.messages import ChatError
from services.front.http.fields import Fields

BODY = Fields(
    {
        "n": 3,
        "zero": 0,
        "x": 0.5,
        "t": "text",
        "yes": True,
        "null": None,
        "list": ["a", ""],
        "rows": [{"a": 1}, 2],
        "nan": math.nan,
    }
)


def test_reads_what_is_there():
    assert (BODY.whole("n", None, 1), BODY.number("n", 1.0, 0, 5), BODY.share("x", 1.0)) == (3, 3.0, 0.5)
    assert (BODY.text("t"), BODY.flag("yes", False), BODY.choice("t", ("text", "other"))) == ("text", True, "text")
    assert Fields({"stop": ["a", "b"]}).texts("stop") == ("a", "b")
    assert next(BODY.tables("rows")).whole("a", None, 0) == 1


@pytest.mark.parametrize("key", ["null", "missing"])
def test_null_counts_as_missing(key):
    assert not BODY.has(key)
    assert (BODY.whole(key, 7, 1), BODY.number(key, 0.5, 0, 1), BODY.text(key, "d")) == (7, 0.5, "d")
    assert (BODY.flag(key, True), BODY.items(key), BODY.texts(key), list(BODY.tables(key))) == (True, [], (), [])
    assert BODY.table(key).values == {}
    with pytest.raises(ChatError, match=f"^{key} is missing"):
        BODY.text(key)


@pytest.mark.parametrize(
    ("read", "complaint"),
    [
        (lambda f: f.whole("x", 1, 0), "a.n.x must be a whole number, not a number"),
        (lambda f: f.whole("yes", 1, 0), "a.n.yes must be a whole number, not true or false"),
        (lambda f: f.whole("n", 1, 4), "a.n.n must be 4 to 2147483647, not 3"),
        (lambda f: f.number("yes", 1, 0, 1), "a.n.yes must be a number, not true or false"),
        (lambda f: f.number("nan", 1, 0, 1), "a.n.nan must be 0 to 1, not nan"),
        (lambda f: f.number("n", 1, 0, 1), "a.n.n must be 0 to 1, not 3"),
        (lambda f: f.share("zero", 1), "a.n.zero must be above 0"),
        (lambda f: f.share("n", 1), "a.n.n must be 0 to 1, not 3"),
        (lambda f: f.text("n"), "a.n.n must be text, not a number"),
        (lambda f: f.flag("n", True), "a.n.n must be true or false, not a number"),
        (lambda f: f.choice("t", ("one", "two")), "a.n.t must be one of one, two, not 'text'"),
        (lambda f: f.items("t"), "a.n.t must be a list, not text"),
        (lambda f: f.texts("list"), r"a.n.list\[1\] must be a text of at least one character"),
        (lambda f: list(f.tables("rows")), r"a.n.rows\[1\] must be an object, not a number"),
        (lambda f: f.table("list"), "a.n.list must be an object, not a list"),
    ],
)
def test_complaints_name_the_field(read, complaint):
    with pytest.raises(ChatError, match=f"^{complaint}"):
        read(Fields(BODY.values, "a.n"))


@pytest.mark.parametrize("body", [None, [], "text", 3, True])
def test_a_body_is_an_object(body):
    with pytest.raises(ChatError, match="the body must be an object"):
        Fields(body)
