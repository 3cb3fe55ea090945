"""Who owns which page of the KV cache. Host side only; knows no JAX, no requests, no schedule.

A page is in one of three states:

    owned    reference count > 0: one or several requests read it, at most one of them writes it
    cached   reference count 0, content known by a hash: reusable by the same prefix until it is evicted
    free     reference count 0, content unknown

Cached and free pages stand in one list from which `allocate` takes the first: pages without a hash at
the front, then cached pages in the order in which they were given back (least recently used first).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np


def page_hash(parent: bytes, tokens: Sequence[int], salt: str = "", adapter: str = "") -> bytes:
    """The name of a full page: a hash of everything its keys and values depend on.

    `parent` is the hash of the page before (b"" for the first), so equal hashes mean equal prefixes.
    """
    digest = blake2b(parent, digest_size=16)
    if not parent and (salt or adapter):
        digest.update(repr((salt, adapter)).encode())
    digest.update(np.asarray(tokens, np.int32).tobytes())
    return digest.digest()


class BlockPool:
    """Reference counts, hashes and the LRU list of `num_pages` pages."""

    def __init__(self, num_pages: int, *, enable_prefix_caching: bool = True):
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages}: must be at least 1")
        self.num_pages = num_pages
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._unowned: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, cached ones included."""
        return len(self._unowned)

    @property
    def num_cached(self) -> int:
        """Pages that nobody owns and whose content a prefix may still find."""
        return sum(self._references[page] == 0 for page in self._page_of.values())

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each and no content, or None (and no change) if too few are left."""
        if count > len(self._unowned):
            return None
        pages = [self._unowned.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._forget(page)
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reader for each page, whether it is owned or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._unowned[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reader less; a page without readers can be reused, the last page of a prefix first."""
        for page in reversed(pages):
            if self._references[page] <= 0:
                raise RuntimeError(f"page {page} is released more often than it is owned")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._unowned[page] = None
                if self._hashes[page] is None:
                    self._unowned.move_to_end(page, last=False)

    def register(self, page: int, name: bytes) -> None:
        """Make an owned, full, computed page findable. The first page of a content stays its representative."""
        if self._references[page] <= 0:
            raise RuntimeError(f"page {page} is not owned and cannot be registered")
        if self.enable_prefix_caching and name not in self._page_of and self._hashes[page] is None:
            self._page_of[name] = page
            self._hashes[page] = name

    def lookup(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of `names`; takes no reference."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unowned(self, pages: Iterable[int]) -> int:
        """How many of these pages `share` would take out of the unowned ones."""
        return sum(self._references[page] == 0 for page in pages)

    def drop_cache(self) -> None:
        """Forget every content (the weights have changed); owned pages stay owned."""
        for page in list(self._page_of.values()):
            self._forget(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the content of these pages (it is not to be trusted)."""
        for page in pages:
            self._forget(page)

    def _forget(self, page: int) -> None:
        name = self._hashes[page]
        if name is not None:
            del self._page_of[name]
            self._hashes[page] = None

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless free + cached + owned pages are all pages and the counts agree.

        `owned` holds the pages of each owner; no owner may hold a page twice.
        """
        counts: Counter[int] = Counter()
        for pages in owned:
            if len(set(pages)) != len(pages):
                raise RuntimeError(f"one owner holds a page twice: {list(pages)}")
            counts.update(pages)
        wrong = [page for page in range(self.num_pages) if self._references[page] != counts[page]]
        if wrong:
            raise RuntimeError(f"reference counts differ from the owners' pages at pages {wrong[:8]}")
        unowned = {page for page in range(self.num_pages) if self._references[page] == 0}
        if unowned != set(self._unowned):
            raise RuntimeError(f"unowned pages and the free list differ at {sorted(unowned ^ set(self._unowned))[:8]}")
        named = {page: name for page, name in enumerate(self._hashes) if name is not None}
        if named != {page: name for name, page in self._page_of.items()}:
            raise RuntimeError("page hashes and the prefix index differ")
