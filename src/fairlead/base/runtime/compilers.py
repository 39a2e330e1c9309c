"""Advice for a missing C compiler: our kernels need one when they are built, Triton's at run time."""

ADVICE = (
    "install a C compiler (Debian, Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc "
    "python3-devel; macOS: xcode-select --install), or name one in the variable CC"
)
_TRITONS_MESSAGE = "Failed to find C compiler"


def explained(error: BaseException) -> str:
    """Return an error's message, with the advice if a library has found no compiler."""
    said = f"{type(error).__name__}: {error}"
    return (
        f"{said} To compile its GPU kernels Triton needs one: {ADVICE}." if _TRITONS_MESSAGE in said else said
    )
