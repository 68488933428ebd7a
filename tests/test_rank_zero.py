from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist

from leyden.errors import ConfigError
from leyden.rank_zero import (
    rank,
    rank_zero_debug,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def script(code):
    """Return what a script writes to stderr and stdout."""
    code = "from leyden.rank_zero import *\nfrom leyden.rank_zero import rank_zero_info\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr, done.stdout


def test_a_process_alone_has_rank_0():
    assert rank() == rank_zero_only.rank == 0


def test_the_launchers_rank_counts_in_its_order(monkeypatch):
    for name, value in (("SLURM_PROCID", "3"), ("LOCAL_RANK", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
        assert rank() == rank_zero_only.rank == int(value)


def test_a_rank_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match=r"RANK='first'; a rank is a number.*torchrun"):
        rank()


def test_an_initialised_process_group_knows_better_than_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert rank() == 0
    finally:
        dist.destroy_process_group()


class Greeter:
    @rank_zero_only
    def greet(self, name: str) -> str:
        """Greet someone."""
        return f"hello {name}"


def test_functions_and_methods_run_on_rank_0_alone(monkeypatch):
    assert Greeter().greet("you") == "hello you"
    assert Greeter.greet.__doc__ == "Greet someone."
    monkeypatch.setenv("RANK", "1")
    assert Greeter().greet("you") is None
    assert rank_zero_only(lambda: 1, default=-1)() == -1


def test_a_warning_is_given_on_rank_0_at_the_line_that_calls(monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("careful", DeprecationWarning)
        monkeypatch.setenv("RANK", "1")
        rank_zero_warn("again")
    (warning,) = caught
    assert (str(warning.message), warning.category) == ("careful", DeprecationWarning)
    assert warning.filename == __file__


def test_messages_are_logged_on_rank_0_from_the_line_that_calls(monkeypatch, caplog):
    with caplog.at_level(logging.DEBUG, "leyden"):
        rank_zero_info("%d of %s", 1, "two")
        rank_zero_debug("detail")
        monkeypatch.setenv("RANK", "1")
        rank_zero_info("elsewhere")
        rank_zero_debug("elsewhere")
    assert caplog.record_tuples == [
        ("leyden", logging.INFO, "1 of two"),
        ("leyden", logging.DEBUG, "detail"),
    ]
    assert {record.pathname for record in caplog.records} == {__file__}


def test_a_plain_script_sees_messages_on_stderr_but_no_debugging():
    assert script("rank_zero_info('seen'); rank_zero_debug('hidden')") == ("seen\n", "")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_script_that_configures_logging_sees_each_message_once(moment):
    configure = "import logging, sys; logging.basicConfig(stream=sys.stdout, level='WARNING')\n"
    message = "rank_zero_info('seen')\n"
    code = "import leyden.rank_zero\n" + configure if moment == "after" else configure
    code += "from leyden.rank_zero import rank_zero_info\n" + message
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("INFO:leyden:seen\n", "")


def test_the_users_level_and_handlers_are_respected():
    quiet = "import logging; logging.getLogger('leyden').setLevel('ERROR'); rank_zero_info('x')"
    assert script(quiet) == ("", "")
    own = "import logging, sys; log = logging.getLogger('leyden'); "
    own += "log.addHandler(logging.StreamHandler(sys.stdout)); rank_zero_info('x')"
    assert script(own) == ("", "x\n")


def test_importing_the_module_loads_no_torch():
    assert script("import sys; print('torch' in sys.modules)") == ("", "False\n")
