"""docker-compose.yml, checked without a Docker engine: its form, and whether its services fit."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pool.connection import MAX_MESSAGE_BYTES
from steplog.cli import make_parser
from steplog.commands import Command, find_command
from steplog.settings import SERVICES as SETTINGS
from steplog.settings import load, settings_class
from tests.deploy.compose_file import COMPOSE, FILE, ROOT, SERVICES, names, variables, words

OURS = [name for name in SERVICES if words(name)[:1] == ["steplog"]]
LISTENING = [name for name in OURS if name != "topics"]
LOOPBACK = re.compile(r"127\.0\.0\.1:\d+:\d+")
ENV_LINE = re.compile(r"^(\w+)=(.*)$", re.MULTILINE)


def command_of(service: str) -> Command:
    """The command that the service's container runs."""
    command = find_command(words(service)[1:])
    assert command, f"there is no command {' '.join(words(service))}"
    return command


def settings_of(service: str) -> Any:
    """The settings as the process itself reads them."""
    command, arguments = command_of(service), words(service)[1:]
    namespace = make_parser(arguments).parse_args(arguments)
    environ = {key: str(value) for key, value in SERVICES[service]["environment"].items()}
    return load(settings_class(command.service), command.service, namespace, environ)


def stages() -> set[str]:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    return set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))


def test_it_follows_the_compose_specification() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(FILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_service_of_steplog_is_there() -> None:
    assert {command_of(name).service for name in OURS} == {
        "topics", "gateway", "reward", "train", "monitor",
    }  # fmt: skip
    assert "version" not in COMPOSE
    assert not any("container_name" in service for service in SERVICES.values())


@pytest.mark.parametrize("service", SERVICES)
def test_dependencies_exist_and_have_the_awaited_condition(service: str) -> None:
    for name, dependency in SERVICES[service].get("depends_on", {}).items():
        assert name in SERVICES
        if dependency["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[name]
        if dependency["condition"] == "service_completed_successfully":
            assert SERVICES[name]["restart"] == "no"
        needed = set(SERVICES[name].get("profiles", []))
        own = set(SERVICES[service].get("profiles", []))
        assert not needed or own <= needed, f"{name} may be missing where {service} runs"


@pytest.mark.parametrize("service", SERVICES)
def test_every_image_has_a_fixed_version(service: str) -> None:
    name, _, tag = SERVICES[service]["image"].rpartition(":")
    assert name
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    if "build" in SERVICES[service]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert tag == project["version"]


def test_the_broker_is_the_one_that_tests_run_on() -> None:
    pom = ElementTree.parse(ROOT / "steplog" / "kafka" / "pom.xml").getroot()
    version = next(one.text for one in pom.iter() if one.tag.endswith("kafka.version"))
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{version}"


def test_the_broker_accepts_the_largest_records() -> None:
    environment = SERVICES["kafka"]["environment"]
    assert int(environment["KAFKA_MESSAGE_MAX_BYTES"]) == MAX_MESSAGE_BYTES
    assert int(environment["KAFKA_REPLICA_FETCH_MAX_BYTES"]) == MAX_MESSAGE_BYTES


def test_the_broker_has_the_settings_of_the_documentation() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    block = re.search(r"```properties\n(.*?)```", operations, re.DOTALL)
    assert block
    environment = SERVICES["kafka"]["environment"]
    for line in block[1].splitlines():
        name, value = line.split("=")
        assert environment["KAFKA_" + name.upper().replace(".", "_")] == value


def test_every_listener_of_the_broker_is_mapped_and_advertised() -> None:
    environment = SERVICES["kafka"]["environment"]

    def listeners(variable: str) -> dict[str, str]:
        parts = environment[variable].split(",")
        return dict(part.split(":", 1) for part in parts)

    bound, mapped = listeners("KAFKA_LISTENERS"), listeners("KAFKA_LISTENER_SECURITY_PROTOCOL_MAP")
    advertised = listeners("KAFKA_ADVERTISED_LISTENERS")
    assert bound.keys() == mapped.keys()
    assert advertised.keys() == bound.keys() - {environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert advertised["INTERNAL"] == "//kafka:19092"
    assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] in advertised


@pytest.mark.parametrize("service", SERVICES)
def test_only_loopback_is_published(service: str) -> None:
    for port in SERVICES[service].get("ports", []):
        assert LOOPBACK.fullmatch(port)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_confined_and_has_limits(service: str) -> None:
    definition = SERVICES[service]
    assert definition["init"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert definition["logging"]["options"].keys() == {"max-size", "max-file"}
    assert "mem_limit" in definition
    if service != "topics":
        assert {"healthcheck", "stop_grace_period"} <= definition.keys()


@pytest.mark.parametrize("service", OURS)
def test_a_service_can_read_its_settings(service: str) -> None:
    """Loading fails on an unknown STEPLOG_ variable, as it does in the container."""
    assert settings_of(service).bootstrap == "kafka:19092"


@pytest.mark.parametrize("service", LISTENING)
def test_ports_are_those_of_the_settings(service: str) -> None:
    port = settings_of(service).port
    assert SERVICES[service]["healthcheck"]["test"][-1] == str(port)
    published = [text.rpartition(":")[2] for text in SERVICES[service].get("ports", [])]
    assert published in ([], [str(port)])


@pytest.mark.parametrize("service", OURS)
def test_urls_point_to_services(service: str) -> None:
    known = {name for one in SERVICES for name in names(one)}
    for value in SERVICES[service]["environment"].values():
        for host in re.findall(r"https?://([\w-]+)", str(value)):
            assert host in known


def test_a_gateway_is_given_time_to_drain() -> None:
    seconds = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert seconds > settings_of("gateway").drain_s


def test_reward_workers_can_be_scaled() -> None:
    assert "ports" not in SERVICES["reward"], "replicas cannot share a port of the host"
    assert "$(hostname)" in words("reward")[-1], "each replica needs its own transactional id"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_engine_and_trainer_use_the_same_weight_transport(profile: str) -> None:
    from trainer.weights.plugin import ENGINES

    settings = settings_of(f"trainer-{profile}")
    engine = SERVICES[f"vllm-{profile}"]
    (backend,) = re.findall(r'"backend": "(\w+)"', " ".join(engine["command"]))
    assert backend in ENGINES
    assert backend == {"gloo": "gloo", "nccl": "steplog_nccl"}[settings.weights_transport]
    assert settings.weights_host in names(f"trainer-{profile}")
    assert engine["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert {"--enable-scale-out", "--logprobs-mode=processed_logprobs"} <= {*engine["command"]}


def test_trainer_and_gateway_have_one_run_and_one_group_size() -> None:
    gateway = settings_of("gateway")
    for trainer in ("trainer-cpu", "trainer-gpu"):
        settings = settings_of(trainer)
        assert (settings.run, settings.group_size) == (gateway.run, gateway.group_size)
        assert gateway.max_groups == 2 * settings.groups_per_batch


@pytest.mark.parametrize("service", [name for name in SERVICES if "build" in SERVICES[name]])
def test_the_dockerfile_has_the_stage(service: str) -> None:
    build = SERVICES[service]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()
    assert build["target"] in stages()


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists(service: str) -> None:
    for volume in SERVICES[service].get("volumes", []):
        if isinstance(volume, dict):  # the user's model: Docker reports a missing folder
            assert volume["bind"] == {"create_host_path": False}
        elif volume.startswith("."):
            assert (ROOT / volume.partition(":")[0]).exists()
            assert volume.endswith(":ro")
        else:
            assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_the_example_of_env_has_every_variable_with_its_default() -> None:
    example = dict(ENV_LINE.findall((ROOT / ".env.example").read_text()))
    assert example.pop("COMPOSE_PROFILES").split(",") == ["cpu", "observability", "ui"]
    defaults = variables()
    assert defaults.keys() == example.keys()
    different = {name for name in defaults if defaults[name] != example[name]}
    assert different <= {"MAX_MODEL_LEN"}, "it has two defaults, one for each profile"


def test_the_profiles_of_the_example_exist() -> None:
    profiles = {name for service in SERVICES.values() for name in service.get("profiles", [])}
    assert profiles == {"cpu", "gpu", "observability", "ui"}


def test_the_build_context_has_every_package_and_project_file() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / path).exists() for path in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= set(kept)
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= set(kept)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile(), re.MULTILINE)
    assert {one for line in copied for one in line.split() if one != "."} <= set(kept)


def dockerfile() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text()


def test_no_image_runs_as_root() -> None:
    bodies = re.split(r"^FROM \S+ AS ", dockerfile(), flags=re.MULTILINE)[1:]
    final = {body.split()[0]: body for body in bodies}
    for target in {
        service["build"]["target"] for service in SERVICES.values() if "build" in service
    }:
        users = re.findall(r"^USER (\S+)$", final[target], re.MULTILINE)
        assert users[-1:] == ["10001"], target


def test_the_engine_image_has_the_pinned_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"vllm==([\d.]+)", " ".join(project["optional-dependencies"]["gpu"]))
    assert f"vllm/vllm-openai:v{version}\n" in dockerfile()


def test_every_service_of_ours_has_settings() -> None:
    assert {command_of(name).service for name in OURS} <= SETTINGS.keys()
    assert Path(FILE).name == "docker-compose.yml"
