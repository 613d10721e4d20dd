"""Writes safetensors files without holding them: read, cast, hash and write one band after another.

A file is 8 bytes (the header's length, little endian), a JSON header {"__metadata__": …, name: {"dtype", "shape",
"data_offsets"}} and the values, row-major, without gaps (https://github.com/huggingface/safetensors). Tensors of wider
types come first, so that each begins at a multiple of its item's size.

Several files are written at a time, each by a thread of its own that hashes and writes while others read and cast what
comes next: all of that happens outside of Python's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock

import torch

from finetune.checkpoint.bands import BandReader, bytes_of
from finetune.checkpoint.plan import OutputTensor
from finetune.checkpoint.torch_file import Record, check_record
from finetune.errors import CheckpointError
from finetune.files import sha256_file, write_file

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}

_MAX_FILES_AT_ONCE = 4
_BANDS_AHEAD = 2


class StoppedError(Exception):
    """Another file failed: this one ends early, and its error says nothing."""


class FileWriter:
    """Writes groups of tensors to files. ``check_crc32`` compares what was read with the crc32 that lie in the source.

    ``progress`` is told the bytes that were written, from several threads.
    """

    def __init__(self, *, check_crc32: bool, progress: Callable[[int], object]) -> None:
        self._check_crc32 = check_crc32
        self._progress = progress
        self._stop = Event()
        self._lock = Lock()
        self._checks: dict[Record, Future[None]] = {}
        self._readers: ThreadPoolExecutor

    def write(self, files: dict[Path, Sequence[OutputTensor]]) -> dict[Path, str]:
        """Write each of ``files``, flushed and read again; return their sha256.

        Raises CheckpointError that names what can't be read.
        """
        num_cores = os.cpu_count() or 1
        at_once = max(1, min(_MAX_FILES_AT_ONCE, num_cores, len(files)))
        with ThreadPoolExecutor(num_cores) as self._readers, ThreadPoolExecutor(at_once) as writers:
            futures = {path: writers.submit(self._write_one, path, group) for path, group in files.items()}
            try:
                wait(futures.values())
                errors = [error for future in futures.values() if (error := future.exception())]
                for error in errors:
                    if not isinstance(error, StoppedError):
                        raise error
                assert not errors, "a file was stopped, and none failed"
                for check in self._checks.values():
                    check.result()
            except BaseException:
                self._stop.set()
                for check in self._checks.values():
                    check.cancel()
                raise
        return {path: future.result() for path, future in futures.items()}

    def _write_one(self, path: Path, group: Sequence[OutputTensor]) -> str:
        ordered = sorted(group, key=lambda output: -output.dtype.itemsize)
        digest = hashlib.sha256()

        def fill(temporary: Path) -> None:
            with temporary.open("wb") as stream:
                header = header_bytes(ordered)
                digest.update(header)
                stream.write(header)
                for band in self._read_ahead(ordered):
                    if self._stop.is_set():
                        raise StoppedError
                    content = bytes_of(band)
                    digest.update(content)
                    stream.write(content)
                    self._progress(len(content))

        try:
            write_file(path, fill)
        except BaseException:
            self._stop.set()
            raise
        # Here rather than at the end, since other files are flushed meanwhile.
        if sha256_file(path) != digest.hexdigest():
            raise CheckpointError("the disk gives back other bytes than were written", where=path)
        return digest.hexdigest()

    def _read_ahead(self, outputs: Sequence[OutputTensor]) -> Iterator[torch.Tensor]:
        waiting: deque[Future[torch.Tensor]] = deque()
        for output in outputs:
            for read in self._bands(output):
                waiting.append(self._readers.submit(read))
                if len(waiting) > _BANDS_AHEAD:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _bands(self, output: OutputTensor) -> Iterator[Callable[[], torch.Tensor]]:
        """One function for each band of ``output``, that reads and casts it."""
        reader = BandReader(output.stored)
        copies = [BandReader(copy) for copy in output.copies]
        for opened in [reader, *copies]:
            self._submit_checks(opened)
        # Compared band by band, unless the copies were cut in another way.
        whole = any((copy.grid, copy.rows_per_band) != (reader.grid, reader.rows_per_band) for copy in copies)
        if whole:
            yield lambda: _cast(_equal(output, [_whole(each) for each in [reader, *copies]]), output)
            return
        for start, end in reader.bands():

            def read(start: int = start, end: int = end) -> torch.Tensor:
                return _cast(_equal(output, [each.read(start, end) for each in [reader, *copies]]), output)

            yield read

    def _submit_checks(self, reader: BandReader) -> None:
        if self._check_crc32:
            with self._lock:
                for record in reader.records - self._checks.keys():
                    self._checks[record] = self._readers.submit(check_record, record)


def _whole(reader: BandReader) -> torch.Tensor:
    return reader.read(0, reader.grid[0]).reshape(reader.stored.shape)


def _equal(output: OutputTensor, bands: list[torch.Tensor]) -> torch.Tensor:
    """The first of them. Compared as stored, not as cast: masters that differ by less show that they aren't tied."""
    for copy, band in zip(output.copies, bands[1:], strict=True):
        if not torch.equal(bands[0], band):
            raise CheckpointError(
                f"{copy.name} and {output.stored.name} are tied in config.json but differ",
                fix="set tie_word_embeddings to false, or train them tied",
            )
    return bands[0]


def _cast(band: torch.Tensor, output: OutputTensor) -> torch.Tensor:
    if band.dtype == output.dtype:
        return band
    result = band.to(output.dtype)
    # bfloat16 has float32's range.
    if output.dtype == torch.float16 and result.isinf().any() and not band.isinf().any():
        raise CheckpointError(
            f"{output.stored.name} holds values that float16 can't", fix="choose --dtype bfloat16 or float32"
        )
    return result


def header_bytes(outputs: Sequence[OutputTensor]) -> bytes:
    """The header of a file that holds ``outputs`` in this order, padded so that the values begin at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for output in outputs:
        if output.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"safetensors can't hold {output.name}, which is {output.dtype}")
        end = start + output.num_bytes
        shape = list(output.stored.shape)
        header[output.name] = {"dtype": DTYPE_NAMES[output.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
