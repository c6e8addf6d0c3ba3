from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from graphstep.config.data import DataConfig
from graphstep.errors import DataError
from graphstep.training.data import (
    BatchIterator,
    BlendedDataset,
    Datasets,
    IndexedDatasetWriter,
    TokenWindows,
    build_datasets,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "graphstep"


def write_indexed(prefix: Path, tokens: np.ndarray) -> str:
    with IndexedDatasetWriter(prefix) as writer:
        writer.add_document(tokens)
    return str(prefix)


def write_text(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def build(*words: str, seq_length: int = 4, need_valid: bool = True, **options: object) -> Datasets:
    config = DataConfig(data_path=words or None, **options)  # type: ignore[arg-type]
    return build_datasets(config, seq_length=seq_length, seed=1, need_valid=need_valid)


def all_labels(dataset: object) -> list[int]:
    if not isinstance(dataset, TokenWindows):
        raise TypeError(type(dataset))
    return [token for index in range(len(dataset)) for token in dataset[index][1:].tolist()]


def test_standard_library_by_default(cache: Path) -> None:
    first = build(seq_length=64)
    again = build(seq_length=64)
    assert "standard library" in first.summary[0]
    assert "kept in" in first.summary[0]
    assert "from" in again.summary[0]
    assert len(first.train) > 2000
    assert first.valid is not None
    assert len(first.valid) > 50
    batch = next(BatchIterator(first.train, micro_batch_size=2, seed=0))
    assert batch["tokens"].shape == (2, 64)
    assert int(batch["tokens"].max()) < first.tokenizer.vocab_size
    assert first.notices == ()
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".tokens"]


def test_splits_are_ranges_in_order(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.arange(101) % 250)
    datasets = build(prefix, seq_length=1, split="50,30,20")
    assert datasets.valid is not None
    assert datasets.test is not None
    # 101 tokens: 0-49 (rounded from 50.5 to even), 50-80, 81-100. The first token of each range is never a label.
    assert all_labels(datasets.train) == list(range(1, 50))
    assert all_labels(datasets.valid) == list(range(51, 81))
    assert all_labels(datasets.test) == list(range(82, 101))


def test_splits_without_share_are_none(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.arange(100))
    datasets = build(prefix, split="1", need_valid=False)
    assert (datasets.valid, datasets.test) == (None, None)
    assert all_labels(datasets.train) == list(range(1, 97))


def test_text_with_huggingface_tokenizer(tmp_path: Path, tokenizer_json: Path) -> None:
    path = write_text(tmp_path / "text", "some words " * 50)
    datasets = build(
        path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_json), split="9,1", append_eod=False
    )
    assert datasets.tokenizer.decode(datasets.train[0]).startswith("some")
    assert datasets.notices == ()
    tokenizer_json.write_text(tokenizer_json.read_text().replace("<|endoftext|>", "<odd>"))
    (notice,) = build(
        path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_json), split="9,1"
    ).notices
    assert "id 317 was added" in notice


def test_files_without_weights_are_one_corpus(tmp_path: Path) -> None:
    words = [write_text(tmp_path / f"{index}.txt", "ab") for index in range(40)]
    datasets = build(*words, split="8,2")
    assert len(datasets.summary) == 1
    assert "40 documents, 120 tokens" in datasets.summary[0]
    assert isinstance(datasets.train, TokenWindows)
    assert len(datasets.train) == (96 - 1) // 4


def test_blend_with_weights(tmp_path: Path) -> None:
    first = write_indexed(tmp_path / "first", np.full(400, 1))
    second = write_indexed(tmp_path / "second", np.full(200, 2))
    datasets = build("0.25", first, "0.75", second, split="1,1,0")
    assert isinstance(datasets.train, BlendedDataset)
    assert datasets.train.weights == (0.25, 0.75)
    iterator = BatchIterator(datasets.train, micro_batch_size=4, seed=0)
    for batch in islice(iterator, 20):
        assert sorted(batch["tokens"][:, 0].tolist()) == [1, 2, 2, 2]


def test_blend_without_weights_visits_each_sample_once(tmp_path: Path) -> None:
    first = write_indexed(tmp_path / "first", np.full(41, 1))
    text = write_text(tmp_path / "text", "a" * 80)
    tiny = write_indexed(tmp_path / "tiny", np.full(3, 1))
    datasets = build(first, text, tiny, split="1,0,0", need_valid=False)
    assert isinstance(datasets.train, BlendedDataset)
    assert datasets.train.weights is None
    assert len(datasets.train) == 10 + 20
    assert datasets.notices == (f"{tiny}: 3 train tokens are too few for one sample",)


def test_mock_data_reads_no_file(cache: Path) -> None:
    datasets = build(mock_data=True, split="1,1,0")
    assert datasets.train[0].tolist() == build(mock_data=True).train[0].tolist()
    assert datasets.valid is not None
    assert datasets.valid[0].tolist() != datasets.train[0].tolist()
    assert datasets.test is None
    assert not cache.exists()


def test_sequence_longer_than_the_data(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.arange(100))
    with pytest.raises(DataError) as caught:
        build(prefix, seq_length=128, split="80,15,5")
    train, valid = caught.value.problems
    assert train.what == (
        "--seq-length 128 needs 129 tokens in the train split, which has 80 of the 100 tokens "
        "(train 80, valid 15, test 5)"
    )
    assert train.fix == "use --seq-length 79 or less, or use more data"
    assert "valid split" in valid.what
    assert "--seq-length 14 or less" in valid.fix
    assert "--eval-iters 0" in valid.fix
    assert len(build(prefix, seq_length=14, split="80,15,5").train) == 5


def test_small_validation_split_matters_only_when_needed(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.arange(100))
    with pytest.raises(DataError) as caught:
        build(prefix, split="97,3,0")
    assert len(caught.value.problems) == 1
    datasets = build(prefix, split="97,3,0", need_valid=False)
    assert datasets.valid is None
    assert datasets.notices == ()


def test_weighted_source_without_a_sample(tmp_path: Path) -> None:
    large = write_indexed(tmp_path / "large", np.arange(100))
    small = write_indexed(tmp_path / "small", np.arange(4))
    with pytest.raises(DataError, match="needs 5 tokens in the train split") as caught:
        build("1", large, "1", small, split="1,0,0", need_valid=False)
    assert [problem.where for problem in caught.value.problems] == [small]


def test_empty_indexed_dataset(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.empty(0, np.int64))
    with pytest.raises(DataError, match="0 of the 0 tokens") as caught:
        build(prefix, need_valid=False)
    assert caught.value.problems[0].fix == "use more data"


def test_wrong_tokenizer_is_seen_at_once(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", np.array([*range(50), 30000]))
    with pytest.raises(DataError, match="token 30000 is not in the vocabulary of 257"):
        build(prefix)


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        build(str(tmp_path / "none"), tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "t.json"))
    assert {problem.code for problem in caught.value.problems} == {"tokenizer-missing", "data-missing"}
    (tmp_path / "one.bin").write_bytes(b"")
    (tmp_path / "two.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "binary").write_bytes(b"\0")
    with pytest.raises(DataError) as caught:
        build(*(str(tmp_path / name) for name in ("one", "two", "binary")))
    assert [problem.code for problem in caught.value.problems] == ["indexed-missing", "indexed-missing", "data-binary"]


def test_missing_paths_and_bad_content_at_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "nul.txt").write_bytes(b"text\0")
    for name in ("i.idx", "i.bin"):
        (tmp_path / name).write_bytes(b"no index")
    words = [str(tmp_path / name) for name in ("none", "bad.txt", "nul.txt", "i", "empty.txt", "good.txt")]
    write_text(tmp_path / "empty.txt", "")
    write_text(tmp_path / "good.txt", "text")
    weighted = [part for word in words for part in ("0.1", word)]
    with pytest.raises(DataError) as caught:
        build(*weighted)
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["data-missing", "data-empty", "data-binary", "indexed-magic", "data-empty"]
    with pytest.raises(DataError) as caught:
        build(*words)  # of several files, those that are no text are left out
    assert [problem.code for problem in caught.value.problems] == ["data-missing", "indexed-magic"]
    assert not cache.exists()


def test_named_cache_folder(tmp_path: Path, cache: Path) -> None:
    path = write_text(tmp_path / "text", "words " * 200)
    build(path, data_cache_path=str(tmp_path / "named"))
    assert len(list((tmp_path / "named").glob("*.tokens"))) == 1
    assert not cache.exists()
