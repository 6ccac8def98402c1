"""Keys and signatures, without HTTP around them."""

import hashlib
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.errors import NotFound, Unauthorized
from gateway.http.keys import Keys, UnusableKeys, load_keys

KEY = "0123456789abcdef"
LATER = int(time.time()) + 1000


def keys(*lines: str, secret: str | None = None) -> Keys:
    return load_keys(SecretStr(",".join(lines)), None, SecretStr(secret) if secret else None)


def test_without_keys_everybody_is_nobody_and_every_pair_works() -> None:
    none = load_keys(None, None, None)
    assert not none.are_required
    assert none.tenant(None) == none.tenant("anything") == ""
    assert none.verify("t~x.y") == ("t~x.y", "")
    assert none.sign("t", "", LATER) == "t"


def test_a_tenant_may_have_several_keys() -> None:
    both = keys(f"alice:{KEY}1", f"alice:{KEY}2", f"bob:{KEY}3")
    assert [both.tenant(KEY + n) for n in "123"] == ["alice", "alice", "bob"]


@pytest.mark.parametrize("wrong", [None, "", KEY, f"{KEY}1 ", f"alice:{KEY}1", "é" * 20])
def test_a_wrong_key_is_refused(wrong: str | None) -> None:
    with pytest.raises(Unauthorized):
        keys(f"alice:{KEY}1").tenant(wrong)


def test_a_hash_in_a_file_stands_for_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    file.write_text(f"# comment\n\n  bob:sha256:{digest.upper()}  \n")
    assert load_keys(None, file, None).tenant(KEY) == "bob"


@pytest.mark.parametrize(
    "line",
    ["alice", "alice:", f":{KEY}", "alice:short", "alice:sha256:zz", "alice:sha256:abcd",
     f"a.b:{KEY}", f"a/b:{KEY}", f"a b:{KEY}", f"é:{KEY}", ""],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_refused(line: str) -> None:
    with pytest.raises(UnusableKeys) as refusal:
        keys(line)
    assert KEY not in str(refusal.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    with pytest.raises(UnusableKeys):
        load_keys(None, file, None)


def test_a_signature_is_read_back() -> None:
    own = keys(f"alice-1:{KEY}")
    assert own.verify(own.sign("t", "alice-1", LATER)) == ("t", "alice-1")


def test_a_signature_of_other_keys_is_refused() -> None:
    signed = keys(f"alice:{KEY}1").sign("t", "alice", LATER)
    with pytest.raises(Unauthorized):
        keys(f"alice:{KEY}2").verify(signed)


def test_a_secret_of_its_own_outlives_a_change_of_keys() -> None:
    signed = keys(f"alice:{KEY}1", secret="s").sign("t", "alice", LATER)
    assert keys(f"alice:{KEY}2", secret="s").verify(signed) == ("t", "alice")


def test_the_order_of_keys_does_not_matter_to_signatures() -> None:
    """Several processes may read them from different places."""
    signed = keys(f"alice:{KEY}1", f"bob:{KEY}2").sign("t", "bob", LATER)
    assert keys(f"bob:{KEY}2", f"alice:{KEY}1").verify(signed) == ("t", "bob")


def test_an_expired_signature_is_refused() -> None:
    own = keys(f"alice:{KEY}")
    with pytest.raises(NotFound):
        own.verify(own.sign("t", "alice", int(time.time()) - 1))
