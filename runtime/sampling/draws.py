"""Draws: tokens that were drawn where the logits are, and their way to the host."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
    """Drawn on the device. The copy to the host begins at once, behind the kernel that draws, so that who reads waits
    for this step, and for none that was launched after it."""

    def __init__(self, token_ids: Tensor, highest: Tensor) -> None:
        self.token_ids = token_ids
        # Exact in float64, as every token id is: both in one copy.
        both = torch.stack((token_ids.double(), highest.double()))
        self._event: torch.cuda.Event | None = None
        if both.device.type == "cuda":
            self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._both = both

    def read(self) -> Drawn:
        if self._event is not None:
            self._event.synchronize()
        token_ids, highest = self._both.tolist()
        return Drawn([int(token_id) for token_id in token_ids], highest)
