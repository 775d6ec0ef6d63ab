"""The one part that can be native: native.cpp, built for this interpreter and this torch by `everstep native`.

Nothing depends on it: without it the same is done in Python, which takes the training thread some 80 µs more a step
(by estimate) for 77 parameters. What was built for another torch, or from
another source, is not found: its name says what it is for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from typing import Any, Protocol

import torch

from everstep.errors import NativeBuildError

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SOURCE = os.path.join(_FOLDER, "native.cpp")


class Native(Protocol):
    """native.cpp, which says what each of them returns."""

    GENERATORS_BYTES: int

    def look(self, tensors: list[torch.Tensor], /) -> bytes: ...

    def generators(self, of_torch: torch.Generator, of_numpy: int, of_random: int, seen: bytearray, /) -> int: ...

    def same_groups(
        self, groups: list[dict[str, Any]], values: list[Any], sizes: list[int], params: list[torch.Tensor] | None, /
    ) -> bool | None: ...


def path(folder: str = _FOLDER) -> str:
    """Where the native part is if it has been built; in the package's folder, so as trustworthy as that."""
    with open(_SOURCE, "rb") as source:
        digest = hashlib.blake2b(source.read(), digest_size=4).hexdigest()
    version = re.sub(r"\W", "_", torch.__version__)
    return os.path.join(folder, f"_native_{version}_{digest}{sysconfig.get_config_var('EXT_SUFFIX')}")


def build(folder: str = _FOLDER) -> str:
    """Compile it with the machine's C++ compiler (some 20 s); returns where it is. NativeBuildError if that fails."""
    from torch.utils.cpp_extension import include_paths

    target = path(folder)
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    includes = [*include_paths("cpu"), sysconfig.get_paths()["include"]]
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with tempfile.TemporaryDirectory(prefix="everstep-native-") as scratch:
        made = os.path.join(scratch, "native.so")
        command = [
            *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", abi, *(f"-I{i}" for i in includes), _SOURCE,
            f"-L{libraries}", "-ltorch_cpu", "-lc10", "-o", made,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as e:
            raise NativeBuildError(f"no C++ compiler could be run ({e}): install one, or name it in CXX") from e
        if done.returncode:
            raise NativeBuildError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
        try:
            _check(_load(made))
            with open(made, "rb") as source, open(target + ".part", "wb") as copy:
                copy.write(source.read())
            os.replace(target + ".part", target)
        except OSError as e:
            raise NativeBuildError(f"{target} could not be written: {e}") from e
    return target


@functools.cache
def part() -> Native | None:
    """The native part; None where it has not been built, or does not load."""
    built = path()
    if not os.path.exists(built):
        return None
    try:
        return _load(built)
    except ImportError:
        return None


def _load(file: str) -> Native:
    loader = importlib.machinery.ExtensionFileLoader("native", file)
    spec = importlib.util.spec_from_file_location("native", file, loader=loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module  # type: ignore[no-any-return]


def _check(found: Native) -> None:
    """NativeBuildError unless it sees what Python sees."""
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2, 2)), torch.zeros(8)[2:]]
    tensors[0].add_(1)
    told = memoryview(found.look(tensors)).cast("q").tolist()
    generator, words, seen = torch.Generator(), ctypes.create_string_buffer(4096), bytearray(found.GENERATORS_BYTES)
    address = ctypes.addressof(words)
    moved = [found.generators(generator, address, address, seen) for _ in range(2)]
    torch.rand(1, generator=generator)
    moved.append(found.generators(generator, address, address, seen))
    if told != [n for t in tensors for n in (t._version, t.data_ptr(), int(t.requires_grad))] or moved != [1, 0, 1]:
        raise NativeBuildError("what was built reads other values than Python does: it is not used")
