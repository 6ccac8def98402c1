import argparse
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from pool.connection import Connection
from servicekit import settings_sources as sources
from steplog import settings
from steplog.settings import SettingsError, add_options, load

SECRET = "hunter2"
LOGIN = {
    "STEPLOG_SECURITY_PROTOCOL": "SASL_SSL",
    "STEPLOG_SASL_MECHANISM": "PLAIN",
    "STEPLOG_SASL_USERNAME": "baker",
}


class Baker(Connection):
    """A service as later ones will be: it talks to Kafka and has settings of its own."""

    ovens: int = Field(2, ge=1, description="how many ovens, 100% of them hot")
    flours: tuple[str, ...] = Field(("rye",), description="what to bake with")
    grams: list[int] | None = Field(None, description="sizes of loaves")
    crusty: bool = Field(False, description="bake longer")
    api_key: SecretStr | None = Field(None, description="key of the mill")


class Keyed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr = Field(min_length=20)
    pin: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _fits(self) -> "Keyed":
        if self.pin.get_secret_value() == "0":
            raise ValueError("a pin needs digits")
        return self


@pytest.fixture(autouse=True)
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(settings.SERVICES, "baker", f"{__name__}:Baker")
    monkeypatch.setitem(settings.SERVICES, "keyed", f"{__name__}:Keyed")


def baker(*argv: str, toml: str | None = None, **environ: str) -> Baker:
    if toml is not None:
        Path("steplog.toml").write_text(toml)
    parser = argparse.ArgumentParser()
    add_options(parser, Baker)
    return load(Baker, "baker", parser.parse_args(argv), environ)


def problems(*argv: str, toml: str | None = None, **environ: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        baker(*argv, toml=toml, **environ)
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None, "pydantic's error quotes values"
    return caught.value.problems


def test_defaults_hold_when_nothing_is_given() -> None:
    assert baker() == Baker()


def test_command_line_wins_over_environment_over_file() -> None:
    toml = "[baker]\novens = 3\ncrusty = true\nflours = ['spelt', 'oat']"
    assert baker(toml=toml).ovens == 3
    assert baker(toml=toml, STEPLOG_BAKER_OVENS="4").ovens == 4
    assert baker("--ovens", "5", toml=toml, STEPLOG_BAKER_OVENS="4").ovens == 5
    assert baker(toml=toml).flours == ("spelt", "oat")
    assert baker("--no-crusty", toml=toml).crusty is False


def test_what_is_given_for_one_service_wins_over_what_is_given_for_all() -> None:
    toml = "bootstrap = 'all:1'\n[baker]\nbootstrap = 'one:1'"
    assert baker(toml=toml).bootstrap == "one:1"
    assert baker(toml=toml, STEPLOG_BOOTSTRAP="all:2").bootstrap == "all:2"
    both = {"STEPLOG_BAKER_BOOTSTRAP": "one:2", "STEPLOG_BOOTSTRAP": "all:2"}
    assert baker(toml=toml, **both).bootstrap == "one:2"


def test_text_becomes_the_type_of_the_field() -> None:
    given = baker("--flours", "rye, oat", "--grams", "500,750", STEPLOG_BAKER_CRUSTY="true")
    assert (given.flours, given.grams, given.crusty) == (("rye", "oat"), [500, 750], True)
    assert baker("--flours", "").flours == ()
    assert baker(STEPLOG_TOPIC_PREFIX="").topic_prefix == ""
    assert baker(STEPLOG_SECURITY_PROTOCOL="SSL", STEPLOG_SSL_CA="/ca.pem").ssl_ca == Path(
        "/ca.pem"
    )


def test_the_file_is_chosen_by_option_then_variable_then_place() -> None:
    for name, ovens in (("option", 3), ("variable", 4)):
        Path(f"{name}.toml").write_text(f"[baker]\novens = {ovens}")
    toml = "[baker]\novens = 5"
    variable = {"STEPLOG_CONFIG": "variable.toml"}
    assert baker("--config", "option.toml", toml=toml, **variable).ovens == 3
    assert baker(toml=toml, **variable).ovens == 4
    assert baker(toml=toml).ovens == 5


def test_a_file_that_was_asked_for_must_be_there_and_be_toml() -> None:
    assert problems("--config", "no.toml") == (
        "the settings file no.toml cannot be read: No such file or directory",
    )
    (told,) = problems(toml="ovens = ")
    assert told.startswith("the settings file steplog.toml is not valid TOML: ")


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (
            "boostrap = 'x'",
            "unknown key boostrap at the top level of steplog.toml; did you mean bootstrap?",
        ),
        (
            "[baker]\noven = 1",
            "unknown key oven in [baker] of steplog.toml; did you mean ovens?",
        ),
        ("[bakery]\n", "unknown key bakery at the top level of steplog.toml; did you mean baker?"),
        ("zzz = 1", "unknown key zzz at the top level of steplog.toml"),
        ("baker = 1", "baker in steplog.toml must be a table, written [baker]"),
        (
            "ovens = 1",
            "unknown key ovens at the top level of steplog.toml"
            " (as a key of baker, it belongs in [baker])",
        ),
    ],
)
def test_unknown_keys_in_the_file(toml: str, sentence: str) -> None:
    assert problems(toml=toml) == (sentence,)


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("STEPLOG_BOOSTRAP", "STEPLOG_BOOTSTRAP"),
        ("STEPLOG_BAKER_OVEN", "STEPLOG_BAKER_OVENS"),
        ("STEPLOG_BAKR_OVENS", "STEPLOG_BAKER_OVENS"),
        ("STEPLOG_BAKER_OVENS_FILE", "STEPLOG_BAKER_OVENS"),
    ],
)
def test_unknown_variables(variable: str, near: str) -> None:
    assert problems(**{variable: "1"}) == (
        f"unknown variable {variable} in the environment; did you mean {near}?",
    )


def test_other_services_keys_are_left_to_them() -> None:
    assert baker(toml="[kafka]\nport = 1", STEPLOG_KAFKA_PORT="2", PATH="/bin") == Baker()


def test_shared_settings_do_not_disturb_a_service_without_a_connection() -> None:
    Path("steplog.toml").write_text("bootstrap = 'all:1'")
    given = load(
        settings.settings_class("kafka"),
        "kafka",
        argparse.Namespace(),
        {"STEPLOG_TOPIC_PREFIX": "x", "STEPLOG_KAFKA_PORT": "1234"},
    )
    assert given.model_dump()["port"] == 1234


def test_every_bad_value_is_one_sentence_that_names_its_source() -> None:
    told = problems(
        "--grams", "1,x", toml="group_protocol = 'none'\nboostrap = 1", STEPLOG_BAKER_OVENS="0"
    )
    assert told == (
        "unknown key boostrap at the top level of steplog.toml; did you mean bootstrap?",
        "group_protocol in steplog.toml cannot be used: input should be 'consumer' or 'classic'",
        "STEPLOG_BAKER_OVENS cannot be used: input should be greater than or equal to 1",
        "--grams cannot be used: input should be a valid integer, unable to parse string as an"
        " integer",
    )


def test_a_secret_comes_from_a_variable_or_a_file_but_not_both() -> None:
    Path("key").write_text(SECRET + "\n")
    for variable in ("STEPLOG_SASL_PASSWORD_FILE", "STEPLOG_BAKER_SASL_PASSWORD_FILE"):
        password = baker(**LOGIN, **{variable: "key"}).sasl_password
        assert password is not None
        assert password.get_secret_value() == SECRET
    both = {"STEPLOG_SASL_PASSWORD": "other", "STEPLOG_BAKER_SASL_PASSWORD_FILE": "key"}
    own = baker(**LOGIN, **both)
    assert own.sasl_password == SecretStr(SECRET)
    assert problems(STEPLOG_BAKER_API_KEY=SECRET, STEPLOG_BAKER_API_KEY_FILE="key") == (
        "STEPLOG_BAKER_API_KEY and STEPLOG_BAKER_API_KEY_FILE are both set; remove one of them",
    )


def test_a_secret_file_that_cannot_be_read() -> None:
    assert problems(STEPLOG_BAKER_API_KEY_FILE="none") == (
        "the file that STEPLOG_BAKER_API_KEY_FILE names cannot be read: No such file or directory",
    )
    Path("binary").write_bytes(b"\xff\xfe\xff")
    assert problems(STEPLOG_BAKER_API_KEY_FILE="binary") == (
        "the file that STEPLOG_BAKER_API_KEY_FILE names is not text in UTF-8",
    )


def test_no_secret_is_shown() -> None:
    given = baker("--api-key", SECRET, STEPLOG_SASL_PASSWORD=SECRET, **LOGIN)
    assert SECRET not in repr(given)
    assert SECRET not in str(given)
    problems("--ovens", "x", "--api-key", SECRET, STEPLOG_SASL_PASSWORD=SECRET)
    with pytest.raises(SettingsError) as caught:
        load(Keyed, "keyed", argparse.Namespace(), {"STEPLOG_KEYED_API_KEY": SECRET})
    assert str(caught.value) == "STEPLOG_KEYED_API_KEY cannot be used: the value is not accepted"


def test_what_is_missing_and_what_does_not_fit_together() -> None:
    with pytest.raises(SettingsError) as caught:
        load(Keyed, "keyed", argparse.Namespace(), {})
    assert str(caught.value) == (
        "api_key is missing: give --api-key, STEPLOG_KEYED_API_KEY, or api_key in [keyed] of the"
        " settings file"
    )
    with pytest.raises(SettingsError) as caught:
        load(Keyed, "keyed", argparse.Namespace(api_key="k" * 20, pin="0"), {})
    assert str(caught.value) == "the settings of keyed do not fit together: a pin needs digits"


def test_help_explains_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        baker("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--ovens OVENS how many ovens, 100% of them hot (default: 2)" in text
    assert "--crusty, --no-crusty bake longer (default: False)" in text
    assert "what to bake with; separated by commas (default: rye)" in text
    assert "one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL (default: PLAINTEXT)" in text
    for name, field in Baker.model_fields.items():
        assert sources.option_flag(name) in text
        assert " ".join((field.description or "").split()) in text


def test_every_registered_service_has_closed_frozen_settings_and_variables_of_its_own() -> None:
    names = [*sources.variables(settings.SHARED, sources.PREFIX)]
    for service in settings.SERVICES:
        cls = settings.settings_class(service)
        assert cls.model_config.get("frozen")
        assert cls.model_config.get("extra") == "forbid"
        names += sources.variables(cls.model_fields, sources.prefix_of(service))
    assert len(names) == len(set(names))
