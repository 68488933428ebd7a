"""metrics.csv: one header, every row, at any moment a process may be killed."""

import csv
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.loggers import CSVLogger


def read(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def opened(folder, resumed_at=None, **options):
    logger = CSVLogger(**options)
    logger.open(folder, resumed_at)
    return logger


def test_the_file_reads_as_written(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"loss": 0.1, "epoch": 0}, step=1)
    logger.log_metrics({"loss": 1 / 3, "val, top-1": 1e-9}, step=2)
    assert (tmp_path / "metrics.csv").read_bytes() == (
        b'step,epoch,loss,"val, top-1"\n1,0,0.1,\n2,,0.3333333333333333,1e-09\n'
    )


# PL #18567: rows of the first run, once each, and none from beyond the point of resumption.
def test_a_resumed_run_keeps_the_rows_before_it_and_cuts_the_others(tmp_path):
    first = opened(tmp_path)
    for step in range(1, 7):
        first.log_metrics({"a": step / 2, "epoch": 0}, step)
    second = opened(tmp_path, resumed_at=4)
    second.log_metrics({"a": 9.0, "epoch": 1}, step=5)
    rows = [(row["step"], row["epoch"], row["a"]) for row in read(tmp_path)]
    old = [(str(step), "0", str(step / 2)) for step in range(1, 5)]
    assert rows == [*old, ("5", "1", "9.0")]


# PL #18567: a, three rows; then a and b, three rows.
def test_a_later_column_is_empty_in_the_rows_above(tmp_path):
    logger = opened(tmp_path)
    for step in range(6):
        logger.log_metrics({"a": 1.0} if step < 3 else {"a": 1.0, "b": 2.0}, step)
        logger.flush()
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    above = [f"{step},1.0," for step in range(3)]
    assert lines == ["step,a,b", *above, *(f"{step},1.0,2.0" for step in range(3, 6))]


def test_step_and_epoch_stay_in_front_when_they_come_later(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"b": 2.0, "epoch": 3}, step=1)
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch,a,b\n0,,1.0,\n1,3,,2.0\n"


def test_rows_are_appended_and_only_a_new_column_writes_the_file_anew(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    with (tmp_path / "metrics.csv").open() as first, (tmp_path / "metrics.csv").open() as second:
        for step in range(1, 1000):
            logger.log_metrics({"a": 1.0}, step)
        assert len(first.readlines()) == 1001
        logger.log_metrics({"a": 1.0, "b": 1.0}, step=1000)
        assert len(second.readlines()) == 1001
    assert len(read(tmp_path)) == 1001


# Log, say so, go on; a column comes at every seventh row. fsync comes before a file is replaced.
LOGGING = """
import os, sys
from pathlib import Path
from leyden.loggers import CSVLogger
folder, flush_every, killed_in_fsync = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
syncs = 0
def fsync(descriptor):
    global syncs
    syncs += 1
    if syncs == killed_in_fsync:
        os._exit(9)
os.fsync = fsync
logger = CSVLogger(flush_logs_every_n_steps=flush_every)
logger.open(folder)
for step in range(60):
    logger.log_metrics({f"m{number}": 1.0 for number in range(step // 7 + 1)}, step)
    print(step, flush=True)
sys.stdin.read()
"""


def logging(folder, flush_every=1, killed_in_fsync=0):
    arguments = [str(folder), str(flush_every), str(killed_in_fsync)]
    return subprocess.Popen(
        [sys.executable, "-c", LOGGING, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def assert_whole(folder, at_least):
    rows = read(folder)
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert len(rows) >= at_least
    for row in rows:
        due = {f"m{number}" for number in range(int(row["step"]) // 7 + 1)}
        assert {name for name, value in row.items() if value == "1.0"} == due


@pytest.mark.parametrize("rows", [1, 7, 8, 23, 60])
def test_a_killed_process_leaves_every_row_it_logged(tmp_path, rows):
    with logging(tmp_path) as process:
        for _ in itertools.islice(process.stdout, rows):
            pass
        process.kill()
    assert_whole(tmp_path, at_least=rows)


@pytest.mark.parametrize("rewrite", [1, 2, 5, 9])
def test_a_kill_while_a_column_is_added_loses_no_row(tmp_path, rewrite):
    with logging(tmp_path, killed_in_fsync=rewrite) as process:
        said = len(process.stdout.readlines())
    assert (process.returncode, said) == (9, 7 * (rewrite - 1))
    if said:
        assert_whole(tmp_path, at_least=said)
    logger = opened(tmp_path, resumed_at=said - 1)
    logger.log_metrics({f"m{number}": 1.0 for number in range(rewrite)}, step=said)
    assert_whole(tmp_path, at_least=said + 1)


def test_rows_held_back_are_written_when_their_steps_have_passed(tmp_path):
    logger = opened(tmp_path, flush_logs_every_n_steps=100)
    for step in (0, 50, 98):
        logger.log_metrics({"a": 1.0}, step)
    assert not (tmp_path / "metrics.csv").exists()
    logger.log_metrics({"b": 2.0}, step=99)
    assert [row["step"] for row in read(tmp_path)] == ["0", "50", "98", "99"]
    logger.log_metrics({"a": 1.0}, step=100)
    logger.close("failed")
    assert [row["step"] for row in read(tmp_path)] == ["0", "50", "98", "99", "100"]


def test_a_line_torn_by_a_crash_is_cut(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"step,a\n1,0.5\n2,0.25\n3,0.\xc3")
    opened(tmp_path).log_metrics({"a": 1.0}, step=3)
    assert (tmp_path / "metrics.csv").read_text() == "step,a\n1,0.5\n2,0.25\n3,1.0\n"


@pytest.mark.parametrize("content", ["name,age\nAda,36\n", "step,a\none,1\n"])
def test_a_file_of_someone_else_is_left_alone(tmp_path, content):
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(ConfigError, match=r"metrics.csv' is not what CSVLogger writes .* Move it"):
        opened(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == content


def test_steps_between_writes_begin_at_one():
    with pytest.raises(ConfigError, match="flush_logs_every_n_steps=0 is not possible"):
        CSVLogger("logs", flush_logs_every_n_steps=0)


names = st.text("ab,\"'\n é", min_size=1, max_size=4)
rows = st.dictionaries(names, st.floats(allow_nan=False), max_size=4)


@given(rows=st.lists(rows, max_size=12), resumed_at=st.integers(-1, 12), held=st.integers(1, 5))
def test_any_metrics_come_back_from_any_resumption(tmp_path_factory, rows, resumed_at, held):
    folder = tmp_path_factory.mktemp("run")
    logger = opened(folder, flush_logs_every_n_steps=held)
    for step, row in enumerate(rows):
        logger.log_metrics(row, step)
    logger.close()
    opened(folder, resumed_at).log_metrics({"last": 1.0}, step=99)
    got = [
        {name: float(value) for name, value in row.items() if value != ""} for row in read(folder)
    ]
    kept = [{"step": step, **row} for step, row in enumerate(rows) if step <= resumed_at]
    assert got == [*kept, {"step": 99, "last": 1.0}]
