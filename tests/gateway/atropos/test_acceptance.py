"""Atropos' own clients, unchanged: an environment that serves to its end, and its tool for SFT data."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gateway.atropos.running import RunningAtropos, counting

pytest.importorskip("atroposlib")
pytestmark = [pytest.mark.broker, pytest.mark.slow]

BATCH = 8
POLL_S = 0.1
LIMIT_S = 240


def trained_items(
    atropos: RunningAtropos, env: "subprocess.Popen[bytes]", kill_at: tuple[int, ...] = ()
) -> list[int]:
    """Polls as trainers do until the environment has ended; the items of all groups that came."""
    items: list[int] = []
    deadline = time.monotonic() + LIMIT_S
    batches = killed = 0
    while env.poll() is None:
        assert time.monotonic() < deadline
        batch = atropos.get("/batch")["batch"]
        if batch is None:
            time.sleep(POLL_S)
            continue
        batches += 1
        items += [group["tokens"][0][0] for group in batch]
        assert sum(len(group["tokens"]) for group in batch) == BATCH
        if batches in kill_at:
            atropos.kill_server(handed=batches - killed)
            killed = batches
    return items


@pytest.mark.parametrize("kill_at", [(), (2, 5, 9)], ids=["undisturbed", "with kills"])
def test_an_environment_serves_to_its_end(
    atropos: RunningAtropos, tokenizer: Path, tmp_path: Path, kill_at: tuple[int, ...]
) -> None:
    log = tmp_path / "env.log"
    with counting(atropos, tokenizer, 12, log) as env:
        atropos.begin(batch_size=BATCH, max_token_len=64, num_steps=12)
        items = trained_items(atropos, env, kill_at)
        assert env.returncode == 0, log.read_text()[-3000:]
    assert len(items) == len(set(items))
    assert len(items) >= 12 * BATCH // 4 - 2 * 3
    assert atropos.get("/status-env", {"env_id": 0})["env_weight"] == 1.0


def test_the_tool_for_sft_data_gets_its_sequences(
    atropos: RunningAtropos, tokenizer: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "sft.jsonl", tmp_path / "env.log"
    tool = Path(sys.executable).with_name("atropos-sft-gen")
    options = ["--api-url", atropos.url, "--group-size", "4", "--max-token-len", "64"]
    options += ["--tokenizer", str(tokenizer)]
    options += ["--num-seqs-to-save", "12", "--save-top-n-per-group", "2", "--save-messages"]
    with counting(atropos, tokenizer, 1000, log):
        command = [str(tool), str(out), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(saved) >= 12
    assert all(one["messages"][0]["role"] == "assistant" for one in saved)
