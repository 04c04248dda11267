"""Passages and their last words, for the task `last_word`."""

from __future__ import annotations

from collections.abc import Iterator

from datasets import Dataset

PASSAGES, WORDS = 400, 60
"""Most passages, and the fewest words of a passage before the word that is asked for."""


def passages(articles: Dataset) -> Dataset:
    """Return passages (`context`) of articles (`text`), each with the word after it."""
    found = (each for text in articles["text"] for each in _of_article(text.split()))
    return Dataset.from_list([each for _, each in zip(range(PASSAGES), found, strict=False)])


def _of_article(words: list[str]) -> Iterator[dict[str, str]]:
    """Yield one passage of each 600 words. Its last word has three letters or more, and was there before, as in LAMBADA."""
    for start in range(0, len(words) - WORDS, 10 * WORDS):
        window = words[start : start + 2 * WORDS]
        for place in range(WORDS, len(window)):
            word = window[place]
            if word.isalpha() and len(word) > 2 and word in window[:place]:
                yield {"context": " ".join(window[:place]), "word": word}
                break
