"""Simulated processes, and connections between them in memory, which fail at any frame.

A frame passes three steps: it is `sent` (a connection that is cut here loses it), it `arrives`, and it is
`handled`. The function `on_step` is called at each of them. It may cut connections, or stop and kill
processes.
"""

from collections import deque
from math import inf

import trio


class Process:
    """What can be stopped for a time. Tasks of a stopped process run on, but send and receive nothing."""

    def __init__(self, name):
        self.name = name
        self.is_alive = True
        self.on_send = lambda kind: None  # called before each frame that it sends while it runs
        self.scope = trio.CancelScope()
        self._continued = trio.Event()
        self._continued.set()
        self._delayed = []

    @property
    def is_stopped(self):
        return not self._continued.is_set()

    async def running(self):
        """Wait until it is not stopped."""
        while self.is_stopped:
            await self._continued.wait()

    def post(self, action):
        """Do something in the process: now, or when it continues."""
        if self.is_stopped:
            self._delayed.append(action)
        elif self.is_alive:
            action()

    def stop(self):
        if not self.is_stopped:
            self._continued = trio.Event()

    def resume(self):
        if self.is_stopped:
            self._continued.set()
            delayed, self._delayed = self._delayed, []
            for action in delayed:
                self.post(action)

    def kill(self):
        self.is_alive = False
        self.scope.cancel()
        self._delayed = []
        self._continued.set()


class Connection:
    """Two streams: `ours` of the process that connected, `theirs` of the other one."""

    def __init__(self, on_step, ours, theirs):
        self.on_step = on_step
        self.delay_s = 0.0
        self.is_cut = False
        self.is_deaf = False  # nothing gets through, and neither side notices
        self.ours, self.theirs = Stream(self, ours), Stream(self, theirs)
        self.ours.peer, self.theirs.peer = self.theirs, self.ours

    def cut(self):
        """End it, with all that is under way."""
        self.is_cut = True
        for stream in (self.ours, self.theirs):
            stream.inbox.clear()
            stream.end()

    def end_of(self, stream):
        """End it as the death of one side does: what that has sent is still received."""
        self.is_cut = True
        stream.inbox.clear()
        stream.end()
        stream.peer.end()


class Stream(trio.abc.Stream):
    """One end. A read returns one frame."""

    def __init__(self, connection, process):
        self.connection = connection
        self.process = process
        self.inbox = deque()
        self.closed_at = inf
        self._is_closed = False
        self._has_ended = False
        self._lot = trio.lowlevel.ParkingLot()
        self._handling = None

    def end(self):
        """The peer has closed."""
        self._has_ended = True
        self._lot.unpark_all()

    async def send_all(self, data):
        if not self.process.is_stopped:
            for frame in frames(bytes(data)):
                self.process.on_send(kind_of(frame))
        await trio.lowlevel.checkpoint()
        await self.process.running()
        for frame in frames(bytes(data)):
            if self._is_closed:
                raise trio.ClosedResourceError
            self.connection.on_step(kind_of(frame), "sent")
            if self.connection.is_cut:
                raise trio.BrokenResourceError
            self.peer.put(frame)

    def put(self, frame):
        if not self.connection.is_deaf and not self._is_closed:
            self.inbox.append((trio.current_time() + self.connection.delay_s, frame))
            self._lot.unpark_all()

    async def receive_some(self, max_bytes=None):
        await trio.lowlevel.checkpoint()
        if self._handling is not None:
            kind, self._handling = self._handling, None
            self.connection.on_step(kind, "handled")
        while True:
            await self.process.running()
            if self._is_closed:
                raise trio.ClosedResourceError
            if self.inbox:
                entry = due_at, frame = self.inbox[0]
                if due_at > trio.current_time():
                    await trio.sleep_until(due_at)
                    continue
                self.connection.on_step(kind_of(frame), "arrives")
                if self.process.is_stopped or not self.inbox or self.inbox[0] is not entry:
                    continue
                self.inbox.popleft()
                self._handling = kind_of(frame)
                return frame
            if self._has_ended:
                return b""
            await self._lot.park()

    async def aclose(self):
        if not self._is_closed:
            self._is_closed = True
            self.closed_at = trio.current_time()
            self._lot.unpark_all()
            self.process.post(self._end_peer)
        await trio.lowlevel.checkpoint()

    def _end_peer(self):
        if not self.connection.is_deaf:
            self.peer.end()

    async def wait_send_all_might_not_block(self):
        await trio.lowlevel.checkpoint()


def frames(data):
    """Return the frames in data that consists of whole ones."""
    found, start = [], 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "little")
        found.append(data[start:end])
        start = end
    return found


def kind_of(frame):
    """Return the tag of a message: the first element of an array, a short string."""
    return frame[6 : 6 + (frame[5] & 0x1F)].decode()
