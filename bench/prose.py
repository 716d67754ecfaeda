"""English text that is on every machine: the prose of Python's language reference."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

_CODE = re.compile(r"::=|>>>|\s{2,}[^\s]*=|^\s*(def|class|for|if) .*:$", re.MULTILINE)


def read_prose() -> str:
    """The paragraphs that are sentences, each once, as `help()` would show them.

    About 50,000 tokens in Python 3.12 and 3.13; every version has its own wording.
    """
    paragraphs = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            is_sentence = len(text) >= 60 and text[0].isupper() and text.endswith((".", ":"))
            if is_sentence and not _CODE.search(paragraph):
                paragraphs[text] = None
    return "\n\n".join(paragraphs)
