"""What pyproject.toml cannot say.

The catalog of studies, with its folders, goes into the wheel as data. A package index shows the README, where a
relative link leads nowhere: once ``[project.urls]`` names a Repository, the package's README has absolute ones.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

FOLDERS = [Path("studies"), *(path for path in sorted(Path("studies").rglob("*")) if path.is_dir())]
README = Path("README.md").read_text(encoding="utf-8")
HOME = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository")
KEPT = {".yaml", ".py", ".csv", ".json", ".parquet"}


def absolute(found: re.Match[str]) -> str:
    """A link to a file as one to the public home."""
    return f"{found[0]}{HOME}/{'raw' if found[1] else 'blob'}/main/"


setup(
    long_description=re.sub(r"(!?)\[[^\]]*\]\((?!\w+:|#)", absolute, README) if HOME else README,
    long_description_content_type="text/markdown",
    data_files=[
        (f"share/lamina/{folder.as_posix()}", [str(file) for file in sorted(folder.iterdir()) if file.suffix in KEPT])
        for folder in FOLDERS
        if folder.name != "__pycache__"
    ],
)
