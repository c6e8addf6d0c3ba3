"""A linear layer that does not draw random numbers when it is built."""

from __future__ import annotations

from torch import nn

from graphstep.models.initialization import WeightInitializer


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose weight is drawn by its parent, which knows the scale, see `initialize_weights`.

    Building a model so takes no numbers from the default generator and does not fill each weight twice.
    """

    def reset_parameters(self) -> None:
        """Leave the parameters as allocated."""

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Set the bias, if there is one, to zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
