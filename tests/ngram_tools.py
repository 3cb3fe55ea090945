"""Prompt lookup in plain Python."""


def search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int] | None:
    """What prompt lookup proposes: the longest match first, then the most recent one."""
    for length in range(longest, shortest - 1, -1):
        tail = tokens[-length:]
        if len(tail) < length:
            continue
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tail:
                proposed = list(tokens)
                for index in range(count):
                    proposed.append(proposed[start + length + index])
                return proposed[len(tokens) :]
    return None
