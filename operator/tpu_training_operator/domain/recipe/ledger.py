"""Where the rules write down what they did. Used by the modules of this package."""

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """One note for every derived number, `field: how it came about`, and warnings about what to look at twice."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def note(self, name: str, text: str) -> None:
        self.notes.append(f"{name}: {text}")

    def warn(self, text: str) -> None:
        self.warnings.append(text)
