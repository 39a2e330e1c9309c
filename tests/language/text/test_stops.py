"""Stop strings end an answer at the same character, however the text is split into pieces."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from fairlead.language.text.stops import StopStrings

texts = st.text("ab\n😀", max_size=30)
stop_lists = st.lists(st.text("ab\n😀", max_size=5), max_size=4)


def naive(text, stops):
    """Return the visible text and the stop string that ended it, by checking after every character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pushed(text, stops, cuts):
    """Push `text` in pieces; return the pieces that came out and the stop string that was found."""
    strings = StopStrings(stops)
    ends = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = []
    for start, end in pairwise(ends):
        visible, stop = strings.push(text[start:end])
        pieces.append(visible)
        if stop is not None:
            return pieces, stop
    return [*pieces, strings.flush()], None


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
@example("aab", ["ab"], [1, 2])
@example("abab\n", ["abab\nb", "b\n"], [1, 2, 3, 4])
def test_split_text_ends_at_the_same_stop_string_as_the_naive_search(text, stops, cuts):
    pieces, stop = pushed(text, stops, cuts)
    assert naive(text, stops) == ("".join(pieces), stop)


@given(texts, stop_lists)
def test_only_a_possible_beginning_of_a_stop_string_is_kept(text, stops):
    strings = StopStrings(stops)
    visible, stop = strings.push(text)
    if stop is None:
        kept = text.removeprefix(visible)
        longest = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
        assert longest == len(kept)


def test_kept_text_is_returned_if_no_stop_string_follows():
    strings = StopStrings(["STOP"])
    assert strings.push("a S") == ("a ", None)
    assert strings.push("TO") == ("", None)
    assert strings.push(", no. S") == ("STO, no. ", None)
    assert strings.flush() == "S"
    assert strings.flush() == ""


def test_first_complete_stop_string_is_used():
    assert StopStrings(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopStrings(["abc", "ab"]).push("abc") == ("", "ab")
    assert StopStrings(["bc", "abc"]).push("abc") == ("", "abc")


def test_without_stop_strings_the_same_string_object_is_returned():
    text = "text"
    for stops in ([], [""]):
        visible, stop = StopStrings(stops).push(text)
        assert visible is text
        assert stop is None


def test_repeated_partial_matches_take_linear_time():
    strings = StopStrings(["a" * 1000 + "b"])
    pieces = [strings.push("a")[0] for _ in range(20_000)]
    assert len("".join(pieces)) == 19_000
    assert strings.push("c") == ("a" * 1000 + "c", None)
