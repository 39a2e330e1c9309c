"""What is kept of files and batches, and how clients see it: OpenAI's objects.

Records are written once; only a `BatchState` changes.
"""

from typing import Any, Literal

import msgspec

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})
Purpose = Literal["batch", "batch_output"]
Metadata = dict[str, str]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file on disk.

    id: Its id, which is also its name on disk.
    owner: Who may see it (see `requester_of`).
    tenant: Whose space it takes.
    size: Its bytes.
    created_at: In seconds since 1970.
    expires_at: When it is removed.
    filename: As the client named it.
    purpose: What it is for.
    """

    id: str
    owner: str
    tenant: str
    size: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it was created.

    id: Its id, which is also its name on disk.
    owner: Who may see it.
    tenant: Whose space its results take, and whose work it is.
    key_id: The id of its key; "": it was created without one.
    created_at: In seconds since 1970.
    expires_at: When it ends, whatever has been done.
    endpoint: The path of all its requests.
    input_file_id: The file that has its requests.
    metadata: The client's own notes.
    """

    id: str
    owner: str
    tenant: str
    key_id: str
    created_at: int
    expires_at: int
    endpoint: str
    input_file_id: str
    metadata: Metadata | None = None


class BatchFault(msgspec.Struct, frozen=True):
    """Why a batch failed. `line`: that of the input file, from 1; None: no single one is at fault."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class FaultList(msgspec.Struct, frozen=True):
    """All of them, or the first ones."""

    data: tuple[BatchFault, ...]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """The requests of a batch: all, and those with an answer or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch is. Times are in seconds since 1970; None: not yet, or never.

    status: Where it is on its way.
    in_progress_at: When its first request could run.
    finalizing_at: When the last one had ended.
    completed_at: When its results were there.
    failed_at: When it was refused.
    expired_at: When its time was over.
    cancelling_at: When its cancellation was noticed.
    cancelled_at: When it was cancelled.
    output_file_id: The file with the answers.
    error_file_id: The file with the errors.
    faults: Why it failed.
    counts: Its requests.
    """

    status: BatchStatus = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[BatchFault, ...] = ()
    counts: RequestCounts = RequestCounts()

    @property
    def is_final(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in FINAL


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch with its state. `is_cancelled`: its cancellation was requested."""

    record: BatchRecord
    state: BatchState
    is_cancelled: bool = False


# What clients see ----------------------------------------------------------------------------------


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are in seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    size: int = msgspec.field(name="bytes")
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class DeletedFile(msgspec.Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files. `has_more`: there are others after `last_id`."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are in seconds since 1970; those of states that it has not reached are null."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: FaultList | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Metadata | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches. `has_more`: there are others after `last_id`."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CreateBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A new batch.

    input_file_id: A file with the purpose batch.
    endpoint: The path of all its requests.
    completion_window: 24h.
    metadata: Up to 16 notes of the client's own.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None


def file_object(file: FileRecord) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=file.id,
        size=file.size,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


def batch_object(batch: StoredBatch) -> BatchObject:
    """Return a batch as clients see it."""
    record, state = batch.record, batch.state
    is_cancelling = batch.is_cancelled and not state.is_final
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=FaultList(state.faults) if state.faults else None,
        input_file_id=record.input_file_id,
        status="cancelling" if is_cancelling else state.status,
        output_file_id=state.output_file_id,
        error_file_id=state.error_file_id,
        created_at=record.created_at,
        in_progress_at=state.in_progress_at,
        expires_at=record.expires_at,
        finalizing_at=state.finalizing_at,
        completed_at=state.completed_at,
        failed_at=state.failed_at,
        expired_at=state.expired_at,
        cancelling_at=state.cancelling_at,
        cancelled_at=state.cancelled_at,
        request_counts=state.counts,
        metadata=record.metadata,
    )
