"""How a broken rule is reported."""


class NkiRuleError(Exception):
    """A kernel did what the hardware, the compiler or this package's own rules forbid."""


def require(holds: bool, rule: str) -> None:
    """Raise ``NkiRuleError`` with the rule, unless it holds."""
    if not holds:
        raise NkiRuleError(rule)
