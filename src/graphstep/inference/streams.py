"""What a request gets, token by token, for those who wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from graphstep.inference.requests import Output, Request


class TokenStream(Iterator[Output]):
    """Yields the outputs of one request. Whoever stops early closes it, which cancels the request.

    Args:
        request: whose outputs these are.
        advance: computes a step; called while there is nothing to yield.
        leave: called once, when the stream ends or is closed.
    """

    def __init__(self, request: Request, advance: Callable[[], object], leave: Callable[[Request], None]) -> None:
        self.request = request
        self._advance = advance
        self._leave = leave
        self._outputs: deque[Output] = deque()
        self._is_closed = False

    def put(self, output: Output) -> None:
        """Add what a step gave to the request."""
        self._outputs.append(output)

    def __next__(self) -> Output:
        if self._is_closed:
            raise StopIteration
        while not self._outputs:
            self._advance()
        output = self._outputs.popleft()
        if output.finish_reason is not None:
            self.close()
        return output

    def close(self) -> None:
        """End it, and the request with it if that is not finished. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._leave(self.request)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
