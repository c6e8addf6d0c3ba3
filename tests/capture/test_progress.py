"""The progress bar of a capture: seen on a terminal, by one rank, and gone afterwards."""

from __future__ import annotations

import io
import threading

import pytest
import torch.distributed
from rich.console import Console
from rich.live import Live

from graphstep.capture.progress import CaptureProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(width: int = 100) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        _environ={"TERM": "xterm"},
        force_jupyter=False,
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphstep.capture.progress.MIN_SECONDS_BETWEEN_FRAMES", 0.0)


@pytest.mark.usefixtures("every_frame")
def test_it_shows_count_region_and_memory() -> None:
    console = terminal()
    with CaptureProgress(3, enabled=True, console=console) as progress:
        assert progress.is_shown
        assert "0/3" in written(console)
        progress.advance("layers.0", 512 * 2**20)
        progress.advance("layers.1[red]")
    text = written(console)
    for part in ("capturing", "1/3", "layers.0", "512 MiB", "2/3", "layers.1[red]"):
        assert part in text
    assert "512 MiB" in text.split("2/3")[1], "the memory that was said last is still shown"


def test_it_is_gone_afterwards() -> None:
    console = terminal()
    with CaptureProgress(1, enabled=True, console=console) as progress:
        progress.advance("layers.0")
    assert not progress.is_shown
    assert written(console).endswith("\x1b[1A\x1b[2K"), "the line is erased"
    before = written(console)
    progress.advance("layers.1")
    assert written(console) == before


@pytest.mark.usefixtures("every_frame")
def test_a_long_name_stays_on_its_line() -> None:
    console = terminal(width=60)
    with CaptureProgress(2, enabled=True, console=console) as progress:
        progress.advance("model.decoder." + "block." * 20 + "mlp")
        assert written(console).count("\n") == 0


def test_frames_are_few() -> None:
    console = terminal()
    with CaptureProgress(10_000, enabled=True, console=console) as progress:
        for number in range(500):
            progress.advance(f"layers.{number}")
    assert written(console).count("capturing") < 100


def test_an_error_ends_it() -> None:
    console = terminal()
    progress = CaptureProgress(2, enabled=True, console=console)
    with pytest.raises(ValueError, match="in the capture"), progress:
        raise ValueError("in the capture")
    assert not progress.is_shown
    assert written(console).endswith("\x1b[1A\x1b[2K")


def test_it_starts_no_thread() -> None:
    before = threading.active_count()
    with CaptureProgress(2, enabled=True, console=terminal()):
        assert threading.active_count() == before


@pytest.mark.parametrize("enabled", [None, True, False])
def test_nothing_is_written_to_a_file(enabled: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    for where in (console, None):
        with CaptureProgress(2, enabled=enabled, console=where) as progress:
            progress.advance("layers.0", 1)
            assert not progress.is_shown
    assert written(console) == ""
    assert capsys.readouterr() == ("", "")


def test_forced_colours_do_not_make_a_file_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with CaptureProgress(2) as progress:
        progress.advance("layers.0")
    assert capsys.readouterr() == ("", "")


def test_by_default_it_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with CaptureProgress(2) as progress:
        progress.advance("layers.0")
    assert "layers.0" in stderr.getvalue()


@pytest.mark.parametrize("state", ["closed", "none", "dumb"])
def test_a_standard_error_that_cannot_show_it(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal() if state == "dumb" else io.StringIO()
    if state == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif state == "closed":
        stderr.close()
    monkeypatch.setattr("sys.stderr", None if state == "none" else stderr)
    with CaptureProgress(2) as progress:
        progress.advance("layers.0")
        assert not progress.is_shown


@pytest.mark.parametrize(
    ("rank", "enabled", "is_shown"),
    [(0, None, True), (1, None, False), (1, True, True), (0, False, False)],
)
def test_one_rank_shows_it(rank: int, enabled: bool | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with CaptureProgress(2, enabled=enabled, console=terminal()) as progress:
        assert progress.is_shown is is_shown


def test_nothing_to_capture_shows_nothing() -> None:
    with CaptureProgress(0, enabled=True, console=terminal()) as progress:
        assert not progress.is_shown


def test_the_live_display_of_others_is_left_alone() -> None:
    """Newer versions of rich show both, older ones refuse the second: either way nothing breaks."""
    console = terminal()
    with Live("training", console=console, auto_refresh=False) as live:
        with CaptureProgress(2, enabled=True, console=console) as progress:
            progress.advance("layers.0")
        assert live.is_started
