"""How far a download or a load is: one line on a terminal, elsewhere a line of the log every few seconds."""

from __future__ import annotations

import logging
import os
import pty
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

from mlx_backend.commands.load_progress import LINE_SECONDS, LoadProgressDisplay, format_seconds
from mlx_backend.commands.output import QueuedHandler, StatusLine, logging_to_stderr
from mlx_backend.registry.base import ModelStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GB = 10**9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(StatusLine):
    """A status line whose texts are kept."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def show(self, texts: Sequence[str]) -> None:
        self.shown.append(texts[0] if texts else "")

    def bar(self, share: float, characters: int) -> str:
        return f"[{share:.2f}]"


def status(
    done: int, total: int, state: Literal["downloading", "loading"] = "downloading", name: str = "m"
) -> ModelStatus:
    return ModelStatus(name=name, state=state, percent=100 * done // total, done=done, total=total)


def test_a_terminal_gets_one_line_with_bytes_and_the_time_left() -> None:
    clock, line = Clock(), Terminal()
    display = LoadProgressDisplay(line, clock)
    display(status(2 * GB, 12 * GB))
    for _ in range(10):
        clock.now += 1
        display(status(int((2 + clock.now / 5) * GB), 12 * GB))
        display(status(int((2 + clock.now / 5) * GB) + 1, 12 * GB))  # too soon to be drawn
    assert line.shown[0] == "Downloading m [0.16] 16 %, 2.0 GB of 12.0 GB"
    assert line.shown[1] == "Downloading m [0.18] 18 %, 2.2 GB of 12.0 GB, 49 s left"
    assert line.shown[-1] == "Downloading m [0.33] 33 %, 4.0 GB of 12.0 GB, 40 s left"
    assert len(line.shown) == 11
    display(status(GB, 12 * GB, "loading"))
    assert line.shown[-1] == "Loading m [0.08] 8 %, 1.0 GB of 12.0 GB", "another rate, which is not known yet"
    display(ModelStatus(name="other", state="ready"))
    assert line.shown[-1] != "", "another model has nothing to do with it"
    display(ModelStatus(name="m", state="ready"))
    assert line.shown[-1] == ""


def test_of_a_download_and_a_load_beside_it_a_terminal_shows_the_first_and_the_log_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock, line = Clock(), Terminal()
    displays = [LoadProgressDisplay(line, clock), LoadProgressDisplay(None, clock)]
    for step in range(1, 9):
        clock.now += 2
        for display in displays:
            display(status(step * GB, 10 * GB))
            display(status(step * GB, 16 * GB, "loading", name="other"))
    assert {text.split()[1] for text in line.shown} == {"m"}
    assert "40 %, 4.0 GB of 10.0 GB, 12 s left" in line.shown[3]
    assert [record.message.split()[:2] for record in caplog.records] == 2 * [
        ["Downloading", "m:"],
        ["Loading", "other:"],
    ]
    displays[0](ModelStatus(name="m", state="ready"))
    clock.now += 2
    displays[0](status(9 * GB, 16 * GB, "loading", name="other"))
    assert line.shown[-1].startswith("Loading other")


def test_the_time_that_a_load_takes_is_told_from_its_percentage() -> None:
    clock, line = Clock(), Terminal()
    display = LoadProgressDisplay(line, clock)
    for clock.now, percent in ((0, 10), (10, 30), (20, 50)):
        display(ModelStatus(name="m", state="loading", percent=percent))
    assert line.shown[-1] == "Loading m [0.50] 50 %, 25 s left"


def test_elsewhere_the_log_gets_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    display = LoadProgressDisplay(None, clock)
    for second in range(13):
        clock.now = float(second)
        display(status(second * GB // 10, 12 * GB))
    assert caplog.messages == [
        "Downloading m: 4 %, 500.0 MB of 12.0 GB, 1 min 55 s left.",
        "Downloading m: 8 %, 1.0 GB of 12.0 GB, 1 min 50 s left.",
    ]
    display(status(1, 12 * GB, "loading"))
    clock.now += LINE_SECONDS - 1
    display(status(2, 12 * GB, "loading"))
    display(ModelStatus(name="m", state="ready"))
    assert len(caplog.messages) == 2, "what is soon over needs no line"


def test_the_time_left_follows_a_rate_that_changes() -> None:
    clock, line = Clock(), Terminal()
    display = LoadProgressDisplay(line, clock)
    done = 0
    for rate, seconds in ((100, 100), (10, 60)):
        for _ in range(seconds):
            clock.now += 1
            done += rate
            display(status(done, 20_000))
    assert line.shown[-1].endswith("15 min 40 s left"), "by the rate of the last half minute"


@pytest.mark.parametrize("total", [0, 10])
def test_what_is_not_known_is_not_said(total: int) -> None:
    clock, line = Clock(), Terminal()
    display = LoadProgressDisplay(line, clock)
    for _ in range(3):
        clock.now += 1
        display(ModelStatus(name="m", state="downloading", percent=0, done=0, total=total))
    assert "left" not in line.shown[-1]
    assert (" of " in line.shown[-1]) is bool(total)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (59, "59 s"), (60, "1 min 0 s"), (3599.5, "1 h 0 min"), (7260, "2 h 1 min")],
)
def test_times_are_written_in_one_or_two_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: where a program writes, and where a person reads."""
    reading, writing = pty.openpty()
    try:
        yield writing, reading
    finally:
        os.close(writing)
        os.close(reading)


def test_log_lines_go_above_the_line_that_changes() -> None:
    with terminal() as (writing, reading):
        handler = QueuedHandler(writing)
        line = StatusLine(handler, writing, is_unicode=False)
        line.show([f"half {line.bar(0.5, 4)}"])
        handler.flush()
        handler.emit(logging.LogRecord("n", logging.INFO, "", 0, "something else", (), None))
        handler.flush()
        line.show(["x" * 5000, "no room for that"])
        handler.flush()
        line.show([])
        handler.close()
        expected = "half ##--\r\x1b[Ksomething else\r\nhalf ##--\r\x1b[Kno room for that\r\x1b[K"
        found = b""
        while len(found) < len(expected):  # a terminal passes on what is written when it gets to it
            found += os.read(reading, 10_000)
        assert found.decode() == expected


@pytest.mark.parametrize(("term", "has_line"), [("xterm", True), ("dumb", False), (None, False)])
def test_only_a_terminal_that_can_clear_a_line_gets_one(
    term: str | None, has_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    with terminal() as (writing, _), open(writing, "w", closefd=False) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with logging_to_stderr("info") as line:
            assert (line is not None) is has_line
    monkeypatch.undo()


def test_of_other_libraries_only_warnings_are_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr("debug"):
        for name in ("httpx2", "huggingface_hub.file_download", "anything", "mlx_backend.models"):
            logging.getLogger(name).info("%s says this", name)
        logging.getLogger("anything").warning("a warning")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" INFO ")[2] or line.partition(" WARNING ")[2] for line in lines] == [
        "mlx_backend.models says this",
        "a warning",
    ]
