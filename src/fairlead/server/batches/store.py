"""The files and batches on disk. Every method blocks: call it in a thread.

Several processes may use one folder. An object is a record that is written once, so all see the same, and
what changes has one writer: the process that holds `lock` runs the batches.

    files/file-…            contents       batches/batch_….json     how it was created
    files/file-….json       the record     batches/batch_….state    how far it is, replaced as a whole
    lock                                   batches/batch_….cancel   its cancellation was requested
                                           batches/batch_….results  the journal of results, a line each

A result is in the journal once, with the number of its request. After a crash the journal is cut after its
last whole line, and only requests without a line in it run again. The files of results are made from the
journal at the end, under ids that follow from the batch's: making them again changes nothing.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Literal, TypeVar

import msgspec

from fairlead.base.errors import Conflict, StorageFull
from fairlead.server.batches.disk import (
    FolderLock,
    NewFile,
    append_lines,
    read_pieces,
    repair_journal,
    write_whole,
)
from fairlead.server.batches.records import BatchRecord, BatchState, FileRecord, Purpose, StoredBatch

# What a file takes at least, so that the bound on bytes also bounds the number of files.
LEAST_BYTES = 4096
PIECE_BYTES = 256 * 1024

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

Record = TypeVar("Record", FileRecord, BatchRecord)
ResultKind = Literal["output", "error"]


class JournalLine(msgspec.Struct, frozen=True):
    """The result of one request.

    number: That of its line in the input file, from 0, without blank lines.
    failed: It is an error.
    result: The line of the file of results.
    """

    number: int
    failed: bool
    result: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(JournalLine).decode
_decode_state = msgspec.json.Decoder(BatchState).decode


class BatchStore:
    """The folder with all files and batches.

    folder: It is made if it is absent.
    tenant_bytes: What one tenant's files and results may take, in bytes.
    keep_s: How long a file is kept after its creation, and a batch, in seconds.
    now: Returns the seconds since 1970.
    """

    def __init__(
        self, folder: Path, *, tenant_bytes: int, keep_s: int, now: Callable[[], float] = time.time
    ) -> None:
        self.now = now
        self.lock = FolderLock(folder / "lock")
        self._folder = folder
        self._files = folder / "files"
        self._batches = folder / "batches"
        self._tenant_bytes = tenant_bytes
        self._keep_s = keep_s
        self._known: dict[Path, FileRecord | BatchRecord] = {}  # records never change

    def prepare(self) -> None:
        """Make the folders. Only this user may read them."""
        for folder in (self._folder, self._files, self._batches):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Files -------------------------------------------------------------------------------------------

    def files(self, owner: str | None = None) -> list[FileRecord]:
        """Return the files of an owner, the oldest first; None: all."""
        now = self.now()
        found = (file for file in self._records(self._files, FileRecord) if file.expires_at > now)
        return sorted(
            (file for file in found if owner is None or file.owner == owner),
            key=lambda file: (file.created_at, file.id),
        )

    def find_file(self, file_id: str, owner: str) -> FileRecord | None:
        """Return a file of this owner; None if there is none."""
        if _FILE_ID.fullmatch(file_id) is None:
            return None
        file = self._record(self._files / f"{file_id}.json", FileRecord)
        return file if file is not None and file.owner == owner and file.expires_at > self.now() else None

    def new_file(self, tenant: str, size: int) -> "IncomingFile":
        """Return a new file of a tenant, to be filled. Raises `StorageFull`."""
        self.check_space(tenant, size)
        file_id = f"file-{token_hex(16)}"
        return IncomingFile(self, file_id, self._files / file_id)

    def check_space(self, tenant: str, size: int) -> None:
        """Raise `StorageFull` if the tenant has no space for so many bytes more.

        What other processes are writing at this moment does not count yet.
        """
        used = self.used(tenant)
        if used + max(size, LEAST_BYTES) > self._tenant_bytes:
            raise StorageFull(
                f"your files and results take {used} of {self._tenant_bytes} bytes (batches.tenantBytes): "
                f"{size} more do not fit, unless you delete some"
            )

    def used(self, tenant: str) -> int:
        """Return the bytes that a tenant's files, batches and results take."""
        used = sum(max(file.size, LEAST_BYTES) for file in self.files() if file.tenant == tenant)
        for record in self._records(self._batches, BatchRecord):
            if record.tenant == tenant:
                used += LEAST_BYTES + _size(self._results(record))
        return used

    def path_of(self, file: FileRecord) -> Path:
        """Return where a file's contents are."""
        return self._files / file.id

    def read(self, file: FileRecord, start: int) -> bytes:
        """Return a piece of a file; empty at its end, or if it has been removed."""
        try:
            return read_pieces(self.path_of(file), start, PIECE_BYTES)
        except FileNotFoundError:
            return b""

    def delete_file(self, file: FileRecord) -> None:
        """Remove a file. Raises `Conflict` if a batch needs it that has not ended."""
        users = [
            batch.record.id for batch in self.batches(file.owner) if batch.record.input_file_id == file.id
        ]
        running = [each for each in users if not self.state(each).is_final]
        if running:
            raise Conflict(f"the file is the input of {running[0]}, which has not ended: cancel that first")
        self._remove(self._files / f"{file.id}.json", self.path_of(file))

    def publish_file(
        self,
        file_id: str,
        *,
        owner: str,
        tenant: str,
        filename: str,
        purpose: Purpose,
        expires_after_s: int | None = None,
    ) -> FileRecord:
        """Make known a file whose contents are on the disk, and return its record."""
        now = int(self.now())
        keep_s = self._keep_s if expires_after_s is None else min(self._keep_s, expires_after_s)
        file = FileRecord(
            id=file_id,
            owner=owner,
            tenant=tenant,
            size=_size(self._files / file_id),
            created_at=now,
            expires_at=now + keep_s,
            filename=filename,
            purpose=purpose,
        )
        write_whole(self._files / f"{file_id}.json", _encode(file))
        return file

    # Batches -----------------------------------------------------------------------------------------

    def create_batch(self, record: BatchRecord) -> StoredBatch:
        """Keep a new batch. Raises `StorageFull`."""
        self.check_space(record.tenant, LEAST_BYTES)
        write_whole(self._path(record.id, "json"), _encode(record))
        return StoredBatch(record, BatchState())

    def batches(self, owner: str | None = None) -> list[StoredBatch]:
        """Return the batches of an owner, the newest first; None: all."""
        found = [
            record
            for record in self._records(self._batches, BatchRecord)
            if owner is None or record.owner == owner
        ]
        found.sort(key=lambda record: (-record.created_at, record.id))
        return [self._stored(record) for record in found]

    def find_batch(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return a batch of this owner; None if there is none."""
        if _BATCH_ID.fullmatch(batch_id) is None:
            return None
        record = self._record(self._path(batch_id, "json"), BatchRecord)
        return self._stored(record) if record is not None and record.owner == owner else None

    def state(self, batch_id: str) -> BatchState:
        """Return how far a batch is."""
        try:
            return _decode_state(self._path(batch_id, "state").read_bytes())
        except FileNotFoundError:
            return BatchState()

    def request_cancel(self, batch_id: str) -> None:
        """Request the cancellation of a batch. The process that runs it notices."""
        write_whole(self._path(batch_id, "cancel"), b"")

    def is_cancelled(self, batch_id: str) -> bool:
        """Return whether the cancellation of a batch was requested."""
        return self._path(batch_id, "cancel").exists()

    # The following is for the process that holds `lock`. ---------------------------------------------

    def unfinished(self, known: set[str]) -> list[BatchRecord]:
        """Return the batches that have not ended, except known ones, the oldest first."""
        found = (record for record in self._records(self._batches, BatchRecord) if record.id not in known)
        return sorted(
            (record for record in found if not self.state(record.id).is_final),
            key=lambda record: (record.created_at, record.id),
        )

    def set_state(self, batch_id: str, state: BatchState) -> None:
        """Replace the state of a batch."""
        write_whole(self._path(batch_id, "state"), _encode(state))

    def append_results(self, record: BatchRecord, results: list[JournalLine]) -> None:
        """Add results to the journal. They are there to stay when this returns. Raises `OSError`."""
        append_lines(self._results(record), b"".join(_encode(result) + b"\n" for result in results))

    def repair_results(self, record: BatchRecord) -> None:
        """Cut the journal after its last whole line, when a batch goes on after a crash."""
        repair_journal(self._results(record), _is_result)

    def results(self, record: BatchRecord) -> Iterator[JournalLine]:
        """Yield the results in the journal, each number once."""
        seen: set[int] = set()
        with suppress(FileNotFoundError), self._results(record).open("rb") as file:
            for line in file:
                result = _decode_line(line)
                if result.number not in seen:
                    seen.add(result.number)
                    yield result

    def write_results(self, record: BatchRecord, kind: ResultKind) -> str | None:
        """Make the file of answers or errors from the journal; return its id, or None if there are none."""
        chosen = (result for result in self.results(record) if result.failed == (kind == "error"))
        file_id = f"file-{sha256(f'{record.id} {kind}'.encode()).hexdigest()[:32]}"
        first = next(chosen, None)
        if first is None:
            return None
        with NewFile(self._files / file_id) as file:
            file.write(bytes(first.result) + b"\n")
            for result in chosen:
                file.write(bytes(result.result) + b"\n")
            file.publish()
        self._known.pop(self._files / f"{file_id}.json", None)
        self.publish_file(
            file_id,
            owner=record.owner,
            tenant=record.tenant,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        return file_id

    def drop_results(self, record: BatchRecord) -> None:
        """Remove the journal of a batch that has ended."""
        self._remove(self._results(record))

    def expire(self) -> None:
        """Remove what has been kept long enough, and what uploads that did not end have left."""
        now = self.now()
        used: set[str] = set()
        for record in list(self._records(self._batches, BatchRecord)):
            is_final = self.state(record.id).is_final
            if is_final and record.created_at + self._keep_s <= now:
                self._remove(
                    *(self._path(record.id, kind) for kind in ("json", "cancel", "results", "state"))
                )
            elif is_final:
                self.drop_results(record)  # if the process ended before it could
            else:
                used.add(record.input_file_id)
        for file in list(self._records(self._files, FileRecord)):
            if file.expires_at <= now and file.id not in used:
                self._remove(self._files / f"{file.id}.json", self.path_of(file))
        for path in self._files.iterdir():
            is_left = path.suffix != ".json" and not path.with_name(f"{path.stem}.json").exists()
            if is_left and _age_s(path, now) > 86_400:
                self._remove(path)

    # Helpers -----------------------------------------------------------------------------------------

    def _stored(self, record: BatchRecord) -> StoredBatch:
        return StoredBatch(record, self.state(record.id), self.is_cancelled(record.id))

    def _path(self, batch_id: str, kind: str) -> Path:
        return self._batches / f"{batch_id}.{kind}"

    def _results(self, record: BatchRecord) -> Path:
        return self._path(record.id, "results")

    def _records(self, folder: Path, kind: type[Record]) -> Iterator[Record]:
        """Yield all records of a folder. Those that are known are not read again."""
        present = {Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith(".json")}
        for path in [known for known in list(self._known) if known.parent == folder and known not in present]:
            self._known.pop(path, None)
        for path in present:
            if (record := self._record(path, kind)) is not None:
                yield record

    def _record(self, path: Path, kind: type[Record]) -> Record | None:
        known = self._known.get(path)
        if known is not None and path.exists():
            assert isinstance(known, kind)
            return known
        self._known.pop(path, None)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        self._known[path] = record
        return record

    def _remove(self, *paths: Path) -> None:
        for path in paths:
            self._known.pop(path, None)
            path.unlink(missing_ok=True)


class IncomingFile(NewFile):
    """A file that is being uploaded. It is removed unless its block reaches `end`.

    store: Keeps it.
    file_id: Its id.
    path: Where its contents will be.
    """

    def __init__(self, store: BatchStore, file_id: str, path: Path) -> None:
        super().__init__(path)
        self._store = store
        self._file_id = file_id

    def end(
        self, *, owner: str, tenant: str, filename: str, expires_after_s: int | None = None
    ) -> FileRecord:
        """Keep the file, and return its record."""
        self.publish()
        return self._store.publish_file(
            self._file_id,
            owner=owner,
            tenant=tenant,
            filename=filename,
            purpose="batch",
            expires_after_s=expires_after_s,
        )


def _is_result(line: bytes) -> bool:
    try:
        _decode_line(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
