"""The shortest time that a compiled step can take: no step is faster than its slowest part at peak speed.

The parts are arithmetic, the traffic to and from HBM, and the exchange between chips. They are assumed to overlap
fully, so this is a bound, not a prediction.
"""

from dataclasses import dataclass

from tpu_training_operator.api.catalogue import Generation
from tpu_training_operator.domain.job.trainer_report import StepCost


@dataclass(frozen=True)
class Bound:
    """Seconds that each part takes at its peak. `intensity`: operations per byte of HBM traffic; `balance`: the
    intensity at which arithmetic and traffic take equally long. `utilisation`: the model's operations over the peak,
    0..1, if a step took no longer than `seconds`."""

    arithmetic: float
    memory: float
    network: float
    intensity: float
    balance: float
    utilisation: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory, self.network)

    @property
    def by(self) -> str:
        parts = {"arithmetic": self.arithmetic, "memory": self.memory, "exchange": self.network}
        return max(parts, key=parts.__getitem__)


def bound_of(cost: StepCost, generation: Generation, replicas: int) -> Bound:
    """Returns the bound of a step on `replicas` replicas of one slice."""
    share = 1 / generation.devices_per_chip
    peak = generation.bf16_tflops_per_chip * 1e12 * share
    bandwidth = generation.hbm_gb_per_second_per_chip * 1e9 * share
    link = generation.ici_gb_per_second_per_chip * 1e9 * share
    arithmetic, memory = cost.flops / peak, cost.traffic / bandwidth
    network = sum(_bytes_sent(*exchanged, replicas) for exchanged in cost.exchanged.items()) / link
    seconds = max(arithmetic, memory, network)
    return Bound(
        arithmetic=arithmetic,
        memory=memory,
        network=network,
        intensity=cost.flops / cost.traffic if cost.traffic else 0.0,
        balance=peak / bandwidth,
        utilisation=cost.model_flops / (peak * seconds) if seconds else 0.0,
    )


def _bytes_sent(kind: str, size: float, replicas: int) -> float:
    """Returns the fewest bytes that a replica must send in collectives of a kind, with any algorithm (for the sum:
    Patarasuk and Yuan 2009). `size`: the bytes that it puts in."""
    others = (replicas - 1) / replicas
    times = {"all-reduce": 2 * others, "all-gather": replicas - 1, "reduce-scatter": others, "all-to-all": others}
    return size * times.get(kind, 1.0)
