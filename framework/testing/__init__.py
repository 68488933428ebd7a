"""For tests of Modules and plugins: a quiet Trainer, a small Module, and each part's contract."""

from .contracts import check_precision as check_precision
from .contracts import check_strategy as check_strategy
from .ranks import on_ranks as on_ranks
from .small import Regression as Regression
from .small import batches as batches
from .small import quiet_trainer as quiet_trainer
