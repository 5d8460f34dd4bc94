"""Wheels of a few lines, so that tests install real packages without a network."""

import zipfile
from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(
    into: Path, version: str = "1.2", requires: str = "", module: str = "tiny_rates", text: str = "", pth: str = ""
) -> Path:
    """The package tiny-rates: a module, by default with VERSION and a program `tiny-rates` that prints it."""
    about = f"tiny_rates-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: tiny-rates\nVersion: {version}\n"
    files = {
        f"{module}.py": text or f"VERSION = '{version}'\n\n\ndef main():\n    print('tiny rates', VERSION)\n",
        f"{about}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{about}/WHEEL": _WHEEL,
        f"{about}/entry_points.txt": f"[console_scripts]\ntiny-rates = {module}:main\n",
    }
    if pth:
        files["tiny_rates.pth"] = pth
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"tiny_rates-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content)
    return path
