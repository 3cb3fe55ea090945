"""The pages of beams that have ended, kept for the beams that go on from them. Knows no JAX."""

from jaxserve.cache.block_pool import BlockPool
from jaxserve.request import Request


class HeldPages:
    """A beam that has ended holds no slot, but its pages: until the last of its forks has been admitted, or is gone, or
    others need the room. A fork whose source has given up its pages is computed like any other request."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self.beams: list[Request] = []

    def hold(self, beam: Request, pages: list[int]) -> None:
        """Keep the pages of a beam that has been taken out of the scheduler."""
        beam.pages = pages
        self.beams.append(beam)

    def release(self, beam: Request) -> None:
        """Give back the pages of a beam that nobody goes on from."""
        if beam in self.beams:
            self.beams.remove(beam)
            self._pool.release(beam.pages)
            beam.pages = []

    def give_up(self) -> bool:
        """Give back the pages of the last beam; False if none is held."""
        if self.beams:
            self.release(self.beams[-1])
            return True
        return False

    def expect(self, request: Request) -> None:
        """A request waits that may share its source's pages."""
        if request.fork_of is not None:
            request.fork_of.num_forks += 1

    def forked(self, request: Request) -> None:
        """A request shares its source's pages now, or is gone before it ever did."""
        source = request.fork_of
        if source is not None and request.num_admissions == 0:
            source.num_forks -= 1
            if source.num_forks == 0:
                self.release(source)
