"""Who calls: the API keys that are let in, and what a key means to the engine."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """What the engine is told of whoever sent a request. Never the key itself."""

    tenant: str = ""  # whose fair share its tokens count against
    cache_salt: str = ""  # prompts share prefix blocks only under the same salt


class ApiKeys:
    """The keys of one server. Without any, everybody may enter and all are one tenant."""

    def __init__(self, keys: Sequence[str] = (), *, salt_per_key: bool | None = None) -> None:
        """`salt_per_key` None: as soon as there are several keys, for how fast a prompt is answered tells whether
        somebody has sent it before, and only holders of one key may know that of each other."""
        salted = len(set(keys)) > 1 if salt_per_key is None else salt_per_key
        pepper = secrets.token_bytes(16)  # names cannot be traced back to keys, not even by trying keys
        self._callers: dict[bytes, Caller] = {}
        for key in keys:
            name = hashlib.sha256(pepper + key.encode()).hexdigest()[:16]
            self._callers[f"Bearer {key}".encode()] = Caller(tenant=name, cache_salt=name if salted else "")

    def identify(self, authorization: bytes) -> Caller | None:
        """Whose the value of an `Authorization` header is; None: nobody's. Takes as long for any wrong one."""
        if not self._callers:
            return Caller()
        found = None
        for expected, caller in self._callers.items():
            if hmac.compare_digest(authorization, expected):
                found = caller
        return found
