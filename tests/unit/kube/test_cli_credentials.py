"""Credentials of a command at a prompt: like kubectl, the kubeconfig first and a pod's service account last."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from tpu_training_operator.kube import credentials
from tpu_training_operator.kube.credentials import NoCredentials, load_credentials, load_personal_credentials


def kubeconfig(path: Path, **contexts: dict[str, Any]) -> Path:
    """One server for every context; the first is the current one."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": next(iter(contexts)),
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": "me", **context}} for name, context in contexts.items()
        ],
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}.example"}} for name in contexts],
        "users": [{"name": "me", "user": {"token": "s3cret"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(autouse=True)
def outside_of_any_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The package reads the variable once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "default"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("token", "of the pod"), ("ca.crt", "certificate"), ("namespace", "team\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(credentials, "_SERVICE_ACCOUNT", tmp_path)


@pytest.mark.parametrize(
    ("context", "server", "namespace"),
    [(None, "https://here.example", "mine"), ("there", "https://there.example", "default")],
)
def test_the_context_gives_server_and_namespace(
    tmp_path: Path, context: str | None, server: str, namespace: str
) -> None:
    file = kubeconfig(tmp_path / "config", here={"namespace": "mine"}, there={})
    found = load_personal_credentials(file, context)
    assert (found.server, found.namespace, found.authorization()) == (server, namespace, "Bearer s3cret")


def test_the_default_kubeconfig_wins_even_in_a_pod(tmp_path: Path, in_pod: None) -> None:
    kubeconfig(tmp_path / "default", here={})
    assert load_personal_credentials().server == "https://here.example"


def test_a_pod_without_a_kubeconfig_uses_its_service_account(in_pod: None) -> None:
    found = load_personal_credentials()
    assert found.server == "https://192.0.2.1:443"
    assert found.namespace == "team"


@pytest.fixture
def operators_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no package that reads a kubeconfig."""
    monkeypatch.setitem(sys.modules, "tpu_training_operator.kube.kubeconfig", None)
    monkeypatch.delattr("tpu_training_operator.kube.kubeconfig", raising=False)


def test_a_pod_of_the_operators_image_uses_its_service_account(operators_image: None, in_pod: None) -> None:
    assert load_personal_credentials().namespace == "team"


def test_the_operators_image_says_what_it_lacks(operators_image: None, in_pod: None, tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="no package that reads a kubeconfig"):
        load_personal_credentials(kubeconfig(tmp_path / "config", here={}))


@pytest.mark.parametrize(
    ("host", "server"), [("192.0.2.1", "https://192.0.2.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_the_operator_reads_the_token_of_its_pod_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_pod: None, host: str, server: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    found = load_credentials()
    assert (found.server, found.ca_file, found.authorization()) == (
        server,
        str(tmp_path / "ca.crt"),
        "Bearer of the pod",
    )
    (tmp_path / "token").write_text("renewed\n")
    assert found.authorization() == "Bearer renewed"


@pytest.mark.parametrize("lacking", ["token", "ca.crt"])
def test_a_pod_without_a_service_account_needs_a_kubeconfig(
    tmp_path: Path, in_pod: None, lacking: str, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / lacking).write_text("")
    with pytest.raises(NoCredentials) as caught:
        load_credentials()
    assert str(caught.value) == snapshot


def test_the_service_account_never_replaces_a_named_kubeconfig_or_context(tmp_path: Path, in_pod: None) -> None:
    for file, context in ((tmp_path / "missing", None), (None, "there")):
        with pytest.raises(NoCredentials):
            load_personal_credentials(file, context)


def test_an_unknown_context_is_answered_with_the_known_ones(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    file = kubeconfig(tmp_path / "config", here={}, there={})
    with pytest.raises(NoCredentials) as caught:
        load_personal_credentials(file, "elsewhere")
    assert str(caught.value) == snapshot


@pytest.mark.parametrize(
    "content",
    [None, b"", b"clusters: [", b"- a\n", b"\xff\xfe", b"kind: Config\n", b"current-context: a\ncontexts: 3\n"],
)
def test_without_a_usable_kubeconfig_one_line_says_why(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(NoCredentials) as caught:
        load_personal_credentials(file)
    told, _, why = str(caught.value).partition("no usable kubeconfig: ")
    assert told == ""
    assert why
    assert "\n" not in why
