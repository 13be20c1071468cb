"""What a server's own Prometheus metrics say of its prefix cache."""

from dataclasses import dataclass

# (hits, lookups) in tokens; each name is summed over its labels.
_COUNTERS = (
    ("llmq_prefix_cache_hits_total", "llmq_prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
)


@dataclass(frozen=True)
class PrefixCounters:
    """Prompt tokens that were found in the prefix cache, of those looked up, since the server started."""

    hits: float
    queries: float

    @classmethod
    def parse(cls, text: str | None) -> "PrefixCounters | None":
        """Of the body of /metrics; None where it has no such counters."""
        totals: dict[str, float] = {}
        for line in (text or "").splitlines():
            name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
            value = rest.rpartition("}")[2].split()
            if line.startswith("#") or not value:
                continue
            try:
                totals[name] = totals.get(name, 0.0) + float(value[0])
            except ValueError:
                return None
        for hits, queries in _COUNTERS:
            if queries in totals:
                return cls(totals.get(hits, 0.0), totals[queries])
        return None

    def since(self, before: "PrefixCounters") -> "PrefixCounters":
        return PrefixCounters(self.hits - before.hits, self.queries - before.queries)

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.queries if self.queries else None
