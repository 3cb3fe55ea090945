from golden_models import GOLDEN_NAMES, load_golden

from jaxserve.models.registry import FAMILIES


def test_every_family_has_a_golden_model():
    assert {load_golden(name).config["architectures"][0] for name in GOLDEN_NAMES} == set(FAMILIES)


def test_no_tensor_makes_two_parameters():
    for family in FAMILIES.values():
        names = [name for source in family.weights.values() for name in source.names]
        assert len(names) == len(set(names))


def test_layer_parameters_come_from_layer_tensors():
    for family in FAMILIES.values():
        for path, source in family.weights.items():
            assert all(("{i}" in name) == ("{i}" in path) for name in source.names)
