"""One script, or one call, on several ranks: who starts them, and what comes back."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, ConfigError, Module, Trainer
from leyden.errors import RankError
from leyden.strategies.launchers.slurm import first_host
from leyden.testing import quiet_trainer

SCRIPT = """
import os, sys, time
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset
from leyden import Module, Trainer

class Line(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        at_fault = self.global_rank == int(os.environ.get("AT_FAULT", "-1")) and batch_idx == 1
        if at_fault and os.environ["FAULT"] == "raise":
            raise ValueError("words of the culprit")
        if at_fault and os.environ["FAULT"] == "exit":
            os._exit(3)
        if at_fault and os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), 9)
        if batch_idx == 0:
            open(f"{os.environ['PIDS']}/{os.getpid()}", "w").close()
        time.sleep(float(os.environ.get("SLOW", "0")))
        (x,) = batch
        return self.layer(x).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = {} if "WORLD" in os.environ else {"devices": 2}
trainer = Trainer(strategy="ddp", accelerator="cpu", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, **options)
trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(64, 3)), 8))
rank = f"rank {trainer.global_rank} of {trainer.world_size}"
os.write(1, f"{rank} args {sys.argv[1:]}\\n".encode())  # in one piece
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that starts the script with variables, and what starts it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "pids").mkdir()
    unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTEST_CURRENT_TEST"}

    def start(*command, **variables):
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.Popen(
            [sys.executable, *(command or ("train.py", "--option", "a b"))],
            cwd=tmp_path,
            env=kept | {"PIDS": str(tmp_path / "pids"), "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.folder = tmp_path
    return start


def assert_none_left(folder, count=2):
    pids = [int(path.name) for path in (folder / "pids").iterdir()]
    assert len(pids) == count
    assert not any(map(is_running, pids))


def is_running(pid):
    try:  # one that ended without a parent may still have its number
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_none_is_left(folder):
    deadline = time.monotonic() + 10
    while any(is_running(int(path.name)) for path in (folder / "pids").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_is_run_once_for_each_rank_and_left_with_their_code(script):
    process = script(CODE="5")
    out, err = process.communicate(timeout=60)
    # Rank 0's output is on the terminal, and the launching process runs no line after fit.
    assert out.splitlines() == ["rank 0 of 2 args ['--option', 'a b']"], err
    assert process.returncode == 5
    assert_none_left(script.folder)


def test_a_module_is_run_as_one(script):
    process = script("-m", "train", "x")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()) == (0, ["rank 0 of 2 args ['x']"]), err


def test_torchruns_processes_are_taken_as_they_are(script):
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py")
    process = script(*command, WORLD="theirs")
    out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["rank 0 of 2 args []", "rank 1 of 2 args []"], err


@pytest.mark.parametrize(
    ("fault", "rank", "code"), [("raise", 1, 1), ("raise", 0, 1), ("exit", 1, 3), ("kill", 1, 137)]
)
def test_the_rank_that_failed_first_is_shown_first(script, fault, rank, code):
    process = script(FAULT=fault, AT_FAULT=str(rank))
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    report = err[err.index("failed first") - 40 :]
    assert re.search(rf"Rank {rank} on \S.* failed first, with exit code {code}", report)
    if fault == "raise":
        assert report.index("ValueError: words of the culprit") < report.find("After it") % 10**9
    assert_none_left(script.folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launching_process_ends_all(script, number, code):
    process = script(SLOW="0.3")
    wait_for_ranks(script.folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert_none_left(script.folder)


def test_a_signal_to_one_rank_ends_all_with_its_code(script):
    process = script(SLOW="0.1")
    wait_for_ranks(script.folder)
    os.kill(int(next((script.folder / "pids").iterdir()).name), signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "ended on SIGTERM" in err
    assert "failed" not in err.rpartition("ended on SIGTERM")[2]
    assert_none_left(script.folder)


def test_ranks_end_with_the_launching_process(script):
    process = script(SLOW="1")
    wait_for_ranks(script.folder)
    process.kill()
    process.communicate(timeout=60)
    wait_until_none_is_left(script.folder)


def wait_for_ranks(folder, count=2):
    deadline = time.monotonic() + 30
    while len(list((folder / "pids").iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Line(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counter(Callback):
    def __init__(self):
        self.batches = 0
        self.note = lambda: None  # cannot travel between processes

    def on_train_batch_end(self, *_):
        self.batches += 1


def samples():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer_of(tmp_path, ranks, strategy="auto", **options):
    return Trainer(
        strategy=strategy, devices=ranks, accelerator="cpu", max_epochs=2,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
        logger=False, **options,
    )  # fmt: skip


def fitted(tmp_path, ranks):
    counter, module = Counter(), Line()
    trainer = trainer_of(tmp_path, ranks, callbacks=counter)
    result = trainer.fit(module, DataLoader(samples(), 16 // ranks))
    return trainer, module, counter, result


def test_a_call_without_a_script_brings_back_what_rank_0_came_to(tmp_path):
    alone, expected, _, _ = fitted(tmp_path / "alone", 1)
    trainer, module, counter, result = fitted(tmp_path / "ranks", 2)
    assert (result.steps, trainer.global_step, trainer.current_epoch) == (8, 8, 2)
    assert (counter.batches, module.seen) == (8, 8)
    torch.testing.assert_close(module.layer.weight, expected.layer.weight)
    assert trainer.callback_metrics.keys() == alone.callback_metrics.keys()
    best = (
        trainer.checkpoint_callback.best_model_path or trainer.checkpoint_callback.last_model_path
    )
    assert Path(best).exists()
    assert str(best).startswith(str(tmp_path / "ranks"))
    counter.note()


class Collecting(Line):
    """Collects garbage in every rank."""

    def on_fit_start(self):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a rank that waits in it
        gc.collect()
        signal.alarm(0)


def test_ranks_do_not_collect_what_this_process_has_left(tmp_path):
    left = [TCPStore("localhost", 0, is_master=True)]
    left.append(left)
    gc.disable()  # it is to be garbage when the ranks are forked
    try:
        del left
        result = trainer_of(tmp_path, 2).fit(Collecting(), DataLoader(samples(), 8))
    finally:
        gc.enable()
    assert result.steps == 8


class Built(Line):
    """Has its layer made where it is sharded."""

    def __init__(self):
        super().__init__()
        del self.layer

    def configure_model(self):
        self.layer = torch.nn.Linear(3, 1)

    def init_weights(self):
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.zeros_(self.layer.bias)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_call_goes_on_from_where_the_one_before_ended_on_each_rank(tmp_path, strategy):
    weights = []
    for ends in ([4], [2, 4]):
        trainer, module = trainer_of(tmp_path, 2, strategy), Built()
        for end in ends:
            trainer.max_epochs = end
            trainer.fit(module, DataLoader(samples(), 8, shuffle=True))
        assert trainer.global_step == 16
        weights.append(module.layer.weight)
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Broken(Line):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise ValueError("words of the culprit")
        return super().training_step(batch, batch_idx)


def test_a_rank_that_fails_in_a_call_is_told_with_its_traceback():
    trainer = quiet_trainer(devices=2, accelerator="cpu")
    with pytest.raises(RankError, match=r"(?s)Rank 1 on .*failed first.*words of the culprit"):
        trainer.fit(Broken(), DataLoader(samples(), 8))


def test_a_stream_cannot_come_back_from_other_processes():
    trainer = quiet_trainer(devices=2, accelerator="cpu")
    with pytest.raises(ConfigError, match=r"stream=True.*devices=1, or run a script"):
        trainer.predict(Line(), DataLoader(samples(), 8), stream=True)


def test_what_was_asked_for_and_what_was_started_are_shown_where_they_differ(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"devices=4 on num_nodes=1 .*started 2.*WORLD_SIZE=2"):
        Trainer(devices=4, accelerator="cpu")
    assert Trainer(accelerator="cpu").num_devices == 2
    assert Trainer(accelerator="cpu").strategy_choice == "ddp"


def test_several_machines_need_a_launcher_on_each():
    with pytest.raises(ConfigError, match=r"num_nodes=2 .*torchrun --nnodes=2"):
        Trainer(num_nodes=2, devices=4, accelerator="cpu")


def test_slurms_variables_are_read(monkeypatch):
    step = {
        "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "4", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_JOB_ID": "71",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-004]",
    }  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "29999")
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    # Uneven nodes have no number of devices for each, which is told with the launcher's numbers.
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE=2"):
        Trainer(accelerator="cpu", devices=4, num_nodes=2)
    assert os.environ["RANK"] == "4"
    assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["MASTER_ADDR"] == "gpu003"
    assert os.environ["MASTER_PORT"] == "29999"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-007,9],login", "gpu003"),
        ("login", "login"),
        ("a1,a2", "a1"),
        ("n[1,4]-ib", "n1-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_signals_do_after_a_call_what_they_did_before(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    fitted(tmp_path, 2)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
