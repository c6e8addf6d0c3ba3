"""What a client is told when a request is refused or fails."""

from __future__ import annotations

from typing import Any, Final

from graphstep.errors import GraphstepError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(GraphstepError, RuntimeError):
    """An answer that is an error, in the form of OpenAI's interface.

    Args:
        status: of the HTTP answer, where that has not begun yet.
        what: for a person.
        param: the field at fault.
        code: for a program.
    """

    def __init__(self, status: int, what: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what, where=param or "")
        self.status = status
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.status, self.what, self.param, self.code))

    def body(self) -> dict[str, Any]:
        """Return the JSON object that tells a client."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.what, "type": kind, "param": self.param, "code": self.code}}


def _rebuild(status: int, what: str, param: str | None, code: str | None) -> ApiError:
    return ApiError(status, what, param=param, code=code)
