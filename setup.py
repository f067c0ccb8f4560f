"""What pyproject.toml cannot say: the catalog of studies, with its folders, goes into the wheel as data."""

from pathlib import Path

from setuptools import setup

FOLDERS = [Path("studies"), *(path for path in sorted(Path("studies").rglob("*")) if path.is_dir())]
KEPT = {".yaml", ".py", ".csv", ".json", ".parquet"}

setup(
    data_files=[
        (f"share/lamina/{folder.as_posix()}", [str(file) for file in sorted(folder.iterdir()) if file.suffix in KEPT])
        for folder in FOLDERS
        if folder.name != "__pycache__"
    ]
)
