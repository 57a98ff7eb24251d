"""Fixtures of small random drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.lab.build import save_drafter
from eagle3.model import Drafter
from tests.eagle3.small import SHAPE, random_drafter


@pytest.fixture
def drafter() -> Drafter:
    return random_drafter()


@pytest.fixture
def embedding() -> Tensor:
    return torch.randn(SHAPE.vocab, SHAPE.hidden, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def drafter_folder(tmp_path: Path, drafter: Drafter) -> Path:
    save_drafter(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"
