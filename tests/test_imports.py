"""Importing costs little beyond torch, and brings in nothing that is not used (PL #12786)."""

import subprocess
import sys

HEAVY = (
    "tensorboard",
    "rich",
    "torchmetrics",
    "copier",
    "sklearn",
    "jinja2.sandbox",
    "questionary",
)


def modules_after(code: str) -> set[str]:
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_leyden_loads_no_torch():
    assert "torch" not in modules_after("import leyden")
    assert "torch" not in modules_after("import leyden.plugins, leyden.loggers, leyden.strategies")


def test_public_names_load_no_logger_metric_or_cli_library():
    names = "from leyden import Module, Trainer, Callback, DataModule, seed_everything"
    loaded = modules_after(names)
    assert "torch" in loaded
    assert [name for name in HEAVY if name in loaded] == []
    assert not [name for name in loaded if name.startswith("leyden.loggers.")]


def test_public_names_add_few_modules_to_torch():
    # A count, so that it holds on any machine: leyden's own, pluggy's, and the standard library's.
    torch_alone = modules_after("import torch, torch.utils.data")
    added = modules_after("from leyden import Module, Trainer, Callback") - torch_alone
    foreign = (
        {name.split(".")[0] for name in added} - {"leyden", "pluggy"} - sys.stdlib_module_names
    )
    assert foreign <= {"torch"}, sorted(foreign)
    assert len(added) < 120


def test_moved_names_are_pointed_out():
    code = (
        "import leyden\ntry:\n    leyden.LightningModule\nexcept AttributeError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "It is leyden.Module here." in done.stdout
