"""Regular expressions of numbers, whose digits are bounded: a model cannot write them forever."""

from decimal import Decimal
from typing import NamedTuple

MOST_DIGITS = 30
"""Of the whole part and of the fraction each; 17 tell all floating-point numbers apart."""
_REST = MOST_DIGITS - 1
_DIGITS = f"[0-9]{{0,{MOST_DIGITS}}}"
_WHOLE = f"(?:0|[1-9][0-9]{{0,{_REST}}})"
_EXPONENT = "(?:[eE][+-]?[0-9]{1,2})?"  # which only a bound of zero allows
_LARGEST = Decimal(10) ** MOST_DIGITS
_MOST_PLACES = 15

INTEGER = f"-?{_WHOLE}"
NUMBER = rf"-?{_WHOLE}(?:\.[0-9]{{1,{MOST_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,3}})?"


class Bound(NamedTuple):
    """A bound of a number. `is_open`: the number itself is out of bounds."""

    value: Decimal
    is_open: bool = False

    def __neg__(self) -> "Bound":
        return Bound(-self.value, self.is_open)


def bounded(least: Bound | None, most: Bound | None, places: int | None) -> list[str] | None:
    """Return expressions that all match a decimal number within bounds; an empty list if there is none.

    `places`: the most digits of the fraction; 0: whole numbers; None: any. None is returned for bounds that
    have too many digits.
    """
    for bound in (least, most):
        if bound is not None and (
            abs(bound.value) >= _LARGEST or -int(bound.value.as_tuple().exponent) > _MOST_PLACES
        ):
            return None
    if least is not None and most is not None:
        if least.value > most.value or (least.value == most.value and (least.is_open or most.is_open)):
            return []
        if places == 0 and not any(
            _is_within(Decimal(one), least, most)
            for one in (int(least.value) - 1, int(least.value), int(least.value) + 1)
        ):
            return []
    found = [_at_least(least)] if least is not None else []
    found += [_at_most(most)] if most is not None else []
    if places is not None or not found:
        fraction = f"(?:\\.[0-9]{{1,{places or MOST_DIGITS}}})?" if places != 0 else ""
        found.append(f"-?{_WHOLE}{fraction}")
    return found


def _is_within(value: Decimal, least: Bound, most: Bound) -> bool:
    above = value > least.value if least.is_open else value >= least.value
    return above and (value < most.value if most.is_open else value <= most.value)


def _at_least(bound: Bound) -> str:
    if bound.value == 0:
        return f"(?:{_above(bound)}){_EXPONENT}"
    if bound.value < 0:
        positive = _WHOLE + _fraction()
        return f"{positive}|-(?:{_below(-bound)})"
    return _above(bound)


def _at_most(bound: Bound) -> str:
    if bound.value == 0:
        zero = "" if bound.is_open else rf"|0(?:\.0{{1,{MOST_DIGITS}}})?"
        return f"-(?:{_above(Bound(bound.value, is_open=True))}){_EXPONENT}{zero}"
    if bound.value < 0:
        return f"-(?:{_above(-bound)})"
    return f"-{_WHOLE}{_fraction()}|{_below(bound)}"


def _fraction() -> str:
    return rf"(?:\.[0-9]{{1,{MOST_DIGITS}}})?"


def _above(bound: Bound) -> str:
    """Return what matches the decimal numbers from a bound on that is not negative."""
    whole, places = _parts(bound.value)
    more = f"[0-9]{{0,{_REST - len(whole)}}}" if len(whole) < MOST_DIGITS else ""
    ways = [f"[1-9][0-9]{{{len(whole)}}}{more}{_fraction()}"] if len(whole) < MOST_DIGITS else []
    for at, digit in enumerate(whole):
        if digit < "9":
            low = max(int(digit) + 1, 1 if at == 0 else 0)
            ways.append(f"{whole[:at]}[{low}-9][0-9]{{{len(whole) - at - 1}}}{_fraction()}")
    ways += [
        rf"{whole}\.{places[:at]}[{int(digit) + 1}-9]{_DIGITS}"
        for at, digit in enumerate(places)
        if digit < "9"
    ]
    if bound.is_open:
        ways.append(rf"{whole}\.{places}0{{0,{_REST}}}[1-9]{_DIGITS}")
    else:
        ways.append(rf"{whole}\.{places}{_DIGITS}" if places else f"{whole}{_fraction()}")
    return "|".join(ways)


def _below(bound: Bound) -> str:
    """Return what matches the decimal numbers from zero up to a bound that is not negative."""
    whole, places = _parts(bound.value)
    ways = []
    if len(whole) > 1:
        ways.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){_fraction()}")
    for at, digit in enumerate(whole):
        low = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > low:
            ways.append(f"{whole[:at]}[{low}-{int(digit) - 1}][0-9]{{{len(whole) - at - 1}}}{_fraction()}")
    if places:
        ways.append(whole)
    for at, digit in enumerate(places):
        if at:
            ways.append(rf"{whole}\.{places[:at]}")
        if digit > "0":
            ways.append(rf"{whole}\.{places[:at]}[0-{int(digit) - 1}]{_DIGITS}")
    if not bound.is_open:
        zeros = f"0{{0,{MOST_DIGITS}}}"
        ways.append(rf"{whole}\.{places}{zeros}" if places else rf"{whole}(?:\.0{zeros})?")
    return "|".join(ways) or r"[^\x00-\x{10ffff}]"


def _parts(value: Decimal) -> tuple[str, str]:
    """Return the digits before the point and those behind it, without zeros at the end."""
    whole, _, places = f"{value:f}".partition(".")
    return whole, places.rstrip("0")
