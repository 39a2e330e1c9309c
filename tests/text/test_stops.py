"""Stop strings end an answer at the same character however the text is cut."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from fairlead.text.stops import StopStrings

texts = st.text("ab\n😀", max_size=30)
stop_lists = st.lists(st.text("ab\n😀", max_size=5), max_size=4)


def naive(text, stops):
    """Return what an answer of `text` shows and what ended it, by looking after every character."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pushed(text, stops, cuts):
    """Return the pieces and the hit of an answer that comes in pieces."""
    strings = StopStrings(stops)
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = []
    for start, end in pairwise(borders):
        safe, hit = strings.push(text[start:end])
        pieces.append(safe)
        if hit is not None:
            return pieces, hit
    return [*pieces, strings.flush()], None


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
@example("aab", ["ab"], [1, 2])
@example("abab\n", ["abab\nb", "b\n"], [1, 2, 3, 4])
def test_an_answer_ends_where_looking_after_every_character_ends_it(text, stops, cuts):
    pieces, hit = pushed(text, stops, cuts)
    assert naive(text, stops) == ("".join(pieces), hit)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    strings = StopStrings(stops)
    safe, hit = strings.push(text)
    if hit is None:
        held = text.removeprefix(safe)
        longest = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
        assert longest == len(held)


def test_text_goes_on_when_a_beginning_comes_to_nothing():
    strings = StopStrings(["STOP"])
    assert ("a ", None) == strings.push("a S")
    assert ("", None) == strings.push("TO")
    assert ("STO, no. ", None) == strings.push(", no. S")
    assert "S" == strings.flush()
    assert "" == strings.flush()


def test_the_stop_string_that_is_complete_first_wins():
    assert ("a", "bc") == StopStrings(["abcd", "bc"]).push("abcd")
    assert ("", "ab") == StopStrings(["abc", "ab"]).push("abc")
    assert ("", "abc") == StopStrings(["bc", "abc"]).push("abc")


def test_without_stop_strings_the_very_text_goes_through():
    text = "text"
    for stops in ([], [""]):
        safe, hit = StopStrings(stops).push(text)
        assert safe is text
        assert hit is None


def test_a_stop_string_that_nearly_comes_all_the_time_takes_linear_work():
    strings = StopStrings(["a" * 1000 + "b"])
    pieces = [strings.push("a")[0] for _ in range(20_000)]
    assert 19_000 == len("".join(pieces))
    assert ("a" * 1000 + "c", None) == strings.push("c")
