"""FairQueue: who is admitted next, among tenants that all want more than there is."""

import bisect
from collections.abc import Iterator

from llmq.runtime.request import Request


class FairQueue:
    """Waiting requests: by priority, then fair among tenants (API keys), then by arrival within a tenant.

    Fairness is the Virtual Token Counter of Sheng et al. 2024 (arXiv 2401.00588): each tenant is charged for the tokens
    it was served, the one charged least goes first, and a tenant that comes back after idling is lifted to the least of
    those that wait (to the one that waited last, where none does), so that it cannot save up. With one tenant this is
    first come, first served.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Request]] = {}  # each in `Request.order`
        self._charged: dict[str, float] = {}
        self._waited_last = ""

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __contains__(self, request: Request) -> bool:
        return request in self._by_tenant.get(request.tenant, ())

    def push(self, request: Request) -> None:
        waiting = self._by_tenant.setdefault(request.tenant, [])
        if not waiting:
            others = [self._charged[tenant] for tenant, rest in self._by_tenant.items() if rest]
            least = min(others, default=self._charged.get(self._waited_last, 0.0))
            self._charged[request.tenant] = max(self._charged.get(request.tenant, 0.0), least)
        # Who was preempted is as old as it was; who comes at the same moment comes behind those that are there.
        place = bisect.insort_left if request.num_preemptions else bisect.insort_right
        place(waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        waiting = self._by_tenant[request.tenant]
        waiting.remove(request)
        if not waiting:
            del self._by_tenant[request.tenant]
            self._waited_last = request.tenant

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that `tenant` was served: prompt tokens computed and tokens generated alike."""
        self._charged[tenant] = self._charged.get(tenant, 0.0) + num_tokens

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of admission as it is now. What it yields may be removed meanwhile."""
        queues = {tenant: list(waiting) for tenant, waiting in self._by_tenant.items()}

        def turn(tenant: str) -> tuple:
            first = queues[tenant][0]
            return (first.priority, self._charged[tenant], first.order)

        while queues:
            tenant = min(queues, key=turn)
            yield queues[tenant].pop(0)
            if not queues[tenant]:
                del queues[tenant]


def _order(request: Request) -> tuple[int, float]:
    return request.order
