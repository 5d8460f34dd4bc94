"""Credentials for the API server, from a kubeconfig."""

import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpu_training_operator.kube.credentials import NoCredentials, load_credentials


def kubeconfig(user: dict[str, Any], cluster: dict[str, Any] | None = None) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443", **(cluster or {})}}],
            "users": [{"name": "u", "user": user}],
        }
    )


@pytest.fixture
def kubeconfig_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that KUBECONFIG names, not there yet; outside of any pod."""
    path = tmp_path / "config"
    # The package reads the variable once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    return path


def test_a_token_becomes_the_authorization_header(kubeconfig_file: Path) -> None:
    kubeconfig_file.write_text(kubeconfig({"token": "s3cret"}))
    credentials = load_credentials()
    assert credentials.server == "https://127.0.0.1:6443"
    assert credentials.authorization() == "Bearer s3cret"
    assert credentials.client_certificate is None


def test_an_exec_plugin_is_asked_for_the_token(kubeconfig_file: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    answer = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "from-exec"}}'
    )
    plugin.write_text(f"#!/bin/sh\necho '{answer}'\n")
    plugin.chmod(0o755)
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
    }
    kubeconfig_file.write_text(kubeconfig(user))
    assert load_credentials().authorization() == "Bearer from-exec"


def test_without_a_token_there_is_no_authorization_header(kubeconfig_file: Path) -> None:
    kubeconfig_file.write_text(kubeconfig({}))
    assert load_credentials().authorization() is None


def test_the_server_is_verified_unless_the_kubeconfig_says_otherwise(kubeconfig_file: Path) -> None:
    kubeconfig_file.write_text(kubeconfig({}, {"insecure-skip-tls-verify": True}))
    assert load_credentials().ssl_context() is False
    kubeconfig_file.write_text(kubeconfig({}))
    context = load_credentials().ssl_context()
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"clusters: [",
        b"- a\n- list\n",
        b"\xff\xfe",
        b"apiVersion: v1\nkind: Config\n",
        b"current-context: here\ncontexts: 3\n",
        kubeconfig({}).replace("cluster: c", "cluster: another").encode(),
    ],
)
def test_without_a_usable_kubeconfig_there_are_no_credentials(kubeconfig_file: Path, content: bytes | None) -> None:
    if content is not None:
        kubeconfig_file.write_bytes(content)
    with pytest.raises(NoCredentials) as caught:
        load_credentials()
    told, _, why = str(caught.value).partition("no usable kubeconfig: ")
    assert told.startswith("no service account token ")
    assert why
    assert "\n" not in why
