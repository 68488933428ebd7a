"""Where batches come from and how they reach the device."""

from .combined import CombinedLoader as CombinedLoader
