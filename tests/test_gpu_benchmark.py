"""The benchmark for a GPU runs, as far as a machine without one can tell."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch

LOG = logging.getLogger("leyden")
FILE = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results" / "gpu.md")
    precision, level = torch.get_float32_matmul_precision(), LOG.level
    yield module
    torch.set_float32_matmul_precision(precision)
    LOG.setLevel(level)


def test_a_dry_run_trains_every_row_alike_and_writes_no_results(gpu, capsys):
    found = gpu.main(["--dry-run"])
    assert {"bare script", "leyden"} <= found.keys()
    for runs in found.values():
        assert len(runs) == 3
        assert all(run.tokens_per_s > 0 for run in runs)
        # What is timed is the same training, to the last bit.
        assert {run.loss for run in runs} == {found["bare script"][0].loss}
    assert "| leyden |" in capsys.readouterr().out
    assert not gpu.RESULTS.exists()


def test_operations_for_a_token_are_those_of_the_model(gpu):
    sizes = gpu.Sizes(2, 16, 2, 8, 11, 2, 6, 2, 2, torch.device("cpu"))
    block = 12 * 16 * 16 + 2 * 2 * 16  # matrices, and two norms
    parameters = 2 * block + 2 * 16 + 11 * 16  # and the last norm, and the head
    assert gpu.flops_per_token(sizes) == 6 * parameters + 12 * 2 * 16 * 8


def test_without_a_gpu_the_full_run_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no CUDA device here. Pass --dry-run"):
        gpu.main([])
