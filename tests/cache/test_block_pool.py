"""The block pool against a model of it: a dict of owners."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jaxserve.cache.block_pool import BlockPool, page_hash


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, sharing, releases, registrations and look-ups, checked after every step."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was last registered for a page

    @rule(target=owners, count=st.integers(0, 6))
    def allocate(self, count):
        free = self.pool.num_free
        pages = self.pool.allocate(count)
        if count > free:
            assert pages is None
            assert self.pool.num_free == free
            return multiple()
        assert len(set(pages)) == count
        assert not set(pages) & {page for owner in self.owned for page in owner}
        for page in pages:
            self.content.pop(page, None)
        self.owned.append(pages)
        return pages

    @rule(target=owners, owner=owners)
    def share(self, owner):
        self.pool.share(owner)
        self.owned.append(list(owner))
        return self.owned[-1]

    @rule(owner=consumes(owners))
    def release(self, owner):
        self.pool.release(owner)
        self.owned.remove(owner)

    @rule(owner=owners, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def register(self, owner, tokens):
        parent = b""
        for page, token in zip(owner, tokens, strict=False):
            parent = page_hash(parent, [token])
            if parent not in self.content.values() and page not in self.content:
                self.content[page] = parent
            self.pool.register(page, parent)

    @rule(target=owners, tokens=st.lists(st.integers(0, 1), max_size=6))
    def look_up_and_share(self, tokens):
        names, parent = [], b""
        for token in tokens:
            parent = page_hash(parent, [token])
            names.append(parent)
        pages = self.pool.lookup(names)
        assert [self.content[page] for page in pages] == names[: len(pages)]
        assert len(pages) == len(names) or names[len(pages)] not in self.content.values()
        unowned = self.pool.num_unowned(pages)
        free = self.pool.num_free
        self.pool.share(pages)
        assert self.pool.num_free == free - unowned
        self.owned.append(pages)
        return pages

    @rule()
    def drop_cache(self):
        self.pool.drop_cache()
        self.content.clear()

    @invariant()
    def integrity(self):
        self.pool.check_integrity(self.owned)
        assert self.pool.num_free == 12 - len({page for owner in self.owned for page in owner})


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_pages_without_content_are_taken_first_then_the_least_recently_used_suffix_first():
    pool = BlockPool(4)
    first = pool.allocate(2)
    names = [page_hash(b"", [1]), page_hash(page_hash(b"", [1]), [2])]
    for page, name in zip(first, names, strict=True):
        pool.register(page, name)
    pool.release(first)
    assert pool.num_cached == 2
    pool.allocate(2)
    assert pool.lookup(names) == first, "cached pages were evicted while empty ones were left"
    pool.allocate(1)
    assert pool.lookup(names) == first[:1], "the beginning of the prefix was evicted before its end"


def test_hashes_depend_on_prefix_salt_and_adapter():
    same = page_hash(b"", [1, 2])
    assert page_hash(b"", [1, 2]) == same
    others = [
        page_hash(b"", [2, 1]),
        page_hash(b"x", [1, 2]),
        page_hash(b"", [1, 2], "salt"),
        page_hash(b"", [1, 2], "", "salt"),
    ]
    assert len({same, *others}) == 5


def test_integrity_sees_lost_and_doubled_pages():
    pool = BlockPool(4)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="twice"):
        pool.check_integrity([[*pages, pages[0]]])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([*pages, pages[0]])
