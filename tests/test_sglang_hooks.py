"""One hook on one target through sglang's registry, beside other plugins' hooks."""

from __future__ import annotations

import collections
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sglang_host import sglang_module

from dcp_inductor.integrations import sglang_hooks
from dcp_inductor.integrations.on_import import when_imported

pytestmark = pytest.mark.sglang

HOME = "toy_home"
TARGET = f"{HOME}.function"


@pytest.fixture
def plugins(monkeypatch) -> Any:
    """sglang's registry, empty."""
    module = sglang_module("srt.plugins.hook_registry")
    registry = module.HookRegistry
    monkeypatch.setattr(registry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(registry, "_patched", set())
    return module


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Callable[[], ModuleType]:
    """Imports a module with a function, and one that has copied its name."""
    text = "def function():\n    return ['it']\ndef other():\n    return ['other']\n"
    (tmp_path / f"{HOME}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    caller = ModuleType("sglang.toy_caller")

    def imported() -> ModuleType:
        module = importlib.import_module(HOME)
        caller.__dict__.setdefault("function", module.function)
        monkeypatch.setitem(sys.modules, caller.__name__, caller)
        return module

    yield imported
    sys.modules.pop(HOME, None)


def ours(original: Callable[[], list[str]]) -> list[str]:
    return [*original(), "ours"]


def theirs(original: Callable[[], list[str]]) -> list[str]:
    return [*original(), "theirs"]


def bind(plugins: Any) -> None:
    sglang_hooks.bind(TARGET, ours, plugins.HookType.AROUND)


def hooked_by_them(plugins: Any, target: str = TARGET) -> None:
    plugins.HookRegistry.register(target, theirs, plugins.HookType.AROUND)


def why(hook: Callable[..., Any] = ours) -> str | None:
    return sglang_hooks.unbound(HOME, "function", hook)


def test_alone(plugins, home):
    module = home()
    bind(plugins)
    plugins.HookRegistry.apply_hooks()
    assert module.function() == ["it", "ours"]
    assert sys.modules["sglang.toy_caller"].function() == ["it", "ours"]
    assert why() is None
    assert why(theirs) == f"sglang's hook registry hasn't put it on {TARGET}"


def test_beside_hooks_that_are_pending(plugins, home):
    """sglang applies both, at the end of its load_plugins()."""
    module = home()
    hooked_by_them(plugins)
    bind(plugins)
    plugins.HookRegistry.apply_hooks()
    assert module.function() == ["it", "theirs", "ours"]
    assert why() is None


def test_after_hooks_that_are_applied(plugins, home):
    module = home()
    hooked_by_them(plugins)
    plugins.HookRegistry.apply_hooks()
    bind(plugins)
    plugins.HookRegistry.apply_hooks()
    assert module.function() == ["it", "theirs", "ours"]
    assert why() is None


@pytest.mark.parametrize("target", ["function", "other"])
def test_while_theirs_are_being_applied(plugins, home, target):
    """sglang imports the module to do that; each hook is applied once."""
    hooked_by_them(plugins, f"{HOME}.{target}")
    when_imported(HOME, lambda: bind(plugins))
    plugins.HookRegistry.apply_hooks()
    module = home()
    found = module.function(), module.other()
    assert (
        found
        == {
            "function": (["it", "theirs", "ours"], ["other"]),
            "other": (["it", "ours"], ["other", "theirs"]),
        }[target]
    )
    assert why() is None


def test_says_why_it_isnt_bound(plugins, home, monkeypatch):
    assert why() == f"{HOME} isn't imported"
    module = home()
    monkeypatch.setattr(plugins.HookRegistry, "_apply_target", None)
    with pytest.raises(TypeError):
        bind(plugins)
    assert "hook registry hasn't put it on" in str(why())
    monkeypatch.delattr(module, "function")
    assert why() == f"{HOME} has no function"


def test_a_caller_that_kept_the_original_is_named(plugins, home):
    original = home().function
    bind(plugins)
    sys.modules["sglang.toy_caller"].function = original
    assert why() == "sglang.toy_caller calls function without it"
