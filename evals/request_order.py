"""In which order requests that share contexts are sent."""


def leaders_first(contexts: list[tuple[int, ...]], group_size: int = 64) -> list[int]:
    """An order in which a context is computed by one request before the others that share it, so that they hit its
    blocks in the prefix cache: equal and similar contexts side by side, and in each group of contexts one request of
    each before the rest.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, context in enumerate(contexts):
        members.setdefault(context, []).append(index)
    groups = [members[context] for context in sorted(members)]
    order: list[int] = []
    for begin in range(0, len(groups), group_size):
        part = groups[begin : begin + group_size]
        order += [group[0] for group in part]
        order += [index for group in part for index in group[1:]]
    return order
