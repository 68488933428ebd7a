"""metrics.jsonl: a strict JSON object per line, whole lines only."""

import json
import math
import subprocess
import sys
import time

import pytest

from leyden.errors import ConfigError
from leyden.loggers import JSONLLogger


def opened(folder, resumed_at=None):
    logger = JSONLLogger()
    logger.open(folder, resumed_at)
    return logger


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_a_line_holds_step_time_and_the_metrics(tmp_path):
    before = time.time()
    opened(tmp_path).log_metrics({"epoch": 0, "loss": 1 / 3}, step=7)
    [line] = lines(tmp_path)
    assert list(line) == ["step", "time", "epoch", "loss"]
    assert before <= line.pop("time") <= time.time()
    assert line == {"step": 7, "epoch": 0, "loss": 1 / 3}


def test_strict_parsers_read_nan_and_infinities(tmp_path):
    opened(tmp_path).log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    [line] = lines(tmp_path)
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")
    assert float(line["b"]) == math.inf


def test_a_resumed_run_cuts_what_lies_beyond(tmp_path):
    first = opened(tmp_path)
    for step in range(6):
        first.log_metrics({"a": float(step)}, step)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()[:4]
    opened(tmp_path, resumed_at=3).log_metrics({"b": 9.0}, step=4)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:4] == kept
    assert [(line["step"], line.get("a"), line.get("b")) for line in lines(tmp_path)[3:]] == [
        (3, 3.0, None),
        (4, None, 9.0),
    ]


def test_a_line_torn_by_a_crash_is_cut(tmp_path):
    whole = '{"step": 1, "time": 0.5, "a": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 2, "ti')
    opened(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


LOGGING = """
import sys
from pathlib import Path
from leyden.loggers import JSONLLogger
logger = JSONLLogger()
logger.open(Path(sys.argv[1]))
for step in range(50):
    logger.log_metrics({"a": 1.0}, step)
    print(step, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("rows", [1, 20, 50])
def test_a_killed_process_leaves_every_line_it_logged(tmp_path, rows):
    command = [sys.executable, "-c", LOGGING, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        for _ in range(rows):
            process.stdout.readline()
        process.kill()
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= rows


@pytest.mark.parametrize("content", ["not json\n", '{"loss": 1}\n', "[1]\n", '{"step": "x"}\n'])
def test_a_file_of_someone_else_is_left_alone(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"is not what JSONLLogger writes .* Move it away"):
        opened(tmp_path, resumed_at=3)
    assert (tmp_path / "metrics.jsonl").read_text() == content
