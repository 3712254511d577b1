import asyncio

import pytest

from services.front.buffer import MAX_UNREAD, EventBuffer
from services.front.generation import (
    Finished,
    Queued,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallDone,
    Usage,
)
from shared.errors import ErrorCode, ServiceError

A, B = TokenLogprob(b"a", -1.0), TokenLogprob(b"b", -2.0, ((b"b", -2.0),))


def drain(buffer):
    async def all_of_them():
        events = []
        while some := await buffer.take():
            events += some
        return events

    return asyncio.run(all_of_them())


def filled(*events):
    buffer = EventBuffer()
    for event in events:
        buffer.put(event)
    buffer.close()
    return buffer


@pytest.mark.parametrize(
    ("put", "got"),
    [
        ([TextDelta("a", (A,)), TextDelta("b", (B,))], [TextDelta("ab", (A, B))]),
        ([ReasoningDelta("a"), ReasoningDelta("b")], [ReasoningDelta("ab")]),
        ([Queued(3), Queued(2)], [Queued(2)]),
        ([ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c")],) * 2,
        ([Queued(1), Started(3, 0), TextDelta("a")],) * 2,
        (
            [ToolCallDelta(0, "", "call_0", "f"), ToolCallDelta(0, "{"), ToolCallDelta(0, "}")],
            [ToolCallDelta(0, "{}", "call_0", "f")],
        ),
        ([ToolCallDelta(0, "{}"), ToolCallDone(0, "{}"), ToolCallDelta(1, "{}", "call_1", "f")],) * 2,
        ([TextDelta("a"), Finished("stop", Usage())],) * 2,
    ],
)
def test_neighbours_of_one_kind_join(put, got):
    assert drain(filled(*put)) == got


def test_an_error_comes_after_what_was_put_before_it():
    async def read():
        buffer = EventBuffer()
        buffer.put(TextDelta("a"))
        buffer.fail(ServiceError(ErrorCode.IO_ERROR, "gone"))
        assert await buffer.take() == [TextDelta("a")]
        with pytest.raises(ServiceError, match="gone"):
            await buffer.take()

    asyncio.run(read())


def test_what_comes_after_the_end_is_dropped():
    buffer = filled(TextDelta("a"))
    buffer.put(TextDelta("b"))
    assert drain(buffer) == [TextDelta("a")]


def test_a_reader_waits_for_news():
    async def read():
        buffer = EventBuffer()
        reader = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        assert not reader.done()
        buffer.put(Started(3, 0))
        buffer.put(TextDelta("a"))
        assert await reader == [Started(3, 0), TextDelta("a")]
        reader = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        buffer.close()
        assert await reader == []

    asyncio.run(read())


def test_it_says_when_it_is_full_and_reading_empties_it():
    async def read():
        buffer = EventBuffer()
        buffer.put(TextDelta("x" * MAX_UNREAD))
        assert not buffer.is_full
        buffer.put(TextDelta("x", (B,)))
        assert buffer.is_full
        await buffer.take()
        assert not buffer.is_full

    asyncio.run(read())
