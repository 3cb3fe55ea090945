"""Stop strings against a definition that reads character by character, for every way a text can be cut."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopStrings

letters = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def definition(text: str, stops, include: bool, free: int = 0) -> tuple[str, str | None]:
    """The text up to the first place at which a stop string ends, not counting those within `free` characters."""
    for end in range(free + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places) -> list[str]:
    bounds = [0, *sorted(place for place in places if place <= len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=500, deadline=None)
@given(letters, stop_lists, st.booleans(), st.lists(st.integers(0, 12)))
def test_any_cut_gives_what_reading_character_by_character_gives(text, stops, include, places):
    expected, stop = definition(text, stops, include)
    found, shown = StopStrings(stops, include), ""
    for piece in cut(text, places):
        certain = found.push(piece)
        shown += certain.text
        assert expected.startswith(shown), "what has been shown is never taken back"
        if certain.stop is not None:
            break
    else:
        certain = None
        shown += found.flush()
    assert shown == expected
    assert (certain.stop if certain else None) == stop


@settings(max_examples=300, deadline=None)
@given(letters, letters, stop_lists, st.booleans(), st.lists(st.integers(0, 12)), st.lists(st.integers(0, 12)))
def test_what_lies_within_the_first_tokens_is_not_matched_later(early, late, stops, include, places, more):
    expected, stop = definition(early + late, stops, include, free=len(early))
    found, shown, ended = StopStrings(stops, include), "", None
    for piece in cut(early, places):
        certain = found.push(piece, may_stop=False)
        assert certain.stop is None
        shown += certain.text
    for piece in cut(late, more):
        certain = found.push(piece)
        shown += certain.text
        ended = certain.stop
        if ended is not None:
            break
    if ended is None:
        shown += found.flush()
    # What was shown before min_tokens stays shown, even if a stop string that ends later begins in it.
    assert ended == stop
    assert shown == expected


@settings(max_examples=200, deadline=None)
@given(letters, stop_lists)
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    found = StopStrings(stops)
    certain = found.push(text)
    if certain.stop is None:
        held = text[len(certain.text) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_alphabet():
    """The public case: nothing of DEFGHIJ is ever shown."""
    found = StopStrings(["DEFGHIJ"])
    assert [found.push(piece) for piece in ("ABC", "DEF", "G", "HI")] == [
        ("ABC", None),
        ("", None),
        ("", None),
        ("", None),
    ]
    assert found.push("JK") == ("", "DEFGHIJ")
    found = StopStrings(["DEFGHIJ"], include=True)
    assert [found.push(piece).text for piece in ("ABCDEF", "G", "HIJK")] == ["ABC", "", "DEFGHIJ"]
