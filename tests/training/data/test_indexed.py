from __future__ import annotations

import pickle
import struct
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphstep.errors import DataError
from graphstep.training.data import IndexedDataset, IndexedDatasetWriter

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[list[list[int]]]]:
    dtype = draw(st.sampled_from(DTYPES))
    limits = np.iinfo(dtype)
    token = st.integers(int(limits.min), int(limits.max))
    sequences = st.lists(st.lists(token, max_size=5), max_size=3)
    return dtype, draw(st.lists(sequences, max_size=4))


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return prefix


def hand_made(prefix: Path, sizes: list[int], pointers: list[int], tokens: list[int]) -> IndexedDataset:
    """An index written byte by byte from the description of the format, for int32 tokens."""
    count = len(sizes)
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, count, 2)
    idx += struct.pack(f"<{count}i{count}q2q", *sizes, *pointers, 0, count)
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    return IndexedDataset(prefix)


@given(documents())
def test_round_trip(case: tuple[str, list[list[list[int]]]]) -> None:
    dtype, expected = case
    with TemporaryDirectory() as folder:
        prefix = Path(folder, "data")
        with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
            for sequences in expected:
                for tokens in sequences:
                    writer.add_sequence(tokens)
                writer.end_document()
        assert sorted(path.name for path in Path(folder).iterdir()) == ["data.bin", "data.idx"]
        dataset = IndexedDataset(prefix)
        flat = [tokens for sequences in expected for tokens in sequences]
        assert dataset.dtype == np.dtype(dtype)
        assert [dataset[index].tolist() for index in range(len(dataset))] == flat
        assert dataset.num_documents == len(expected)
        bounds = dataset.document_indices.tolist()
        assert [flat[a:b] for a, b in pairwise(bounds)] == expected
        row = dataset.tokens()
        assert row[0 : len(row)].tolist() == [token for tokens in flat for token in tokens]
        assert dataset.num_tokens == len(row)


def test_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "data", [[1, 2, 3], [4]], "uint16")
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    assert (tmp_path / "data.idx").read_bytes() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_token_types(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "data", [[1]], dtype)
    assert (tmp_path / "data.idx").read_bytes()[17] == CODES[dtype]


def test_nothing_is_copied(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "data", [[1, 2], [3]]))
    for view in (dataset[1], dataset.tokens()[:], dataset.sizes, dataset.document_indices):
        assert not view.flags.writeable
        assert not view.flags.owndata
    assert np.shares_memory(dataset[1], dataset.tokens()[2:])
    assert dataset[-1].tolist() == [3]
    with pytest.raises(IndexError):
        dataset[2]


def test_every_truncation_of_the_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4], []])
    whole = (tmp_path / "data.idx").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "data.idx").write_bytes(whole[:length])
        with pytest.raises(DataError) as caught:
            IndexedDataset(prefix)
        (problem,) = caught.value.problems
        assert problem.code == ("indexed-magic" if length == 0 else "indexed-truncated")
        assert problem.where.endswith("data.idx")
        assert "b''" not in problem.what
        assert length > 0 or problem.what == "not an indexed dataset: the file is empty"
        assert problem.fix
    (tmp_path / "data.idx").write_bytes(whole)
    assert len(IndexedDataset(prefix)) == 3


def test_every_truncation_of_the_tokens(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    whole = (tmp_path / "data.bin").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "data.bin").write_bytes(whole[:length])
        with pytest.raises(DataError, match="truncated or belongs to another index"):
            IndexedDataset(prefix)


@settings(max_examples=200)
@given(st.data())
def test_damaged_index_never_reads_outside(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        prefix = write(Path(folder, "data"), [[1, 2, 3], [4], [5, 6]])
        idx = Path(folder, "data.idx")
        content = bytearray(idx.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        idx.write_bytes(content)
        try:
            dataset = IndexedDataset(prefix)
        except DataError:
            return
        row = dataset.tokens()
        assert len(row[0 : len(row)]) == sum(len(dataset[index]) for index in range(len(dataset)))


@pytest.mark.parametrize(
    ("offset", "new", "code"),
    [
        (0, b"X", "indexed-magic"),
        (9, struct.pack("<Q", 2), "indexed-version"),
        (17, b"\x06", "indexed-dtype"),
        (17, b"\x63", "indexed-dtype"),
        (18, struct.pack("<Q", 2**63), "indexed-truncated"),
        (26, struct.pack("<Q", 1), "indexed-length"),
        (34, struct.pack("<i", -1), "indexed-sizes"),
        (34, struct.pack("<i", 2**31 - 1), "indexed-sizes"),
        (42, struct.pack("<q", -2), "indexed-sizes"),
        (42, struct.pack("<q", 1), "indexed-sizes"),
        (42, struct.pack("<q", 2**63 - 1), "indexed-sizes"),
        (58, struct.pack("<q", -1), "indexed-documents"),
        (66, struct.pack("<q", 9), "indexed-documents"),
        (74, struct.pack("<q", 9), "indexed-documents"),
    ],
)
def test_damaged_fields(tmp_path: Path, offset: int, new: bytes, code: str) -> None:
    prefix = write(tmp_path / "data", [[1, 2, 3], [4]])
    content = bytearray((tmp_path / "data.idx").read_bytes())
    content[offset : offset + len(new)] = new
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert [problem.code for problem in caught.value.problems] == [code]
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_missing_files_are_reported_together(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1]])
    (tmp_path / "data.bin").unlink()
    with pytest.raises(DataError, match=r"data\.bin does not exist"):
        IndexedDataset(prefix)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "none")
    assert [problem.where.rsplit(".", 1)[1] for problem in caught.value.problems] == ["idx", "bin"]


def test_multimodal_index_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", [[1, 2], [3]])
    with (tmp_path / "data.idx").open("ab") as file:
        file.write(b"\0\1")
    with pytest.raises(DataError, match="multimodal"):
        IndexedDataset(prefix)


@given(st.permutations([[1, 2, 3], [4], [5, 6]]), st.integers(-8, 8), st.integers(-8, 8))
def test_sequences_in_any_order_in_the_file(order: list[list[int]], start: int, stop: int) -> None:
    pointers = {1: 0, 4: 12, 5: 16}
    flat = [token for tokens in order for token in tokens]
    with TemporaryDirectory() as folder:
        dataset = hand_made(
            Path(folder, "data"),
            [len(tokens) for tokens in order],
            [pointers[tokens[0]] for tokens in order],
            [1, 2, 3, 4, 5, 6],
        )
        row = dataset.tokens()
        assert len(row) == 6
        assert row[start:stop].tolist() == flat[start:stop]


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "data", []))
    assert (len(dataset), dataset.num_tokens, dataset.num_documents) == (0, 0, 0)
    assert len(dataset.tokens()) == 0


def test_writer_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    def write_all(documents: list[object]) -> None:
        with IndexedDatasetWriter(tmp_path / "data") as writer:
            for tokens in documents:
                writer.add_document(tokens)  # type: ignore[arg-type]

    for tokens in ([70000], [-1], [[1]], [0.5]):
        with pytest.raises(DataError, match=r"data\.bin, sequence 1"):
            write_all([[1], tokens])
    with pytest.raises(DataError, match="float32"):
        IndexedDatasetWriter(tmp_path / "data", dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_writer_overwrites_and_may_finish_twice(tmp_path: Path) -> None:
    write(tmp_path / "data", [[1, 2]])
    with IndexedDatasetWriter(tmp_path / "data", dtype="int32") as writer:
        writer.add_sequence([7])
        writer.finish()
        writer.finish()
        writer.abort()
    dataset = IndexedDataset(tmp_path / "data")
    assert (dataset.num_documents, dataset[0].tolist()) == (1, [7])
