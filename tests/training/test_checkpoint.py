from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphstep.checkpoint_folders import MODEL, STATE, TRACKER, find_checkpoint
from graphstep.errors import CheckpointError
from graphstep.training import checkpoint as checkpoints
from graphstep.training.checkpoint import OPTIMIZER, RANDOM, Checkpoint, TrainingState, save_checkpoint

ARCHITECTURE = {"num_layers": 2, "num_attention_heads": 4}


def training_state(iteration: int, value: float = 1.0) -> TrainingState:
    return TrainingState(
        iteration=iteration,
        model={"w": torch.full((3, 2), value), "half": torch.full((4,), value, dtype=torch.bfloat16)},
        optimizer={"exp_avg.w": torch.full((3, 2), value), "step.w": torch.tensor(float(iteration))},
        random={"cpu": torch.get_rng_state()},
        architecture=ARCHITECTURE,
        data={"train": {"consumed_samples": 7}},
        progress={"loss": 2.5},
    )


def targets() -> dict[str, dict[str, Tensor]]:
    state = training_state(0, value=0.0)
    return {"model": dict(state.model), "optimizer": dict(state.optimizer)}


RANDOM_STATE = {"cpu": torch.get_rng_state()}


def open_checkpoint(folder: Path, **changes: object) -> Checkpoint:
    return Checkpoint(folder, **{**targets(), "random": RANDOM_STATE, "architecture": ARCHITECTURE, **changes})


def test_round_trip_is_exact_and_loads_in_place(tmp_path: Path) -> None:
    state = training_state(100)
    folder = save_checkpoint(tmp_path / "run", state)
    assert folder.name == "iter_0000100"
    assert sorted(p.name for p in folder.iterdir()) == sorted([MODEL, OPTIMIZER, RANDOM, STATE])
    live = targets()
    addresses = [t.data_ptr() for group in live.values() for t in group.values()]
    loaded = Checkpoint(find_checkpoint(tmp_path / "run"), **live, random=RANDOM_STATE, architecture=ARCHITECTURE)
    assert (loaded.iteration, loaded.data, loaded.progress) == (100, state.data, state.progress)
    assert torch.equal(loaded.random()["cpu"], state.random["cpu"])
    loaded.restore()
    assert [t.data_ptr() for group in live.values() for t in group.values()] == addresses
    for group, saved in (("model", state.model), ("optimizer", state.optimizer)):
        assert all(torch.equal(live[group][name], tensor) for name, tensor in saved.items())


def test_the_latest_is_found_and_an_older_one_can_be_named(tmp_path: Path) -> None:
    older = save_checkpoint(tmp_path, training_state(5))
    newer = save_checkpoint(tmp_path, training_state(10))
    assert find_checkpoint(tmp_path) == newer
    assert find_checkpoint(older) == older
    assert (tmp_path / TRACKER).read_text() == "10\n"


def test_the_same_iteration_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, training_state(5, value=1.0))
    save_checkpoint(tmp_path, training_state(5, value=2.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", TRACKER]
    assert load_file(tmp_path / "iter_0000005" / MODEL)["w"][0, 0] == 2.0


def test_nothing_is_pickled(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    json.loads((folder / STATE).read_text())


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, RANDOM, STATE])
@pytest.mark.parametrize("keep", [0, 5, 0.5, -1])
def test_truncated_files_are_refused(tmp_path: Path, name: str, keep: float) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    data = (folder / name).read_bytes()
    # The state ends with a brace and a newline, and the brace is what counts.
    size = int(len(data) * keep) if 0 < keep < 1 else (len(data) - 2 if keep == -1 else int(keep))
    (folder / name).write_bytes(data[:size])
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        open_checkpoint(folder)
    assert [problem.where for problem in caught.value.problems] == [str(folder / name)]


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, RANDOM, STATE])
def test_missing_files_are_refused(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    (folder / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert [problem.where for problem in caught.value.problems] == [str(folder / name)]


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1}', "null", '{"format": 2, "iteration": "5"}'])
def test_json_that_is_no_state_is_refused(tmp_path: Path, text: str) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    (folder / STATE).write_text(text)
    with pytest.raises(CheckpointError, match="missing or of the wrong type"):
        open_checkpoint(folder)


def test_hostile_json_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps({**state, "data": {"train": 5}}))
    with pytest.raises(CheckpointError, match="of the wrong type"):
        open_checkpoint(folder)
    (folder / STATE).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        open_checkpoint(folder)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="expected format 1, found format 99"):
        open_checkpoint(folder)


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    older, newer = (save_checkpoint(tmp_path, training_state(n)) for n in (5, 10))
    (newer / OPTIMIZER).write_bytes((older / OPTIMIZER).read_bytes())
    with pytest.raises(CheckpointError, match="of iteration 5"):
        open_checkpoint(newer)


def test_tensors_that_do_not_fit_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    tensors = load_file(folder / MODEL)
    del tensors["half"]
    save_file({**tensors, "w": torch.ones(2, 3), "extra": torch.ones(1)}, folder / MODEL, {"iteration": "5"})
    tensors = load_file(folder / OPTIMIZER)
    save_file({**tensors, "step.w": torch.ones((), dtype=torch.float64)}, folder / OPTIMIZER, {"iteration": "5"})
    live = targets()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, **live)
    assert [problem.what for problem in caught.value.problems] == [
        "w: expected [3, 2] float32, found [2, 3] float32",
        "half: expected [4] bfloat16, found nothing",
        "extra: expected nothing, found [1] float32",
        "step.w: expected [] float32, found [] float64",
    ]
    assert all(not tensor.any() for group in live.values() for tensor in group.values())


def test_of_many_tensors_that_do_not_fit_five_are_listed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    more = {f"more.{index}": torch.zeros(2) for index in range(9)}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, model={**targets()["model"], **more})
    problems = caught.value.problems
    assert [problem.what.partition(":")[0] for problem in problems[:5]] == list(more)[:5]
    assert [problem.what for problem in problems[5:]] == ["... and 4 more tensors"]
    assert {problem.code for problem in problems} == {"checkpoint-mismatch"}


def test_options_that_differ_stand_for_the_tensors(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    wide = {name: torch.zeros(9) for name in targets()["model"]}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, model=wide, architecture={**ARCHITECTURE, "num_attention_heads": 8})
    [problem] = caught.value.problems
    assert problem.what == "--num-attention-heads is 8 here and 4 in the checkpoint"
    assert problem.code == "checkpoint-architecture"
    assert problem.where == str(folder / STATE)
    (folder / OPTIMIZER).unlink()
    with pytest.raises(CheckpointError, match="the file is missing") as caught:
        open_checkpoint(folder, model=wide, architecture={**ARCHITECTURE, "num_attention_heads": 8})
    assert len(caught.value.problems) == 2


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        find_checkpoint(tmp_path / "file")
    save_checkpoint(tmp_path, training_state(5))
    (tmp_path / TRACKER).write_text("ten\n")
    with pytest.raises(CheckpointError, match=r"(?s)'ten'.*iter_0000005"):
        find_checkpoint(tmp_path)
    (tmp_path / TRACKER).write_text("10\n")
    with pytest.raises(CheckpointError, match=r"(?s)iter_0000010, which does not exist.*iter_0000005"):
        find_checkpoint(tmp_path)
    for digits in (300, 5000):
        (tmp_path / TRACKER).write_text("9" * digits)
        with pytest.raises(CheckpointError, match="should hold an iteration number"):
            find_checkpoint(tmp_path)


class Crash(BaseException):
    """Ends a test's save as a killed process would: no handler of ours catches it."""


@pytest.mark.parametrize(
    ("step", "call"),
    [("save_file", 1), ("save_file", 2), ("save_file", 3), ("publish_folder", 1), ("write_text_atomically", 1)],
)
@pytest.mark.parametrize("iteration", [5, 10], ids=["same-iteration", "next-iteration"])
def test_a_crash_between_files_leaves_the_older_checkpoint_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, call: int, iteration: int
) -> None:
    save_checkpoint(tmp_path, training_state(5, value=1.0))
    original = getattr(checkpoints, step)
    calls = []

    def crash(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == call:
            raise Crash
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoints, step, crash)
    with pytest.raises(Crash):
        save_checkpoint(tmp_path, training_state(iteration, value=2.0))
    monkeypatch.undo()

    loaded = open_checkpoint(find_checkpoint(tmp_path))
    assert loaded.iteration == 5
    loaded.restore()
    # A later save works and clears what the crash left.
    save_checkpoint(tmp_path, training_state(15, value=3.0))
    assert find_checkpoint(tmp_path).name == "iter_0000015"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_crash_while_a_folder_is_replaced_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, training_state(5, value=1.0))
    rename = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path.name.startswith("."):
            raise Crash
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(Crash):
        save_checkpoint(tmp_path, training_state(5, value=2.0))
    monkeypatch.undo()
    folder = find_checkpoint(tmp_path)
    assert folder.name == "iter_0000005.replaced"
    assert open_checkpoint(folder).iteration == 5
    save_checkpoint(tmp_path, training_state(5, value=3.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def test_a_full_disk_is_reported_and_older_checkpoints_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, training_state(5))

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", refuse)
    with pytest.raises(CheckpointError, match=r"(?s)iteration 10 was not written.*No space left"):
        save_checkpoint(tmp_path, training_state(10))
    monkeypatch.undo()
    assert open_checkpoint(find_checkpoint(tmp_path)).iteration == 5


def test_random_states_must_fit_and_may_lack_that_of_another_device(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, training_state(5))
    extra = {"cuda": torch.zeros(16, dtype=torch.uint8)}
    assert "cuda" not in open_checkpoint(folder, random={**RANDOM_STATE, **extra}).random()
    save_file({"cpu": torch.zeros(3, dtype=torch.uint8)}, folder / RANDOM, {"iteration": "5"})
    with pytest.raises(CheckpointError, match=r"cpu: expected \[\d+\] uint8, found \[3\] uint8"):
        open_checkpoint(folder)
    save_file({**RANDOM_STATE, **extra}, folder / RANDOM, {"iteration": "5"})
    assert open_checkpoint(folder).iteration == 5


def test_tensors_that_share_one_storage_are_saved_apart(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    state = dataclasses.replace(training_state(5), model={"a": flat[:4], "b": flat[4:].view(2, 3)})
    folder = save_checkpoint(tmp_path, state)
    tensors = load_file(folder / MODEL)
    assert torch.equal(tensors["a"], flat[:4])
    assert torch.equal(tensors["b"], flat[4:].view(2, 3))
    assert (folder / MODEL).stat().st_size < 400
