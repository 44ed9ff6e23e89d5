"""The house's rule: imports go down only, and importing the package stays light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_inductor

ROOT = Path(dcp_inductor.__file__).parent
WORDS = ("errors", "config", "logs", "report", "version")
LAYERS = (WORDS, ("merge",), ("runtime",), ("op",), ("compiler",), ("integrations",))
TOP = len(LAYERS)
FORBIDDEN = {
    "runtime": ("torch.fx", "torch._inductor", "dcp_inductor.compiler"),
    "compiler": ("dcp_inductor.runtime",),
}


def layer_of(module: str) -> int:
    """The layer of ``a.b`` below dcp_inductor; cli, demo and the like are on top."""
    head = module.split(".")[0]
    for level, names in enumerate(LAYERS):
        if head in names:
            return level
    return TOP


def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions; not type-only ones."""
    found: list[str] = []

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if getattr(node.test, "id", "") != "TYPE_CHECKING":
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.extend(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert node.level == 0, f"{path.name}: relative import"
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)

    Visitor().visit(ast.parse(path.read_text()))
    return found


def violations(path: Path, module: str) -> list[str]:
    bad = []
    for imported in imports_of(path):
        if imported.startswith("dcp_inductor."):
            below = imported.removeprefix("dcp_inductor.")
            if layer_of(below) > layer_of(module):
                bad.append(f"{module} imports {below}, which lies above it")
        for prefix in FORBIDDEN.get(module.split(".")[0], ()):
            if imported == prefix or imported.startswith(prefix + "."):
                bad.append(f"{module} imports {imported}")
    return bad


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    assert violations(MODULES[module], module) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("merge", "import dcp_inductor.op"),
        ("runtime.x", "from torch._inductor import ir"),
        ("runtime.x", "from dcp_inductor.compiler import proof"),
        ("compiler.x", "from dcp_inductor.runtime import groups"),
        ("op", "from dcp_inductor.integrations.inductor import install"),
    ],
)
def test_the_rule_sees_a_violation(tmp_path, module, line):
    path = tmp_path / "x.py"
    path.write_text(line)
    assert violations(path, module)


def test_import_touches_no_device_and_no_host():
    code = (
        "import sys, dcp_inductor\n"
        "hosts = 'flashinfer', 'sglang', 'transformers'\n"
        "heavy = [m for m in ('torch', 'triton', *hosts) if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "dcp_inductor.install(); dcp_inductor.a2a_lse_reduce\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "met = [m for m in hosts if m in sys.modules]\n"
        "assert not met, met\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_resolve():
    for name in dcp_inductor.__all__:
        assert callable(getattr(dcp_inductor, name))
        # Importing a submodule of that name would put it in the name's place.
        assert importlib.util.find_spec(f"dcp_inductor.{name}") is None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dcp_inductor.nothing  # noqa: B018
