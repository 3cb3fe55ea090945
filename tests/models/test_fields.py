import pytest

from jaxserve.models.fields import CheckpointError, Fields, nearest

FIELDS = Fields(
    values={"n": 3, "zero": 0, "yes": True, "x": 0.5, "list": [1, 2], "text": "a", "none": None},
    where="some.json",
    defaults={"n": 9, "absent": 7},
)


def test_a_value_wins_over_its_default_and_an_absent_field_takes_it():
    assert FIELDS.integer("n") == 3
    assert FIELDS.integer("absent") == 7


def test_a_field_without_value_and_default_is_named():
    with pytest.raises(CheckpointError, match=r"some\.json: the field 'size' is missing"):
        FIELDS.integer("size")


@pytest.mark.parametrize(
    ("method", "name", "rule"),
    [
        ("integer", "zero", "a positive integer"),
        ("integer", "yes", "a positive integer"),
        ("integer", "x", "a positive integer"),
        ("number", "text", "a positive number"),
        ("number", "yes", "a positive number"),
        ("flag", "n", "true or false"),
        ("token_ids", "text", "a token id, a list of token ids, or null"),
    ],
)
def test_a_wrong_value_is_named_with_the_rule(method, name, rule):
    with pytest.raises(CheckpointError) as error:
        getattr(FIELDS, method)(name)
    assert str(error.value) == f"some.json: {name}={FIELDS.values[name]!r}, but it must be {rule}"


def test_token_ids_and_optional_integers():
    assert FIELDS.token_ids("n") == (3,)
    assert FIELDS.token_ids("zero") == (0,)
    assert FIELDS.token_ids("list") == (1, 2)
    assert FIELDS.token_ids("none") == ()
    assert FIELDS.integer_or_none("none") is None


def test_a_list_per_layer_may_be_longer_and_not_shorter():
    assert FIELDS.per_layer("list", 1) == [1]
    with pytest.raises(CheckpointError, match="an entry for each of 3 layers"):
        FIELDS.per_layer("list", 3)


def test_nearest_suggests_only_what_is_close():
    assert nearest("lama3", ["llama3", "yarn"]) == " (did you mean 'llama3'?)"
    assert nearest("zzz", ["llama3", "yarn"]) == ""
