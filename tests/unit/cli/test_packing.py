"""What --code packs: git's own answer where git has one, the same bytes each time, and nothing dropped in silence."""

import gzip
import hashlib
import io
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tpu_training_operator.cli.code import packing
from tpu_training_operator.cli.code.packing import CannotPack, PackedCode, pack

TREE = (
    *("a", "b.py", "c.txt", "d1", "#e", "!f", "g ", "[h]", "oi"),
    *("src/a", "src/b.py", "src/x/a", "src/x/b.txt", "src/x/y/a", "src/x/y/z.py"),
    *("out/a", "out/b.py", "data/raw/a", "data/raw/big.txt", "data/b.py", "deep/out/a", "deep/src/b.py"),
)
PATTERNS = (
    *("a", "*.py", "/a", "src/", "/src/", "out", "out/", "src/*", "src/**", "**/a", "src/**/a", "**/x/**", "data/raw"),
    *("!a", "!*.py", "!src/", "!/src/b.py", "!out/a", "# a", "\\#e", "\\!f", "g\\ ", "g ", "?", "d[0-9]", "d[!0-9]"),
    *(
        "[h]",
        "\\[h\\]",
        "[",
        "[a",
        "b.p[x-z]",
        "*/a",
        "*/*",
        "/*",
        "!/src",
        "**",
        "a/**/b",
        "",
        "  ",
        "\\",
    ),
    *(
        "src/x*",
        "s?c/x",
        "***",
        "src/***/a",
        "s[/]rc",
        "/**/y",
        "x/y",
        "[]h]",
        "[^a]",
        "!",
        "/",
        "b*y",
        "da**a/raw",
        "*b*p*",
        "d*t*/*a*/b*.*t",
    ),
)


def lay(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names(packed: PackedCode) -> list[str]:
    return list(packed.sizes)


def git(folder: Path, *arguments: str) -> str:
    alone = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(folder)}
    command = ["git", "-c", "core.quotePath=off", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **alone}, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_it_leaves_out_what_git_ignores(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    lay(tmp_path, *TREE)
    chance = random.Random(11)
    places = ("", "src/", "data/", "deep/")
    for each in range(len(PATTERNS) + 150):
        for place in places:
            (tmp_path / place / ".gitignore").unlink(missing_ok=True)
        chosen = [PATTERNS[each]] if each < len(PATTERNS) else chance.choices(PATTERNS, k=chance.randint(2, 4))
        (tmp_path / ".gitignore").write_text("\n".join(chosen))
        if each % 3 == 2:
            (tmp_path / chance.choice(places[1:]) / ".gitignore").write_text("\r\n".join(chance.choices(PATTERNS, k=2)))

        listed = git(tmp_path, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
        # Git is asked about a folder's files, and the packing of nothing is an error.
        ours = [name for name, _ in packing._files(tmp_path)]

        assert sorted(ours) == sorted(filter(None, listed)), chosen


@pytest.mark.parametrize(
    "pattern",
    [
        "*a" * 3 + "*b",
        "/" + "**/" * 40 + "a*b*c*d*e*f",
        "**/d/" * 20 + "x",
        "**/d*d/" * 20 + "*x/**",
        "*x" * 9_000,
        "[[:alpha:]]",
    ],
    ids=lambda pattern: pattern[:20],
)
def test_a_line_that_may_take_hours_or_is_not_read_as_by_git_is_refused(tmp_path: Path, pattern: str) -> None:
    lay(tmp_path, "a" * 200)
    (tmp_path / ".gitignore").write_text(f"*.tmp\n{pattern}\n")
    with pytest.raises(CannotPack, match=r"\.gitignore: the line '.*; write it "):
        pack(tmp_path)


@pytest.mark.parametrize(
    "pattern", ["**/" * 40 + " x", "x" * 99_000, "*a*a*b", "**/d*d/*d/**/d*x"], ids=lambda pattern: pattern[:20]
)
def test_a_long_path_and_a_long_line_take_no_longer(tmp_path: Path, pattern: str) -> None:
    deep = "/".join(["dd"] * 60)
    lay(tmp_path, f"{deep}/{'a' * 200}")
    (tmp_path / ".gitignore").write_text(pattern)
    assert names(pack(tmp_path)) == [".gitignore", f"{deep}/{'a' * 200}"]


def test_a_folder_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    here = tmp_path
    for _ in range(40):
        here = here / ("d" * 40)
        here.mkdir()
    with pytest.raises(CannotPack, match=r"'d{40}/.*' "):
        pack(tmp_path)


def test_the_users_own_ignore_file_counts_as_in_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    lay(home, ".config/git/ignore", text="*.local\n")
    lay(tmp_path, "code/a.py", "code/b.local", "code/c.global")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    assert names(pack(tmp_path / "code")) == ["a.py", "c.global"]
    lay(home, "everywhere", text="*.global\n")
    (home / ".gitconfig").write_text("[core]\n\texcludesFile = ~/everywhere\n")
    if shutil.which("git"):
        assert names(pack(tmp_path / "code")) == ["a.py", "b.local"]


SECRETS = (
    *(".env", ".env.production", ".netrc", ".git-credentials", ".npmrc", ".pypirc", "keys/ID_RSA", "keys/id_ed25519"),
    *("infra/terraform.tfstate", "infra/prod.tfvars", "tls/server.pem", "tls/server.key", "my-service.kubeconfig"),
    *("client_secret_1.json", "conf/credentials.json", "home/.config/gcloud/application_default_credentials.json"),
)
SECRET_FOLDERS = (".aws/", ".docker/", ".kube/", ".ssh/", "home/.config/gcloud/")


def test_files_that_often_hold_secrets_are_left_out_and_told(tmp_path: Path) -> None:
    harmless = (
        ".env.example",
        "a.py",
        "credentials.py",
        "docker/x.py",
        "env/keys.txt",
        "keys/id_rsa.pub",
        "secrets.py",
    )
    lay(tmp_path, *harmless, *SECRETS, *(f"{folder}config" for folder in SECRET_FOLDERS))
    packed = pack(tmp_path)
    assert names(packed) == sorted(harmless)
    below = tuple(name for name in SECRETS if not name.startswith(SECRET_FOLDERS))
    assert packed.secrets == tuple(sorted((*below, *SECRET_FOLDERS)))


def test_a_secret_is_packed_if_tpujobignore_names_it(tmp_path: Path) -> None:
    lay(tmp_path, "a.py", ".env", "tls/ca.pem", "tls/server.pem", ".aws/config", "x/.netrc", ".npmrc")
    (tmp_path / ".gitignore").write_text("!.npmrc\n.tpujobignore\n.gitignore\n")
    (tmp_path / ".tpujobignore").write_text("!.env\n!tls/ca.pem\n!.aws/\n!*.pem\n!.*\n")
    packed = pack(tmp_path)
    assert [name for name in names(packed) if "ignore" not in name] == [".aws/config", ".env", "a.py", "tls/ca.pem"]
    assert packed.secrets == (".npmrc", "tls/server.pem", "x/.netrc")


def test_what_git_ignores_is_not_told_as_a_secret(tmp_path: Path) -> None:
    lay(tmp_path, "a.py", ".env")
    (tmp_path / ".gitignore").write_text(".env\n.gitignore\n")
    assert (names(pack(tmp_path)), pack(tmp_path).secrets) == (["a.py"], ())


def test_the_ignore_files_above_the_folder_count_as_in_git(tmp_path: Path) -> None:
    (tmp_path / ".git" / "info").mkdir(parents=True)
    lay(tmp_path, "code/a.py", "code/a.tmp", "code/x/secret", "code/x/b.py", "code/notes")
    (tmp_path / ".gitignore").write_text("*.tmp\n/code/x/secret\n")
    (tmp_path / ".git" / "info" / "exclude").write_text("notes\n")
    assert names(pack(tmp_path / "code")) == ["a.py", "x/b.py"]


def test_tpujobignore_has_the_last_word(tmp_path: Path) -> None:
    lay(tmp_path, "a.py", "generated.py", "notes.md")
    (tmp_path / ".gitignore").write_text("generated.py\n")
    (tmp_path / ".tpujobignore").write_text("!generated.py\n*.md\n.*\n")
    assert names(pack(tmp_path)) == ["a.py", "generated.py"]


def test_what_is_of_no_use_elsewhere_is_never_packed(tmp_path: Path) -> None:
    lay(tmp_path, "a.py", ".git/config", "x/__pycache__/a.pyc", "env/pyvenv.cfg", "env/lib/b.py")
    assert names(pack(tmp_path)) == ["a.py"]


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    for folder, order in (("one", (0, 1, 2)), ("two", (2, 0, 1))):
        files = ("b/ä.py", "a.py", "run.sh")
        lay(tmp_path / folder, *(files[index] for index in order))
        (tmp_path / folder / "run.sh").chmod(0o755 if folder == "one" else 0o700)
    os.utime(tmp_path / "one" / "a.py", (1, 1))
    one, two = pack(tmp_path / "one"), pack(tmp_path / "two")
    assert one.archive == two.archive
    assert one.sha256 == hashlib.sha256(one.archive).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one.archive))) as tar:
        members = [(member.name, member.mode, member.mtime, member.uid, member.uname) for member in tar]
    assert members == [("a.py", 0o644, 0, 0, ""), ("b/ä.py", 0o644, 0, 0, ""), ("run.sh", 0o755, 0, 0, "")]


def test_a_link_to_a_file_of_the_folder_is_packed_as_that_file(tmp_path: Path) -> None:
    lay(tmp_path, "a.py")
    (tmp_path / "b.py").symlink_to("a.py")
    assert pack(tmp_path).sizes == {"a.py": 1, "b.py": 1}


def test_what_cannot_be_packed_is_said_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    lay(tmp_path, "code/a.py", "code/sub/b.py", "secret")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "to-folder").symlink_to("sub")
    (folder / "to-nothing").symlink_to("nothing")
    os.mkfifo(folder / "pipe")
    (folder / "bell\a.py").touch()
    with pytest.raises(CannotPack) as raised:
        pack(folder)
    remedy = "; leave it out with a line in .gitignore or .tpujobignore"
    assert raised.value.message.splitlines() == [
        f"--code {folder}: 'bell\\x07.py' has a name that cannot be unpacked everywhere{remedy}",
        f"--code {folder}: 'out' is a link to {tmp_path}/secret, outside of the folder{remedy}",
        f"--code {folder}: 'pipe' is neither a file nor a folder{remedy}",
        f"--code {folder}: 'to-folder' is a link to a folder; a link to a file is packed as that file{remedy}",
        f"--code {folder}: 'to-nothing' is a link to nothing{remedy}",
    ]


@pytest.mark.parametrize("target", ["ignored.py", ".git/config", ".env", "sub/__pycache__/x.pyc"])
def test_a_link_does_not_bring_back_what_is_left_out(tmp_path: Path, target: str) -> None:
    lay(tmp_path, "a.py", target)
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    (tmp_path / "link").symlink_to(tmp_path / target)
    (tmp_path / "other").symlink_to("link")
    with pytest.raises(CannotPack) as raised:
        pack(tmp_path)
    problem = f"is a link to {tmp_path / target}, which is left out"
    assert [problem in line for line in raised.value.message.splitlines()] == [True, True]


def test_links_in_a_circle_are_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CannotPack, match="'a' is a link to nothing"):
        pack(tmp_path)


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        (
            "LARGEST_CODE",
            99,
            "its files have more than 99 bytes: 100 bytes so far; data belong in data.uri",
        ),
        (
            "LARGEST_CODE_ARCHIVE",
            9,
            r"the archive has \d+ bytes, and the limit is 9 bytes; the largest files: big",
        ),
        ("MOST_CODE_FILES", 1, "it has more than 1 files; so far big has 1, x has 1; leave files out"),
    ],
)
def test_a_folder_that_is_too_large_is_refused_with_what_makes_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, words: str
) -> None:
    lay(tmp_path, "big", text="x" * 100)
    lay(tmp_path, "x/small")
    monkeypatch.setattr(packing, limit, most)
    with pytest.raises(CannotPack, match=words):
        pack(tmp_path)


def test_a_folder_that_is_none_or_empty(tmp_path: Path) -> None:
    lay(tmp_path, "file", "empty/.gitignore", text="*")
    for name, words in (("nowhere", "there is no such folder"), ("file", "not a folder"), ("empty", "it has no files")):
        with pytest.raises(CannotPack, match=words):
            pack(tmp_path / name)
