"""What a person sees while a run goes on: bars in a terminal, a few plain lines elsewhere."""

import io
import logging
import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from leyden import ConfigError, Module, Trainer
from leyden.plugins import PlainProgress, RichProgress


class Line(Module):
    """Fits a line; ``during`` is called in each training step with the batch's index."""

    def __init__(self, during=lambda batch_idx: None):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.during = during

    def training_step(self, batch, batch_idx):
        self.during(batch_idx)
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/constant", 0.25, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield (torch.ones(2),)


def loader(batches):
    return DataLoader(TensorDataset(torch.ones(batches, 2)), batch_size=1)


def trainer(**choices):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", **quiet, **choices})


class Terminal:
    """A pseudo-terminal whose other end is read; it stands in for stdout and stderr."""

    def __init__(self):
        self.end, near = os.openpty()
        attributes = termios.tcgetattr(near)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(near, termios.TCSANOW, attributes)
        self.out, self.err = (
            io.TextIOWrapper(os.fdopen(end, "wb"), encoding="utf-8", write_through=True)
            for end in (near, os.dup(near))
        )
        self.received = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                self.received += os.read(self.end, 65536)
            except OSError:  # the near end is closed
                return

    def close(self):
        self.out.close()
        self.err.close()
        self._reader.join()
        os.close(self.end)

    def screen(self):
        """Return the lines that somebody in front of it would see, scrolled ones included."""
        rows, row = [""], 0
        for part in re.findall(
            r"\x1b\[\??[\d;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", self.received.decode()
        ):
            if part == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif part.endswith("A") and part.startswith("\x1b"):
                row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                rows[row] = ""
            elif not part.startswith("\x1b") and part != "\r":
                rows[row] += part
        return [line.rstrip() for line in rows if line.strip()]


@contextmanager
def terminal(width=100):
    """Put stdout and stderr on a terminal; what it showed is complete after the block."""
    shown = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", shown.out)
        patch.setattr(sys, "stderr", shown.err)
        try:
            yield shown
        finally:
            shown.close()


def test_a_thousand_steps_into_a_file_print_a_few_lines(capsys):
    started = monotonic()
    trainer(max_epochs=2).fit(Line(), loader(500))  # PL #6647
    most = 3 + (monotonic() - started) / 5
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("Epoch")]
    assert len(lines) <= most and len(out) < 500 * most
    assert re.fullmatch(
        r"Epoch 2/2  500/500  \d+(\.\d)? it/s  took 0:00:\d\d  data \d+%  train/loss=\S+", lines[-1]
    )


@pytest.mark.parametrize(("epochs", "batches"), [(1, 1000), (1000, 1)])
def test_plain_lines_keep_their_distance_in_long_and_in_short_epochs(capsys, epochs, batches):
    started = monotonic()
    progress = PlainProgress(every_seconds=0.1)
    trainer(max_epochs=epochs, callbacks=[progress]).fit(Line(), loader(batches))
    most = 3 + 2 * (monotonic() - started) / 0.1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert 2 <= len(lines) <= most
    assert lines[-1].startswith(f"Epoch {epochs}/{epochs}  {batches}/{batches}  ")


def counts(capsys):
    """Return the epoch, and the count of batches, in each line of a training."""
    return re.findall(r"^(Epoch \S+) +(\S+)  ", capsys.readouterr().out, re.MULTILINE)


def test_plain_lines_count_the_batches_of_every_epoch(capsys):
    trainer(max_epochs=2, callbacks=[PlainProgress(1e-9)]).fit(Line(), loader(2))
    of_epoch = ["1/2", "2/2", "2/2"]  # after each batch, and at the end of the epoch
    expected = [(f"Epoch {epoch}/2", count) for epoch in (1, 2) for count in of_epoch]
    assert counts(capsys) == [*expected, ("Epoch 2/2", "2/2")]


def test_epochs_without_limit_and_data_without_length_show_no_total(capsys):
    model = Line(lambda batch_idx: setattr(model.trainer, "should_stop", batch_idx == 2))
    endless = DataLoader(Endless(), batch_size=None)
    trainer(max_epochs=-1, callbacks=[PlainProgress(1e-9)]).fit(model, endless)
    assert counts(capsys) == [("Epoch 1", count) for count in ("1", "2", "3", "3")]


def test_a_limit_of_steps_is_the_total_where_it_ends_the_epoch(capsys):
    run = trainer(max_steps=2, accumulate_grad_batches=2, callbacks=[PlainProgress(1e-9)])
    run.fit(Line(), loader(1000))
    assert [count for _, count in counts(capsys)] == ["1/4", "2/4", "3/4", "4/4", "4/4"]


def test_resuming_in_the_middle_of_an_epoch_counts_on(capsys, tmp_path):
    first = trainer(max_steps=3)
    first.fit(Line(), loader(5))
    first.save_checkpoint(tmp_path / "middle.ckpt")
    capsys.readouterr()
    second = trainer(max_epochs=1, callbacks=[PlainProgress(1e-9)])
    second.fit(Line(), loader(5), ckpt_path=tmp_path / "middle.ckpt")
    assert [count for _, count in counts(capsys)] == ["4/5", "5/5", "5/5", "5/5"]


def test_plain_lines_tell_of_test_and_prediction(capsys):
    run = trainer(callbacks=[PlainProgress()])
    run.test(Line(), loader(3), verbose=False)
    run.predict(Line(), loader(4))
    out = capsys.readouterr().out
    assert re.search(r"^Testing  3/3  \S+ it/s  took 0:00:00$", out, re.MULTILINE)
    assert re.search(r"^Predicting  4/4  \S+ it/s  took 0:00:00$", out, re.MULTILINE)


def test_plain_lines_need_a_time_between_them():
    with pytest.raises(ConfigError, match=r"every_seconds=0 must be a number above 0"):
        PlainProgress(every_seconds=0)


def test_no_bar_is_shown_where_none_is_wanted():
    with terminal() as shown:
        trainer(max_epochs=1, enable_progress_bar=False).fit(Line(), loader(2))
    assert not any("Epoch" in line for line in shown.screen())


def test_a_terminal_shows_one_bar_for_a_fit_drawn_in_place():
    with terminal() as shown:
        trainer(max_epochs=3).fit(Line(), loader(4), loader(2))
    *_, bar, metrics = shown.screen()
    assert re.fullmatch(r"Epoch 3/3     ━{40}  4/4 +\S+ it/s  took 0:00:\d\d  data \d+%", bar)
    assert re.fullmatch(r" {14}\S+=\S+  \S+=\S+", metrics)
    assert "train/loss=" in metrics and "val/constant=0.2500" in metrics
    assert sum("Epoch" in line for line in shown.screen()) == 1
    assert shown.received.count(b"Epoch ") > 2  # it was drawn over
    assert shown.received.count(b"Validating") > 0  # and a validation was there meanwhile


def test_what_is_printed_and_logged_in_training_stays_whole_above_the_bar():
    def during(batch_idx):
        print(f"batch {batch_idx} [bold] [/x] :smile:")
        print("dots", end="..", flush=True)
        logging.getLogger("mine").warning("logged %d", batch_idx)
        print("done")

    with terminal() as shown:
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger("mine").addHandler(handler)
        trainer(max_epochs=1).fit(Line(during), loader(2))
        logging.getLogger("mine").removeHandler(handler)
        assert handler.stream is sys.stderr is shown.err
    first = next(i for i, line in enumerate(shown.screen()) if line.startswith("batch 0"))
    assert shown.screen()[first:-2] == [
        line
        for batch in (0, 1)
        for line in (f"batch {batch} [bold] [/x] :smile:", f"logged {batch}", "dots..done")
    ]


def test_another_bar_in_training_leaves_its_last_form():
    def during(batch_idx):
        for percent in (0, 50, 100):
            print(f"\rloading {percent}%", end="", flush=True)
        print()

    with terminal() as shown:
        trainer(max_steps=1).fit(Line(during), loader(1))
    assert shown.received.count(b"loading 50%") == 1
    assert [line for line in shown.screen() if "loading" in line] == ["loading 100%"]


def fail(batch_idx):
    raise RuntimeError("out of luck")


def interrupt(batch_idx):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("end", "error", "done"), [(fail, RuntimeError, "0/4"), (interrupt, SystemExit, "1/4")]
)
def test_a_broken_run_gives_the_terminal_back_and_the_next_draws_again(end, error, done):
    with terminal() as shown:
        run = trainer(max_epochs=1)
        with pytest.raises(error):
            run.fit(Line(end), loader(4))
        assert (sys.stdout, sys.stderr) == (shown.out, shown.err)
        trainer(max_epochs=1).fit(Line(), loader(4))
    assert [line.split()[3] for line in shown.screen() if "Epoch" in line] == [done, "4/4"]
    assert shown.received.count(b"\x1b[?25l") == shown.received.count(b"\x1b[?25h") == 2  # cursor


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_shows_less_and_wraps_nothing(width):
    with terminal(width) as shown:
        trainer(max_epochs=1, callbacks=[RichProgress()]).fit(Line(), loader(4))
    bar = next(line for line in shown.screen() if line.startswith("Epoch 1/1"))
    assert len(bar) <= width
    assert "4/4" in bar and ("data" in bar) == (width == 80) and ("took" in bar) == (width >= 60)


def test_the_bar_of_a_test_stays_with_the_count_of_all_loaders():
    with terminal() as shown:
        trainer().test(Line(), [loader(3), loader(2)], verbose=False)
    assert re.match(r"Testing       ━{40}  5/5 +\S+ it/s  took 0:00:00", shown.screen()[-1])


def test_bars_read_metrics_only_where_they_draw(monkeypatch):
    reads = []
    read = Trainer.progress_bar_metrics.fget
    monkeypatch.setattr(
        Trainer, "progress_bar_metrics", property(lambda self: reads.append(1) or read(self))
    )
    with terminal() as shown:
        trainer(max_epochs=100).fit(Line(), loader(20))
    assert 2 < len(reads) <= shown.received.count(b"Epoch ") < 500
