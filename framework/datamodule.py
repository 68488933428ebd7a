"""DataModule: data, kept apart from the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset

from .hparams import KeepsHyperparameters
from .overrides import DataHooks

if TYPE_CHECKING:
    from .trainer import Trainer


class DataModule(DataHooks, KeepsHyperparameters):
    """Where data comes from, reusable between Modules.

    Define ``train_dataloader`` and its sisters; download in ``prepare_data``, which runs once per
    machine, and build data sets in ``setup``, which runs in every process.
    """

    trainer: Trainer | None = None
    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on every machine, or on the first alone."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this DataModule."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned when the checkpoint was saved."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **dataloader_options: Any,
    ) -> Self:
        """Return a DataModule of these data sets; the training one is shuffled.

        Each may be one data set, or a list or dict of them.
        """

        def loader(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, Mapping):
                return {name: loader(one, shuffle) for name, one in dataset.items()}
            if isinstance(dataset, (list, tuple)) and all(isinstance(d, Dataset) for d in dataset):
                return [loader(one, shuffle) for one in dataset]
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            options = {"batch_size": batch_size, "num_workers": num_workers, **dataloader_options}
            return DataLoader(dataset, shuffle=shuffle, **options)

        module = cls()
        given: Iterable[tuple[str, Any]] = (
            ("train", train_dataset), ("val", val_dataset), ("test", test_dataset),
            ("predict", predict_dataset),
        )  # fmt: skip
        for stage, dataset in given:
            if dataset is not None:
                method = lambda d=dataset, s=stage == "train": loader(d, s)  # noqa: E731
                setattr(module, f"{stage}_dataloader", method)
        return module
