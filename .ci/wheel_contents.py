"""Checks that a wheel holds every module of the repository, those behind links as plain files."""

import sys
import zipfile
from pathlib import Path

root = Path(__file__).parent.parent
linked = ("kernels", "fusion", "compression")
expected = {path.relative_to(root).as_posix() for path in (root / "mcr_plus").rglob("*.py")}
for folder in linked:
    expected |= {f"mcr_plus/{path.relative_to(root).as_posix()}" for path in (root / folder).rglob("*.py")}
found = set(zipfile.ZipFile(sys.argv[1]).namelist())
missing = sorted(expected - found)
extra = sorted(name for name in found if name.split("/")[0] != "mcr_plus" and ".dist-info/" not in name)
if missing or extra or "mcr_plus/py.typed" not in found:
    sys.exit(f"wheel: missing {missing}, unexpected {extra}, py.typed {'mcr_plus/py.typed' in found}")
print(f"wheel: {len(expected)} modules, all there")
