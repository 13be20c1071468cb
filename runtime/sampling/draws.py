"""Draws: tokens that were drawn where the logits are, and their way to the host."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llmq.runtime.staging import Fetched


class Drawn(NamedTuple):
    """On the host: a token of each row, and the row's highest logit."""

    token_ids: list[int]
    highest: list[float]


class Draws(Protocol):
    @property
    def token_ids(self) -> Tensor:
        """int64 [num_rows], where the logits are."""
        ...

    def read(self) -> Drawn:
        """Waits for the device."""
        ...


@dataclass(frozen=True, eq=False)
class HostDraws:
    """Drawn on the host: there is nothing to wait for."""

    drawn: Drawn
    device: torch.device

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor(self.drawn.token_ids, dtype=torch.int64, device=self.device)

    def read(self) -> Drawn:
        return self.drawn


class DeviceDraws:
    """Drawn on the device, and on their way to the host."""

    def __init__(self, token_ids: Tensor, highest: Tensor) -> None:
        self.token_ids = token_ids
        # Exact in float64, as every token id is: both in one copy.
        self._both = Fetched(torch.stack((token_ids.double(), highest.double())))

    def read(self) -> Drawn:
        token_ids, highest = self._both.read().tolist()
        return Drawn([int(token_id) for token_id in token_ids], highest)
