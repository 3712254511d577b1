"""The calling side of a socket in two versions with the same behaviour, for a thread and for an event loop.

An ErrorReply is raised as ServiceError. When the peer goes away everything pending fails with PeerLost, and so does
every later call until `connect`. The boot_id of its Welcome tells whether the same process is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable

import zmq

from shared.errors import ErrorCode, PeerLost, ServiceError
from shared.protocol.codec import is_final, spec_of
from shared.protocol.messages import PROTOCOL_VERSION, Cancel, ErrorReply, Hello, Welcome
from shared.runtime.boot import Identity
from shared.transport.link import Link
from shared.transport.sockets import ONE_WAY_ID, descriptor, poll_ms

# Between two attempts to reach a service that is not there yet.
RETRY_S = 0.05

# reply -> whether more of them are wanted
Take = Callable[[object], bool]


class BlockingClient:
    """One thread's connection to a service. Requests may overlap; replies are taken by `finish` or `poll`."""

    def __init__(self, endpoint: str, identity: Identity) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._ids = itertools.count(1)
        self._pending: set[int] = set()
        self._inbox: deque[tuple[int, object]] = deque()
        self._link: Link | None = None
        self._poller = zmq.Poller()

    def connect(self, timeout_s: float) -> Welcome:
        """Reach the service, however long it takes to appear, and greet it.

        Raises:
            PeerLost: no Welcome within `timeout_s`.
            ServiceError: it speaks another version of the protocol.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._greet(deadline)
            except PeerLost:
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                time.sleep(RETRY_S)

    def close(self) -> None:
        """Hang up; pending requests are cancelled by the service. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._pending.clear()
        self._inbox.clear()

    def call(self, msg: object, timeout_s: float) -> object:
        """Send a request and wait for its final reply."""
        return self.finish(self.start(msg), timeout_s)

    def start(self, msg: object) -> int:
        """Send a request; its id is for `finish`, `poll`, `cancel` and `forget`.

        Raises:
            PeerLost: there is no connection.
            ServiceError: no_capacity, the service does not read.
        """
        assert spec_of(msg).is_request, f"{type(msg).__name__} is not a request"
        request_id = next(self._ids)
        self._connected().send(request_id, msg)
        self._pending.add(request_id)
        return request_id

    def send(self, msg: object) -> None:
        """Send a one-way message."""
        assert spec_of(msg).one_way, f"{type(msg).__name__} is not one-way"
        self._connected().send(ONE_WAY_ID, msg)

    def finish(self, request_id: int, timeout_s: float) -> object:
        """Wait for the final reply; parts of a stream before it are dropped.

        Raises:
            ServiceError: the reply is an ErrorReply; or `timeout`, and then the request is cancelled and forgotten.
            PeerLost: the service went away.
        """
        deadline = time.monotonic() + timeout_s
        if (found := self._take(request_id)) is not None:
            return _result(found)
        while True:
            if self._connected().is_lost:
                raise self._connected().lost()
            assert request_id in self._pending, f"request {request_id} is not pending"
            if not self._wait(deadline):
                self._abandon(request_id)
                raise ServiceError(ErrorCode.TIMEOUT, f"no reply from {self._endpoint} within {timeout_s:g} s")
            if (found := self._take(request_id)) is not None:
                return _result(found)

    def poll(self, timeout_s: float) -> tuple[int, object] | None:
        """The next reply of any request, an ErrorReply included; None if none comes in time.

        Raises:
            PeerLost: the service went away; this is how an idle caller learns of it.
        """
        deadline = time.monotonic() + timeout_s
        while not self._inbox:
            if not self._wait(deadline):
                return None
        return self._inbox.popleft()

    def cancel(self, request_id: int) -> None:
        """Ask for an early end; the request still gets its final reply."""
        if request_id in self._pending:
            self._connected().send(ONE_WAY_ID, Cancel(request_id))

    def forget(self, request_id: int) -> None:
        """Drop the replies of this request, those to come included. The service goes on with it."""
        self._pending.discard(request_id)
        self._inbox = deque(event for event in self._inbox if event[0] != request_id)

    def _greet(self, deadline: float) -> Welcome:
        self.close()
        self._link = Link(self._endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(self._link.monitor, zmq.POLLIN)
        while not self._link.is_connected:
            if not self._wait(deadline):
                self.close()
                raise self._link.lost()
        hello = Hello(PROTOCOL_VERSION, self._identity.service, self._identity.boot_id)
        try:
            welcome = self.call(hello, max(0.0, deadline - time.monotonic()))
        except ServiceError as error:
            self.close()
            if error.code is ErrorCode.TIMEOUT:
                raise PeerLost(
                    f"the service at {self._endpoint} accepts connections but does not say Welcome"
                ) from None
            raise
        assert isinstance(welcome, Welcome)
        return welcome

    def _connected(self) -> Link:
        if self._link is None:
            raise PeerLost(f"not connected to {self._endpoint}")
        return self._link

    def _wait(self, deadline: float) -> bool:
        """Take in what arrives next; False if nothing does in time. Raises PeerLost when all replies are read."""
        link = self._connected()
        if link.is_lost:
            raise link.lost()
        ready = self._poller.poll(poll_ms(deadline))
        if any(source is link.monitor for source, _ in ready) and link.update():
            for reply in link.receive():
                self._deliver(*reply)
            self._lose(link)
        elif (event := next(link.receive(), None)) is not None:
            self._deliver(*event)
        return bool(ready)

    def _deliver(self, request_id: int, msg: object) -> None:
        if request_id in self._pending:
            self._inbox.append((request_id, msg))
            if is_final(msg):
                self._pending.discard(request_id)

    def _take(self, request_id: int) -> object | None:
        """The final reply of this request, if it has arrived; parts of a stream before it are dropped."""
        mine = [msg for i, msg in self._inbox if i == request_id]
        if not mine:
            return None
        self._inbox = deque(event for event in self._inbox if event[0] != request_id)
        return mine[-1] if is_final(mine[-1]) else None

    def _abandon(self, request_id: int) -> None:
        with contextlib.suppress(ServiceError):  # the time-out is the news
            self.cancel(request_id)
        self.forget(request_id)

    def _lose(self, link: Link) -> None:
        link.close()
        self._pending.clear()
        if not self._inbox:
            raise link.lost()


def _result(reply: object) -> object:
    if isinstance(reply, ErrorReply):
        raise service_error(reply)
    return reply


def service_error(reply: ErrorReply) -> ServiceError:
    """The exception for an error reply; a code of a newer version is `internal`."""
    known = reply.code in list(ErrorCode)
    return ServiceError(ErrorCode(reply.code) if known else ErrorCode.INTERNAL, reply.detail)


class AsyncClient:
    """An event loop's connection to a service: any number of overlapping calls and streams.

    Works on any asyncio loop: the sockets' descriptors are watched by the loop, and read until they are empty.
    """

    def __init__(self, endpoint: str, identity: Identity) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        """As `BlockingClient.connect`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self._greet(deadline)
            except PeerLost:
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_connected and not self._link.is_lost

    async def call(self, msg: object, timeout_s: float) -> object:
        """Send a request and wait for its final reply; on time-out it is cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._request(msg, lambda _: True)
        except TimeoutError:
            text = f"no reply from {self._endpoint} to {type(msg).__name__} within {timeout_s:g} s"
            raise ServiceError(ErrorCode.TIMEOUT, text) from None

    async def stream(self, msg: object, take: Take) -> None:
        """Send a request and hand its replies to `take`, the final one last, until `take` wants no more.

        The loop calls `take` as soon as a reply is there: a task would have to be woken first. What it raises is
        raised here. The request is cancelled if this ends before the final reply, however it ends.
        """
        await self._request(msg, take)

    def send(self, msg: object) -> None:
        """Send a one-way message."""
        assert spec_of(msg).one_way, f"{type(msg).__name__} is not one-way"
        self._send(ONE_WAY_ID, msg)

    async def is_lost_within(self, seconds: float) -> bool:
        """Whether the connection, which there must be, is lost within this time; at once if it is."""
        try:
            await asyncio.wait_for(self._lost.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Hang up; whatever is pending fails with PeerLost. Idempotent."""
        if self._link is not None and self._loop is not None and not self._link.socket.closed:
            self._loop.remove_reader(descriptor(self._link.socket))
            self._loop.remove_reader(descriptor(self._link.monitor))
            self._link.close()
        for pending in self._pending.values():
            pending.fail(PeerLost(f"the service at {self._endpoint} went away"))
        self._pending.clear()
        self._changed.set()
        self._lost.set()

    async def _greet(self, deadline: float) -> Welcome:
        self.close()
        link = self._link = Link(self._endpoint)
        self._lost.clear()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor(link.socket), self._deliver, link)
        self._loop.add_reader(descriptor(link.monitor), self._pump)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._until_connected(link)
                hello = Hello(PROTOCOL_VERSION, self._identity.service, self._identity.boot_id)
                welcome = await self.call(hello, 1e9)
        except TimeoutError:
            self.close()
            raise link.lost() from None
        except BaseException:
            self.close()
            raise
        assert isinstance(welcome, Welcome)
        return welcome

    async def _until_connected(self, link: Link) -> None:
        self._pump()
        while not link.is_connected:
            if link.is_lost:
                raise link.lost()
            self._changed.clear()
            await self._changed.wait()

    def _connected(self) -> Link:
        if self._link is None:
            raise PeerLost(f"not connected to {self._endpoint}")
        return self._link

    async def _request(self, msg: object, take: Take) -> object:
        """The last reply that was taken."""
        assert spec_of(msg).is_request, f"{type(msg).__name__} is not a request"
        request_id = next(self._ids)
        pending = self._pending[request_id] = _Pending(take)
        try:
            self._send(request_id, msg)
            return await pending.last
        finally:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        """Forget a request, and cancel it if its final reply has not come."""
        if self._pending.pop(request_id, None) is not None:
            with contextlib.suppress(ServiceError):  # a peer that is gone or stuck has nothing to cancel
                self.send(Cancel(request_id))

    def _send(self, request_id: int, msg: object) -> None:
        try:
            self._connected().send(request_id, msg)
        finally:
            self._pump()  # sending may have consumed the wake-up for what has arrived, or for the loss

    def _pump(self) -> None:
        """Take note of connection and loss, and deliver everything that came before."""
        link = self._connected()
        link.update()
        self._deliver(link)
        self._changed.set()
        if link.is_lost:
            self.close()

    def _deliver(self, link: Link) -> None:
        """Everything that has arrived: the descriptor only tells when something changes."""
        for request_id, msg in link.receive():
            if (pending := self._pending.get(request_id)) is not None:
                final = is_final(msg)
                if final:
                    del self._pending[request_id]
                pending.give(msg, final)


class _Pending:
    """A request whose final reply has not come: who takes its replies, and the future that its caller awaits."""

    __slots__ = ("_take", "last")

    def __init__(self, take: Take) -> None:
        self._take = take
        self.last: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def give(self, reply: object, final: bool) -> None:
        """Nobody is called any more once the waiting is over."""
        if self.last.done():
            return
        try:
            wants_more = self._take(_result(reply))
        except Exception as error:  # told to who waits
            self.last.set_exception(error)
            return
        if final or not wants_more:
            self.last.set_result(reply)

    def fail(self, error: PeerLost) -> None:
        if not self.last.done():
            self.last.set_exception(error)
