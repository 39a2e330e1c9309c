"""The plan of a run, drawn from a seed: everything except the order in which Trio runs the tasks.

Times are small whole seconds, so that arrivals, answers and deadlines often fall on the same instant.
"""

from dataclasses import dataclass, replace
from random import Random

from fairlead.base.errors import Displaced, FairleadError, QueueFull, QueueTimeout, RequestTimeout
from fairlead.base.job import Job, Sampling

MODEL = "asked for"
OTHER_MODEL = "swapped in"
NEVER_S = 1e6


@dataclass(frozen=True)
class ClientPlan:
    """One client's job, and how long a node takes for it. `repeatable`: a second answer would be the same."""

    name: str
    tenant: str
    stream: bool
    arrives_s: int
    first_s: int
    rest_s: int
    model: str = MODEL
    repeatable: bool = False

    @property
    def job(self) -> Job:
        sampling = Sampling(max_tokens=10, temperature=0.0 if self.repeatable else 1.0)
        prompt = ([1, 2, 3],)
        return Job(
            self.name, self.tenant, self.model, prompt, sampling, stream=self.stream, request_id=self.name
        )


@dataclass(frozen=True)
class Plan:
    """The clients, nodes and limits of a run. `seats`: of each node. `downtime_s`: of a node."""

    seed: int
    client_plans: tuple[ClientPlan, ...]
    seats: tuple[int, ...]
    downtime_s: int = 1
    capacity: int = 100
    queue_timeout_s: float = NEVER_S
    request_timeout_s: float = NEVER_S
    most_wait_s: float = 0.0
    swapping: bool = False
    starvation_s: float = 60.0

    @property
    def refusals(self) -> set[type[FairleadError]]:
        """The errors that a client may get without any strike."""
        return {
            *([QueueFull, Displaced] if self.capacity < len(self.client_plans) else []),
            *([QueueFull] if self.most_wait_s else []),
            *([QueueTimeout] if self.queue_timeout_s < NEVER_S else []),
            *([RequestTimeout] if self.request_timeout_s < NEVER_S else []),
        }


def draw_plan(seed: int, *, tight: bool = False, swapping: bool = False) -> Plan:
    """Return the seed's plan. Without `tight`, capacity and time suffice for every job."""
    random, repeatable, patience = Random(seed), Random(f"repeatable {seed}"), Random(f"patience {seed}")
    client_plans = tuple(
        ClientPlan(
            name=f"{number}",
            tenant=random.choice("ABC"),
            stream=random.random() < 0.5,
            arrives_s=random.choice([0, 0, 0, 1, 2]),
            first_s=random.choice([0, 0, 1]),
            rest_s=random.choice([0, 1, 2]),
            repeatable=repeatable.random() < 0.5,
        )
        for number in range(random.randint(2, 6))
    )
    seats = random.choice([(1,), (1,), (2,), (1, 1), (1, 2)])
    if not tight:
        return Plan(seed, client_plans, seats)
    if swapping:
        client_plans = tuple(
            replace(client_plan, model=random.choice([MODEL, OTHER_MODEL])) for client_plan in client_plans
        )
    return Plan(
        seed,
        client_plans,
        seats,
        downtime_s=random.choice([1, 2]),  # not 0: a granted job reaches the node before the node is back
        capacity=random.choice([0, 1, 2, 100]),
        queue_timeout_s=random.choice([0, 1, 2, 3, NEVER_S]),
        request_timeout_s=random.choice([0, 1, 2, 3, NEVER_S]),
        most_wait_s=patience.choice([0, 0, 0, 1, 2]),
        swapping=swapping,
        starvation_s=random.choice([0, 1, 2, 60]),
    )
