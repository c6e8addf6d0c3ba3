"""From options to datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from graphstep.config.data import DataConfig
from graphstep.errors import DataError, Problem
from graphstep.training.data.corpus import check_beginning, standard_library_corpus, text_corpus
from graphstep.training.data.datasets import BlendedDataset, Dataset, MockDataset, TokenRow, TokenWindows, check_tokens
from graphstep.training.data.indexed import IndexedDataset
from graphstep.training.data.sources import Source, read_data_path
from graphstep.training.data.token_store import open_token_store
from graphstep.training.data.tokenizers import HuggingFaceTokenizer, Tokenizer, build_tokenizer

_SPLITS = ("train", "valid", "test")
_MOCK_SAMPLES = (1 << 16, 1 << 12, 1 << 12)
_NUM_CHECKED_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a training run reads."""

    train: Dataset
    valid: Dataset | None
    """None when there is not one whole sample for it."""
    test: Dataset | None
    """None when there is not one whole sample for it."""
    tokenizer: Tokenizer
    summary: tuple[str, ...]
    """One line for each source: documents, tokens, name, cache file."""
    notices: tuple[str, ...]
    """What the user should know and that is no error: skipped files, no cache, sources without effect."""


@dataclass(frozen=True)
class _Tokens:
    """One source, opened."""

    name: str
    row: TokenRow
    weight: float | None
    bounds: tuple[int, ...]
    """[4] where the splits begin and end."""

    def num_tokens(self, split: int) -> int:
        return self.bounds[split + 1] - self.bounds[split]


def build_datasets(config: DataConfig, *, seq_length: int, seed: int, need_valid: bool = True) -> Datasets:
    """Open what the options name, tokenising text where that has not been done before.

    Each source is cut into three ranges of consecutive tokens in the proportions of ``config.split``.

    Args:
        config: options of the data.
        seq_length: S; samples have S + 1 tokens.
        seed: of the samples of ``mock_data``; nothing else depends on it.
        need_valid: a validation split without one whole sample is an error.

    Raises:
        DataError: missing, empty, truncated or malformed data or tokenizer, tokens outside the vocabulary, a split
            that is needed and has fewer than S + 1 tokens. All problems that can be found together are reported
            together.
    """
    tokenizer, sources, shares, problems = _named(config)
    if tokenizer is None or problems:
        raise DataError([*problems, *_content_problems(sources, tokenizer)])
    notices: list[str] = []
    if isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.has_own_eod:
        notices.append(f"the tokenizer has no end-of-document token: id {tokenizer.eod} was added for it")
    if config.mock_data:
        return _mock(tokenizer, shares, seq_length=seq_length, seed=seed, notices=notices)
    summary: list[str] = []
    opened: list[_Tokens] = []
    for source in sources:
        try:
            opened.append(_open(source, config, tokenizer, shares, summary, notices))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    _check_lengths(opened, seq_length=seq_length, need_valid=need_valid)
    parts = [_split(opened, split, seq_length, tokenizer.vocab_size, notices) for split in range(3)]
    if parts[0] is None:
        raise RuntimeError("the training split was checked and is empty")
    return Datasets(
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        tokenizer=tokenizer,
        summary=tuple(summary),
        notices=tuple(notices),
    )


def check_names(config: DataConfig) -> None:
    """Check the tokenizer, the paths and the split that the options name, and read no data.

    Raises:
        DataError: all problems.
    """
    problems = _named(config)[-1]
    if problems:
        raise DataError(problems)


def _named(config: DataConfig) -> tuple[Tokenizer | None, tuple[Source, ...], tuple[float, ...], list[Problem]]:
    """Return tokenizer, sources that are there, shares of the splits, and what is wrong with all of them."""
    problems: list[Problem] = []
    tokenizer: Tokenizer | None = None
    sources: tuple[Source, ...] = ()
    try:
        tokenizer = build_tokenizer(config.tokenizer_type, config.tokenizer_model)
    except DataError as error:
        problems += error.problems
    if not config.mock_data:
        sources, missing = _sources(config)
        problems += missing
    shares = _shares(config, problems)
    return tokenizer, sources, shares, problems


def _sources(config: DataConfig) -> tuple[tuple[Source, ...], list[Problem]]:
    if config.data_path is None:
        return (Source(paths=(), is_indexed=False, weight=None),), []
    return read_data_path(config.data_path)


def _content_problems(sources: Sequence[Source], tokenizer: Tokenizer | None) -> list[Problem]:
    """Return what is wrong inside sources, as far as a short look shows it: the run fails anyway."""
    problems: list[Problem] = []
    for source in sources:
        try:
            if source.is_indexed:
                row = IndexedDataset(source.name).tokens()
                if tokenizer is not None:
                    check_tokens(row[:_NUM_CHECKED_TOKENS], tokenizer.vocab_size, where=f"--data-path {source.name}")
            elif source.paths:
                corpus = text_corpus(source.paths)
                if source.weight is not None and corpus.is_file:  # of several files, bad ones would be left out
                    check_beginning(corpus)
        except DataError as error:
            problems += error.problems
    return problems


def _shares(config: DataConfig, problems: list[Problem]) -> tuple[float, ...]:
    try:
        return config.split_weights
    except ValueError:
        problems.append(
            Problem(
                code="data-split",
                what=f"not one to three weights >= 0, the first above 0: {config.split!r}",
                where=f"--split {config.split}",
                fix="use shares of training, validation and test data, such as 969,30,1",
            )
        )
        return (1.0, 0.0, 0.0)


def _mock(
    tokenizer: Tokenizer, shares: Sequence[float], *, seq_length: int, seed: int, notices: Sequence[str]
) -> Datasets:
    train, valid, test = (
        MockDataset(
            num_samples=num_samples,
            seq_length=seq_length,
            vocab_size=tokenizer.vocab_size,
            seed=seed,
            stream=stream,
        )
        for stream, num_samples in enumerate(_MOCK_SAMPLES)
    )
    return Datasets(
        train=train,
        valid=valid if shares[1] else None,
        test=test if shares[2] else None,
        tokenizer=tokenizer,
        summary=(f"mock data: {len(train)} samples of {seq_length} tokens, drawn from seed {seed}",),
        notices=tuple(notices),
    )


def _open(
    source: Source,
    config: DataConfig,
    tokenizer: Tokenizer,
    shares: Sequence[float],
    summary: list[str],
    notices: list[str],
) -> _Tokens:
    row: TokenRow
    if source.is_indexed:
        dataset = IndexedDataset(source.name)
        row, name, num_documents, kept = dataset.tokens(), source.name, dataset.num_documents, dataset.dtype.name
        check_tokens(row[:_NUM_CHECKED_TOKENS], tokenizer.vocab_size, where=f"--data-path {name}")
    else:
        corpus = text_corpus(source.paths) if source.paths else standard_library_corpus()
        cache_folder = Path(config.data_cache_path) if config.data_cache_path else None
        store = open_token_store(corpus, tokenizer, append_eod=config.append_eod, cache_folder=cache_folder)
        row, name, num_documents = store.tokens, corpus.name, store.num_documents
        kept = "in memory" if store.path is None else f"{'from' if store.was_cached else 'kept in'} {store.path}"
        notices += store.notices
    documents = "1 document" if num_documents == 1 else f"{num_documents:,} documents"
    summary.append(f"{name}: {documents}, {len(row):,} tokens ({kept})")
    # Rounded sums, so that the ranges meet and the last one ends at the end.
    inner = [min(round(len(row) * share), len(row)) for share in accumulate(shares[:2])]
    return _Tokens(name, row, source.weight, (0, *inner, len(row) if shares[2] else inner[1]))


def _check_lengths(opened: Sequence[_Tokens], *, seq_length: int, need_valid: bool) -> None:
    """Raise all problems of needed splits that have no whole sample."""
    problems = []
    for split in range(2 if need_valid else 1):
        usable = [tokens.num_tokens(split) > seq_length for tokens in opened]
        is_weighted_train = split == 0 and opened[0].weight is not None
        if all(usable) if is_weighted_train else any(usable):
            continue
        for tokens, is_usable in zip(opened, usable, strict=True):
            if not is_usable:
                problems.append(_too_short(tokens, split, seq_length))
    if problems:
        raise DataError(problems)


def _too_short(tokens: _Tokens, split: int, seq_length: int) -> Problem:
    counts = ", ".join(f"{name} {tokens.num_tokens(index):,}" for index, name in enumerate(_SPLITS))
    longest = tokens.num_tokens(split) - 1
    advice = ["use more data"]
    if longest >= 1:
        advice.insert(0, f"use --seq-length {longest} or less")
    if split == 1:
        advice.append("give validation a larger share in --split, or switch evaluation off with --eval-iters 0")
    return Problem(
        code="data-too-short",
        what=f"--seq-length {seq_length} needs {seq_length + 1:,} tokens in the {_SPLITS[split]} split, which has "
        f"{tokens.num_tokens(split):,} of the {len(tokens.row):,} tokens ({counts})",
        where=tokens.name,
        fix=", or ".join(advice),
    )


def _split(
    opened: Sequence[_Tokens], split: int, seq_length: int, vocab_size: int, notices: list[str]
) -> Dataset | None:
    windows: list[Dataset] = []
    weights: list[float] = []
    for tokens in opened:
        part = TokenWindows(
            tokens.row,
            seq_length=seq_length,
            start=tokens.bounds[split],
            stop=tokens.bounds[split + 1],
            vocab_size=vocab_size,
            name=tokens.name,
        )
        if len(part):
            windows.append(part)
            weights.append(tokens.weight or 0.0)
        elif len(opened) > 1 and part.num_tokens:
            notices.append(f"{tokens.name}: {part.num_tokens} {_SPLITS[split]} tokens are too few for one sample")
    if not windows:
        return None
    if len(windows) == 1:
        return windows[0]
    return BlendedDataset(windows, weights=weights if opened[0].weight is not None else None)
