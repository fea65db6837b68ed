"""Follow one thread through a compiled kernel's PTX, and count what it executes.

Branches of our kernels depend on integers that the host knows: the program's index, and tables of shapes. A
thread's integers and predicates are computed, tables are read from memory, and every floating-point value is
unknown. A branch on an unknown predicate (a second pass over an ill-conditioned panel) takes the path that
executes less.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.prediction.integers import compute

# Instructions of one kind as many of another: what ptxas makes of a division or a root, about.
EXPANSION = {"div": 10, "sqrt": 10, "rcp": 6}
SHARED = "global_smem"  # Triton's name for a program's shared memory, whose addresses begin at 0 here
MAX_STEPS = 3_000_000
FIRST_STEPS = 20_000  # of each way from a branch that can't be decided, before more are tried

_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")
_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "u64": 8, "u32": 4, "s32": 4, "s64": 8, "f32": 4, "f64": 8}


class EndlessError(RuntimeError):
    """A thread executes more instructions than it may."""


@dataclass(frozen=True)
class Instruction:
    """An instruction with its predicate, if any, its opcode's parts, and its operands."""

    predicate: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass
class Counts:
    """What one thread executes: instructions by unit, and global memory's bytes by argument."""

    instructions: Counter[str] = field(default_factory=Counter)
    global_bytes: Counter[str] = field(default_factory=Counter)
    matrix_flops: Counter[str] = field(default_factory=Counter)  # of its warp (or warp group), by type

    def copy(self) -> Counts:
        return Counts(self.instructions.copy(), self.global_bytes.copy(), self.matrix_flops.copy())


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int], list[str]]:
    """Return a kernel's instructions, the positions of its labels, and the names of its parameters."""
    head, _, body = ptx.partition(".entry ")[2].partition("\n{")
    parameters = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"//[^\n]*", "", body).split("\n"):
        text = line.strip()
        if label := re.fullmatch(r"(\$?\w+):", text):
            labels[label[1]] = len(instructions)
            continue
        if text.startswith((".", "{", "}")) and not text.startswith("{ "):
            continue
        for statement in re.sub(r"^\{ | \}$", "", text).split(";"):
            found = _STATEMENT.fullmatch(statement.strip())
            if found and not statement.strip().startswith("."):
                operands = tuple(each.strip() for each in _OPERAND.findall(found[4]) if each.strip())
                instructions.append(
                    Instruction(found[2], found[1] == "!", tuple(found[3].split(".")), operands)
                )
    return instructions, labels, parameters


class Thread:
    """Thread 0 of one program of a kernel, as far as integers tell what it does.

    arguments: by parameter, an int, or None where it is a float. memory: (name, address, size in bytes,
    whether its contents may be read) of every tensor.
    """

    def __init__(
        self,
        ptx: str,
        arguments: Sequence[int | None],
        program: int,
        memory: Sequence[tuple[str, int, int, bool]],
    ):
        self._instructions, self._labels, parameters = parse(ptx)
        self._parameters = dict(zip(parameters, arguments, strict=False))
        self._program = program
        self._memory = sorted(memory, key=lambda each: each[1])
        self._starts = [start for _, start, _, _ in self._memory]

    def run(self) -> Counts:
        return self._run(0, {}, Counts(), [MAX_STEPS])

    def _run(self, at: int, registers: dict[str, Any], counts: Counts, steps: list[int]) -> Counts:
        while at < len(self._instructions):
            steps[0] -= 1
            if steps[0] < 0:
                raise EndlessError(f"a thread executes more than {MAX_STEPS} instructions: an endless loop?")
            each = self._instructions[at]
            at += 1
            name = each.opcode[0]
            guard: bool | None = True
            if each.predicate is not None:
                value = registers.get(each.predicate)
                guard = None if value is None else bool(value) != each.negated
            if name in ("ret", "exit"):
                if guard is not False:
                    break
                continue
            counts.instructions["issued"] += EXPANSION.get(name, 1)
            if name == "bra":
                target = self._labels[each.operands[0]]
                if guard is None:
                    return self._shorter((target, at), registers, counts, steps)
                if guard:
                    at = target
                continue
            self._count(each, guard, registers, counts)
            if guard is False:
                continue
            self._evaluate(each, guard, registers)
        return counts

    def _shorter(
        self, ways: tuple[int, int], registers: dict[str, Any], counts: Counts, steps: list[int]
    ) -> Counts:
        """Go both ways from a branch, in growing numbers of steps; return the counts of the first to end."""
        allowed = FIRST_STEPS
        while True:
            ends = []
            for way in ways:
                left = [min(allowed, steps[0])]
                try:
                    ends.append(self._run(way, dict(registers), counts.copy(), left))
                except EndlessError:
                    if allowed >= steps[0]:
                        raise
            if ends:
                return min(ends, key=lambda each: each.instructions["issued"])
            allowed *= 4

    def _count(
        self, each: Instruction, guard: bool | None, registers: dict[str, Any], counts: Counts
    ) -> None:
        name, types = each.opcode[0], each.opcode[1:]
        if name in ("wgmma", "mma") and "mma" in (name, *types, *(t.split("_")[0] for t in types)):
            shape = next(filter(None, (re.fullmatch(r"m(\d+)n(\d+)k(\d+)", each) for each in types)), None)
            if shape:
                flops = 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
                counts.matrix_flops["f64" if "f64" in types else "tf32" if "tf32" in types else "f16"] += (
                    flops if name == "mma" else flops // 4
                )
            return
        is_arithmetic = name in (
            "add",
            "sub",
            "mul",
            "fma",
            "div",
            "sqrt",
            "rcp",
            "min",
            "max",
            "abs",
            "neg",
            "setp",
            "cvt",
        )
        if is_arithmetic and "f64" in types:
            counts.instructions["f64"] += EXPANSION.get(name, 1)
        elif is_arithmetic and "f32" in types:
            counts.instructions["f32"] += EXPANSION.get(name, 1)
        elif "shared" in types or name in ("ldmatrix", "stmatrix", "shfl"):
            counts.instructions["shared"] += 1
        if "global" in types and name in ("ld", "st", "cp") and guard is not False:
            if name == "cp":
                # The fourth operand, how many bytes to read, is 0 where the mask is.
                sizes = [self._value(operand, registers) for operand in each.operands[2:4]]
                size = min(value for value in sizes if value is not None)
                address = each.operands[1]
            else:
                vector = next((int(t[1:]) for t in types if re.fullmatch(r"v\d", t)), 1)
                size = vector * _SIZES[types[-1]]
                address = each.operands[0 if name == "st" else 1]
            where = self._address(address, registers)
            counts.global_bytes[self._owner(where)] += size

    def _owner(self, address: int | None) -> str:
        if address is None:
            return "unknown"
        index = bisect_right(self._starts, address) - 1
        if index >= 0:
            name, start, size, _ = self._memory[index]
            if address < start + size:
                return name
        return "unknown"

    def _address(self, operand: str, registers: dict[str, Any]) -> int | None:
        base, _, offset = operand.strip("[] ").partition("+")
        value = 0 if base.strip() == SHARED else registers.get(base.strip())
        return None if value is None else value + int(offset.strip() or 0)

    def _value(self, operand: str, registers: dict[str, Any]) -> Any:
        if operand.startswith("%"):
            special = {"%ctaid.x": self._program, "%tid.x": 0, "%ctaid.y": 0, "%ctaid.z": 0}
            return special[operand] if operand in special else registers.get(operand)
        if operand == SHARED:
            return 0
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", operand):
            return int(operand, 0)
        return None

    def _evaluate(self, each: Instruction, guard: bool | None, registers: dict[str, Any]) -> None:
        """Set the instruction's results, None where they are not known."""
        name, types = each.opcode[0], each.opcode[1:]
        if name == "cp" and "shared" in types and len(each.operands) > 2:
            # A table's elements reach the registers by way of shared memory where the compiler loads them
            # early.
            source, place = (
                self._address(each.operands[1], registers),
                self._address(each.operands[0], registers),
            )
            if source is not None and place is not None:
                registers[f"shared {place}"] = source
        if not each.operands or name in ("st", "bar", "cp", "fence", "membar"):
            return
        target = each.operands[0]
        if re.fullmatch(r"\{\s*%\w+\s*\}", target):
            target = target.strip("{ }")
        if target.startswith("{") or "|" in target:
            names = re.findall(r"%\w+", target)
            values: list[Any] = [None] * len(names)
            source = self._value(each.operands[1], registers) if name == "mov" else None
            if source is not None and names:  # a register taken apart
                width = 64 // len(names) if "b64" in types else 32 // len(names)
                values = [(source >> (width * i)) & ((1 << width) - 1) for i in range(len(names))]
        else:
            names, values = [target], [self._result(name, types, each.operands, registers)]
        for register, value in zip(names, values, strict=True):
            registers[register] = value if guard else None

    def _result(
        self, name: str, types: tuple[str, ...], operands: tuple[str, ...], registers: dict[str, Any]
    ) -> Any:
        if name == "ld":
            return self._load(types, operands, registers)
        if name == "mov" and operands[1].startswith("{"):
            parts = [self._value(part, registers) for part in re.findall(r"%\w+|-?\d+", operands[1])]
            if None in parts:
                return None
            width = (64 if "b64" in types else 32) // len(parts)
            return sum((part & ((1 << width) - 1)) << (width * i) for i, part in enumerate(parts))
        values = [self._value(each, registers) for each in operands[1:]]
        if name == "selp":
            chosen = values[2]
            return None if chosen is None else values[0] if chosen else values[1]
        if any(each.startswith("f") for each in types) and name not in ("cvt", "mov"):
            return None
        if name in ("and", "or") and types == ("pred",):
            decisive = name == "or"
            if any(value is not None and bool(value) == decisive for value in values):
                return decisive
        if name == "mul" and 0 in values:
            return 0
        if not values or None in values:
            return None
        return compute(name, types, values)

    def _load(self, types: tuple[str, ...], operands: tuple[str, ...], registers: dict[str, Any]) -> Any:
        if types[0] == "param":
            return self._parameters.get(operands[1].strip("[] "))
        address = self._address(operands[1], registers)
        if types[0] == "shared":
            address = registers.get(f"shared {address}")
        if address is None:
            return None
        for _, start, size, is_readable in self._memory:
            if is_readable and start <= address < start + size:
                return ctypes.c_int64.from_address(address).value if types[-1] == "b64" else None
        return None
