"""The shape of the code, held by a test: who imports whom, how long things are, and what never appears where.

Every rule is a function from a parsed file to complaints, and every rule is shown an offender that it must complain about.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sparsedp

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sparsedp"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

SHARED_WORDS = {"errors", "dp.values", "dp.masks", "dp.randomness"}
MAY_IMPORT = {
    "dp.values": set(),
    "dp.masks": {"errors"},
    "dp.randomness": {"errors"},
    "dp.discrete": {"dp.randomness"},
    "dp.sampling": SHARED_WORDS,
    "dp.selection": SHARED_WORDS,
    "dp.clipping": SHARED_WORDS,
    "dp.noise": SHARED_WORDS | {"dp.discrete"},
    "dp.pruning": SHARED_WORDS,
    "dp.ledger": {"errors"},
    "dp.parts": {"errors", "dp.ledger"},
    "dp.accounting": {"errors", "dp.ledger", "dp.parts"},
    "dp.tradeoff": {"errors", "dp.ledger", "dp.accounting"},
    "dp.calibration": {"errors", "dp.ledger", "dp.accounting", "dp.tradeoff"},
}
"""The concept files do not know each other; `dp.mechanism`, which composes them, and any later file of dp/ may import all of dp/."""

LAYERS = {
    "errors": set(),
    "config": {"errors"},
    "models": {"errors", "models", "config", "disk", "dp.randomness"},
    "data": {"errors", "data", "config", "disk", "dp.randomness"},
}
EXTRAS = {"torchvision", "timm", "matplotlib", "PIL", "tensorboard", "datasets", "onnx", "onnxscript", "pandas", "pyarrow"}
PRINTERS = {"cli", "__main__", "verbs", "progress", "pruning_report", "data.decoding"}
"""Where the screen is. `data.decoding` speaks to its parent process over standard output."""

Rule = Callable[[str, ast.Module], Iterator[str]]


def module_name(path: Path) -> str:
    """`dp.noise` for src/sparsedp/dp/noise.py; a package has the name of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ours(tree: ast.AST) -> set[str]:
    """The modules of sparsedp that a file imports, at whatever depth."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparsedp":
            inside = (node.module or "").removeprefix("sparsedp").removeprefix(".")
            names = [f"{inside}.{a.name}".removeprefix(".") for a in node.names]
            found |= {n if (SOURCE / n.replace(".", "/")).with_suffix(".py").exists() else inside for n in names} - {""}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("sparsedp.") for a in node.names if a.name.startswith("sparsedp.")}
    return found


def foreign(tree: ast.AST) -> set[str]:
    """Full names of everything else that is imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def dotted(node: ast.AST) -> str:
    """`torch.manual_seed` for the expression of that shape, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    inside = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inside}.{node.attr}" if inside and isinstance(node, ast.Attribute) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def import_rule(name: str, tree: ast.Module) -> Iterator[str]:
    """Concept files import the shared words and not each other; dp/ imports dp/ and errors; values import nothing of ours."""
    for other in ours(tree):
        if name.startswith("dp"):
            if not (other == "errors" or other.split(".")[0] == "dp") or (name in MAY_IMPORT and other not in MAY_IMPORT[name]):
                yield f"imports {other}"
        elif name in LAYERS or name.split(".")[0] in LAYERS:
            allowed = LAYERS.get(name, LAYERS.get(name.split(".")[0], set()))
            if other not in allowed and other.split(".")[0] not in allowed:
                yield f"imports {other}"
        elif name.startswith("engines") and other.split(".")[0] not in {"engines", "dp", "errors"}:
            yield f"imports {other}"


def lengths(name: str, tree: ast.Module) -> Iterator[str]:
    """No function over 60 lines; no file over 320."""
    last = max((getattr(node, "end_lineno", 0) or 0 for node in ast.walk(tree)), default=0)
    if last > 320:
        yield f"has {last} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60:
            yield f"{node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"


def no_print(name: str, tree: ast.Module) -> Iterator[str]:
    """The library neither prints nor logs; the command line and the progress display do."""
    if name in PRINTERS:
        return
    for called, node in calls(tree):
        writes = called in {"sys.stdout.write", "sys.stderr.write", "pprint", "pprint.pprint"}
        if (
            called == "print"
            or writes
            or re.fullmatch(r"(logging|logger|log|_log)\.(debug|info|warning|error|exception|critical)", called)
        ):
            yield f"line {node.lineno} calls {called}"


GLOBAL_DRAWS = re.compile(
    r"(torch\.(manual_seed|seed|set_rng_state|cuda\.manual_seed\w*)|random\.\w+|np\.random\.\w+|numpy\.random\.\w+"
    r"|torch\.(rand|randn|randint|randperm|bernoulli|normal|multinomial|rand_like|randn_like|randint_like|poisson))"
)
IN_PLACE_DRAWS = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"}


def no_global_randomness(name: str, tree: ast.Module) -> Iterator[str]:
    """A draw names its generator. A model's own initialisers and dropout draw from the global one, seeded inside `fork_rng` alone."""
    forked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any(called.endswith("fork_rng") for item in node.items for called, _ in calls(item))
    ]
    for called, node in calls(tree):
        if any(block.lineno <= node.lineno <= (block.end_lineno or 0) for block in forked):
            continue
        if name.startswith("models.") and called.startswith("nn.init."):
            continue
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        generator = any(keyword.arg == "generator" for keyword in node.keywords)
        seeded = called.endswith("random.default_rng") and bool(node.args)
        if (GLOBAL_DRAWS.fullmatch(called) or attribute in IN_PLACE_DRAWS) and not generator and not seeded:
            yield f"line {node.lineno} calls {called or attribute}"


IMPURE_MODULES = {
    "os", "io", "pathlib", "tempfile", "shutil", "time", "datetime", "random", "secrets", "uuid", "subprocess", "multiprocessing",
    "threading", "socket", "logging", "sys", "requests", "urllib", "warnings", "pickle", "torch.distributed",
}  # fmt: skip


def purity(name: str, tree: ast.Module) -> Iterator[str]:
    """dp/ has no files, clocks, processes, global state or randomness of the operating system."""
    if not name.startswith("dp"):
        return
    for other in foreign(tree):
        if any(other == m or other.startswith(m + ".") for m in IMPURE_MODULES):
            yield f"imports {other}"
    for called, node in calls(tree):
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else called
        if called in {"open", "input", "exec", "eval", "__import__"} or called.startswith("torch.distributed"):
            yield f"line {node.lineno} calls {called}"
        if attribute in {"write_text", "read_text", "write_bytes", "read_bytes", "save", "urandom", "tofile", "fromfile"}:
            yield f"line {node.lineno} calls {attribute}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield f"line {node.lineno} keeps state outside of a function"


MAKERS = {"Released": {"dp.values", "dp.noise"}, "ClippedSum": {"dp.clipping", "distributed"}}
"""Who may make the two kinds of value. Reducing over ranks makes a sum of sums."""


def makers(name: str, tree: ast.Module) -> Iterator[str]:
    """A `Released` comes from `add_noise`, `public` or division; a `ClippedSum` from clipping, or from its reduction."""
    for called, node in calls(tree):
        made = called.split(".")[-1]
        if made in MAKERS and name not in MAKERS[made]:
            yield f"line {node.lineno} makes a {made}"


def no_pickle(name: str, tree: ast.Module) -> Iterator[str]:
    """No object is unpickled: torch.load reads weights only, numpy loads no objects; data.restricted holds the one safe unpickler."""
    for other in foreign(tree):
        if (
            other.split(".")[0] in {"pickle", "dill", "shelve", "cloudpickle", "joblib", "marshal"}
            and name != "data.restricted"
        ):
            yield f"imports {other}"
    for called, node in calls(tree):
        keywords = {k.arg: k.value for k in node.keywords}
        if called == "torch.load" and not (
            isinstance(keywords.get("weights_only"), ast.Constant) and keywords["weights_only"].value is True
        ):
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if "allow_pickle" in keywords and not (
            isinstance(keywords["allow_pickle"], ast.Constant) and keywords["allow_pickle"].value is False
        ):
            yield f"line {node.lineno}: allow_pickle"


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the file is imported: not the bodies of functions, nor what only a type checker reads."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def lazy_extras(name: str, tree: ast.Module) -> Iterator[str]:
    """Optional packages are imported where they are used; the command line and its values start without torch."""
    heavy = {"torch", "numpy", "dp_accounting", "scipy"} if name in {"config", "cli", "errors", "__main__", ""} else set()
    for node in at_import(tree):
        for other in foreign(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if other.split(".")[0] in EXTRAS | heavy:
                yield f"imports {other} at the top"


def no_swallowing(name: str, tree: ast.Module) -> Iterator[str]:
    """No handler that catches everything and says nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or dotted(node.type) in {"Exception", "BaseException"}
            if broad and all(
                isinstance(s, ast.Pass | ast.Continue) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
                for s in node.body
            ):
                yield f"line {node.lineno} swallows every error"


RULES: dict[Rule, tuple[tuple[str, str], ...]] = {
    import_rule: (
        ("dp.noise", "from sparsedp.dp.clipping import clipped_sum"), ("dp.selection", "from sparsedp.dp import clipping"),
        ("dp.mechanism", "from sparsedp.training import train"), ("dp.anything", "import sparsedp.keys"),
        ("dp.values", "from sparsedp.errors import wrong"), ("engines.fast", "from sparsedp import keys"),
        ("models.wrn", "from sparsedp.dp.noise import add_noise"), ("errors", "from sparsedp.config import Run"),
    ),
    lengths: (("x", "def f():\n" + "    a = 1\n" * 60), ("x", "a = 1\n" * 321)),
    no_print: (("dp.noise", "print(total)"), ("training", "import sys\nsys.stdout.write('x')"), ("training", "logger.info('%s', batch)")),
    no_global_randomness: (
        ("dp.noise", "torch.randn(3)"), ("x", "torch.manual_seed(0)"), ("x", "np.random.default_rng()"), ("x", "w.normal_(0, 1)"),
        ("x", "random.shuffle(order)"), ("x", "torch.randperm(n)"), ("x", "with fork_rng():\n    pass\ntorch.manual_seed(1)"), ("dp.x", "nn.init.normal_(w)"),
    ),
    purity: (
        ("dp.noise", "import os"), ("dp.noise", "from time import monotonic"), ("dp.x", "open('f')"), ("dp.x", "from torch import distributed"),
        ("dp.x", "path.write_text('x')"), ("dp.x", "def f():\n    global seen"), ("dp.x", "import torch.distributed as dist"),
    ),
    makers: (("training", "Released({}, 'x')"), ("dp.mechanism", "values.Released({}, 'x')"), ("engines.fast", "ClippedSum({}, 1.0)")),
    no_pickle: (
        ("checkpoint", "import pickle"), ("x", "torch.load(path)"), ("x", "torch.load(path, weights_only=False)"),
        ("x", "np.load(path, allow_pickle=True)"),
    ),
    lazy_extras: (
        ("report", "import matplotlib.pyplot as plt"), ("data.x", "try:\n    from PIL import Image\nexcept ImportError:\n    Image = None"),
        ("cli", "import torch"), ("x", "class A:\n    import timm"),
    ),
    no_swallowing: (("x", "try:\n    f()\nexcept Exception:\n    pass"), ("x", "try:\n    f()\nexcept:\n    'never mind'")),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps(rule: Rule) -> None:
    complaints = [
        f"{path.relative_to(ROOT)}: {said}"
        for path in FILES
        for said in rule(module_name(path), ast.parse(path.read_text("utf-8")))
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "name", "offender"), [(r, *o) for r, shown in RULES.items() for o in shown])
def test_an_offender_is_seen(rule: Rule, name: str, offender: str) -> None:
    assert list(rule(name, ast.parse(offender)))


def guarantees(path: Path, functions_only: bool = False) -> Iterator[tuple[str, str]]:
    """(first sentence after 'Guarantee:', where it stands) of every docstring of a file."""
    kinds = (ast.FunctionDef,) if functions_only else (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        for found in re.finditer(r"Guarantee: (.+?\.)(?=\s|$)", text or "", re.DOTALL):
            yield " ".join(found.group(1).split()), f"{path.name}:{getattr(node, 'name', '')}"


def test_every_guarantee_is_quoted_by_a_test_and_every_quote_is_a_guarantee() -> None:
    """The docstring of a test that would fail without a guarantee repeats it, first sentence, to the letter."""
    promised = dict(pair for path in FILES for pair in guarantees(path))
    quoted = {text: where for path in TESTS for text, where in guarantees(path, functions_only=True) if ":test_" in where}
    assert len(promised) > 8
    assert not {t: w for t, w in promised.items() if t not in quoted}, "a guarantee that no test quotes"
    assert not {t: w for t, w in quoted.items() if t not in promised}, "a test quotes what nothing promises"


def test_the_public_names() -> None:
    assert sorted(sparsedp.__all__) == sorted([
        "BudgetError", "Data", "Ledger", "Mechanism", "Model", "Optim", "Private", "Run", "Runtime", "Sparsity", "UsageError",
        "attach", "explain", "recipe", "train",
    ])  # fmt: skip
    for name in sparsedp.__all__:
        assert getattr(sparsedp, name) is not None
    with pytest.raises(AttributeError):
        _ = sparsedp.nothing_of_the_kind


def test_every_module_imports_without_the_extras() -> None:
    names = [f"sparsedp.{module_name(p)}".rstrip(".") for p in FILES if p.name != "__main__.py"]
    program = (
        "import importlib, sys\n"
        f"for extra in {sorted(EXTRAS)!r}: sys.modules[extra] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_without_torch() -> None:
    program = "import sys, sparsedp, sparsedp.cli, sparsedp.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_the_folders_of_the_design_exist() -> None:
    for name in ("dp.values", "dp.masks", "dp.randomness", "dp.mechanism", "engines", "models", "data", "errors", "keys"):
        assert importlib.import_module(f"sparsedp.{name}").__doc__, f"{name} has no docstring"


def test_files_say_nothing_of_machines_or_indexes() -> None:
    """No absolute home, no index address, no credentials in what is published."""
    offending = re.compile(r"/root/|/home/\w+/|pypi\.org|files\.pythonhosted|--index-url|--extra-index-url|find-links")
    published = [*FILES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci" / "run"]
    assert not [p for p in published if offending.search(p.read_text("utf-8"))]
