"""Settings of a dispatcher and fronts on different machines."""

from collections.abc import Iterator

import msgspec

from fairlead.base.config.spelling import Fault, spelled


class DispatcherConfig(msgspec.Struct, frozen=True, rename=spelled):
    """How `fairlead front` reaches the dispatcher, and where `fairlead dispatcher` listens."""

    listen: str | None = None
    """The address on which `fairlead dispatcher` takes connections of fronts: tcp://HOST:PORT."""
    addresses: tuple[str, ...] = ()
    """The addresses that `fairlead front` connects to, of the dispatcher and its standbys: tcp://HOST:PORT."""
    key_file: str | None = None
    """File with the key that fronts and dispatchers share, of 16 bytes or more. It is never sent."""
    tls_certificate: str | None = None
    """File with the dispatcher's certificate and those that sign it; with it, connections are encrypted."""
    tls_key: str | None = None
    """File with the private key of the certificate; default: the file of the certificate has it."""
    tls_ca: str | None = None
    """File with the certificates that a front accepts as the dispatcher's signers; with it, connections are
    encrypted.
    """

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of addresses, and of settings that need others."""
        if self.listen is not None and not _is_address(self.listen):
            yield Fault(("listen",), "must be tcp://HOST:PORT")
        for index, address in enumerate(self.addresses):
            if not _is_address(address):
                yield Fault(("addresses", index), "must be tcp://HOST:PORT")
        if (self.listen is not None or self.addresses) and self.key_file is None:
            yield Fault(("keyFile",), "is missing: fronts and dispatchers need a key")
        if self.tls_key is not None and self.tls_certificate is None:
            yield Fault(("tlsCertificate",), "is missing, but there is tlsKey")


def _is_address(text: str) -> bool:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    return (
        text.startswith("tcp://") and bool(host) and port.isascii() and port.isdigit() and int(port) < 65536
    )
