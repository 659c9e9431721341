"""Make the wheel's package of the checkout's one module: asyncgate.py becomes asyncgate/__init__.py."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What a package needs and a module beside its parts cannot have.
GENERATED = {
    "__main__.py": '"""Run the gate as `python -m asyncgate`."""\n\n'
    "import sys\n\nfrom asyncgate import main\n\nsys.exit(main())\n",
    "py.typed": "",
}
# Pages of the documentation that lie beside docs/.
PAGES = ("CHANGELOG.md", "README.md", "SECURITY.md")


class PackageHook(BuildHookInterface[Any]):
    """Add the package's own files to a standard wheel; an editable one leaves the checkout as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files to add before the wheel is written."""
        if version != "standard":
            return
        self.scratch = TemporaryDirectory()
        included = build_data["force_include"]
        included[str(Path(self.root, "asyncgate.py"))] = "asyncgate/__init__.py"
        included |= {str(Path(self.root, name)): f"asyncgate/{name}" for name in PAGES}
        for name, text in GENERATED.items():
            path = Path(self.scratch.name, name)
            path.write_text(text)
            included[str(path)] = f"asyncgate/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the generated files once the wheel holds them."""
        if version == "standard":
            self.scratch.cleanup()
