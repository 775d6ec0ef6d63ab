"""State of every kind goes through msgpack and comes back with its types and bits, or is refused by path."""

from __future__ import annotations

import collections
import enum
import inspect
import struct
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from everstep.errors import CorruptionError, UnsupportedValueError
from everstep.tree import freeze, pack, unpack

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ---------------------------------------------------------------------------------------------- sameness


def assert_same(left: Any, right: Any, path: str = "value") -> None:
    """Fail unless both have the same types, order and bits all the way down."""
    if isinstance(left, torch.Tensor):
        assert type(right) is torch.Tensor, path
        assert_same_tensor(left.detach(), right, path)
        return
    assert type(left) is type(right), f"{path}: {type(left)} became {type(right)}"
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert left.flags.f_contiguous == right.flags.f_contiguous, path
        assert left.tobytes() == right.tobytes(), path
        assert right.flags.writeable, path
    elif isinstance(left, (np.str_, np.bytes_, str, bytes, bool, int, type(None), torch.dtype, torch.device)):
        assert left == right, path
    elif isinstance(left, np.generic):
        assert left.tobytes() == right.tobytes(), path
    elif isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right), path
    elif isinstance(left, complex):
        assert struct.pack("<2d", left.real, left.imag) == struct.pack("<2d", right.real, right.imag), path
    elif isinstance(left, dict):
        assert_same(list(left), list(right), f"{path} keys")
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
        if isinstance(left, collections.defaultdict):
            assert left.default_factory is right.default_factory, path
    else:
        assert isinstance(left, (list, tuple)), path
        assert len(left) == len(right), path
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}[{index}]")


def assert_same_tensor(left: torch.Tensor, right: torch.Tensor, path: str) -> None:
    assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout), path
    assert not right.requires_grad, path
    if left.layout is torch.sparse_coo:
        assert left.is_coalesced() == right.is_coalesced(), path
        assert_same_tensor(left._indices(), right._indices(), f"{path} indices")
        assert_same_tensor(left._values(), right._values(), f"{path} values")
        return
    assert left.clone().stride() == right.stride(), path
    assert tensor_bits(left) == tensor_bits(right), path


def tensor_bits(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.resolve_conj().resolve_neg())
    return copy.flatten().view(torch.uint8).numpy().tobytes() if copy.numel() else b""


def through_msgpack(value: Any) -> Any:
    """Return what `value` is after it was packed, written, read and unpacked."""
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(pack(value))))


def assert_round_trip(value: Any) -> None:
    assert_same(value, through_msgpack(value))
    frozen = freeze(value)
    assert_same(value, frozen)
    assert msgspec.msgpack.encode(pack(frozen)) == msgspec.msgpack.encode(pack(value))


# ---------------------------------------------------------------------------------------------- round trips

TENSOR_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
ARRAY_DTYPES = [
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    "<c16",
    "<i1",
    "<i2",
    ">i4",
    "<i8",
    "<u8",
    "?",
    ">f8",
    "<U3",
    "S5",
]
FACTORIES = [None, int, float, str, list, dict, tuple, bool, bytes]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    flat.numpy()[:] = np.frombuffer(content, np.uint8)
    tensor = flat.view(dtype).reshape(shape)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if dtype.kind in "US":
        text = st.text(st.characters(max_codepoint=127), max_size=dtype.itemsize)
        content = np.array([draw(text) for _ in range(int(np.prod(shape, dtype=int)))], dtype).reshape(shape)
    else:
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=int))
        content = np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), dtype).reshape(shape)
        if dtype.kind == "b":
            content = content.view(np.uint8) % 2 == 1
    return np.asfortranarray(content) if draw(st.booleans()) and content.ndim else content.copy()


def numpy_scalars() -> st.SearchStrategy[np.generic]:
    kinds = [np.float16, np.float32, np.float64, np.complex64, np.complex128, np.longlong, np.ulonglong]
    kinds += [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    from_bits = st.tuples(st.sampled_from(kinds), st.binary(min_size=16, max_size=16)).map(
        lambda drawn: np.frombuffer(drawn[1][: np.dtype(drawn[0]).itemsize], drawn[0])[0]
    )
    return st.one_of(
        from_bits, st.booleans().map(np.bool_), st.text().map(np.str_), st.binary().map(np.bytes_)
    )


def python_scalars() -> st.SearchStrategy[Any]:
    bits = st.binary(min_size=8, max_size=8).map(lambda content: struct.unpack("<d", content)[0])
    text = st.text(st.characters(exclude_categories=()), max_size=8)
    integers = st.one_of(
        st.integers(), st.integers(-(2**200), 2**200), st.sampled_from([2**64, -(2**63) - 1])
    )
    return st.one_of(
        st.none(),
        st.booleans(),
        integers,
        st.floats(),
        bits,
        st.complex_numbers(),
        text,
        st.binary(max_size=8),
    )


def keys() -> st.SearchStrategy[str | int]:
    text = st.text(st.characters(exclude_categories=()), max_size=4)
    return st.one_of(text, st.integers(), st.sampled_from(["$", "v", "t", "s", "b"]))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    dicts = st.dictionaries(keys(), children, max_size=4)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        dicts.map(collections.Counter),
        dicts.map(collections.OrderedDict),
        st.tuples(st.sampled_from(FACTORIES), dicts).map(lambda drawn: collections.defaultdict(*drawn)),
    )


LEAVES = st.one_of(
    python_scalars(),
    numpy_scalars(),
    tensors(),
    arrays(),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.quint8, torch.float8_e5m2]),
    st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]).map(torch.device),
)
STATES = st.recursive(LEAVES, containers, max_leaves=12)


@given(STATES)
@settings(UNHURRIED)
def test_any_state_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert_round_trip(value)


@given(STATES)
@settings(UNHURRIED, max_examples=50)
def test_plain_values_are_plain_all_the_way(value: Any) -> None:
    def check(plain: Any) -> None:
        assert type(plain) in (type(None), bool, int, float, str, bytes, list, dict)
        for item in plain.values() if type(plain) is dict else plain if type(plain) is list else ():
            check(item)
        assert type(plain) is not dict or all(type(key) is str for key in plain)

    check(pack(value))


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        -(2**4000),
        -0.0,
        float("nan"),
        struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0],
        complex(-0.0, float("inf")),
        "lone \ud800 surrogate",
        {"lone \udfff surrogate": 1},
        {"$": "tuple", "v": [1]},
        {"$": 1},
        {1: "a", "1": "b", -1: "c"},
        {2**70: "long"},
        np.longdouble("1.1"),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.array(3.0),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.arange(4.0).reshape(4, 1, 1, 1).to(memory_format=torch.channels_last),
        torch.zeros(3).expand(2, 3),
        torch.arange(10.0)[3:7],
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=lambda value: (
        f"{type(value).__name__}-{value!s:.20}".replace("\n", " ").encode("ascii", "replace").decode()
    ),
)
def test_odd_values_come_back(value: Any) -> None:
    assert_round_trip(value)


@pytest.mark.parametrize("is_coalesced", [False, True])
@pytest.mark.parametrize("dense_shape", [[], [3]])
def test_sparse_tensors_keep_indices_values_and_whether_they_are_coalesced(
    is_coalesced: bool, dense_shape: list[int]
) -> None:
    indices = torch.tensor([[0, 1, 1, 5], [2, 0, 0, 3]])
    values = torch.arange(float(np.prod([4, *dense_shape]))).reshape(4, *dense_shape)
    tensor = torch.sparse_coo_tensor(indices, values, (6, 4, *dense_shape), check_invariants=True)
    assert_round_trip(tensor.coalesce() if is_coalesced else tensor)
    empty = torch.sparse_coo_tensor(size=(6, 4, *dense_shape), check_invariants=True)
    assert_round_trip(empty._coalesced_(is_coalesced))


def test_the_gradient_of_a_sparse_embedding_comes_back() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    assert embedding.weight.grad is not None and not embedding.weight.grad.is_coalesced()
    assert_round_trip({"grad": embedding.weight.grad})


def test_what_comes_back_is_independent_memory() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    plain, frozen = pack([tensor, array]), freeze([tensor, array])
    restored = unpack(plain)
    tensor += 1
    array += 1
    for copy in (unpack(plain), frozen, restored):
        assert copy[0].tolist() == copy[1].tolist() == [0, 0, 0]
        copy[0].add_(5)
        copy[1] += 5
    assert unpack(plain)[0].tolist() == [0, 0, 0]
    assert not restored[0]._is_view()


def test_frozen_containers_are_copies() -> None:
    inner = {"b": [1]}
    frozen = freeze({"a": inner, "d": (inner,)})
    inner["b"].append(2)
    assert frozen == {"a": {"b": [1]}, "d": ({"b": [1]},)}


def test_a_shared_object_is_no_cycle() -> None:
    shared = [1]
    assert_round_trip({"a": shared, "b": (shared, shared)})


# ---------------------------------------------------------------------------------------------- put and get


def test_put_is_offered_the_original_tensors_and_get_what_it_returned() -> None:
    weight, small = torch.nn.Parameter(torch.ones(4)), torch.tensor(1.0)
    kept: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> Any:
        if tensor.numel() < 2:
            return None
        kept.append(tensor)
        return ["blob", len(kept) - 1]

    plain = pack({"w": weight, "s": small, "nested": [(weight,)]}, put)
    assert kept[0] is weight and kept[1] is weight and len(kept) == 2
    restored = unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), lambda name: kept[name[1]])
    assert restored["w"] is weight and restored["nested"] == [(weight,)]
    assert_same(small, restored["s"])


def test_a_false_stand_in_is_still_a_stand_in() -> None:
    assert unpack(pack(torch.ones(2), lambda tensor: 0), lambda name: torch.tensor(name)).tolist() == 0


def test_put_is_not_offered_sparse_tensors() -> None:
    tensor = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    offered: list[torch.Tensor] = []
    pack(tensor, offered.append)
    assert offered == []


def test_a_reference_without_get_is_corruption() -> None:
    with pytest.raises(CorruptionError, match="stored elsewhere"):
        unpack(pack(torch.ones(2), lambda tensor: 0))


def test_errors_of_put_and_get_are_their_own() -> None:
    def fail(anything: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pack([torch.ones(1)], fail)
    with pytest.raises(KeyError, match="mine"):
        unpack(pack([torch.ones(1)], lambda tensor: 7), fail)


# ---------------------------------------------------------------------------------------------- refusals


class Colour(enum.IntEnum):
    RED = 1


class OwnDict(dict[str, int]):
    pass


Point = collections.namedtuple("Point", "x y")


def quiet(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "object"),
    "function": (assert_same, "function"),
    "lambda": (lambda: 0, "function"),
    "generator": ((number for number in [1]), "generator"),
    "class": (int, "type"),
    "module": (torch.nn.Linear(1, 1), "Linear"),
    "enum": (Colour.RED, "Colour"),
    "namedtuple": (Point(1, 2), "Point"),
    "dict subclass": (OwnDict(), "OwnDict"),
    "bytearray": (bytearray(b"x"), "bytearray"),
    "memoryview": (memoryview(b"x"), "memoryview"),
    "range": (range(3), "range"),
    "generator of torch": (torch.Generator(), "Generator"),
    "return type": (torch.ones(2, 2).max(0), "return_types.max"),
    "bool key": ({True: 1}, "dict.*keys is a bool"),
    "None key": ({None: 1}, "dict.*keys is a NoneType"),
    "tuple key": (collections.Counter([(1, 2)]), "Counter.*keys is a tuple"),
    "numpy key": (collections.OrderedDict({np.int64(1): 1}), "OrderedDict.*keys is a numpy.int64"),
    "factory": (collections.defaultdict(lambda: 0), "defaultdict.*default_factory"),
    "factory of sets": (collections.defaultdict(set), "defaultdict.*default_factory"),
    "set": ({1, 2}, "this set\\."),
    "empty set": (set(), "this set\\."),
    "frozenset": (frozenset({1}), "this frozenset\\."),
    "deque": (collections.deque([1], 3), "this collections.deque\\."),
    "object array": (np.array([None]), "ndarray.*dtype is object"),
    "structured array": (np.zeros(2, [("a", "i4")]), "ndarray.*dtype is"),
    "datetime array": (np.zeros(2, "M8[s]"), "ndarray.*dtype is datetime64"),
    "datetime scalar": (np.datetime64("2020-01-01"), "datetime64"),
    "matrix": (np.ma.masked_array([1.0]), "MaskedArray"),
    "meta tensor": (torch.empty(2, device="meta"), "Tensor.*meta"),
    "quantized": (
        quiet(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "Tensor.*qint8",
    ),
    "too many dimensions": (torch.ones([1] * 65), "Tensor.*64 dimensions"),
    "sparse csr": (quiet(lambda: torch.eye(2).to_sparse_csr()), "Tensor.*sparse_csr"),
    "nested": (quiet(lambda: torch.nested.nested_tensor([torch.ones(1)])), "Tensor.*nested"),
    "tensor subclass": (torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", [pack, freeze])
def test_a_refusal_names_path_and_type_and_what_to_do(name: str, function: Callable[..., Any]) -> None:
    value, expected = REFUSED[name]
    state = {"steps": [0, 1, {"in ner": (0, value)}]}
    with pytest.raises(UnsupportedValueError, match=expected) as raised:
        function(state, path="sched")
    message = str(raised.value)
    assert message.startswith("sched.steps[2]['in ner'][1]: ")
    assert "leave it out" in message


@pytest.mark.parametrize("function", [pack, freeze])
def test_paths_go_through_every_container(function: Callable[..., Any]) -> None:
    bad = object()
    for value, path in [
        (collections.OrderedDict(a=[bad]), "a[0]"),
        (collections.defaultdict(int, {3: {"x": bad}}), "[3].x"),
        (collections.Counter({"n": bad}), "n"),
        ((1, bad), "[1]"),
        ({"$": {"y": bad}}, "['$'].y"),
        ({10**5000: bad, -1: bad}, "[a long int]"),
        (bad, "the state itself"),
    ]:
        with pytest.raises(UnsupportedValueError) as raised:
            function(value)
        assert str(raised.value).startswith(f"{path}: cannot store")


@pytest.mark.parametrize("function", [pack, freeze])
def test_cycles_are_refused(function: Callable[..., Any]) -> None:
    ring: list[Any] = [1]
    ring.append({"again": (ring,)})
    with pytest.raises(UnsupportedValueError, match=r"^s\[1\]\.again\[0\]: .*contains itself"):
        function(ring, path="s")
    loop: dict[Any, Any] = collections.defaultdict(dict)
    loop[1] = loop
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        function(loop)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}])
def test_depth_has_a_limit_that_all_functions_share(wrap: Callable[[Any], Any]) -> None:
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    value: Any = [2**70, 1j, np.str_("\ud800"), np.float32(1), sparse]
    for _ in range(64):
        value = wrap(value)
    assert_same(value, through_msgpack(value))
    assert_same(value, freeze(value))
    for function in (pack, freeze):
        with pytest.raises(UnsupportedValueError, match="levels deep"):
            function(wrap(value))
    deep: Any = 1
    for _ in range(20_000):
        deep = wrap(deep)
    for function in (pack, freeze):
        with pytest.raises(UnsupportedValueError, match="levels deep"):
            function(deep)


# ---------------------------------------------------------------------------------------------- real states


def one_step_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.tensor([[1, 2], [3, 3]])).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def all_optimizers() -> list[str]:
    return [
        name
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]


@pytest.mark.parametrize("name", all_optimizers())
def test_the_state_of_every_optimizer_comes_back(name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Embedding(5, 4, sparse=name == "SparseAdam")
    kind = getattr(torch.optim, name)
    options = {"amsgrad": True} if name in ("Adam", "AdamW") else {}
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        one_step_of(optimizer, model)
    state = optimizer.state_dict()
    assert_round_trip(state)
    optimizer.load_state_dict(through_msgpack(state))


def test_hyperparameters_that_are_tensors_and_numpy_numbers_come_back() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)
    optimizer.param_groups[0]["weight_decay"] = np.float32(0.1)
    assert_round_trip(optimizer.state_dict())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 9]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(0.9) ** step),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3])],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_real_schedulers_comes_back(name: str) -> None:
    model = torch.nn.Embedding(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = quiet(lambda: SCHEDULERS[name](optimizer))
    for _ in range(5):
        one_step_of(optimizer, model)
        quiet(lambda: scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step())
    state = scheduler.state_dict()
    assert_round_trip(state)
    scheduler.load_state_dict(through_msgpack(state))


def test_the_state_of_a_grad_scaler_and_of_the_random_generators_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    assert_round_trip(scaler.state_dict())
    assert_round_trip(torch.get_rng_state())
    assert_round_trip(np.random.get_state())
    assert_round_trip(np.random.default_rng(0).bit_generator.state)


# ---------------------------------------------------------------------------------------------- malformed


def deep_list() -> list[Any]:
    nested: list[Any] = []
    for _ in range(20_000):
        nested = [nested]
    return nested


MALFORMED: dict[str, Any] = {
    "unknown tag": {"$": "object", "v": 1},
    "tag of another type": {"$": 1},
    "tag that is deep": {"$": deep_list()},
    "tag that is a method": {"$": "mapping", "v": []},
    "missing field": {"$": "tuple"},
    "one field too many": {"$": "tuple", "v": [], "w": 1},
    "int key": {1: 2},
    "foreign type": [object()],
    "tuple": (1, 2),
    "int that is no bytes": {"$": "int", "v": 3},
    "str that is no utf-8": {"$": "str", "v": b"\xff"},
    "complex of one part": {"$": "complex", "v": [1.0]},
    "complex of str": {"$": "complex", "v": [1.0, "x"]},
    "size of str": {"$": "size", "v": ["1"]},
    "size too large": {"$": "size", "v": [2**63]},
    "set": {"$": "set", "v": [1]},
    "frozenset": {"$": "frozenset", "v": [1]},
    "deque": {"$": "deque", "v": [1], "n": None},
    "dict of odd length": {"$": "dict", "v": [1]},
    "dict of equal keys": {"$": "dict", "v": [1, 2, 1, 3]},
    "dict of bool keys": {"$": "dict", "v": [True, 2]},
    "dict of list keys": {"$": "dict", "v": [[], 2]},
    "unknown factory": {"$": "default", "v": [], "f": "exec"},
    "factory of sets": {"$": "default", "v": [], "f": "set"},
    "factory of another type": {"$": "default", "v": [], "f": 1},
    "unknown dtype": {"$": "dtype", "v": "onnx"},
    "unknown device": {"$": "device", "v": "toaster:1"},
    "device of huge index": {"$": "device", "v": "cuda:99999999999999999999"},
    "tensor of quantized dtype": {"$": "tensor", "t": "qint8", "s": [1], "b": b"\0"},
    "tensor of too few bytes": {"$": "tensor", "t": "float32", "s": [2**40], "b": b"\0" * 4},
    "tensor of too many bytes": {"$": "tensor", "t": "float32", "s": [1], "b": b"\0" * 5},
    "tensor of negative shape": {"$": "tensor", "t": "int8", "s": [-1, -1], "b": b"\0"},
    "tensor of float shape": {"$": "tensor", "t": "int8", "s": [1.0], "b": b"\0"},
    "tensor with a shape beyond torch": {"$": "tensor", "t": "int8", "s": [0, 2**62, 2**62], "b": b""},
    "tensor of too many axes": {"$": "tensor", "t": "int8", "s": [2**62] * 400, "b": b""},
    "scalar tensor of many bytes": {"$": "tensor", "t": "int8", "s": [], "b": b"\0" * 2},
    "tensor of a size beyond printing": {"$": "tensor", "t": "int8", "s": [2**62] * 64, "b": b""},
    "tensor with gaps": {"$": "tensor", "t": "int8", "s": [2], "b": b"\0\0", "st": [2**50]},
    "tensor with overlaps": {"$": "tensor", "t": "int8", "s": [2], "b": b"\0\0", "st": [0]},
    "tensor of too many strides": {"$": "tensor", "t": "int8", "s": [2], "b": b"\0\0", "st": [1, 1]},
    "array of objects": {"$": "array", "t": "|O8", "s": [1], "b": b"\0" * 8, "o": "C"},
    "array of no dtype": {"$": "array", "t": "<f3", "s": [1], "b": b"\0" * 3, "o": "C"},
    "array of no size": {"$": "array", "t": "|S0", "s": [2**40], "b": b"", "o": "C"},
    "array of no order": {"$": "array", "t": "<f4", "s": [1], "b": b"\0" * 4, "o": "K"},
    "array beyond numpy": {"$": "array", "t": "<f4", "s": [0, 2**62, 2**62], "b": b"", "o": "C"},
    "array of too many axes": {"$": "array", "t": "<f4", "s": [1] * 99, "b": b"\0" * 4, "o": "C"},
    "array of characters that do not exist": {"$": "array", "t": "<U1", "s": [1], "b": b"\xff" * 4, "o": "C"},
    "array of unhashable order": {"$": "array", "t": "<f4", "s": [1], "b": b"\0" * 4, "o": []},
    "scalar of too few bytes": {"$": "scalar", "t": "float32", "b": b"\0"},
    "scalar of both fields": {"$": "scalar", "t": "float32", "b": b"\0" * 4, "v": 1},
    "scalar of no field": {"$": "scalar", "t": "float32"},
    "scalar str of bytes": {"$": "scalar", "t": "str_", "v": b"x"},
    "scalar of unknown type": {"$": "scalar", "t": "void", "b": b""},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_values_are_corruption(name: str) -> None:
    for plain in (MALFORMED[name], [MALFORMED[name]], {"$": "tuple", "v": [MALFORMED[name]]}):
        with pytest.raises(CorruptionError, match="stored state"):
            unpack(plain)


@pytest.mark.parametrize(
    ("indices", "values", "shape"),
    [
        ([[5]], [1.0], [3]),
        ([[-1]], [1.0], [3]),
        ([[0]], [1.0, 2.0], [3]),
        ([[0]], [1.0], [3, 3]),
        ([0], [1.0], [3]),
    ],
)
def test_sparse_tensors_that_do_not_fit_are_corruption(
    indices: list[Any], values: list[float], shape: list[int]
) -> None:
    parts = {"i": pack(torch.tensor(indices)), "v": pack(torch.tensor(values))}
    with pytest.raises(CorruptionError):
        unpack({"$": "coo", "s": shape, "c": False, **parts})


def test_deeply_nested_plain_values_are_corruption() -> None:
    for wrap in (lambda v: [v], lambda v: {"a": v}, lambda v: {"$": "tuple", "v": [v]}):
        plain: Any = 1
        for _ in range(20_000):
            plain = wrap(plain)  # type: ignore[no-untyped-call]
        with pytest.raises(CorruptionError, match="levels deep"):
            unpack(plain)


TAGS = ["int", "str", "complex", "tuple", "size", "dict", "counter", "ordered"]
TAGS += ["default", "dtype", "device", "tensor", "ref", "coo", "array", "scalar"]
PLAIN_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=16),
    st.sampled_from(["float32", "int8", "<f4", "<U1", "|S3", "C", "F", "int", "cpu", "str_", "bool"]),
    st.lists(st.integers(0, 3), max_size=3),
)
NONSENSE = st.recursive(
    PLAIN_LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.dictionaries(st.sampled_from([*"$vtsfbcio", "st"]), children, max_size=4),
        st.tuples(
            st.sampled_from(TAGS), st.dictionaries(st.sampled_from([*"vtsfbcio", "st"]), children)
        ).map(lambda drawn: {"$": drawn[0], **drawn[1]}),
    ),
    max_leaves=10,
)


def unpacks_or_is_corrupt(plain: Any) -> None:
    try:
        value = unpack(plain, lambda name: torch.zeros(1))
    except CorruptionError:
        return
    pack(value)


@given(NONSENSE)
@settings(UNHURRIED, max_examples=400)
def test_nonsense_unpacks_or_is_corruption(plain: Any) -> None:
    unpacks_or_is_corrupt(plain)


@given(STATES, st.data())
@settings(UNHURRIED)
def test_damaged_values_unpack_or_are_corruption(value: Any, data: st.DataObject) -> None:
    def damage(plain: Any) -> Any:
        if data.draw(st.integers(0, 4)) == 0:
            return data.draw(PLAIN_LEAVES)
        if type(plain) is list:
            return [damage(item) for item in plain]
        if type(plain) is dict:
            return {key: damage(item) for key, item in plain.items()}
        return plain

    unpacks_or_is_corrupt(damage(pack(value)))
