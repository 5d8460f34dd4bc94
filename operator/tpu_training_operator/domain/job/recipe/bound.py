"""The shortest time that a compiled step can take, and the time if no two parts of it overlap.

The parts are arithmetic, the traffic to and from HBM, and the exchange between chips, each at its peak. Arithmetic and
traffic may overlap fully, and so may an exchange that the schedule starts early; one that the schedule waits for adds
to the others. The first time is a bound. The second is not: a part that falls short of its peak takes longer.
"""

from dataclasses import dataclass

from tpu_training_operator.api.catalogue import Generation, Shape
from tpu_training_operator.api.replace import replace
from tpu_training_operator.domain.job.trainer_report import StepCost


@dataclass(frozen=True)
class Bound:
    """Seconds that each part takes at its peak. `memory` leaves out what the collectives read and write while the
    schedule waits for them; these waits are `waiting`, a part of `network`. `intensity`: operations per byte of HBM
    traffic; `balance`: the intensity at which arithmetic and traffic take equally long. `utilisation`: the model's
    operations over the peak, 0..1, if a step took no longer than `seconds`."""

    arithmetic: float
    memory: float
    network: float
    waiting: float
    intensity: float
    balance: float
    utilisation: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory, self.network - self.waiting) + self.waiting

    @property
    def serial(self) -> float:
        """The seconds if nothing overlaps."""
        return self.arithmetic + self.memory + self.network

    @property
    def by(self) -> str:
        parts = {"arithmetic": self.arithmetic, "memory": self.memory, "exchange": self.network}
        return max(parts, key=parts.__getitem__)


def bound_of(cost: StepCost, generation: Generation, shape: Shape, slices: int = 1) -> Bound:
    """Returns the bound of a step on one slice, or on several that sum their gradients over the data-center network."""
    share = 1 / generation.devices_per_chip
    peak = generation.bf16_tflops_per_chip * 1e12 * share
    bandwidth = generation.hbm_gb_per_second_per_chip * 1e9 * share
    link = generation.ici_gb_per_second_per_chip * 1e9 * share * shape.links
    network = generation.dcn_gbit_per_second_per_chip / 8 * 1e9 * shape.chips

    def exchange(bytes_by_kind: dict[str, float]) -> float:
        inside = sum(_bytes_sent(*exchanged, shape.devices) for exchanged in bytes_by_kind.items()) / link
        # A slice sums first, and then sends the sum as one replica would, over all of its hosts.
        between = _bytes_sent("all-reduce", bytes_by_kind.get("all-reduce", 0.0), slices)
        return inside + (between / network if network else 0.0)

    # XLA leaves out products with padding, and counts a loop once.
    operations = max(cost.flops, cost.model_flops)
    bound = Bound(
        arithmetic=operations / peak,
        memory=(cost.traffic - cost.waited_traffic) / bandwidth,
        network=exchange(cost.exchanged),
        waiting=exchange(cost.waited),
        intensity=operations / cost.traffic if cost.traffic else 0.0,
        balance=peak / bandwidth,
        utilisation=0.0,
    )
    return replace(bound, utilisation=cost.model_flops / (peak * bound.seconds)) if bound.seconds else bound


def _bytes_sent(kind: str, size: float, replicas: int) -> float:
    """Returns the fewest bytes that a replica must send in collectives of a kind, with any algorithm (for the sum:
    Patarasuk and Yuan 2009). `size`: the bytes that it puts in."""
    others = (replicas - 1) / replicas
    times = {"all-reduce": 2 * others, "all-gather": replicas - 1, "reduce-scatter": others, "all-to-all": others}
    return size * times.get(kind, 1.0)
