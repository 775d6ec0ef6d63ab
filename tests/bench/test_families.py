"""The six model families: that they are what their names say."""

import pytest
import torch

from everstep.bench import families
from everstep.bench.families import FAMILIES

ORIGINALS = [
    (families.resnet18, 11_689_512), (families.vgg16, 138_357_544), (families.inception_v3, 23_834_568),
    (families.alexnet, 61_100_840), (families.GPT2, 124_439_808), (families.BERT, 109_482_240),
]  # fmt: skip


@pytest.mark.parametrize("model, num_parameters", ORIGINALS)
def test_at_scale_one_a_model_has_the_parameters_of_the_original(model, num_parameters):
    with torch.device("meta"):
        built = model(1.0)
    assert sum(p.numel() for p in built.parameters()) == num_parameters


@pytest.mark.parametrize("model, shape, outputs", [
    (families.resnet18, (1, 3, 224, 224), (1, 1000)), (families.vgg16, (1, 3, 224, 224), (1, 1000)),
    (families.inception_v3, (2, 3, 299, 299), (2, 1000)), (families.alexnet, (1, 3, 224, 224), (1, 1000)),
])  # fmt: skip
def test_at_scale_one_a_model_takes_the_images_of_the_original(model, shape, outputs):
    with torch.device("meta"):
        assert model(1.0)(torch.empty(shape)).shape == outputs


def test_at_scale_one_transformers_take_the_sequences_of_the_originals():
    with torch.device("meta"):
        assert families.GPT2()(torch.zeros(1, 1024, dtype=torch.long)).shape == (1, 1024, 50257)
        assert families.BERT()(torch.zeros(1, 512, dtype=torch.long)).shape == (1, 768)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_scaled_model_learns_its_batch_and_every_parameter_has_a_part_in_it(family):
    model, optimizer = family.build(family.quick)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        families.train_step(model, optimizer, family.batch(family.quick))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    described = families.describe(family, family.quick)
    assert described["num_parameters"] == sum(p.numel() for p in before.values())
    copies = 2 if described["optimizer"] == "SGD" else 3
    assert described["state_bytes"] >= copies * 4 * described["num_parameters"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_equal_seeds_build_equal_models_and_batches_and_leave_the_global_generator_alone(family):
    before = torch.get_rng_state()
    (a, _), (b, _) = family.build(family.quick), family.build(family.quick)
    x, y = family.batch(family.quick, seed=1), family.batch(family.quick, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
