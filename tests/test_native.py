from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import native
from everstep.errors import NativeBuildError


@pytest.fixture
def part() -> native.Native:
    found = native.part()
    if found is None:
        pytest.skip("everstep native has not been run, or there is no C++ compiler")
    return found


def seen_by_python(tensors: list[torch.Tensor]) -> list[int]:
    return [n for t in tensors for n in (t._version, t.data_ptr(), int(t.requires_grad))]


def test_the_native_look_sees_what_python_sees(part: native.Native) -> None:
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
        found = part.look(tensors)
        assert memoryview(found).cast("q").tolist() == seen_by_python(tensors)
        assert found != before
        before = found
    assert part.look(tensors) == before
    assert part.look([]) == b""


def test_what_has_no_memory_or_counter_is_an_error_and_not_a_crash(part: native.Native) -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    for odd in (uncounted, torch.zeros(3).to_sparse()):
        with pytest.raises(RuntimeError):
            part.look([torch.zeros(1), odd])
    with pytest.raises(TypeError):
        part.look((torch.zeros(1),))  # type: ignore[arg-type]


def test_a_generator_has_moved_when_what_it_draws_next_has_changed(part: native.Native) -> None:
    generator, seen = torch.Generator(), bytearray(part.GENERATORS_BYTES)
    words = [ctypes.create_string_buffer(2500) for _ in range(2)]
    other = torch.Generator().manual_seed(5).get_state()
    steps: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: None),  # nothing had been seen before
        (0, lambda: None),
        (1, lambda: torch.rand(1, generator=generator)),
        (1, lambda: torch.rand(624, generator=generator)),  # the same position, other words
        (1, lambda: torch.randn(1, generator=generator)),  # one deviate is held back
        (1, lambda: torch.randn(1, generator=generator)),  # and used up
        (1, lambda: torch.randn(1, generator=generator, dtype=torch.float64)),
        (1, lambda: generator.manual_seed(1)),
        (0, lambda: generator.manual_seed(1)),
        (1, lambda: generator.set_state(other)),
        (0, lambda: generator.set_state(generator.get_state())),
        (2, lambda: ctypes.memset(words[0], 1, 1)),
        (4, lambda: ctypes.memset(ctypes.addressof(words[1]) + 2499, 1, 1)),
        (0, lambda: torch.rand(1)),
    ]  # fmt: skip
    for i, (expected, change) in enumerate(steps):
        change()
        before = generator.get_state()
        found = part.generators(generator, *map(ctypes.addressof, words), seen)
        assert found == expected, i
        assert torch.equal(generator.get_state(), before)


def test_what_generators_cannot_read_is_an_error_and_not_a_crash(part: native.Native) -> None:
    words = ctypes.create_string_buffer(2500)
    generator, address = torch.Generator(), ctypes.addressof(words)
    seen = bytearray(part.GENERATORS_BYTES)
    with pytest.raises(TypeError):
        part.generators(generator, address, address, seen[1:])
    with pytest.raises(ValueError, match="address 0"):
        part.generators(generator, 0, address, seen)


def test_groups_are_the_same_only_with_the_same_objects_in_the_same_order(part: native.Native) -> None:
    params = [torch.zeros(1) for _ in range(5)]
    lr, momentum = 0.125, 10.0**3

    def groups() -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": lr, "momentum": momentum}, {"params": [], "lr": lr},
            {"params": params[2:], "lr": lr, "momentum": momentum},
        ]  # fmt: skip

    def same(edit: Callable[[Any], object], *, params_too: bool = True) -> bool | None:
        found = groups()
        values = [value for group in found for value in group.values()]
        sizes = [len(group["params"]) for group in found]
        edit(found)
        return part.same_groups(found, values, sizes, params if params_too else None)

    edits: list[tuple[bool | None, Callable[[Any], object]]] = [
        (True, lambda g: None),
        (False, lambda g: g[0].update(lr=lr + 0)),  # an equal one is another object
        (False, lambda g: g[0].update(new=lr)),
        (False, lambda g: g[2].pop("momentum")),
        (False, lambda g: g[1].update(params=[])),
        (False, lambda g: g[0]["params"].append(params[0])),
        (False, lambda g: g[1]["params"].append(params[0])),
        (False, lambda g: g[0]["params"].clear()),
        (False, lambda g: g.append({"params": []})),
        (False, lambda g: g.pop()),
        (False, lambda g: g.reverse()),
        (None, lambda g: g.__setitem__(0, type("Mine", (dict,), {})(g[0]))),
    ]
    for i, (expected, edit) in enumerate(edits):
        assert same(edit) is expected, i
        assert same(edit, params_too=False) is expected, i
    swapped: Callable[[Any], object] = lambda g: g[0]["params"].reverse()  # noqa: E731
    assert same(swapped) is False
    assert same(swapped, params_too=False) is True
    assert part.same_groups(tuple(groups()), [], [], None) is None  # type: ignore[arg-type]


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
