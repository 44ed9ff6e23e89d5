"""What the text of a user Triton kernel tells: identity, numbers, use of its place.

Also writes a kernel, with all it calls, into files that need nothing of this process.
Running it is opaque.py's.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import math
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class CantRead(Exception):
    """The kernel's text isn't enough to run it elsewhere; str() says why."""


def jit_function(kernel: Any) -> Any:
    """The JITFunction of a kernel of Inductor's side table. Raises CantRead."""
    configs = getattr(kernel, "configs", None)
    if configs is not None:
        raise CantRead("is autotuned: a proof runs one configuration of a kernel")
    if not inspect.isfunction(getattr(kernel, "fn", None)):
        raise CantRead(f"is a {type(kernel).__name__}, not a plain triton.jit function")
    return kernel


@functools.cache
def identity(kernel: Any) -> str:
    """A hash of the kernel's text and of all it calls and reads."""
    text = "\n".join(file for _, file in sorted(_files(kernel).items()))
    return hashlib.sha256(text.encode()).hexdigest()


def write_files(kernel: Any, folder: Path) -> str:
    """Put the kernel's files into ``folder``; the name of its module."""
    files = _files(kernel)
    for name, text in files.items():
        path = folder / f"{name}.py"
        if not path.exists():
            path.write_text(text)
    return _module_of(kernel)


def numbers(kernel: Any) -> list[float]:
    """The numbers that stand in the text of the kernel and of what it calls, less the
    small integers, which are axes and strides."""
    found: dict[float, None] = {}
    for text in _files(kernel).values():
        for node in ast.walk(ast.parse(text)):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, float) or (type(value) is int and value > 4):
                found[float(value)] = None
    return [number for number in found if math.isfinite(number)]


def looks_at_place(kernel: Any, axes: set[int], names: set[str]) -> str | None:
    """Whether a kernel does more with its place than to compute addresses.

    axes: of the grid, those that grow with the batch. names: parameters that do.
    Values made of them may be added, multiplied, cast and used as addresses; anything
    else (a comparison, a division, an argument of a call) can tell one row from
    another. Returns what it does, or None.
    """
    return _Places(axes, names).visit_function(_definition(kernel))


def _definition(kernel: Any) -> ast.FunctionDef:
    (definition,) = ast.parse(_text(kernel)).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


@functools.cache
def _text(kernel: Any) -> str:
    """Its source from ``def`` on, without decorators."""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    return "\n".join(source.splitlines()[definition.lineno - 1 :]) + "\n"


@functools.cache
def _files(kernel: Any) -> dict[str, str]:
    """Module name to text, for the kernel and every jit function that it reaches."""
    files: dict[str, str] = {}
    todo = [kernel]
    while todo:
        function = todo.pop()
        if _module_of(function) not in files:
            lines, called = _globals_of(function)
            files[_module_of(function)] = "\n".join(
                [*lines, "", "@triton.jit", _text(function)]
            )
            todo += called
    return files


@functools.cache
def _module_of(function: Any) -> str:
    place = f"{function.fn.__module__}.{function.fn.__qualname__}"
    key = repr((place, _text(function), sorted(map(repr, _globals_of(function)[0]))))
    return f"kernel_{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@functools.cache
def _globals_of(function: Any) -> tuple[list[str], list[Any]]:
    """(lines that define what the function reads, the jit functions among it)."""
    lines = ["import triton", "import triton.language as tl"]
    called: list[Any] = []
    for name, value in sorted(_read_names(function.fn)):
        if inspect.isfunction(getattr(value, "fn", None)) and hasattr(value, "run"):
            if value.fn.__module__.split(".")[0] != "triton":
                called.append(value)
                lines.append(
                    f"from {_module_of(value)} import {value.fn.__name__} as {name}"
                )
                continue
            lines.append(
                f"from {value.fn.__module__} import {value.fn.__name__} as {name}"
            )
        else:
            lines.append(_defining(name, value))
    return lines, called


def _read_names(fn: Any) -> Iterator[tuple[str, Any]]:
    known = dict(fn.__globals__)
    known |= inspect.getclosurevars(fn).nonlocals
    source = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    (definition,) = source.body
    assert isinstance(definition, ast.FunctionDef)
    parts: list[ast.AST] = [*definition.body, definition.args]
    read = {
        node.id
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for name in read:
        if name in known and not hasattr(builtins, name):
            yield name, known[name]


def _defining(name: str, value: Any) -> str:
    import triton.language as tl

    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, tl.constexpr):
        return f"{name} = tl.constexpr({_literal(value.value)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{name} = {_literal(value)}"
    home = getattr(value, "__module__", None) or type(value).__module__
    if home.split(".")[0] == "triton":
        return f"import pickle; {name} = pickle.loads({pickle.dumps(value)!r})"
    raise CantRead(f"reads the global {name}, a {type(value).__name__}")


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


class _Places(ast.NodeVisitor):
    """Follows values made of the place through a kernel's assignments."""

    def __init__(self, axes: set[int], names: set[str]) -> None:
        self.axes = axes
        self.names = set(names)
        self.found: str | None = None

    def visit_function(self, definition: ast.FunctionDef) -> str | None:
        before = -1
        while before != len(self.names) and self.found is None:  # loops carry values
            before = len(self.names)
            for statement in definition.body:
                self.visit(statement)
        return self.found

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._placed(node.value) or self._placed(node.target):
            self._check_operator(node.op)
            self._assign([node.target], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign([node.target], node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            if self._placed(node):
                self._complain(node)
            return
        super().generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._placed(node.value)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        if self._placed(value):
            for target in targets:
                if isinstance(target, ast.Name):
                    self.names.add(target.id)
                else:
                    self._complain(target)

    def _placed(self, node: ast.expr) -> bool:
        """True if the value is made of the place; notes each use that isn't plain."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.BinOp):
            sides = [self._placed(node.left), self._placed(node.right)]
            if any(sides):
                self._check_operator(node.op)
            return any(sides)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._placed(node.operand)
        if isinstance(node, ast.Subscript):
            return self._placed(node.value)
        if isinstance(node, ast.Call):
            return self._call(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and self._placed(child):
                self._complain(node)
        return False

    def _call(self, node: ast.Call) -> bool:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in ("program_id", "num_programs"):
            axis = next((a.value for a in arguments if isinstance(a, ast.Constant)), -1)
            return axis in self.axes or axis == -1
        if name == "to" and isinstance(node.func, ast.Attribute):
            return self._placed(node.func.value)
        if name in ("load", "store") and node.args:
            self._placed(arguments.pop(0))
        elif isinstance(node.func, ast.Attribute):
            arguments.append(node.func.value)
        for argument in arguments:
            if self._placed(argument):
                self._complain(node)
        return False

    def _check_operator(self, operator: ast.operator) -> None:
        if not isinstance(operator, (ast.Add, ast.Sub, ast.Mult)):
            self._complain(operator)

    def _complain(self, node: ast.AST) -> None:
        if self.found is None:
            text = ast.unparse(node) if isinstance(node, ast.expr) else ""
            kind = type(node).__name__.lower()
            self.found = f"has {text!r}" if text else f"has a {kind} of its place"
