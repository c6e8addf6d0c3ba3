"""What waits for what while batches come from the host: told from the calls, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.capture import host_inputs
from graphstep.capture.host_inputs import HostInputs


class Streams:
    """Stands for ``torch.cuda``: streams and events that note what comes before what, and run nothing."""

    def __init__(self) -> None:
        self.main = Stream()
        self.now = self.main
        self.before: dict[str, frozenset[str]] = {}
        """What is done when an operation begins, on whichever stream."""

    def run(self, name: str) -> None:
        self.before[name] = self.now.done
        self.now.done |= {name}

    def Stream(self, device: torch.device) -> Stream:  # As in torch.
        return Stream()

    def Event(self) -> Event:
        return Event()

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outside, self.now = self.now, stream
        yield
        self.now = outside


class Stream:
    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: Event) -> None:
        self.done |= event.done


class Event:
    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.done = stream.done


class Copies(TorchDispatchMode):
    """Notes copies on the stream they are started on."""

    def __init__(self, streams: Streams, static: Tensor) -> None:
        super().__init__()
        self._streams = streams
        self._static = static
        self.number = 0
        self.places: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._streams.run(f"batch {self.number} arrives")
            self.places[f"batch {self.number}"] = args[0].data_ptr()
        elif func is torch.ops.aten._foreach_copy_.default:
            assert args[0][0].data_ptr() == self._static.data_ptr()
            assert args[1][0].data_ptr() == self.places[f"batch {self.number}"]
            self._streams.run(f"batch {self.number} is taken")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(host_inputs.torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    return found


def test_a_batch_arrives_beside_the_graph_of_the_one_before(streams: Streams) -> None:
    static = torch.zeros(4)
    streams.run("what was there before")
    inputs = HostInputs([static])
    with Copies(streams, static) as copies:
        for number in range(6):
            copies.number = number
            inputs.load([torch.full((4,), float(number))])
            assert torch.equal(static, torch.full((4,), float(number)))
            streams.run(f"graph {number}")
    for number in range(6):
        arrives, taken = streams.before[f"batch {number} arrives"], streams.before[f"batch {number} is taken"]
        assert "what was there before" in arrives, "whose memory the staging places may have"
        assert f"batch {number} arrives" in taken
        assert number == 0 or f"graph {number - 1}" in taken, "it reads the batch that is overwritten"
        assert f"batch {number} is taken" in streams.before[f"graph {number}"]
        # Two graphs may be still to run: only who has read the same place before is waited for.
        assert not {f"graph {number - 1}", f"graph {number - 2}", f"batch {number - 1} is taken"} & arrives
        assert number < 2 or f"batch {number - 2} is taken" in arrives
    assert len(set(copies.places.values())) == 2
