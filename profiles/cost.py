"""What tokens cost on a machine that is paid by the hour."""


def dollars_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Of 10^6 tokens, the machine paid for them alone: price / 3600 / (tokens/s) * 10^6. None: no token came."""
    return price_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else None
