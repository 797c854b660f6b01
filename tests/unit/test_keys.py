"""API keys: their file, their hashes, and who may do what with them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from calculet_core.clock import S
from calculet_core.config import TenantConfig
from calculet_core.errors import CalculetError, ConfigError
from calculet_core.keys import KEY_ID_BYTES, SECRET_BYTES, KeyFile, KeyRecord, format_keys, hash_key, make_key, parse_keys
from calculet_core.limits import LocalLimits
from calculet_core.shell.files import LockHeld
from calculet_core.shell.keys import change_keys, read_keys
from calculet_router.tenants import Identity, Tenants

NOW_S = 1_700_000_000.0


def a_key(tenant: str = "team", **fields: object) -> tuple[KeyRecord, str]:
    key_id, key = make_key(os.urandom(KEY_ID_BYTES + SECRET_BYTES))
    return KeyRecord(key_id, tenant, hash_key(key.encode()).hex(), 0, 0, **fields), key  # type: ignore[arg-type]


def tenants(*records: KeyRecord, require_keys: bool = False, **limits: object) -> Tenants:
    configs = [TenantConfig(name="default"), TenantConfig(name="team", **limits)]  # type: ignore[arg-type]
    made = Tenants(configs, require_keys)
    if records:
        made.take_keys(KeyFile(1, records))
    return made


def code(found: Identity | CalculetError) -> str:
    assert isinstance(found, CalculetError)
    return found.code


# ---------------------------------------------------------------- keys and their file
def test_a_key_is_long_random_and_carries_only_its_id() -> None:
    first, second = (make_key(os.urandom(36)) for _ in range(2))
    assert first[1].startswith(f"ck-{first[0]}-") and len(first[1]) == len("ck-") + 8 + 1 + 43
    assert first[1] != second[1]
    with pytest.raises(ValueError, match="36 bytes"):
        make_key(b"short")


def test_the_file_holds_no_key_and_comes_back_as_it_was() -> None:
    record, key = a_key(note="laptop", expires_s=5)
    data = format_keys(KeyFile(3, (record,)))
    assert parse_keys(data, "keys.json") == KeyFile(3, (record,))
    secret = key.split("-", 2)[2]
    assert secret.encode() not in data and record.sha256.encode() in data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not valid JSON"),
        (b'{"version":0,"keys":[]}', "$.version: Expected `int` >= 1"),
        (b'{"version":1,"keys":[],"extra":1}', "unknown field `extra`"),
        (b'{"version":1,"keys":[{"id":"x"}]}', "$.keys[0]"),
        (b'{"version":1,"keys":[],"schema":"calculet-keys/v9"}', "$.schema"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match="keys.json") as caught:
        parse_keys(data, "keys.json")
    assert message in str(caught.value)


def test_an_id_may_be_there_once(tmp_path: Path) -> None:
    record, _ = a_key()
    with pytest.raises(ConfigError, match="is there twice"):
        parse_keys(format_keys(KeyFile(1, (record, record))), "keys.json")


def test_the_file_is_private_and_a_file_that_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.json"
    path.parent.mkdir()
    assert read_keys(path) is None
    record, _ = a_key()
    assert change_keys(path, lambda found: KeyFile(1, (record,))).version == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == KeyFile(1, (record,))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640 lets others at it"):
        read_keys(path)


def test_the_file_belongs_to_its_folders_owner(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    os.chown(tmp_path, 12_345, 12_346)
    change_keys(tmp_path / "keys.json", lambda found: KeyFile(1, ()))
    found = (tmp_path / "keys.json").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12_345, 12_346, 0o600)


def test_one_at_a_time_changes_it_and_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    inside, leave = threading.Event(), threading.Event()

    def slow(found: KeyFile | None) -> KeyFile:
        inside.set()
        assert leave.wait(20)
        return KeyFile(1, ())

    thread = threading.Thread(target=change_keys, args=(path, slow))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(LockHeld):
        change_keys(path, lambda found: KeyFile(9, ()))
    leave.set()
    thread.join(20)
    with pytest.raises(RuntimeError):
        change_keys(path, lambda found: (_ for _ in ()).throw(RuntimeError))
    assert read_keys(path) == KeyFile(1, ())


# ---------------------------------------------------------------- who asks
def test_without_a_key_file_everybody_is_default_whatever_they_send() -> None:
    for header in (None, b"", b"Bearer any", b"Basic eA=="):
        found = tenants().identify(header, NOW_S)
        assert isinstance(found, Identity) and (found.tenant.name, found.key) == ("default", None)


def test_from_the_first_key_on_everybody_needs_one() -> None:
    record, key = a_key()
    desk = tenants(record)
    for header in (b"Bearer " + key.encode(), b"bearer  " + key.encode() + b" "):
        found = desk.identify(header, NOW_S)
        assert isinstance(found, Identity) and (found.tenant.name, found.key) == ("team", record.id)
    for header in (None, b"", b"Bearer", b"Bearer " + key[:-1].encode(), b"Basic eA==", key.encode(), b"Bearer \xff\x00"):
        assert code(desk.identify(header, NOW_S)) == "invalid_api_key"


def test_revoking_the_last_key_does_not_open_the_door() -> None:
    record, key = a_key(revoked_s=1)
    assert code(tenants(record).identify(b"Bearer " + key.encode(), NOW_S)) == "invalid_api_key"
    emptied = tenants()
    emptied.take_keys(KeyFile(2, ()))
    assert code(emptied.identify(None, NOW_S)) == "invalid_api_key"


def test_keys_can_be_required_before_there_is_one() -> None:
    desk = tenants(require_keys=True)
    assert code(desk.identify(None, NOW_S)) == "invalid_api_key"
    desk.take_keys(None)
    assert code(desk.identify(b"Bearer x", NOW_S)) == "invalid_api_key"


def test_a_key_ends_when_it_says() -> None:
    record, key = a_key(expires_s=int(NOW_S))
    desk = tenants(record)
    assert isinstance(desk.identify(b"Bearer " + key.encode(), NOW_S - 1), Identity)
    assert code(desk.identify(b"Bearer " + key.encode(), NOW_S)) == "invalid_api_key"
    assert (desk.accepted_keys(NOW_S - 1), desk.accepted_keys(NOW_S)) == (1, 0)


def test_a_key_of_a_tenant_that_is_gone_is_forbidden() -> None:
    record, key = a_key("left")
    assert code(tenants(record).identify(b"Bearer " + key.encode(), NOW_S)) == "permission_denied"


def test_no_refusal_repeats_the_key() -> None:
    record, key = a_key("left", revoked_s=None)
    for presented in (key, "ck-00000000-secret"):
        refusal = tenants(record).identify(b"Bearer " + presented.encode(), NOW_S)
        assert isinstance(refusal, CalculetError) and presented not in refusal.message and record.sha256 not in refusal.message


# ---------------------------------------------------------------- limits
def test_a_tenant_keeps_to_its_aliases() -> None:
    desk = tenants(models=("small",))
    team = desk._configs["team"]
    refusal = desk.forbids(team, "large")
    assert refusal is not None and (refusal.code, refusal.param) == ("permission_denied", "model") and "small" in refusal.message
    assert desk.forbids(team, "small") is None
    assert desk.forbids(desk.anonymous.tenant, "large") is None


def test_the_headers_say_what_is_left_and_when_it_is_whole_again() -> None:
    desk = tenants(requests_per_s=4, max_active=3)
    team = desk._configs["team"]
    assert desk.headers(desk.anonymous.tenant, 0) == b""
    for _ in range(3):
        assert desk.admit(team, 1, 0) is None
    lines = dict(line.split(b": ") for line in desk.headers(team, 0).split(b"\r\n") if line)
    assert lines == {
        b"x-ratelimit-limit-requests": b"4", b"x-ratelimit-remaining-requests": b"1", b"x-ratelimit-reset-requests": b"0.750s",
        b"x-ratelimit-limit-active": b"3", b"x-ratelimit-remaining-active": b"0",
    }  # fmt: skip
    refusal = desk.admit(team, 1, 0)
    assert refusal is not None and refusal.code == "tenant_quota"
    desk.release(team, 3)
    assert desk.admit(team, 1, 0) is None
    refusal = desk.admit(team, 1, 0)
    assert refusal is not None and (refusal.code, refusal.retry_after_s) == ("tenant_rate_limited", 0.25)
    assert desk.admit(team, 1, S // 4) is None


def test_limits_hold_for_all_routers_together_and_a_refused_rate_keeps_no_active() -> None:
    limits, config = LocalLimits(), TenantConfig(name="team", requests_per_s=2, max_active=3)
    routers = [Tenants([TenantConfig(name="default"), config], limits=limits) for _ in range(3)]
    assert routers[0].admit(config, 2, 0) is None
    refusal = routers[1].admit(config, 2, 0)
    assert refusal is not None and (refusal.code, "2 of 3 requests are active" in refusal.message) == ("tenant_quota", True)
    assert routers[1].admit(config, 1, 0) is None
    routers[0].release(config, 2)
    refusal = routers[2].admit(config, 1, 0)
    assert refusal is not None and (refusal.code, refusal.retry_after_s) == ("tenant_rate_limited", 0.5)
    assert (limits.total("team"), [router.active["team"] for router in routers]) == (1, [0, 1, 0])
    assert b"x-ratelimit-remaining-active: 2\r\n" in routers[2].headers(config, 0)
