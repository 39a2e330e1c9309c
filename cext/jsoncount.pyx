# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: annotation_typing=False, auto_pickle=False, autotestdict=False
"""A counter of the values in a JSON text, which creates no values and does not hold the GIL.

A parser creates an object for each value while it holds the GIL. This module counts the values before the
parser begins. It reads each byte once and does not check the grammar.

Promises:

- For any bytes, no parser creates more values than are counted, up to where it finds an error.
- The text is UTF-8 exactly if `invalid_at` is negative.
- The GIL is not held while the bytes are read, and no memory is allocated.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memcpy
cimport cython

cdef enum:
    NAMES_AT_MOST = 8
    FRACTION = 4   # the count of a number with a fraction or an exponent: writing it takes that much longer
    NAME_SHOWN = 64

cdef enum Kind:
    LITERAL, SPACE, OPEN, CLOSE, COMMA, COLON, QUOTE

cdef Kind KINDS[256]


cdef void classify(const char *signs, Kind kind) noexcept:
    while signs[0]:
        KINDS[<unsigned char>signs[0]] = kind
        signs += 1


classify(b" \t\n\r", SPACE)
classify(b"[{", OPEN)
classify(b"]}", CLOSE)
classify(b",", COMMA)
classify(b":", COLON)
classify(b'"', QUOTE)  # all other bytes are LITERAL, which is 0

cdef uint64_t ONES = 0x0101010101010101
cdef uint64_t HIGHS = 0x8080808080808080


cdef struct Text:
    const unsigned char *bytes
    Py_ssize_t length
    Py_ssize_t invalid_at


cdef struct Name:
    const char *bytes
    Py_ssize_t length
    int64_t numbers  # in members of this name


cdef struct Member:
    Py_ssize_t begin  # of its name; −1: there is none
    Py_ssize_t end
    int64_t values


@cython.final
cdef class Counts:
    """The result of `count`.

    `values`: all except keys and those in `apart`. `apart`: for each of these names, how many numbers its
    members have. `largest`: the name of the outermost object's member with most values, as it is written, at
    most 64 bytes of it; empty if there is none. `invalid_at`: index of the first bytes not in UTF-8, or −1.
    """

    cdef readonly int64_t values
    cdef readonly tuple apart
    cdef readonly bytes largest
    cdef readonly Py_ssize_t invalid_at


def count(body: bytes, apart: tuple[bytes, ...] = ()) -> Counts:
    """Count the values in a JSON text.

    Numbers in arrays, at any depth, below those members of the outermost object that `apart` names (at most 8
    names) are counted separately. Any other number with a fraction or an exponent counts as 4 values.
    """
    cdef Text text
    cdef Name names[NAMES_AT_MOST]
    cdef Member largest
    cdef int64_t values
    cdef int i, known = len(apart)
    if not isinstance(body, bytes):
        raise TypeError(f"a body is bytes, not {type(body).__name__}")
    if known > NAMES_AT_MOST:
        raise ValueError(f"apart has {known} names, more than {NAMES_AT_MOST}")
    for i in range(known):
        name = apart[i]
        if not isinstance(name, bytes):
            raise TypeError(f"a name is bytes, not {type(name).__name__}")
        names[i] = Name(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), 0)
    text = Text(<const unsigned char *>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), -1)
    with nogil:
        values = walk(&text, names, known, &largest)
    cdef Counts found = Counts.__new__(Counts)
    found.values = values
    found.apart = tuple([names[i].numbers for i in range(known)])
    found.largest = b"" if largest.begin < 0 else body[largest.begin:min(largest.end, largest.begin + NAME_SHOWN)]
    found.invalid_at = text.invalid_at
    return found


cdef int64_t walk(Text *text, Name *names, int known, Member *largest) noexcept nogil:
    cdef const unsigned char *bytes = text.bytes
    cdef Py_ssize_t at = 0, depth = 0, begin = 0
    cdef int64_t values = 0
    cdef Kind kind, before = SPACE
    cdef Name *name = NULL
    cdef Member member = Member(-1, -1, 0)
    cdef Py_ssize_t string_begin = 0, string_end = 0
    cdef bint fraction
    largest[0] = member
    while at < text.length:
        kind = KINDS[bytes[at]]
        if kind == SPACE:
            at += 1
            continue
        if kind == LITERAL:
            begin = at
            at = end_of_literal(text, at, &fraction)
            if not (bytes[begin] == b"-" or b"0" <= bytes[begin] <= b"9"):
                values += 1
            elif name != NULL and before != COLON:
                name.numbers += 1
            else:
                values += FRACTION if fraction else 1
        elif kind == QUOTE:
            string_begin = at + 1
            at = end_of_string(text, string_begin)
            string_end = at - 1
            values += 1
        else:
            at += 1
            if kind == OPEN:
                values += 1
                depth += 1
            elif kind == CLOSE:
                depth -= depth > 0
            elif kind == COLON and before == QUOTE:
                values -= 1  # the string was a key
                if depth == 1:
                    keep_larger(largest, &member, values)
                    member = Member(string_begin, string_end, values)
                    name = name_of(&bytes[string_begin], string_end - string_begin, names, known)
        before = kind
    keep_larger(largest, &member, values)
    return values


cdef void keep_larger(Member *largest, const Member *member, int64_t values) noexcept nogil:
    # `member.values` is the number of values before its own.
    if member.begin >= 0 and (largest.begin < 0 or values - member.values > largest.values):
        largest[0] = Member(member.begin, member.end, values - member.values)


cdef Name *name_of(const unsigned char *bytes, Py_ssize_t length, Name *names, int known) noexcept nogil:
    cdef int i
    for i in range(known):
        if names[i].length == length and memcmp(names[i].bytes, bytes, length) == 0:
            return &names[i]
    return NULL


cdef Py_ssize_t end_of_literal(Text *text, Py_ssize_t at, bint *fraction) noexcept nogil:
    # A literal is any text between spaces and JSON's structural characters: numbers, names, and invalid JSON.
    cdef unsigned char byte
    fraction[0] = False
    while at < text.length and KINDS[text.bytes[at]] == LITERAL:
        byte = text.bytes[at]
        if byte >= 0x80:
            at = end_of_character(text, at)
            continue
        if byte == b"." or byte == b"e" or byte == b"E":
            fraction[0] = True
        at += 1
    return at


cdef Py_ssize_t end_of_string(Text *text, Py_ssize_t at) noexcept nogil:
    # Return the index after the closing quote; for a string without one, one past the end of the text.
    cdef const unsigned char *bytes = text.bytes
    cdef uint64_t word, quotes, escapes
    while at < text.length:
        while at + 8 <= text.length:
            memcpy(&word, &bytes[at], 8)
            quotes = word ^ (ONES * 0x22)
            escapes = word ^ (ONES * 0x5C)
            # The classic test for a zero byte; it may err where a high bit is set, which ends the run anyway.
            if (word | ((quotes - ONES) & ~quotes) | ((escapes - ONES) & ~escapes)) & HIGHS:
                break
            at += 8
        if at >= text.length:
            break
        if bytes[at] == b'"':
            return at + 1
        if bytes[at] == b"\\":
            at += 1
            if at < text.length and bytes[at] < 0x80:
                at += 1
        elif bytes[at] >= 0x80:
            at = end_of_character(text, at)
        else:
            at += 1
    return text.length + 1


cdef Py_ssize_t end_of_character(Text *text, Py_ssize_t at) noexcept nogil:
    # `at` is a byte of 0x80 or more. Well-formed sequences are those of table 3-7 of the Unicode standard.
    cdef const unsigned char *bytes = text.bytes
    cdef unsigned char first = bytes[at], low = 0x80, high = 0xBF
    cdef Py_ssize_t length, i
    if 0xC2 <= first <= 0xDF:
        length = 2
    elif 0xE0 <= first <= 0xEF:
        length = 3
        low = 0xA0 if first == 0xE0 else 0x80
        high = 0x9F if first == 0xED else 0xBF
    elif 0xF0 <= first <= 0xF4:
        length = 4
        low = 0x90 if first == 0xF0 else 0x80
        high = 0x8F if first == 0xF4 else 0xBF
    else:
        length = 0
    if length and at + length <= text.length and low <= bytes[at + 1] <= high:
        for i in range(2, length):
            if not 0x80 <= bytes[at + i] <= 0xBF:
                break
        else:
            return at + length
    if text.invalid_at < 0:
        text.invalid_at = at
    return at + 1
