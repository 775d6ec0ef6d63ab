"""Bad input: a typed error that says what to do; nothing on disk changes, nothing live changes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import (
    EverstepError,
    FormatError,
    MismatchError,
    NotARunError,
    StepNotFoundError,
    StorageError,
    UnsupportedValueError,
    UsageError,
)
from everstep.format import documents
from everstep.format.documents import RunDocument
from truth import Truth, check_history, crash, different, live_state, tree_hash


def build(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, changes.get("width", 5)), nn.BatchNorm1d(changes.get("width", 5)),
                          nn.Linear(changes.get("width", 5), 2))  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.fixture(params=["closed", "crashed"])
def run_path(request: Any, tmp_path: Path) -> Path:
    """A run of four steps with one extra."""
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", extras={"sched": scheduler(optimizer)}, quiet=True)
    run.resume()
    for _ in range(4):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.commit()
    run.close() if request.param == "closed" else crash(run)
    return tmp_path / "run"


def both_ways(path: Path, objects: Any, error: type[Exception], *words: str) -> None:
    """Neither attach and resume nor History.restore accepts these, and neither changes anything."""
    before = tree_hash(path)
    for way in ("attach", "steps", "restore"):
        model, optimizer, extras = objects()
        live = live_state(model, optimizer, extras)
        with pytest.raises(error) as caught:
            if way == "restore":
                everstep.open(path).restore(model, optimizer, extras=extras)
            else:
                with everstep.attach(model, optimizer, path, extras=extras, quiet=True) as run:
                    run.resume() if way == "attach" else next(iter(run.steps([1, 2])))
        for word in words:
            assert word in str(caught.value), word
        assert different(live, live_state(model, optimizer, extras)) == []
        assert tree_hash(path) == before, way


def with_extras(model: Any, optimizer: Any) -> tuple[Any, ...]:
    return model, optimizer, {"sched": scheduler(optimizer)}


def test_every_difference_of_a_wrong_shape_is_listed(run_path: Path) -> None:
    both_ways(
        run_path, lambda: with_extras(*build(width=6)), MismatchError,
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "2.weight", "(5, 4)", "(6, 4)",
    )  # fmt: skip


def test_every_difference_of_wrong_names_is_listed(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.Linear(5, 2)})
        return with_extras(model, torch.optim.AdamW(model.parameters()))

    both_ways(run_path, objects, MismatchError, "a.weight", "b.bias", "0.weight", "1.running_mean", "2.bias")


def test_every_difference_of_a_wrong_dtype_is_listed(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, _ = build()
        model.double()
        return with_extras(model, torch.optim.AdamW(model.parameters()))

    both_ways(run_path, objects, MismatchError, "float32", "float64", "0.weight", "1.running_mean", "2.bias")


def test_a_model_with_more_than_the_run_is_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, _ = build()
        model.add_module("3", nn.Linear(2, 2))
        return with_extras(model, torch.optim.AdamW(model.parameters()))

    both_ways(run_path, objects, MismatchError, "3.weight", "3.bias")


def test_a_model_with_less_than_the_run_is_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, _ = build()
        model = model[:2]
        return with_extras(model, torch.optim.AdamW(model.parameters()))

    both_ways(run_path, objects, MismatchError, "2.weight", "2.bias")


def test_another_optimizer_class_is_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, _ = build()
        return with_extras(model, torch.optim.SGD(model.parameters(), lr=0.1))

    both_ways(run_path, objects, MismatchError, "SGD", "AdamW")


def test_an_optimizer_over_other_parameters_is_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, _ = build()
        return with_extras(model, torch.optim.AdamW(model[0].parameters()))

    both_ways(run_path, objects, MismatchError, "2.weight")


def test_other_names_of_models_and_optimizers_are_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, optimizer = build()
        return {"net": model}, {"opt": optimizer}, {"sched": scheduler(optimizer)}

    both_ways(run_path, objects, MismatchError, "opt", "net")


def test_a_missing_extra_is_refused(run_path: Path) -> None:
    before = tree_hash(run_path)
    model, optimizer = build()
    live = live_state(model, optimizer)
    with (
        pytest.raises(MismatchError, match="sched"),
        everstep.attach(model, optimizer, run_path, quiet=True) as run,
    ):
        run.resume()
    assert different(live, live_state(model, optimizer)) == []
    assert tree_hash(run_path) == before


def test_an_extra_that_the_run_does_not_have_is_refused(run_path: Path) -> None:
    def objects() -> tuple[Any, ...]:
        model, optimizer = build()
        return model, optimizer, {"sched": scheduler(optimizer), "other": scheduler(optimizer)}

    both_ways(run_path, objects, MismatchError, "other")


def test_a_missing_step_is_refused_and_says_which_there_are(run_path: Path) -> None:
    before = tree_hash(run_path)
    model, optimizer, extras = with_extras(*build())
    live = live_state(model, optimizer)
    with (
        pytest.raises(StepNotFoundError, match="0 to 4"),
        everstep.attach(model, optimizer, run_path, extras=extras, quiet=True) as run,
    ):
        run.resume(step=17)
    assert different(live, live_state(model, optimizer)) == []
    assert tree_hash(run_path) == before


def test_a_run_can_be_resumed_after_a_failed_attempt(run_path: Path) -> None:
    model, optimizer = build(width=6)
    with (
        pytest.raises(MismatchError),
        everstep.attach(model, optimizer, run_path, extras={"sched": scheduler(optimizer)}, quiet=True) as run,
    ):
        run.resume()
    model, optimizer = build()
    with everstep.attach(model, optimizer, run_path, extras={"sched": scheduler(optimizer)}, quiet=True) as run:
        assert run.resume() == 4


def test_a_second_try_on_the_same_run_object_works_after_a_missing_step(run_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, run_path, extras={"sched": scheduler(optimizer)}, quiet=True) as run:
        with pytest.raises(StepNotFoundError):
            run.resume(step=17)
        assert run.resume() == 4


# -- not a run --------------------------------------------------------------------------------------------------------


def test_a_run_of_a_newer_format_is_refused(run_path: Path) -> None:
    old = documents.decode((run_path / "run.json").read_bytes(), RunDocument, "")
    for format_, features in (((2, 0), ()), ((1, 0), ("compressed-bases",))):
        newer = RunDocument(old.run, format_, old.created, incompatible=features)
        (run_path / "run.json").write_bytes(documents.encode(newer))
        both_ways(run_path, lambda: with_extras(*build()), FormatError, "Upgrade")
        with pytest.raises(FormatError):
            everstep.open(run_path)


def test_a_run_of_a_newer_format_with_unknown_fields_is_refused_as_such(run_path: Path) -> None:
    """A future run.json may look different; it must not be called damaged."""
    import xxhash

    body = b'{"run":"00112233445566778899aabbccddeeff","format":[3,1],"made":"2031","shape":{"x":1}}'
    digest = xxhash.xxh3_64_hexdigest(body).encode()
    (run_path / "run.json").write_bytes(b'{"xxh3":"' + digest + b'","body":' + body + b"}\n")
    both_ways(run_path, lambda: with_extras(*build()), FormatError, "3.1")


def test_a_run_of_a_newer_minor_format_is_read(run_path: Path) -> None:
    old = documents.decode((run_path / "run.json").read_bytes(), RunDocument, "")
    newer = RunDocument(old.run, (1, 9), old.created, compatible=("nicer",))
    (run_path / "run.json").write_bytes(documents.encode(newer))
    assert everstep.open(run_path).steps == [0, 1, 2, 3, 4]


def test_a_run_with_features_a_writer_must_know_is_only_read(run_path: Path) -> None:
    old = documents.decode((run_path / "run.json").read_bytes(), RunDocument, "")
    newer = RunDocument(old.run, (1, 0), old.created, read_only=("new-index",))
    (run_path / "run.json").write_bytes(documents.encode(newer))
    assert everstep.open(run_path).steps == [0, 1, 2, 3, 4]
    before = tree_hash(run_path)
    model, optimizer = build()
    with pytest.raises(FormatError, match="new-index"):
        everstep.attach(model, optimizer, run_path, extras={"sched": scheduler(optimizer)}, quiet=True)
    assert tree_hash(run_path) == before


def test_opening_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="nothing"):
        everstep.open(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_opening_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="empty"):
        everstep.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_attaching_to_an_empty_folder_makes_a_run(tmp_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path, quiet=True) as run:
        assert run.resume() == 0
    assert everstep.open(tmp_path).steps == [0]


def test_attaching_to_a_deep_new_path_makes_its_folders(tmp_path: Path) -> None:
    model, optimizer = build()
    with everstep.attach(model, optimizer, tmp_path / "a" / "b" / "c", quiet=True) as run:
        assert run.resume() == 0


@pytest.mark.parametrize("what", ["folder", "file", "file-above", "dangling"])
def test_something_else_in_the_way_is_refused_and_left_alone(what: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    if what == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif what == "dangling":
        path.symlink_to(tmp_path / "nowhere" / "at" / "all")
    else:
        path.write_text("mine")
    target = path / "run" if what == "file-above" else path
    before = tree_hash(tmp_path) if what != "dangling" else {}
    model, optimizer = build()
    kind = (NotARunError, StorageError) if what in ("file-above", "dangling") else NotARunError
    with pytest.raises(kind) as caught:
        everstep.attach(model, optimizer, target, quiet=True)
    assert str(path) in str(caught.value)
    if what != "dangling":
        assert tree_hash(tmp_path) == before
        with pytest.raises(NotARunError):
            everstep.open(target)
        assert tree_hash(tmp_path) == before


def test_a_run_without_its_run_file_is_not_taken_for_a_new_one(run_path: Path) -> None:
    (run_path / "run.json").unlink()
    before = tree_hash(run_path)
    model, optimizer = build()
    with pytest.raises(EverstepError, match=r"run\.json"):
        everstep.attach(model, optimizer, run_path, quiet=True)
    with pytest.raises(EverstepError, match=r"run\.json"):
        everstep.open(run_path)
    assert tree_hash(run_path) == before


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100, b"not json", b'{"xxh3":"0","body":{}}\n'])
def test_a_damaged_run_file_is_a_typed_error(content: bytes, run_path: Path) -> None:
    (run_path / "run.json").write_bytes(content)
    both_ways(run_path, lambda: with_extras(*build()), EverstepError, "run.json")


# -- values that cannot be stored -------------------------------------------------------------------------------------


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Strange:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": [1, Strange()]}}, ("holder", "a", "b", "1", "Strange")),
        ({"f": len}, ("holder", "f", "builtin_function")),
        ({("k", 1): 2}, ("holder", "tuple")),
        ({1.5: 2}, ("holder", "float")),
        ({"g": (i for i in range(2))}, ("holder", "g", "generator")),
    ],
)  # fmt: skip
def test_an_unsupported_extra_is_refused_with_its_path_and_type(value: Any, words: Any, tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(UnsupportedValueError) as caught:
        everstep.attach(model, optimizer, tmp_path / "run", extras={"holder": Holder(value)}, quiet=True)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_hyperparameter_is_refused_with_its_path_and_type(tmp_path: Path) -> None:
    model, optimizer = build()
    optimizer.param_groups[0]["strange"] = Strange()
    with pytest.raises(UnsupportedValueError, match=r"strange.*Strange"):
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
        try:
            run.resume()
        finally:
            crash(run)


def test_an_unsupported_optimizer_state_is_refused_with_its_path_and_type(tmp_path: Path) -> None:
    model, optimizer = build()
    optimizer.state[model[0].weight]["strange"] = Strange()
    with pytest.raises(UnsupportedValueError, match=r"strange.*Strange"):
        run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
        try:
            run.resume()
        finally:
            crash(run)


def test_an_unsupported_value_in_mid_run_is_told_and_what_was_stored_stays(tmp_path: Path) -> None:
    model, optimizer = build()
    run = everstep.attach(model, optimizer, tmp_path / "run", quiet=True)
    truth = Truth(run, model, optimizer)
    truth.resume()
    for _ in range(5):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.commit()
    optimizer.param_groups[0]["strange"] = Strange()
    with pytest.raises(UnsupportedValueError, match=r"strange.*Strange"):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        run.commit()
        run.flush()
        run.commit()
    crash(run)
    check_history(tmp_path / "run", truth)


def test_a_failed_resume_leaves_hooks_and_rng_alone(run_path: Path) -> None:
    model, optimizer = build(width=6)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    rng = torch.get_rng_state()
    run = everstep.attach(model, optimizer, run_path, extras={"sched": scheduler(optimizer)}, quiet=True)
    rng = torch.get_rng_state()
    with pytest.raises(MismatchError):
        run.resume()
    assert torch.equal(rng, torch.get_rng_state())
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.close()


def test_errors_are_what_they_say() -> None:
    assert issubclass(UsageError, ValueError)
    for kind in (FormatError, MismatchError, NotARunError, StepNotFoundError, UnsupportedValueError):
        assert issubclass(kind, EverstepError)
