"""Generate the typed client, and make the wheel's package of one module: asyncgate.py becomes asyncgate/__init__.py."""

from __future__ import annotations

import os
import subprocess
import sys
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
    """Generate what git does not hold, for every build; add the package's own files to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the typed client into the tree, and name the files to add to a wheel."""
        # In a process of its own: what is imported here would be another tree's in the next build of this process. The
        # path names this tree, since with PYTHONSAFEPATH another gate that is installed would generate its own.
        searched = os.pathsep.join([self.root, *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, "-m", "asyncgate.commands.declare"], cwd=self.root, check=True,
                       env={**os.environ, "PYTHONPATH": searched})
        if not self.makes_package(version):
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
        """Remove the package's own files once the wheel holds them."""
        if self.makes_package(version):
            self.scratch.cleanup()

    def makes_package(self, version: str) -> bool:
        """Whether this build needs a package: an sdist and an editable wheel leave the checkout as it is."""
        return self.target_name == "wheel" and version == "standard"
