"""Which of a notebook's variables hold something that this execution has measured.

``doubts.py`` asks: a verdict on a plan, a formula, or a committed file says nothing about the learner's machine. The
answer comes from the source of the cells: a variable is measured if a call that measures is among what its value was
computed from. What measures is everything but arithmetic on what was there before: Python's own functions, the
planner, reading a file.
"""

import ast
import builtins
import inspect
import sys
from types import FunctionType, ModuleType

# Functions of these modules compute with what they are given, read files, or draw: they measure nothing.
PURE = {
    "builtins",
    "plan",
    "planner",
    "numpy",
    "pandas",
    "matplotlib",
    "IPython",
    "ipywidgets",
    "pathlib",
    "nbformat",
    "doubts",
}
PURE |= set(sys.stdlib_module_names) - {"subprocess", "time", "resource", "os", "socket", "urllib"}
PURE_PARTS = ("labkit.teaching", "labkit.measuring.differences", "labkit.measuring.records")
PLANS = {"plan", "plan_of"}  # of a record they read its options only: what they return is no measurement


class Provenance:
    """The measured variables of a kernel, from the cells it has executed and the objects their names stand for."""

    def __init__(self, cells: list[str], names: dict):
        self.names = names
        self.measured = set()
        self.functions = {}
        self.assigned = {}  # {variable: the one statement that gives it its value, or None where there are several}
        self._open = set()  # functions that are being looked into: one may call itself
        for source in cells:
            try:
                tree = ast.parse(source)
            except SyntaxError:  # a cell with a magic
                continue
            self._follow(tree.body, self.measured)
            self._note_assignments(tree.body)

    def of(self, node: ast.AST, local: frozenset = frozenset()) -> bool:
        """Whether an expression's value depends on a measurement. local: measured names of a function it stands in."""
        return self._depends(node, self.measured | local)

    def computed(self, name: str) -> ast.Assign | None:
        """The statement that computes a measured variable from others, without measuring anything itself."""
        statement = self.assigned.get(name)
        if statement is None or name not in self.measured or self._depends(statement.value, set(), calls_only=True):
            return None
        return statement

    def _note_assignments(self, body: list):
        for statement in body:
            simple = isinstance(statement, ast.Assign)
            plain = simple and all(isinstance(each, (ast.Name, ast.Tuple)) for each in statement.targets)
            for node in ast.walk(statement):
                names = [node] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ()
                if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                    names = _targets(node)  # rows[0] = …: no longer what it was
                for each in names:
                    own = plain and each.id not in self.assigned
                    self.assigned[each.id] = statement if own else None
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):  # rows.append(…)
                for each in _targets(statement.value.func):
                    self.assigned[each.id] = None

    def _follow(self, body: list, measured: set):
        """Note what the statements assign, in order; a name stays measured once it was."""
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[statement.name] = statement
                continue
            if isinstance(statement, ast.ClassDef):
                continue
            self._assigned(statement, measured)
            for part in ("body", "orelse", "finalbody"):
                self._follow(getattr(statement, part, []), measured)
            for handler in getattr(statement, "handlers", []):
                if handler.name and any(self._depends(each, measured) for each in statement.body):
                    measured.add(handler.name)  # the error of a run
                self._follow(handler.body, measured)

    def _assigned(self, statement, measured: set):
        pairs = []
        if isinstance(statement, ast.Assign):
            pairs = [(target, statement.value) for target in statement.targets]
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and statement.value:
            pairs = [(statement.target, statement.value)]
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            pairs = [(statement.target, statement.iter)]
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            pairs = [(item.optional_vars, item.context_expr) for item in statement.items if item.optional_vars]
            # What is computed under a meter ends up in it.
            pairs += [(item.context_expr, item.context_expr) for item in statement.items]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value  # rows.append(measured)
            if isinstance(call.func, ast.Attribute):
                pairs = [(call.func.value, call)]
            # a notebook's function, or another, that fills what it is given
            if self._depends(call, measured):
                pairs += [(each, call) for each in (*call.args, *(word.value for word in call.keywords))]
        pairs += [(node.target, node.value) for node in _own(statement) if isinstance(node, ast.NamedExpr)]
        for target, value in pairs:
            if self._depends(value, measured):
                measured |= {node.id for node in _targets(target)}

    def _depends(self, node, measured: set, calls_only=False) -> bool:
        """Whether a value depends on measured variables or on a call that measures. calls_only: on such a call."""
        if isinstance(node, ast.Name):
            return node.id in measured or (node.id in self.functions and self._function_measures(node.id, calls_only))
        if isinstance(node, ast.Call):
            if getattr(node.func, "attr", getattr(node.func, "id", None)) in PLANS:
                return False
            passed_on = (each for each in node.args if isinstance(each, (ast.Name, ast.Attribute)))  # map(measure, …)
            if self._measures(node.func) or any(map(self._measures, passed_on)):
                return True
        return any(self._depends(child, measured, calls_only) for child in ast.iter_child_nodes(node))

    def _function_measures(self, name: str, calls_only: bool) -> bool:
        """Whether what a notebook's function returns was measured in it, or (not calls_only) computed from such a variable."""
        if name in self._open:
            return False
        self._open.add(name)
        try:
            node = self.functions[name]
            inner = set() if calls_only else self.measured - _parameters(node)
            self._follow(node.body, inner)
            reads = [each for each in ast.walk(node) if isinstance(each, (ast.Return, ast.Yield)) and each.value]
            return any(self._depends(each.value, inner, calls_only) for each in reads)
        finally:
            self._open.discard(name)

    def _measures(self, function) -> bool:
        """Whether the function that is called measures, by where it comes from."""
        path = []
        while isinstance(function, ast.Attribute):
            path.insert(0, function.attr)
            function = function.value
        if not isinstance(function, ast.Name) or function.id in self.functions:
            return False  # a method of a value: what matters is the value
        found = self.names.get(function.id, getattr(builtins, function.id, None))
        for name in path:
            if not isinstance(found, (ModuleType, type)):
                # a method: of an object of the course it measures (lab.run), of data it does not (rows.values)
                return type(found).__module__.partition(".")[0] == "labkit" and not _is_pure(type(found))
            found = getattr(found, name, None)
        own = isinstance(found, FunctionType) and found.__module__ == "__main__"  # looked into where it is defined
        return callable(found) and not own and not _is_pure(found)


def _is_pure(found) -> bool:
    module = inspect.getmodule(found)
    name = getattr(found, "__module__", None) or getattr(module, "__name__", "builtins")
    return name.partition(".")[0] in PURE or name.startswith(PURE_PARTS)


def _targets(target):
    """The names that an assignment to this target changes: a, (a, b), a[i], a.b."""
    while isinstance(target, (ast.Subscript, ast.Attribute, ast.Starred)):
        target = target.value
    if isinstance(target, ast.Name):
        yield target
    elif isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _targets(each)


def _parameters(node) -> set[str]:
    every = node.args
    return {
        each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg) if each
    }


def _own(statement):
    """The nodes of a statement without those of the statements within it."""
    nodes = [statement]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
