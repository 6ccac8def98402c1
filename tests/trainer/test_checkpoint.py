"""Checkpoints are there whole or not at all."""

from pathlib import Path

import pytest
import torch

from servicekit.errors import Fatal
from trainer.checkpoint import Checkpoints

TENSORS = {"weight.a": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}


class Died(Exception):
    pass


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    place = checkpoints.save(12, TENSORS, {"run": "run"})
    assert place == tmp_path / "run" / "00000012"
    assert checkpoints.newest() == 12
    loaded = checkpoints.load(12)
    assert all(loaded[name].equal(tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("stage", ["checkpoint written", "checkpoint renamed"])
def test_a_process_that_dies_while_saving_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, stage: str
) -> None:
    def die(at: str) -> None:
        if at == stage:
            raise Died

    Checkpoints(tmp_path, "run", keep=2).save(1, TENSORS, {})
    with pytest.raises(Died):
        Checkpoints(tmp_path, "run", keep=2, probe=die).save(2, TENSORS, {})
    after = Checkpoints(tmp_path, "run", keep=2)
    assert after.newest() == (1 if stage == "checkpoint written" else 2)
    after.save(3, TENSORS, {})
    assert after.versions()[-1] == 3
    assert not list((tmp_path / "run").glob(".*")), "what was not finished is cleared away"


def test_the_newest_are_kept_and_every_nth(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2, keep_every=4)
    for version in range(1, 10):
        checkpoints.save(version, TENSORS, {})
    assert checkpoints.versions() == [4, 8, 9]


def test_a_broken_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    place = checkpoints.save(1, TENSORS, {})
    (place / "state.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(Fatal, match="move it away"):
        checkpoints.load(1)


def test_other_files_beside_checkpoints_do_no_harm(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    checkpoints.save(1, TENSORS, {})
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert checkpoints.versions() == [1]
