"""What the server logs and prints cannot stop it, whoever reads it or does not."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from urllib.request import urlopen

import pytest
from server_process import ENVIRONMENT

from mlx_backend.commands.output import MAX_LINE_CHARACTERS, JsonFormatter, LineFormatter, QueuedHandler


def logger_of(handler: logging.Handler) -> logging.Logger:
    handler.setFormatter(LineFormatter("%(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_a_log_that_nobody_reads_holds_nobody_up_and_says_how_much_was_dropped() -> None:
    source, sink = os.pipe()
    handler = QueuedHandler(sink, max_waiting=10)
    logger = logger_of(handler)
    for number in range(1000):  # far more than the pipe and the queue hold
        logger.info("%d %s", number, "x" * 1000)
    read: list[str] = []

    def read_all() -> None:
        with os.fdopen(source, encoding="utf-8") as lines:
            read.extend(lines)

    reader = threading.Thread(target=read_all)
    reader.start()

    def dropped() -> int:
        return sum(int(line.split()[1]) for line in list(read) if "dropped" in line)

    def written() -> int:
        return sum("xxx" in line for line in list(read))

    while written() + dropped() < 1000:  # said whenever all that was queued has been written
        logger.info("go on")
        handler.flush()
    handler.close()
    os.close(sink)
    reader.join()
    assert read[0].startswith("0 xxx")
    assert dropped() > 500
    assert written() + dropped() >= 1000


def test_a_log_whose_reader_has_gone_holds_nobody_up() -> None:
    source, sink = os.pipe()
    os.close(source)
    handler = QueuedHandler(sink, max_waiting=10)
    logger = logger_of(handler)
    for number in range(1000):
        logger.info("%d", number)
    handler.close()
    os.close(sink)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb", r"a\nb"),
        ("tab\tstays", "tab\tstays"),
        ("\x1b[31mred\r", r"\x1b[31mred\r"),
        ("日本 \u2028 \x85", r"日本 \u2028 \x85"),
    ],
)
def test_what_clients_send_stays_in_its_line(text: str, line: str) -> None:
    record = logging.LogRecord("name", logging.INFO, "path", 1, "%s", (text,), None)
    assert LineFormatter("%(message)s").format(record) == line


@pytest.mark.parametrize("formatter", [LineFormatter("%(levelname)s %(message)s"), JsonFormatter()])
def test_what_clients_send_begins_no_line_of_a_traceback_either_and_its_end_is_kept(
    formatter: logging.Formatter,
) -> None:
    try:
        raise ValueError("x" * 50_000 + "\nINFO everything is fine\r\x1b[31m")
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, "path", 1, "broken", (), sys.exc_info())
    text = formatter.format(record)
    first, *rest = text.splitlines()
    assert "ERROR" in first
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in text
    assert len(text) < 20_000
    assert "everything is fine" in text


@pytest.mark.parametrize("formatter", [LineFormatter("%(message)s"), JsonFormatter()])
def test_no_password_of_an_address_is_logged(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("no answer from socks5://bob:secret@proxy:9/")
    except ValueError:
        record = logging.LogRecord(
            "name", logging.ERROR, "path", 1, "%s", ("http://bob:p@secret@hub/a@b",), sys.exc_info()
        )
    record.fields = {"where": "https://token-secret@hub"}
    text = formatter.format(record).replace("\\u2026", "…")
    assert "http://…@hub/a@b" in text
    assert "socks5://…@proxy:9/" in text
    assert "secret" not in text


def test_a_line_is_cut_where_it_is_too_long() -> None:
    record = logging.LogRecord("name", logging.INFO, "path", 1, "x" * 10**6, (), None)
    assert len(LineFormatter("%(message)s").format(record)) == MAX_LINE_CHARACTERS + 2


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_server_whose_output_nobody_reads_stops_in_order(closed: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_backend", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        while not process.stdout.readline().startswith(b"  Try: "):
            pass
        (process.stdout if closed == "stdout" else process.stderr).close()
        process.send_signal(signal.SIGTERM)
        other = process.stderr if closed == "stdout" else process.stdout
        rest = other.read()
        assert process.wait(60) == 0
        assert b"Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_log_that_nobody_reads_holds_up_no_stream() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, bytes(65_536)):  # until the pipe holds no more
            pass
    with suppress(BlockingIOError):
        while os.write(writing, b" "):
            pass
    os.set_blocking(writing, True)
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_backend", "--port", "0", "--log-level", "debug"],
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("Listening on "))
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        for _ in range(5):
            with urlopen(f"{url}/v1/chat/completions", json.dumps(body).encode(), timeout=60) as stream:
                assert stream.read().endswith(b"data: [DONE]\n\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(reading)
        os.close(writing)
