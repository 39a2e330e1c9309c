"""Forms are read the same however they are cut into pieces, and what cannot be read is refused."""

import io

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.formats.multipart import (
    HEADS_BYTES,
    MOST_PARTS,
    PREAMBLE_BYTES,
    VALUE_BYTES,
    FormParser,
    InvalidForm,
    boundary_of,
    is_form,
    part_head,
)

MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n'
    b"\r\nRIFF\r\n--c\r\n\r\n"
)
END = b"--b--\r\n"


def parsed(form: bytes, cuts: tuple[int, ...] = (), boundary: bytes = b"b", kept: tuple[str, ...] = ()):
    """Return the parts of a form that arrives in pieces, each with its content, and the kept values."""
    parser = FormParser(boundary, kept)
    contents = b""
    for begin, end in zip((0, *cuts), (*cuts, len(form)), strict=True):
        contents += parser.feed(form[begin:end])
    parser.end()
    parts = [
        (part.name, part.filename, part.content_type, contents[part.start : part.start + part.size])
        for part in parser.parts
    ]
    assert sum(part.size for part in parser.parts) == len(contents)
    return parts, parser.values


def fault(form: bytes, kept: tuple[str, ...] = ("model",)) -> tuple[str | None, str]:
    """Return the field and the message of the error that a form causes."""
    with pytest.raises(InvalidForm) as caught:
        parsed(form, kept=kept)
    return caught.value.field, str(caught.value)


def test_parts_and_their_contents_are_found():
    parts, values = parsed(MODEL + FILE + END, kept=("model",))
    assert parts == [("model", None, "", b"whisper"), ("file", "a.wav", "audio/wav", b"RIFF\r\n--c\r\n")]
    assert values == {"model": "whisper"}


def test_preamble_epilogue_and_padding_are_no_content():
    form = b"hello\r\n" + MODEL.replace(b"--b\r\n", b"--b \t\r\n") + b"--b--\r\n--b\r\nnot a part"
    assert parsed(form)[0] == [("model", None, "", b"whisper")]


def test_form_without_parts_is_empty():
    assert parsed(END) == parsed(b"--b--") == ([], {})


@given(st.lists(st.integers(0, len(MODEL + FILE + END)), max_size=12))
def test_pieces_of_any_size_give_the_same_form(cuts):
    form = MODEL + FILE + END
    assert parsed(form, kept=("model",)) == parsed(form, tuple(sorted(cuts)), kept=("model",))


@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([b"\r\n--", b"\r\n--x", b"--x\r\n", b"\r"]), max_size=5
    ),
    st.text(max_size=20),
    st.integers(1, 9),
)
def test_forms_of_httpx_are_read_as_they_were_meant(contents, filename, size):
    boundary = b"xyz"
    files = [("file", (filename or "f", content, "audio/wav")) for content in contents]
    request = httpx.Request(
        "POST",
        "http://test",
        data={"model": "m"},
        files=[*files, ("last", io.BytesIO(b"end"))],
        headers={"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"},
    )
    form = request.read()
    if any(boundary in content for content in contents):
        return
    parts, _ = parsed(form, tuple(range(size, len(form), size)), boundary)
    assert [part[3] for part in parts] == [b"m", *contents, b"end"]
    assert [part[0] for part in parts] == ["model", *("file" for _ in contents), "last"]


@given(st.text(min_size=1, max_size=20), st.text(max_size=20), st.binary(max_size=40))
def test_written_parts_are_read_as_they_were(name, filename, content):
    def read(head: bytes):
        return parsed(b"".join((head, content, b"\r\n--qq--\r\n")), boundary=b"qq")[0]

    if any(ord(letter) < 0x20 and letter not in "\t\r\n" for letter in name + filename):
        return
    if b"\r\n--qq" in content or any(0xD800 <= ord(letter) < 0xE000 for letter in name + filename):
        return
    ((read_name, read_filename, kind, body),) = read(part_head(b"qq", name, filename, "image/png"))
    assert (kind, body) == ("image/png", content)
    again = read(part_head(b"qq", read_name, read_filename, kind))
    assert again == [(read_name, read_filename, kind, content)]


def disposition(value: bytes) -> bytes:
    return b"--b\r\nContent-Disposition: %s\r\n\r\nx\r\n--b--\r\n" % value


@pytest.mark.parametrize(
    ("value", "name", "filename"),
    [
        (b'form-data; name="a"; filename="b c.wav"', "a", "b c.wav"),
        (b"form-data; name=a; filename=b", "a", "b"),
        (b'FORM-DATA;filename="b";NAME="a";', "a", "b"),
        (b'form-data; name="a"; filename="say \\"hi\\".wav"', "a", 'say "hi".wav'),
        (b'form-data; name="a"; filename=""', "a", ""),
        (b'form-data; name="a"; filename="_"; filename*=UTF-8\'\'%e2%82%ac.wav', "a", "€.wav"),
        ('form-data; name="ä"; filename="ö.wav"'.encode(), "ä", "ö.wav"),
        (b'form-data; name="a"; filename="b;name=c"', "a", "b;name=c"),
    ],
)
def test_dispositions_of_clients_are_read(value, name, filename):
    assert parsed(disposition(value))[0] == [(name, filename, "", b"x")]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (b"", "the form ends before its last boundary"),
        (MODEL, "the form ends before its last boundary"),
        (MODEL[:-9], "the form ends before its last boundary"),
        (b"--b\r\nContent-Disp", "the form ends before its last boundary"),
        (b"x" * (PREAMBLE_BYTES + 10), "the body does not begin with the boundary that Content-Type names"),
        (MODEL + b"--bb\r\n", "a boundary is not followed by the end of its line"),
        (b"--b" + b" " * 300 + b"\r\n", "a boundary is followed by too many spaces"),
        (b"--b\r\n\r\nx\r\n--b--", "a part has a line that is no header"),
        (b"--b\r\nX: y\r\n\r\nx\r\n--b--", "a part has no Content-Disposition: form-data"),
        (b"--b\r\nno header\r\n\r\n", "a part has a line that is no header"),
        (b"--b\r\nX: a\r\n b\r\n\r\n", "a part has a line that is no header"),
        (b"--b\r\nX: a\nY: b\r\n\r\n", "a part has a line that is no header"),
        (b"--b\r\nX: a\r\nX: b\r\n\r\n", "a part has the header X twice"),
        (disposition(b"attachment; name=a"), "a part has no Content-Disposition: form-data"),
        (disposition(b"form-data"), "a part has no name"),
        (disposition(b'form-data; name=""'), "a part has no name"),
        (disposition(b"form-data; name=a; name=b"), "a part has a Content-Disposition that cannot be read"),
        (disposition(b'form-data; name="a'), "a part has a Content-Disposition that cannot be read"),
        (MODEL * (MOST_PARTS + 1), f"a form may have {MOST_PARTS} parts"),
        (b"--b\r\nX: " + b"y" * HEADS_BYTES, f"the heads of the parts have more than {HEADS_BYTES} bytes"),
        (
            b"--b\r\n" + b"X: y\r\n" * HEADS_BYTES,
            f"the heads of the parts have more than {HEADS_BYTES} bytes",
        ),
    ],
)
def test_form_that_lies_is_refused(form, message):
    assert fault(form, kept=()) == (None, message)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (MODEL + MODEL + END, "is given twice"),
        (MODEL.replace(b'"model"', b'"model"; filename="x"') + END, "must be a text, not a file"),
        (MODEL.replace(b"whisper", b"\xff") + END, "is not valid UTF-8"),
        (MODEL.replace(b"whisper", b"x" * (VALUE_BYTES + 100)), f"must have at most {VALUE_BYTES} bytes"),
        (
            MODEL.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"),
            "must not have a Content-Transfer-Encoding",
        ),
    ],
)
def test_fault_of_a_field_that_is_read_names_it(form, message):
    assert fault(form) == ("model", message)


def test_parser_holds_no_content():
    """A megabyte without a line end passes through, whatever follows."""
    parser = FormParser(b"b")
    parser.feed(MODEL[:-2])
    passed = sum(len(parser.feed(b"\r\n--" * 16_000)) for _ in range(16))
    assert 64_000 * 16 - 5 <= passed <= 64_000 * 16
    assert len(parser._buffer) <= 5


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b(c)"', b"a b(c)"),
        ("multipart/form-data;BOUNDARY=----WebKitFormBoundaryX; x=y", b"----WebKitFormBoundaryX"),
    ],
)
def test_boundary_is_read(content_type, boundary):
    assert is_form(content_type)
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=a; boundary=b",
        'multipart/form-data; boundary="a',
        "multipart/form-data; boundary=" + "x" * 71,
        'multipart/form-data; boundary="x "',
        "multipart/form-data; boundary=ä",
        "multipart/form-data; boundary=a\0b",
    ],
)
def test_form_without_a_usable_boundary_is_refused(content_type):
    with pytest.raises(InvalidForm) as caught:
        boundary_of(content_type)
    assert caught.value.field == "Content-Type"


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/mixed; boundary=x", "text/multipart"]
)
def test_other_bodies_are_no_forms(content_type):
    assert not is_form(content_type)
