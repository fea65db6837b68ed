"""Test that docs/troubleshooting.md quotes messages of the source: all that don't explain themselves."""

import ast
import re

import pytest

from tests.docs.code_blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
# Words of messages that say what is wrong and what is accepted: the page could only repeat them.
EXPLAINS = re.compile(
    r"\b(takes?|must|should|needs?|got|only|instead|known are|can't|doesn't fit|goes with|[Ll]ikely cause)\b"
    r"|, but |[:.] ([Gg]ive|[Cc]all|[Uu]se|[Ss]et|[Mm]ake|[Aa]pply|[Nn]ame|[Bb]uild|[Ww]rap|[Cc]ompress)\b"
)
# Others that do.
SELF_EXPLAINING = [
    "Cannot specify both process_group and device_mesh",
    "DistributedDataParallel is not needed when a module",
    "Expected to have finished reduction in the prior iteration before starting a new one. Backward did not",
    "backend … did not all-reduce a … tensor on",
    "candidates has … twice: …",
    "candidates: …",
    "errors_of is rank",
    "has a … but no error",
    "has the unknown …",
    "strongest is …, which is not one of the candidates",
    "the checkpoint … has no '…': save",
    "the state is compress_reduce_scatter's: it sums shards",
    "trial: an entry has another type than a trial's: …",
    "… has values that aren't finite",
    "… implements neither average nor reduce",
    "… is a DTensor",
    "… is in the memory of the gradient of …",
    "… has no process group after the quorum. Likely causes",
    "… has no sharded parameters",
]
PACKAGES = ["comm", "compress", "frameworks", "fsdp", "hooks", "parallel", "reducer"]
# Stands for the variable part of a message, in quotations and in strings from the source.
VARIABLE = "…"
# Modules with functions that return messages for raise statements.
WITH_MESSAGES = ("reducer/core.py", "reducer/usage.py", "comm/process_group.py")
MESSAGE_MODULES = [ROOT / "gradcomp" / name for name in WITH_MESSAGES]
# Strings that only join other strings to a message, or are only a part of a message.
PARTS = {"… …", "…: …", "… (exchange … of the group: …)", "parameters … are", "ranks … have", "rank … has"}


def texts_in(tree):
    """Return the strings in a tree; an f-string is one string, with VARIABLE for each formatted value."""
    if isinstance(tree, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else VARIABLE for each in tree.values)
        return ["".join(parts)]
    if isinstance(tree, ast.Constant):
        return [tree.value] if isinstance(tree.value, str) else []
    return [text for child in ast.iter_child_nodes(tree) for text in texts_in(child)]


def source_trees(packages=PACKAGES):
    paths = [path for package in packages for path in (ROOT / "gradcomp" / package).rglob("*.py")]
    return [(path, ast.parse(path.read_text())) for path in paths]


def raised_texts():
    """Return the messages in raise statements, and the messages that functions make for raise statements."""
    texts = []
    for path, tree in source_trees():
        raises = (each for each in ast.walk(tree) if isinstance(each, ast.Raise))
        for call in (each.exc for each in raises if isinstance(each.exc, ast.Call)):
            texts += [text for message in call.args for text in texts_in(message) if is_message(message)]
        if path in MESSAGE_MODULES:
            texts += [text for node in ast.walk(tree) for text in returned_texts(node) if " " in text]
    return [text for text in texts if text not in PARTS]


def is_message(node):
    return isinstance(node, ast.JoinedStr | ast.Constant)


def returned_texts(node):
    return texts_in(node.value) if isinstance(node, ast.Return) and is_message(node.value) else []


def quotations(page):
    """Return the page's quotations, up to the messages of torch, gloo and Triton."""
    own = page.partition("\n## Messages of torch")[0]
    return [
        quoted.strip()
        for line in re.findall(r"^\*\*`.*", own, re.MULTILINE)
        for _, quoted in re.findall(r"\*\*(`+)(.+?)\1\*\*", line)
    ]


def quotes(quotation, text):
    """Return whether the quotation's fixed parts follow each other in the text."""
    pattern = ".*".join(re.escape(part) for part in quotation.split(VARIABLE))
    return re.search(pattern, text, re.DOTALL) is not None


def test_what_is_quoted_is_in_the_source():
    trees = [tree for _, tree in source_trees([*PACKAGES, "kernels"])]
    trees.append(ast.parse((ROOT / "gradcomp" / "device.py").read_text()))
    texts = [text.replace("%s", VARIABLE) for tree in trees for text in texts_in(tree)]
    quoted = quotations(PAGE.read_text()) + SELF_EXPLAINING
    assert len(quoted) > 30
    assert [each for each in quoted if not any(quotes(each, text) for text in texts)] == []


def test_every_message_is_quoted_or_explains_itself():
    quoted = quotations(PAGE.read_text()) + SELF_EXPLAINING
    texts = raised_texts()
    assert len(texts) > 80
    unclear = [text for text in texts if not EXPLAINS.search(text)]
    assert [text for text in unclear if not any(quotes(each, text) for each in quoted)] == []
    assert 10 < len(unclear) < len(texts) / 3


@pytest.mark.parametrize(
    ("quotation", "is_quoted"),
    [("bits is …; choose 4 or 8", True), ("bits is …; it must be 2", False), ("to be 4 … bits", False)],
)
def test_a_quotation_that_is_not_in_the_source_is_found(quotation, is_quoted):
    (text,) = texts_in(ast.parse("f'{name}: bits is {self.bits!r}; choose 4 or 8'").body[0])
    assert text == "…: bits is …; choose 4 or 8"
    assert quotes(quotation, text) == is_quoted
    assert quotations(f"**`{quotation}`**\n\ntext\n") == [quotation]
