"""What the benchmarks train."""

import torch

from everstep.bench import workloads
from everstep.bench.workloads import Workload


def test_the_model_of_the_design_has_17_million_parameters():
    with torch.device("meta"):
        model = workloads.GPT(Workload())
    assert 16.5e6 < sum(p.numel() for p in model.parameters()) < 17.5e6


def test_equal_seeds_build_equal_models_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    (a, _), (b, _) = workloads.build(Workload().quick()), workloads.build(Workload().quick())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_batch_has_the_tokens_asked_for():
    for tokens in (256, 1024):
        batch = next(iter(workloads.batches(Workload(tokens=tokens), num_batches=2)))
        assert batch[:, 1:].numel() == tokens
        assert int(batch.min()) >= 0 and int(batch.max()) < Workload().vocabulary


def test_a_step_lowers_the_loss_on_its_own_batch():
    model, optimizer = workloads.build(Workload().quick())
    batch = next(iter(workloads.batches(Workload().quick())))
    before = model(batch).item()
    for _ in range(10):
        workloads.train_step(model, optimizer, batch)
    assert model(batch).item() < before
    assert all(p.grad is None for p in model.parameters())
