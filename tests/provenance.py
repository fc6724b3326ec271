# SPDX-License-Identifier: BSD-3-Clause
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
PURE_PARTS = (
    "labkit.teaching",
    "labkit.measuring.differences",
    "labkit.measuring.records",
    "labkit.running.plan_options",
)
PLANS = {"plan", "plan_of"}  # of a record they read its options only: what they return is no measurement


class Provenance:
    """The measured variables of a kernel, from the cells it has executed and the objects their names stand for."""

    def __init__(self, cells: list[str], names: dict, line: int | None = None):
        """line: of the last cell, up to which it has been executed; None: unknown."""
        self.names = names
        self.measured = set()
        self.functions = {}
        self.assigned = {}  # {variable: the one statement that gives it its value, or None where there are several}
        self._open = set()  # functions that are being looked into: one may call itself
        for left, source in zip(reversed(range(len(cells))), cells, strict=True):
            try:
                tree = ast.parse(source)
            except SyntaxError:  # a cell with a magic
                continue
            self._line = None if left else line
            self._follow(tree.body, self.measured, in_order=bool(left or line))
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

    def _follow(self, body: list, measured: set, in_order=False):
        """Note what the statements assign, in order.

        in_order: each is executed, one after the other, so that a name may stop to be measured. Within branches and
        functions it stays measured once it was.
        """
        for statement in body:
            if in_order and self._line and statement.lineno > self._line:
                break
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[statement.name] = statement
                measured |= self._filled_by(statement, measured)
                continue
            if isinstance(statement, ast.ClassDef):
                continue
            if in_order and isinstance(statement, (ast.Assign, ast.For)):
                plain = isinstance(statement, ast.Assign)
                value, targets = (statement.value, statement.targets) if plain else (statement.iter, [statement.target])
                if not self._depends(value, measured):
                    measured -= {node.id for target in targets for node in ast.walk(target) if _is_stored(node)}
            self._assigned(statement, measured)
            for part in ("body", "orelse", "finalbody"):
                always = part == "body" and isinstance(statement, (ast.For, ast.With))
                self._follow(getattr(statement, part, []), measured, in_order and always)
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
            # And in the file or the folder that it is given.
            calls = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
            pairs += [(each, call) for call in calls for each in call.args if self._measures(call.func)]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value  # rows.append(measured)
            if isinstance(call.func, ast.Attribute):
                pairs = [(node, call) for node in _targets(call.func.value) if self._may_be_filled(node)]
            # a notebook's function, or another, that fills what it is given
            if self._depends(call, measured) and not self._shows(call.func):
                given = [
                    node for each in (*call.args, *(word.value for word in call.keywords)) for node in _targets(each)
                ]
                pairs += [(each, call) for each in given if self._may_be_filled(each)]
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
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)):
            return self._inner_depends(node, measured, calls_only)
        return any(self._depends(child, measured, calls_only) for child in ast.iter_child_nodes(node))

    def _inner_depends(self, node, measured: set, calls_only: bool) -> bool:
        """Whether a comprehension or a lambda depends on a measurement. Its own names hide others, of functions too."""
        functions, own = self.functions, _parameters(node) if isinstance(node, ast.Lambda) else set()
        measured = measured - own
        try:
            for each in getattr(node, "generators", ()):
                names = {name.id for name in _targets(each.target)}
                measured = measured | names if self._depends(each.iter, measured, calls_only) else measured - names
                own |= names
            self.functions = {name: of for name, of in functions.items() if name not in own}
            return any(self._depends(child, measured, calls_only) for child in ast.iter_child_nodes(node))
        finally:
            self.functions = functions

    def _shows(self, function) -> bool:
        """Whether a function prints or draws: what it is given stays as it was."""
        module = getattr(self.names.get(getattr(function, "id", None)), "__module__", None) or ""
        return getattr(function, "id", None) == "print" or module == "doubts" or module.startswith("labkit.teaching")

    def _may_be_filled(self, name: ast.Name) -> bool:
        return not isinstance(self.names.get(name.id), (int, float, str, ModuleType))

    def _filled_by(self, function, measured: set) -> set[str]:
        """The notebook's variables in which a function of it leaves what it measures: runs[name] = …"""
        own = _own_names(function)
        filled = measured - own
        self._follow(function.body, filled)
        return filled - own

    def _function_measures(self, name: str, calls_only: bool) -> bool:
        """Whether what a notebook's function returns was measured in it, or (not calls_only) computed from such a variable."""
        if name in self._open:
            return False
        self._open.add(name)
        try:
            node = self.functions[name]
            inner = set() if calls_only else self.measured - _own_names(node)
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
        return callable(found) and not own and (not _is_pure(found) or found in (exec, eval))


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


def _own_names(function) -> set[str]:
    """The names that in a function stand for something of its own."""
    return _parameters(function) | {node.id for node in ast.walk(function) if _is_stored(node)}


def _is_stored(node) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


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
