"""What pyproject.toml cannot say.

The catalog of studies lies at the top of the repository and goes into the wheel as data of ``lamina.lab.papers``,
without the records, which are a distribution of their own. A package index shows the README, where a relative link
leads nowhere: once ``[project.urls]`` names a Repository, the package's README has absolute ones.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

README = Path("README.md").read_text(encoding="utf-8")
HOME = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository")


class BuildWithStudies(build_py):
    """Copies the catalog of studies into the package."""

    def run(self) -> None:
        """Build; an editable installation reads the repository's own folder."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "lamina", "lab", "papers", "studies")
            left_out = shutil.ignore_patterns("records", "__pycache__")
            shutil.copytree("studies", target, ignore=left_out, dirs_exist_ok=True)


def absolute(found: re.Match[str]) -> str:
    """Return a link to a file as one to the public home."""
    return f"{found[0]}{HOME}/{'raw' if found[1] else 'blob'}/main/"


setup(
    long_description=re.sub(r"(!?)\[[^\]]*\]\((?!\w+:|#)", absolute, README) if HOME else README,
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithStudies},
)
