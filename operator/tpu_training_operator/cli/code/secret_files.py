"""Recognises files that usually hold secrets. `--code` packs them only if `.tpujobignore` names them."""

from tpu_training_operator.cli.code.ignore_files import is_ignored, parse_ignore_file

# Patterns of an ignore file, matched in lower case.
_USUAL = """
.env .env.* !.env.example !.env.sample !.env.template .envrc
.netrc _netrc .git-credentials .npmrc .pypirc .dockercfg .docker/ .pgpass .my.cnf .htpasswd
.boto .s3cfg .vault-token .databrickscfg .ssh/ .gnupg/ .aws/ .azure/ .kube/ **/.config/gcloud/ **/.config/gh/
.huggingface/ **/.cache/huggingface/token **/.streamlit/secrets.toml
id_rsa id_dsa id_ecdsa id_ed25519 *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx
*.tfstate *.tfstate.* *.tfvars kubeconfig *.kubeconfig application_default_credentials.json
credentials.json client_secret*.json service-account*.json service_account*.json serviceaccount*.json
kaggle.json secrets.json secrets.toml secrets.yaml secrets.yml
"""
_RULES = (parse_ignore_file("", "\n".join(_USUAL.split())),)


def is_secret(path: str, *, is_directory: bool) -> bool:
    return is_ignored(_RULES, path.lower(), is_directory=is_directory)
