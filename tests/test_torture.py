"""A run that is killed at random instants ends as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
AT_SAVES = "import torture; torture.AIMS = {'save': 1}; torture.main()"


def tortured(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=BENCHMARKS,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts by fork, and looks into /proc")
def test_five_kills_change_nothing():
    done = tortured("torture.py", "--kills", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills and restarts" in done.stdout
    assert "PASSED" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="starts by fork, and looks into /proc")
def test_what_is_not_in_the_checkpoint_is_found_out():
    # With this seed the kill comes after the third save has begun: there is one to go on from.
    done = tortured("-c", AT_SAVES, "--kills", "1", "--seed", "5", "--forgetful")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT: round 1['average']" in done.stdout
    assert "['state_dict']" not in done.stdout
