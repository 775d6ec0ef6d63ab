from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import native
from everstep.errors import NativeBuildError


@pytest.fixture
def look() -> native.Look:
    found = native.look()
    if found is None:
        pytest.skip("everstep native has not been run, or there is no C++ compiler")
    return found


def seen_by_python(tensors: list[torch.Tensor]) -> list[int]:
    return [n for t in tensors for n in (t._version, t.data_ptr(), int(t.requires_grad))]


def test_the_native_look_sees_what_python_sees(look: native.Look) -> None:
    base = torch.zeros(64)
    tensors: list[torch.Tensor] = [
        nn.Parameter(torch.randn(3, 4)), base, base[7:], torch.zeros(4, 5).t(), torch.zeros(0), torch.tensor(3),
        torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64), nn.Parameter(torch.zeros(2), False),
    ]  # fmt: skip
    edits: list[Any] = [
        lambda: None,
        lambda: base.add_(1),
        lambda: tensors[0].detach().mul_(2),
        lambda: setattr(tensors[0], "data", torch.ones(3, 4)),
        lambda: tensors[8].requires_grad_(True),
        lambda: tensors[0].requires_grad_(False),
    ]
    before: bytes | None = None
    for edit in edits:
        edit()
        found = look(tensors)
        assert memoryview(found).cast("q").tolist() == seen_by_python(tensors)
        assert found != before
        before = found
    assert look(tensors) == before
    assert look([]) == b""


def test_what_has_no_memory_or_counter_is_an_error_and_not_a_crash(look: native.Look) -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    for odd in (uncounted, torch.zeros(3).to_sparse()):
        with pytest.raises(RuntimeError):
            look([torch.zeros(1), odd])
    with pytest.raises(TypeError):
        look((torch.zeros(1),))  # type: ignore[arg-type]


def test_a_build_that_fails_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeBuildError, match="install one, or name it in CXX"):
        native.build(str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeBuildError, match="failed"):
        native.build(str(tmp_path))
    assert not os.listdir(tmp_path)


def test_what_was_built_for_another_torch_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = native.path()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert native.path() != own
