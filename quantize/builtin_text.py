"""English that every Python has: the language reference in `pydoc_data.topics`, in two halves with no text in common.

Good for a first calibration without a network, and for evaluating on other text than the calibration's. It is technical
prose with code in it: calibrate on text like your own where you have some.
"""

from typing import Literal

Split = Literal["calibration", "heldout"]

# Topics quote each other ("compound" holds "if", "with", ...), so the halves are parted by paragraph, not by topic.
_MIN_PARAGRAPH_CHARACTERS = 40


def builtin_text(split: Split) -> str:
    """One half of the text, paragraphs separated by blank lines, in the order of the topics' names.

    Every second topic, by name, goes to each half; a paragraph met before, in either half, is left out.
    """
    return "\n\n".join("\n\n".join(paragraphs) for paragraphs in builtin_documents(split))


def builtin_documents(split: Split) -> list[list[str]]:
    """The topics of one half, each a list of its paragraphs."""
    from pydoc_data.topics import topics

    if split not in ("calibration", "heldout"):
        raise ValueError(f"no split {split!r}: 'calibration' and 'heldout' are")
    halves: dict[str, list[list[str]]] = {"calibration": [], "heldout": []}
    seen: set[str] = set()
    for index, name in enumerate(sorted(topics)):
        fresh = []
        for paragraph in topics[name].split("\n\n"):
            # Indentation differs where one topic quotes another.
            key = " ".join(paragraph.split())
            if len(key) >= _MIN_PARAGRAPH_CHARACTERS and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n"))
        if fresh:
            halves["heldout" if index % 2 else "calibration"].append(fresh)
    return halves[split]
