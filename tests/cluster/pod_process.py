"""A process on this machine that finds its credentials as in a pod: in a folder, and the server in variables."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

# A pod's folder has a fixed name; here it is an argument.
_AS_IN_A_POD = """\
import sys
from pathlib import Path
sys.modules["kubernetes"] = None  # The operator's image has none.
from tpu_training_operator.kube import credentials
credentials._SERVICE_ACCOUNT = Path(sys.argv.pop(1))
from tpu_training_operator.main import main
main()
"""


def mount_account(folder: Path, token: str, ca_file: Path) -> Path:
    """The service account's files, as in a pod. Returns the token's, which may be replaced."""
    folder.mkdir()
    shutil.copy(ca_file, folder / "ca.crt")
    (folder / "token").write_text(token)
    return folder / "token"


def operator_command(server: str, account: Path, *arguments: str) -> Iterator[str]:
    """Arguments of env(1). `account`: the folder."""
    where = urlsplit(server)
    yield f"KUBERNETES_SERVICE_HOST={where.hostname}"
    yield f"KUBERNETES_SERVICE_PORT={where.port}"
    yield from (sys.executable, "-c", _AS_IN_A_POD, str(account), *arguments)
